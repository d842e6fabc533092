"""A general plugin of vLLM's for the tests: counts what is expensive, in files that anybody can look at.

Each event appends one byte to a file in ``$TEST_PROBE``, so that a file's size is the count, over all processes. And
faults: while there is a file ``lose`` there, no lookup finds an encoder's output; while there is ``miss``, no item has
its tensors; while there is ``hold``, processors wait, and while there is ``fail``, they fail. With
``$TEST_PROBE_TIMES`` set, nanoseconds are noted, a line each: ``cpu_ns`` of processor time for each picture's
preprocessing, and ``half_ns`` in a connector's scheduler half for each step that asked it anything.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any


def note(name: str, count: int = 1) -> None:
    with open(os.path.join(os.environ["TEST_PROBE"], name), "ab") as file:
        file.write(b"." * count)


def times() -> None:
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    from mmbroker.adapters.vllm.connector import MMBrokerConnector

    def line(name: str, value: int) -> None:
        with open(os.path.join(os.environ["TEST_PROBE"], name), "a") as file:
            file.write(f"{value}\n")

    apply = BaseMultiModalProcessor.apply

    def timed_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return apply(self, *args, **kwargs)
        finally:
            line("cpu_ns", time.thread_time_ns() - start)

    BaseMultiModalProcessor.apply = timed_apply
    spent = [0, 0]

    def timed(original: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.perf_counter_ns()
            result = original(*args)
            spent[0] += time.perf_counter_ns() - start
            spent[1] += 1
            return result

        return call

    def timed_build(original: Any) -> Any:
        original = timed(original)

        def call(*args: Any) -> Any:
            asked = spent[1]
            result = original(*args)
            if asked:
                line("half_ns", spent[0])
            spent[:] = [0, 0]
            return result

        return call

    names = (
        "has_cache_item",
        "ensure_cache_available",
        "update_state_after_alloc",
        "update_connector_output",
        "request_finished",
    )

    def timed_init(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for name in names:
                setattr(self, name, timed(getattr(self, name)))
            self.build_connector_meta = timed_build(self.build_connector_meta)

        return init

    for connector in (ECExampleConnector, MMBrokerConnector):
        connector.__init__ = timed_init(connector.__init__)


def ordered(fault: str) -> bool:
    return os.path.exists(os.path.join(os.environ["TEST_PROBE"], fault))


def adapter() -> None:
    import mmbroker
    from mmbroker.adapters.vllm import items, lookups, saving

    fetch, whole, put = lookups.Lookups._fetch, items.whole, saving.Saves._put

    def lossy(self: Any, keys: Any) -> Any:
        return {} if ordered("lose") else fetch(self, keys)

    def missing(item: Any, table: Any) -> Any:
        if ordered("miss"):
            raise mmbroker.FeatureMissing("a test has ordered so")
        return whole(item, table)

    def put_and_note(self: Any, batch: Any) -> None:
        before = self.counts["saved"]
        put(self, batch)
        note("saved", self.counts["saved"] - before)

    saving.Saves._put = put_and_note  # type: ignore[method-assign]
    lookups.Lookups._fetch = lossy  # type: ignore[method-assign]
    items.whole = missing


def register() -> None:
    from vllm.model_executor.models import qwen2_5_vl
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    model = qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    if hasattr(model, "_probed"):
        return
    model._probed = True
    adapter()
    if os.environ.get("TEST_PROBE_TIMES"):
        times()
    embed, call = model.embed_multimodal, BaseMultiModalProcessor._call_hf_processor

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        outputs = embed(self, **kwargs)
        note("encoded", len(outputs))
        return outputs

    def call_hf_processor(self: Any, data: Any, kwargs: Any) -> Any:
        note("processed", len(data.get("images") or ()))
        pause = threading.Event()
        while ordered("hold"):
            pause.wait(0.01)
        if ordered("fail"):
            raise ValueError("a test has ordered so")
        return call(self, data, kwargs)

    model.embed_multimodal = embed_multimodal
    BaseMultiModalProcessor._call_hf_processor = call_hf_processor
