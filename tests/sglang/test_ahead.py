"""Encoders that run ahead of the model: SGLang's own `embed_mm_inputs` finds what was made for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmbroker.adapters.sglang import ahead, consumer, encoding
from mmbroker.adapters.sglang.settings import Settings
from mmbroker.proto.reference import is_reference
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.conftest import fake, make_bench
from tests.kit import eventually

from . import kit
from .test_carry import counted, same
from .test_gpu import HIDDEN, LENGTH, MODEL, GpuEngine, features

__all__ = ["counted", "fake", "make_bench"]

pytestmark = pytest.mark.sglang


class Ordered:
    """An encoder of numbered rows, and SGLang's function, which both note when they are called."""

    def __init__(self, engine: GpuEngine) -> None:
        self.engine = engine
        self.seen: list[str] = []
        self.fails: list[Exception] = []
        self.embed = engine.utils.embed_mm_inputs

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        self.seen.append(f"encoder of {len(items)}")
        if self.fails:
            raise self.fails.pop()
        return torch.cat(
            [torch.full((LENGTH * len(item.offsets), HIDDEN), float(item.feature.sum())) for item in items]
        )

    def original(
        self,
        mm_inputs_list: Any,
        extend_prefix_lens: Any,
        extend_seq_lens: Any,
        input_ids: Any,
        input_embedding: Any,
        multimodal_model: Any,
        placeholder_tokens: Any,
        data_embedding_func_mapping: Any = None,
    ) -> Any:
        self.seen.append("sglang")
        return self.embed(
            mm_inputs_list=mm_inputs_list,
            extend_prefix_lens=extend_prefix_lens,
            extend_seq_lens=extend_seq_lens,
            input_ids=input_ids,
            input_embedding=input_embedding,
            multimodal_model=multimodal_model,
            data_embedding_func_mapping=data_embedding_func_mapping,
        )

    def run(self, requests: list[Any], prefix: int = 0, extended: int = 64) -> torch.Tensor:
        """One batch. What each of its tokens became."""
        ids = []
        for inputs in requests:
            padded = [0] * 64
            for item in inputs.mm_items:
                for start, end in item.offsets:
                    padded[start : end + 1] = [item.pad_value] * (end - start + 1)
            ids += padded[prefix : prefix + extended]
        torch.manual_seed(0)
        result, _ = encoding.embed(
            self.original,
            mm_inputs_list=requests,
            extend_prefix_lens=[prefix] * len(requests),
            extend_seq_lens=[extended] * len(requests),
            input_ids=torch.tensor(ids),
            input_embedding=torch.nn.Embedding(100, HIDDEN),
            multimodal_model=self,
            placeholder_tokens=None,
        )
        return result.detach()  # type: ignore[no-any-return]


@pytest.fixture
def engine(
    fake: Driven, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuEngine]:
    monkeypatch.setattr(consumer, "device_of", lambda scheduler: "cuda:0")
    bench = make_bench(fake)
    with fake.stream() as stream:
        engine = GpuEngine(bench, stream)
        if not kit.NEWEST:
            cache = engine.utils
            engine.consumer.ahead = ahead.Ahead(
                lambda item: cache.embedding_cache.get_single(item.hash) is not None
            )
        yield engine
        eventually(lambda: kit.balanced(bench.broker.status()), "holds and grants come to nothing")
        engine.close()


@pytest.fixture
def model(engine: GpuEngine) -> Ordered:
    if kit.NEWEST:
        pytest.skip("with this release encoders do not run ahead")
    return Ordered(engine)


def request(engine: GpuEngine, *seeds: int) -> Any:
    return engine.output(*(engine.picture(0.1, seed, 2 + 8 * index) for index, seed in enumerate(seeds)))


