"""Derived keys without an engine: what they cover, and every step of a request that can fail, end early, or be late."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import io
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmbroker
from mmbroker.adapters.fingerprint import derived_key, fingerprint
from mmbroker.adapters.sglang import artifacts, holding, joining, known, packing, settings, shaping
from mmbroker.adapters.sglang.asking import Asking
from mmbroker.demo.model import tiny_model
from mmbroker.proto import errors
from mmbroker.proto.reference import is_reference
from tests.kit import BrokerProcess, eventually

from . import kit

pytestmark = pytest.mark.sglang

kit.schedule_batch()  # so that importing it warns of nothing later

from sglang.srt.managers.schedule_batch import Modality  # noqa: E402
from sglang.srt.multimodal.media_artifacts.base import MediaArtifactCacheMixin  # noqa: E402

ENGINE = "engine"


@dataclasses.dataclass(frozen=True)
class Artifact:
    content_digest: str
    artifact_key: str
    feature_hash: int
    feature: Any
    model_specific_data: dict[str, Any]


class Processor(MediaArtifactCacheMixin):  # type: ignore[misc]
    """SGLang's own order of events, and a model's part that only this test knows: pixels are features."""

    artifact_modality = Modality.IMAGE
    gpu_image_decode = False
    mm_processor_executor = None
    processor_fingerprint = "sha256:" + 64 * "0"
    trust_mm_content_hashes = False

    def __init__(self) -> None:
        self.io_executor = ThreadPoolExecutor(4)
        self.batches: list[int] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def prepare_artifact_batch(self, entries: Sequence[Any]) -> list[Artifact]:
        self.batches.append(len(entries))
        self.meanwhile()
        return [self._artifact(entry) for entry in entries]

    @staticmethod
    def _artifact(entry: Any) -> Artifact:
        pixels = torch.from_numpy(np.array(entry.media))
        grid = {"grid": torch.tensor([pixels.shape]), "names": ("a", [1, None, True, 0.5]), "raw": b"x"}
        return Artifact(
            entry.content_digest, entry.artifact_key, artifacts._hash_of(entry.artifact_key), pixels, grid
        )


class Bench:
    """A processor with derived keys, and a rank that takes what it puts."""

    def __init__(self, broker: BrokerProcess) -> None:
        asked = settings.Settings(True, str(broker.directory), 5.0, ENGINE)
        self.broker = broker
        self.joining = joining.Joining(asked, "tokenizer")
        assert self.joining.joined.wait(10)
        self.rank = mmbroker.connect(broker.directory, name="rank")
        self.table = self.rank.attach(engine=ENGINE)
        self.processor = Processor()
        self.asking = Asking(self.joining, ENGINE)
        self.artifacts = artifacts.Artifacts(self.processor, fingerprint(test=1), Artifact, self.asking)

    def close(self) -> None:
        self.rank.close()
        self.joining.close()
        self.processor.io_executor.shutdown()

    @property
    def client(self) -> Any:
        return self.asking.client

    async def prepare(
        self, *media: Any, wait: float = 5.0, derived: bool = True, **options: Any
    ) -> list[Any]:
        """The artifacts, checked: of what was asked for, with features that a rank can take."""
        with holding.Turn(None, wait, derived) as turn:
            made = await self.artifacts.prepare(
                type(self.processor).prepare_media_artifacts_without_cache, media, options
            )
            own = await self.processor.prepare_media_artifacts_without_cache(media)
            for one, other in zip(made, own, strict=True):
                assert (one.content_digest, one.artifact_key, one.feature_hash) == (
                    other.content_digest,
                    other.artifact_key,
                    other.feature_hash,
                )
                assert str(one.model_specific_data) == str(other.model_specific_data)
                if is_reference(one.feature):
                    with self.table.take(one.feature) as use:
                        assert torch.equal(use.tensor, other.feature)
                else:
                    assert torch.equal(one.feature, other.feature)
            named = [(a.feature["boot"], a.feature["hold"]) for a in made if is_reference(a.feature)]
            assert len(turn.taken(named)) == len(set(named)), "what is referred to is held"
            for key in set(named):
                self.client._own._holds[self.client._link.session, key[1]].drop()
        return made

    def at_rest(self) -> None:
        kit.at_rest(self.broker)


@pytest.fixture
def bench(broker: BrokerProcess) -> Iterator[Bench]:
    made = Bench(broker)
    yield made
    made.close()


def data(seed: int = 0, size: tuple[int, int] = (12, 8)) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def references(made: Sequence[Any]) -> list[bool]:
    return [is_reference(one.feature) for one in made]


# --- the way ----------------------------------------------------------------------------------------------------------


def test_what_is_known_is_not_made_again(bench: Bench) -> None:
    async def run() -> None:
        assert references(await bench.prepare(data(1), data(2))) == [True, True]
        bench.processor.batches.clear()
        made = await bench.prepare(data(2), data(1), data(2))
        assert references(made) == [True] * 3 and made[0].feature == made[2].feature
        assert bench.processor.batches == [3], "only the test itself has made them, to compare"
        # Some are there, and some are not.
        bench.processor.batches.clear()
        assert references(await bench.prepare(data(1), data(3), data(2), data(4))) == [True] * 4
        assert bench.processor.batches == [2, 4]

    asyncio.run(run())
    bench.at_rest()
    assert bench.broker.status()["counters"]["seals"] == 4


def test_two_requests_at_once_make_a_picture_once(bench: Bench) -> None:
    async def run() -> None:
        pairs = [(data(1), data(2)), (data(2), data(3)), (data(3), data(1)), (data(2), data(1))]
        for made in await asyncio.gather(*(bench.prepare(*pair) for pair in pairs)):
            assert references(made) == [True, True]

    asyncio.run(run())
    counters = bench.broker.status()["counters"]
    assert (counters["promises"], counters["seals"]) == (3, 3)
    bench.at_rest()


def test_what_came_decoded_has_no_derived_key(bench: Bench) -> None:
    async def run() -> None:
        picture = Image.open(io.BytesIO(data(5)))
        assert references(await bench.prepare(picture, data(5))) == [False, True]
        assert references(await bench.prepare(data(6), derived=False)) == [False]

    asyncio.run(run())
    bench.at_rest()


def test_content_hashes_are_checked_as_sglang_does(bench: Bench) -> None:
    async def run() -> None:
        (known,) = await bench.prepare(data(1))
        made = await bench.prepare(data(1), data(2), content_hashes=[known.content_digest, None])
        assert references(made) == [True, True]
        with pytest.raises(ValueError, match="content hash mismatch"):
            await bench.prepare(data(1), content_hashes=["sha256:" + 64 * "1"])

    asyncio.run(run())
    bench.at_rest()


# --- every step fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [errors.BrokerLost("x"), errors.DeadlineExceeded("x"), errors.QuotaExceeded("x")]
)
@pytest.mark.parametrize("step", ["get_or_promise", "put_many"])
def test_an_error_of_the_broker_leaves_it_to_sglang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, error: errors.BrokerError
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise error

    async def run() -> None:
        await bench.prepare(data(1))
        monkeypatch.setattr(bench.client, step, broken)
        assert references(await bench.prepare(data(1), data(2))) == [False, False]

    asyncio.run(run())
    bench.at_rest()


def test_a_broker_that_is_killed_while_a_picture_is_made(bench: Bench) -> None:
    async def run() -> None:
        bench.processor.meanwhile = lambda: bench.broker.kill()
        assert references(await bench.prepare(data(1))) == [False]

    asyncio.run(run())


def test_a_broker_that_stops_answering_is_not_waited_for(bench: Bench) -> None:
    async def run() -> None:
        bench.broker.process.send_signal(signal.SIGSTOP)
        try:
            assert references(await bench.prepare(data(1), wait=60.0)) == [False]
        finally:
            bench.broker.process.send_signal(signal.SIGCONT)

    asyncio.run(run())
    bench.at_rest()


def test_a_picture_that_fails_is_the_next_ones_to_make(bench: Bench) -> None:
    def fails() -> None:
        raise RuntimeError("on purpose")

    async def run() -> None:
        bench.processor.meanwhile = fails
        results = await asyncio.gather(*(bench.prepare(data(1)) for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["on purpose"] * 3
        bench.processor.meanwhile = lambda: None
        assert references(await bench.prepare(data(1))) == [True]

    asyncio.run(run())
    bench.at_rest()


@pytest.mark.parametrize("step", ["waiting for another's", "putting"])
def test_a_cancelled_request_gives_everything_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its client has gone away while a call of its was under way."""

    async def run() -> None:
        with mmbroker.connect(bench.broker.directory) as other:
            if step == "putting":
                put, begun, go_on = bench.client.put_many, asyncio.Event(), threading.Event()
                loop = asyncio.get_running_loop()

                def slow(*args: Any, **options: Any) -> Any:
                    helds = put(*args, **options)
                    loop.call_soon_threadsafe(begun.set)
                    go_on.wait(10)
                    return helds

                monkeypatch.setattr(bench.client, "put_many", slow)
                task = asyncio.create_task(bench.prepare(data(1)))
                await begun.wait()
                task.cancel()
                go_on.set()
            else:
                key = bench.artifacts._key(data(1), await _snapshot(bench, data(1)), Modality.IMAGE)
                (kept,) = other.get_or_promise([key])
                task = asyncio.create_task(bench.prepare(data(1)))
                await asyncio.to_thread(
                    eventually, lambda: bench.broker.status()["waiting_count"], "it waits for the other"
                )
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if step != "putting":
                kept.drop()

    asyncio.run(run())
    bench.at_rest()


