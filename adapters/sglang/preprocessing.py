"""Features made on the CPU, for as many workers as that takes: none of them needs a CUDA context.

SGLang decodes JPEGs and shapes pictures on the GPU where there is one. Then each worker has a context there, several
hundred MiB, and its work takes turns with the model's on a GPU that both want. On the CPU it takes more of the CPU,
which several workers share.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def stay_on_cpu(manager: Any) -> None:
    """Have the processor of a `TokenizerManager` decode on the CPU, with this worker's share of the cores.

    `hooks.processor_device` has it shape pictures there.
    """
    # Of the class, because SGLang asks that. Both are of this process, which serves one model.
    type(manager.mm_processor).gpu_image_decode = False
    if not os.environ.get("OMP_NUM_THREADS"):
        workers = max(1, getattr(manager.server_args, "tokenizer_worker_num", 1) or 1)
        # Half of all cores: the scheduler, and whoever hashes and copies, want some, too; and threads that wait for
        # each other at every small operation take longer than one alone.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (2 * workers)))