def test_the_encoder_runs_first_and_once(
    engine: GpuEngine, model: Ordered, counted: Callable[[str], int]
) -> None:
    def look(received: Any, inputs: Any) -> None:
        found = model.run([inputs])
        assert model.seen == ["encoder of 2", "sglang"]
        assert all(map(is_reference, features(inputs)))
        assert counted("encoded_ahead") == 2 and counted("encoded") == 2
        engine.parked(2)
        engine.consumer.ahead = None
        engine.utils.init_mm_embedding_cache(1 << 20)
        for item in inputs.mm_items:
            item.__dict__["_mmbroker_uses"].ahead = None
        assert same(model.run([inputs]), found), "the same as in the model's turn"
        assert model.seen[2:] == ["sglang", "encoder of 2"]

    engine.serve(request(engine, 0, 1), look)


def test_what_is_not_asked_for_is_not_made(
    engine: GpuEngine, model: Ordered, counted: Callable[[str], int]
) -> None:
    """What lies in another chunk, what the cache has, and what comes twice."""

    def look(received: Any, inputs: Any) -> None:
        model.run([inputs], 0, 8)
        assert model.seen == ["encoder of 1", "sglang"]
        model.run([inputs, inputs], 4, 20)
        assert model.seen[2:] == ["encoder of 1", "sglang"]
        model.run([inputs], 0, 64)
        assert model.seen[4:] == ["sglang"]
        model.run([inputs], 32, 20)
        assert model.seen[5:] == ["sglang"]
        assert counted("encoded_ahead") == 2

    engine.serve(request(engine, 0, 1), look)


def test_items_that_are_encoded_another_way_wait_for_their_turn(engine: GpuEngine, model: Ordered) -> None:
    item = engine.picture(0.1, 0, 2)
    item.offsets = [(2, 5), (8, 11)]

    def look(received: Any, inputs: Any) -> None:
        model.run([inputs])
        assert model.seen == ["sglang", "encoder of 1"]

    engine.serve(engine.output(item), look)


def test_an_encoder_that_fails_ahead_has_its_turn(
    engine: GpuEngine, model: Ordered, counted: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Each is counted, and it is said once."""

    def look(received: Any, inputs: Any) -> None:
        for times in (1, 2):
            engine.utils.init_mm_embedding_cache(1 << 20)
            model.seen.clear()
            model.fails = [torch.OutOfMemoryError("the GPU is full")]
            model.run([inputs])
            assert model.seen == ["encoder of 1", "sglang", "encoder of 1"]
            assert counted("ahead_failed") == times and counted("encoded_ahead") == 0
        engine.utils.init_mm_embedding_cache(1 << 20)
        model.fails = [ValueError("never"), ValueError("never")]
        with pytest.raises(ValueError, match="never"):
            model.run([inputs])
        assert all(map(is_reference, features(inputs)))

    with caplog.at_level(logging.WARNING):
        engine.serve(request(engine, 0), look)
    (said,) = [r.getMessage() for r in caplog.records if "ahead of the model" in r.getMessage()]
    assert "the GPU is full" in said


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        ({"cached": None}, False),
        ({"architecture": "AnotherModel"}, False),
        ({"stages": 2}, False),
        ({"peers": "others"}, False),
        ({"asked": False}, False),
        ({"graphs": "1"}, False),
    ],
    ids=str,
)
def test_where_encoders_run_ahead(
    change: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a model or a release that was not tried, nor where ranks share the work, nor against what was asked."""
    kit.schedule_batch()
    monkeypatch.setattr(consumer, "_peers", lambda scheduler: change.get("peers"))
    monkeypatch.setattr(consumer.Consumer, "_attach", lambda self, client: None)
    monkeypatch.setattr(
        consumer, "Joining", lambda *args: SimpleNamespace(wait=lambda: None, close=lambda: None)
    )
    monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", change.get("graphs", "0"))
    scheduler = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[change.get("architecture", MODEL)])
        )
    )
    made = consumer.Consumer(
        Settings(broker=True, engine="an-engine", ahead=change.get("asked", True)),
        scheduler,
        consumer.Topology(0, 1, 0, change.get("stages", 1)),
        lambda *args: None,
        change.get("cached", lambda item: False),
    )
    assert (made.ahead is not None) is runs