async def _snapshot(bench: Bench, media: bytes) -> Any:
    (snapshot,) = await bench.artifacts._snapshots([media], Modality.IMAGE)
    return snapshot


def test_who_waits_too_long_makes_it(bench: Bench) -> None:
    async def run() -> None:
        with mmbroker.connect(bench.broker.directory) as other:
            key = bench.artifacts._key(data(1), await _snapshot(bench, data(1)), Modality.IMAGE)
            (promise,) = other.get_or_promise([key])
            assert references(await bench.prepare(data(1), wait=0.1)) == [False]
            promise.drop()

    asyncio.run(run())
    bench.at_rest()


@pytest.mark.parametrize("extra", [b"", b"\xff", b"\x92\xa2is\x01", b"\x92\xa4what\xc0"])
def test_nonsense_beside_a_feature_is_no_artifact(bench: Bench, extra: bytes) -> None:
    async def run() -> None:
        key = bench.artifacts._key(data(1), await _snapshot(bench, data(1)), Modality.IMAGE)
        bench.client.put(torch.ones(3), key=key, extra=extra).drop()
        assert references(await bench.prepare(data(1))) == [False]

    asyncio.run(run())
    bench.at_rest()


# --- what a key covers ------------------------------------------------------------------------------------------------


class Wrapped:
    """What of one of SGLang's processors a fingerprint looks at, around a real one of transformers."""

    def __init__(self, processor: Any, config: Any, payload: dict[str, Any]) -> None:
        self._processor, self.hf_config, self._payload = processor, config, payload

    def preprocess_fingerprint_payload(self) -> dict[str, Any]:
        return self._payload

    def _fast_image_processor_device(self, processor: Any) -> str:
        return "cpu"


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoProcessor

    return AutoProcessor.from_pretrained(tiny_model()), AutoConfig.from_pretrained(tiny_model())


