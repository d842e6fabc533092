"""The plugin where the scheduler's tensors are on a GPU: SGLang's own `embed_mm_inputs`, and a GPU that is a fake.

An image's encoder is a function of the test's, which sees what a model's would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmbroker.adapters.sglang import consumer, encoding, placing, producer, settings
from mmbroker.cuda.fake_memory import VARIABLE, Machine, Make
from mmbroker.proto.errors import PoolFull
from mmbroker.proto.reference import is_reference
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.conftest import fake, make_bench
from tests.gpu.test_table import block
from tests.kit import eventually

from . import kit
from .test_carry import Engine, counted, same

__all__ = ["counted", "fake", "make_bench"]

pytestmark = pytest.mark.sglang

MODEL = "Qwen2_5_VLForConditionalGeneration"
LENGTH = 4  # tokens of a picture
HIDDEN = 8


class Model:
    """An encoder, and what it found in the places of the features."""

    def __init__(self, engine: GpuEngine) -> None:
        self.engine = engine
        self.found: list[torch.Tensor] = []

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        for item in items:
            assert isinstance(item.feature, torch.Tensor)
            self.found.append(item.feature.clone())
        return torch.ones(len(items) * LENGTH, HIDDEN)


class GpuEngine(Engine):
    """Its scheduler's device is the fake GPU."""

    def __init__(self, bench: Bench, stream: int, **options: Any) -> None:
        self.bench = bench
        super().__init__(
            settings.Settings(True, str(bench.broker.directory), 2.0, "an-engine"), MODEL, **options
        )
        assert self.consumer._table is not None and self.consumer._table.path == "device"
        self.consumer._stream = stream
        self.model = Model(self)
        from sglang.srt.managers import mm_utils

        self.utils = mm_utils
        mm_utils.init_mm_embedding_cache(1 << 20)

    def picture(self, mib: float, seed: int, at: int) -> Any:
        """An item whose tokens begin at `at`."""
        item = self.item(block(mib, seed=seed))
        item.offsets = [(at, at + LENGTH - 1)]
        return item

    def embed(self, inputs: Any, prefix: int, extended: int) -> None:
        """What the scheduler does with one chunk of a prompt."""
        padded = [0] * 64
        for item in inputs.mm_items:
            for start, end in item.offsets:
                padded[start : end + 1] = [item.pad_value] * (end - start + 1)
        encoding.embed(
            self.utils.embed_mm_inputs,
            mm_inputs_list=[inputs],
            extend_prefix_lens=[prefix],
            extend_seq_lens=[extended],
            input_ids=torch.tensor(padded[prefix : prefix + extended]),
            input_embedding=torch.nn.Embedding(100, HIDDEN),
            multimodal_model=self.model,
            placeholder_tokens=None,
        )

    def parked(self, count: int) -> None:
        eventually(lambda: self.bench.count("parked") == count, f"{count} parked")


@pytest.fixture
def engine(
    fake: Driven, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuEngine]:
    monkeypatch.setattr(consumer, "device_of", lambda scheduler: "cuda:0")
    bench = make_bench(fake)
    with fake.stream() as stream:
        engine = GpuEngine(bench, stream)
        yield engine
        eventually(lambda: kit.balanced(bench.broker.status()), "holds and grants come to nothing")
        engine.close()


def features(inputs: Any) -> list[Any]:
    return [item.feature for item in inputs.mm_items]


def test_the_encoder_finds_the_feature_on_the_device(
    engine: GpuEngine, counted: Callable[[str], int]
) -> None:
    def look(received: Any, inputs: Any) -> None:
        assert all(map(is_reference, features(inputs)))
        found = []
        own = engine.model.get_image_feature
        engine.model.get_image_feature = lambda items: (  # type: ignore[method-assign]
            found.extend(engine.bench.on_device(item.feature) for item in items),
            own(items),
        )[1]
        engine.embed(inputs, 0, 20)
        assert found == [True, True]
        assert all(map(is_reference, features(inputs))), "a tensor was left for SGLang to copy to the CPU"
        assert [same(got, block(0.5, seed)) for seed, got in enumerate(engine.model.found)] == [True, True]
        engine.parked(2)

    engine.serve(engine.output(engine.picture(0.5, 0, 2), engine.picture(0.5, 1, 10)), look)
    assert (counted("encoded"), counted("moved"), counted("releases")) == (2, 0, 2)


def test_a_chunk_reads_what_lies_in_it(engine: GpuEngine, counted: Callable[[str], int]) -> None:
    """And lets go of it; what comes later keeps its place. A retracted request reads the cache, or the host."""

    def look(received: Any, inputs: Any) -> None:
        engine.embed(inputs, 0, 8)
        assert counted("encoded") == 1
        engine.parked(1)
        engine.embed(inputs, 8, 8)
        assert counted("encoded") == 2
        engine.parked(2)
        engine.embed(inputs, 0, 16)
        assert counted("encoded") == 2, "the cache has both"
        engine.utils.init_mm_embedding_cache(1 << 20)
        engine.embed(inputs, 0, 16)
        assert counted("encoded") == 4
        assert [
            same(got, block(0.5, seed)) for seed, got in zip((0, 1, 0, 1), engine.model.found, strict=True)
        ]

    engine.serve(engine.output(engine.picture(0.5, 0, 2), engine.picture(0.5, 1, 10)), look)


