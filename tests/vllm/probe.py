"""A general plugin of vLLM's for the tests: counts what is expensive, in files that anybody can look at.

Each event appends one byte to a file in ``$TEST_PROBE``, so that a file's size is the count, over all processes. And
faults: while there is a file ``lose`` there, no lookup finds an encoder's output; while there is ``miss``, no item has
its tensors.
"""

from __future__ import annotations

import os
from typing import Any


def note(name: str, count: int = 1) -> None:
    with open(os.path.join(os.environ["TEST_PROBE"], name), "ab") as file:
        file.write(b"." * count)


def ordered(fault: str) -> bool:
    return os.path.exists(os.path.join(os.environ["TEST_PROBE"], fault))


def faults() -> None:
    import mmbroker
    from mmbroker.adapters.vllm import items, lookups

    fetch, whole = lookups.Lookups._fetch, items.whole

    def lossy(self: Any, keys: Any) -> Any:
        return {} if ordered("lose") else fetch(self, keys)

    def missing(item: Any, table: Any) -> Any:
        if ordered("miss"):
            raise mmbroker.FeatureMissing("a test has ordered so")
        return whole(item, table)

    lookups.Lookups._fetch = lossy  # type: ignore[method-assign]
    items.whole = missing


def register() -> None:
    from vllm.model_executor.models import qwen2_5_vl
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    model = qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    if hasattr(model, "_probed"):
        return
    model._probed = True
    faults()
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