def test_a_fingerprint_changes_with_everything_that_shapes_the_output(
    real: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(model_path="model", revision=None)

    def mark(
        change: Callable[[Any, Any], None] = lambda p, c: None,
        payload: dict[str, Any] | None = None,
        **fields: Any,
    ) -> bytes:
        processor, config = copy.deepcopy(real)
        change(processor, config)
        wrapped = Wrapped(processor, config, payload or {"image_config": {}})
        return shaping.fingerprint_of(wrapped, SimpleNamespace(**{**vars(args), **fields}))

    def image(name: str, value: Any) -> Callable[[Any, Any], None]:
        return lambda processor, config: setattr(processor.image_processor, name, value)

    before = mark()
    assert before == mark(), "the same settings have the same fingerprint"
    sizes = real[0].image_processor.size
    marks = [
        before,
        *(
            mark(image("size", {**dict(sizes), "longest_edge": sizes["longest_edge"] - step}))
            for step in (1, 2)
        ),
        mark(image("size", {**dict(sizes), "shortest_edge": 3137})),
        mark(image("image_mean", [0.5, 0.5, 0.5])),
        mark(image("rescale_factor", 1 / 256)),
        mark(image("do_convert_rgb", False)),
        mark(image("resample", 2)),
        mark(image("patch_size", 16)),
        mark(lambda processor, config: setattr(config, "architectures", ["Another"])),
        mark(lambda processor, config: setattr(config.vision_config, "spatial_merge_size", 3)),
        mark(payload={"image_config": {"max_pixels": 1000}}),
        mark(payload={"image_config": {"max_pixels": 1000.0}}),
        mark(model_path="another"),
        mark(revision="main"),
    ]
    monkeypatch.setenv("SGLANG_IMAGE_MAX_PIXELS", "1000")
    marks.append(mark())
    monkeypatch.delenv("SGLANG_IMAGE_MAX_PIXELS")
    monkeypatch.setattr(shaping, "versions", lambda *packages: dict.fromkeys(packages, "0"))
    marks.append(mark())
    assert len(set(marks)) == len(marks)


def test_what_cannot_be_written_down_is_refused_by_its_place(real: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"settings.*hook"):
        shaping.fingerprint_of(
            Wrapped(*real, {"hook": object()}), SimpleNamespace(model_path="model", revision=None)
        )


def test_ten_thousand_pictures_with_near_identical_settings_have_as_many_keys() -> None:
    keys = set()
    for bound in range(2500):
        mark = fingerprint(settings={"size": {"longest_edge": 12845056 - bound}})
        for options in ({}, {"max_pixels": bound}, {"detail": "low"}, {"detail": "lo", "w": None}):
            keys.add(
                derived_key(fingerprint(shaped=mark, modality="IMAGE", options=options), b"same picture")
            )
    assert len(keys) == 10_000


def test_outputs_that_differ_have_keys_that_differ(real: tuple[Any, Any]) -> None:
    picture = Image.open(io.BytesIO(data(3, (300, 400))))
    outputs: dict[bytes, set[bytes]] = {}
    for edge in range(40_000, 60_000, 1_000):
        processor = copy.deepcopy(real[0])
        processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": edge}
        made = processor.image_processor(images=[picture], return_tensors="pt")["pixel_values"]
        mark = shaping.fingerprint_of(
            Wrapped(processor, real[1], {}), SimpleNamespace(model_path="model", revision=None)
        )
        outputs.setdefault(mark, set()).add(made.numpy().tobytes())
    assert len(outputs) == 20 and all(len(same) == 1 for same in outputs.values())
    assert len({next(iter(same)) for same in outputs.values()}) > 2, "the bounds make a difference"


def test_what_is_beside_a_feature_comes_back_as_it_was() -> None:
    value = {"a": [1, -2.5, None, True], "b": ("x", b"y"), "t": torch.arange(6).reshape(2, 3), 3: {}}
    back = known.up(known.down(value))
    assert str(back) == str(value) and back["t"].dtype == torch.int64
    with pytest.raises(TypeError):
        known.down(object())
    large = Artifact("", "", 0, torch.ones(1), {"mask": torch.ones(2000)})
    assert known.closed(large, frozenset({"feature"})) is None
    assert known.closed(dataclasses.replace(large, model_specific_data={}), frozenset({"feature"}))
    assert packing.portable(large.feature)
