"""A general plugin of vLLM's for the tests: counts what is expensive, in files that anybody can look at.

Each event appends one byte to a file in ``$TEST_PROBE``, so that a file's size is the count, over all processes.
"""

from __future__ import annotations

import os
from typing import Any


def note(name: str, count: int = 1) -> None:
    with open(os.path.join(os.environ["TEST_PROBE"], name), "ab") as file:
        file.write(b"." * count)


def register() -> None:
    from vllm.model_executor.models import qwen2_5_vl
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    model = qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    if hasattr(model, "_probed"):
        return
    model._probed = True
    embed, call = model.embed_multimodal, BaseMultiModalProcessor._call_hf_processor

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        outputs = embed(self, **kwargs)
        note("encoded", len(outputs))
        return outputs

    def call_hf_processor(self: Any, data: Any, kwargs: Any) -> Any:
        note("processed", len(data.get("images") or ()))
        return call(self, data, kwargs)

    model.embed_multimodal = embed_multimodal
    BaseMultiModalProcessor._call_hf_processor = call_hf_processor