def test_what_the_cache_has_is_never_read(engine: GpuEngine, counted: Callable[[str], int]) -> None:
    for parked in (1, 2):

        def look(received: Any, inputs: Any, parked: int = parked) -> None:
            engine.embed(inputs, 0, 16)
            engine.parked(parked)

        engine.serve(engine.output(engine.picture(0.5, 0, 2)), look)
    assert counted("takes") == 2 and counted("encoded") == 1


def test_an_encoder_that_fails_leaves_the_reference(engine: GpuEngine) -> None:
    def look(received: Any, inputs: Any) -> None:
        def broken(items: list[Any]) -> torch.Tensor:
            raise ValueError("no memory")

        engine.model.get_image_feature = broken  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="no memory"):
            engine.embed(inputs, 0, 16)
        assert all(map(is_reference, features(inputs)))

    engine.serve(engine.output(engine.picture(0.5, 0, 2)), look)


def test_a_request_that_ends_before_its_encoder(engine: GpuEngine) -> None:
    engine.serve(engine.output(engine.picture(0.5, 0, 2)), lambda received, inputs: None)


def test_other_models_find_tensors_at_once(engine: GpuEngine) -> None:
    """And what reads them in the model's stream is waited for before their place is another's."""
    engine.consumer._late = False
    fake, stream = engine.bench.driven, engine.consumer._stream
    assert isinstance(stream, int)

    def look(received: Any, inputs: Any) -> None:
        feature = inputs.mm_items[0].feature
        assert same(feature, block(0.5, 0)) and engine.bench.on_device(feature)
        del feature
        blocking.__enter__()

    blocking = fake.blocked(stream)
    with fake.pinned(4096) as target:
        engine.serve(engine.output(engine.picture(0.5, 0, 2)), look)
        assert target.nbytes
        table = engine.consumer._table
        assert table is not None
        with engine.bench.client.put(block(0.1, 7)):
            pass
        blocking.__exit__(None, None, None)
    eventually(lambda: table.stats()["unsettled"] == 0, "settled after the stream")


@pytest.mark.parametrize("private", [False, True])
def test_features_made_on_the_gpu_stay_there(
    engine: GpuEngine, counted: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    monkeypatch.setattr(producer, "_on_gpu", lambda tensor: True)
    items = [engine.picture(0.5, 0, 2), engine.item([block(0.2, 1), block(0.1, 2)])]
    items[1].offsets = [(10, 13)]

    def look(received: Any, inputs: Any) -> None:
        assert engine.bench.broker.status()["pool"]["used"] == 0
        if not private:
            engine.embed(SimpleNamespace(mm_items=inputs.mm_items[:1]), 0, 16)
            assert same(engine.model.found[0], block(0.5, 0))

    engine.serve(engine.output(*items), look, private)
    assert counted("put_on_device") == 2


def test_no_room_for_what_was_made_on_the_gpu(
    engine: GpuEngine,
    counted: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The host does, as for all others; each is counted, and it is said once."""
    monkeypatch.setattr(placing._through_host, "_said", float("-inf"))
    monkeypatch.setattr(producer, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(placing, "_ON_DEVICE", 0.1)

    def look(received: Any, inputs: Any) -> None:
        engine.embed(inputs, 0, 16)
        assert same(engine.model.found[0], block(40, 0))

    for times in (1, 2):
        engine.serve(engine.output(engine.picture(40, 0, 2)), look)
        assert (counted("put_on_device"), counted("through_host"), counted("features")) == (0, times, times)
    (said,) = [record.getMessage() for record in caplog.records if "through the host" in record.getMessage()]
    assert "(1)" in said and "PoolFull" in said


def test_sglangs_pool_is_used_only_where_the_broker_is_not(
    engine: GpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_on_gpu", lambda tensor: True)
    tensor = torch.ones(3)
    wrapped: list[torch.Tensor] = []

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        wrapped.append(tensor)
        return tensor

    assert engine.producer.keep(wrap, tensor) is tensor and not wrapped

    def refuse(*args: Any, **options: Any) -> None:
        raise PoolFull("no room", requested=1, free=0, limit=1)

    item = engine.picture(0.1, 0, 2)
    monkeypatch.setattr(engine.producer._joining.client, "put_many", refuse)
    engine.serve(engine.output(item), lambda received, inputs: None)
    assert [same(one, block(0.1, 0)) for one in wrapped] == [True]


def test_a_server_on_a_gpu(
    own_transport: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, whose tensors the fake GPU has: in chunks of a prompt, with sessions, the same texts."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    Machine(tmp_path, Make())
    chunks = ("--chunked-prefill-size", "32")
    with kit.running_scene(
        chunks, {"TEST_DEVICE": "cuda:0"}, name="gpu", gpu="0", device_headroom_mib=0, device_mib=64
    ) as scene:
        assert kit.workload(scene.engine) == own_transport(*chunks)["texts"]
        (engine,) = scene.status()["engines"]
        assert engine["ranks"][0]["path"] == "device"
        counts = scene.total("scheduler")
        assert counts["takes"] >= kit.PICTURES and counts["errors"] == counts["misses"] == 0
        assert not kit.fallbacks(scene.total("tokenizer"))
        with scene.change("scheduler") as changed:
            scene.engine.ask([kit.album()[0]], "Is this the same picture?", tokens=4)
        assert changed["takes"] == 1 and "encoded" not in changed, "the embedding was cached"
        scene.at_rest()
        counters = scene.status()["counters"]
        assert counters["loads"] and counters["parked"]
