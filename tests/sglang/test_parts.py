"""The plugin's parts without an engine: envelopes, counted holds, fallbacks, counters, settings."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmbroker.adapters import turns
from mmbroker.adapters.sglang import (
    export,
    fallbacks,
    holding,
    joining,
    measure,
    packing,
    pictures,
    seams,
    settings,
    uses,
)
from mmbroker.proto import errors
from tests.kit import BrokerProcess, eventually

from . import kit

pytestmark = pytest.mark.sglang

REFERENCE = {"mmbroker": 1, "boot": b"b" * 16, "hold": 7}


def output(hashes: tuple[int | None, ...] = (1, 2)) -> Any:
    """A processor's output for two pictures, as it is when the broker has them."""
    batch = kit.schedule_batch()
    items = []
    for index, number in enumerate(hashes):
        item = batch.MultimodalDataItem(
            modality=batch.Modality.IMAGE,
            offsets=[(1 + 3 * index, 2 + 3 * index)],
            feature=dict(REFERENCE),
            model_specific_data={"image_grid_thw": torch.tensor([[1, 2, 2]]), "name": "cat", "none": None},
        )
        if number is not None:
            item.set_hash(number)
        items.append(item)
    ids = [5, 9, 9, 5, 9, 9, 5]
    return batch.MultimodalProcessorOutput(
        mm_items=items,
        input_ids=ids,
        padded_input_ids=batch.MultimodalProcessorOutput.build_padded_input_ids(ids, items),
        mrope_positions=torch.arange(21).reshape(3, 7),
        mrope_position_delta=torch.tensor([[-3]]),
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4, dtype=torch.int32),
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
    ],
    ids=str,
)
def test_a_packed_tensor_comes_back(tensor: torch.Tensor) -> None:
    back = packing.unpack(packing.pack(tensor))
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    back.zero_()  # memory of its own, which may be written


def test_an_envelope_gives_back_what_was_in_the_request() -> None:
    sent, wanted = output(), output()
    packing.close(sent)
    assert not any(
        isinstance(v, torch.Tensor) for item in sent.mm_items for v in item.model_specific_data.values()
    )
    assert sent.padded_input_ids is None and sent.mrope_positions is None
    received = pickle.loads(pickle.dumps(sent))
    envelope = packing.envelope_of(received)
    assert envelope is not None
    before = pickle.dumps(received)
    opened = packing.open_copy(received, envelope)
    assert pickle.dumps(received) == before, "a later pipeline stage gets what was received"
    assert opened.padded_input_ids == wanted.padded_input_ids
    assert torch.equal(opened.mrope_positions, wanted.mrope_positions)
    assert torch.equal(opened.mrope_position_delta, wanted.mrope_position_delta)
    for item, other in zip(opened.mm_items, wanted.mm_items, strict=True):
        assert item.feature == REFERENCE and item.hash == other.hash and item.pad_value == other.pad_value
        assert set(item.model_specific_data) == set(other.model_specific_data)
        assert torch.equal(item.image_grid_thw, other.image_grid_thw)
        assert item.name == "cat"


def test_a_padded_prompt_that_cannot_be_rebuilt_travels_as_it_is() -> None:
    strange = output()
    strange.padded_input_ids = [0, *strange.padded_input_ids[1:]]
    packing.close(strange)
    envelope = packing.envelope_of(strange)
    assert envelope is not None and not envelope["padded"]
    assert packing.open_copy(strange, envelope).padded_input_ids[0] == 0
    unhashed = output((1, None))
    packing.close(unhashed)
    assert packing.open_copy(unhashed, packing.envelope_of(unhashed) or {}).padded_input_ids is None


def test_what_a_processor_keeps_is_not_changed() -> None:
    request = output()
    kept = [item.model_specific_data for item in request.mm_items]
    packing.close(request)
    assert all("image_grid_thw" in data and packing.ENVELOPE not in data for data in kept)


def test_a_request_without_an_envelope_is_not_ours() -> None:
    assert packing.envelope_of(output()) is None
    assert packing.envelope_of(SimpleNamespace(message="failed earlier")) is None
    assert packing.envelope_of(None) is None


class Held:
    def __init__(self, hold: int = 7) -> None:
        self.ref = SimpleNamespace(boot=b"b" * 16, hold=hold)
        self.drops = 0

    def drop(self) -> None:
        self.drops += 1


def state(finished: bool = True, dispatched: bool = True) -> SimpleNamespace:
    return SimpleNamespace(finished=finished, dispatched=dispatched)


def test_a_hold_ends_with_the_last_of_its_requests() -> None:
    held, claims = Held(), holding.Claims()
    claim = holding.Claim([held])
    claims.add(claim)
    states = holding.States({}, claims.left)
    for rid in ("a", "b"):
        states[rid] = state()
        claims.dispatched(rid, claim.keys)
    claims.dispatched("a", claim.keys)
    claims.end_one(claim)
    states["original"] = state()
    del states["original"]
    del states["a"]
    assert held.drops == 0
    states.pop("b")
    states.pop("b", None)
    assert held.drops == 1
    claims.dispatched("late", claim.keys)
    claims.left("late", state())
    assert held.drops == 1, "a hold that is over cannot be taken up again"


def test_every_way_out_of_the_table_of_requests_counts() -> None:
    left: list[str] = []
    states = holding.States({name: state() for name in "abcd"}, lambda rid, _: left.append(rid))
    del states["a"]
    states.pop("b")
    states.popitem()
    states.clear()
    assert sorted(left) == ["a", "b", "c", "d"] and not states
    with pytest.raises(KeyError):
        del states["a"]
    with pytest.raises(KeyError):
        states.pop("a")
    assert len(left) == 4


@pytest.mark.parametrize("ending", ["the scheduler's last word", "the end of its grace"])
def test_a_request_given_up_early_keeps_its_hold_for_a_while(ending: str) -> None:
    """Its message may still be on the way to a scheduler that has other things to do."""
    held, claims = Held(), holding.Claims()
    claim = holding.Claim([held])
    claims.add(claim)
    claims.dispatched("a", claim.keys)
    claims.end_one(claim)
    timers: list[tuple[float, Any]] = []

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(delay: float, call: Any, *args: Any) -> Any:
            timers.append((delay, lambda: call(*args)))
            return later(0, lambda: None)

        loop.call_later = call_later  # type: ignore[method-assign]
        claims.left("a", state(finished=False))

    asyncio.run(leave())
    assert held.drops == 0 and claims.lingering
    ((delay, call),) = timers
    assert delay == holding.GRACE
    if ending == "the end of its grace":
        call()
    else:
        claims.last_word("another")
        assert held.drops == 0
        claims.last_word("a")
    assert held.drops == 1 and not claims.lingering
    call()
    assert held.drops == 1


@pytest.mark.parametrize("ending", ["answers", "fails", "nothing", "closed early"])
def test_the_calls_own_count_ends_with_its_first_answer(ending: str) -> None:
    held, claims = Held(), holding.Claims()
    seen: list[int] = []

    async def answers() -> AsyncIterator[str]:
        scope = holding.scope.get()
        assert scope is not None
        claim = holding.Claim([held])
        claims.add(claim)
        scope.append(claim)
        if ending == "fails":
            raise ValueError("rejected")
        if ending == "nothing":
            return
        try:
            yield "first"
            yield "second"
        finally:
            seen.append(held.drops)

    async def call() -> list[str]:
        wrapped = holding.first_answer_ends(answers(), claims)
        assert holding.scope.get() is None
        got = []
        async for answer in wrapped:
            assert holding.scope.get() is None, "nothing of it is left in the caller's context"
            assert held.drops == 1
            got.append(answer)
            if ending == "closed early":
                await wrapped.aclose()
        return got

    if ending == "fails":
        with pytest.raises(ValueError, match="rejected"):
            asyncio.run(call())
    else:
        assert asyncio.run(call()) == {"nothing": [], "closed early": ["first"]}.get(
            ending, ["first", "second"]
        )
    assert held.drops == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.PoolFull("", requested=2, limit=1), "too_large"),
        (errors.PoolFull("", requested=1, limit=1), "full"),
        (errors.BrokerLost(""), "absent"),
        (errors.NoSuchEngine(""), "not_attached"),
        (errors.EngineLagging(""), "lagging"),
        (errors.DeadlineExceeded(""), "late"),
        (errors.QuotaExceeded(""), "refused"),
        (errors.DigestConflict(""), "failed"),
        (TypeError(""), "failed"),
    ],
)
def test_every_error_has_a_counter(error: Exception, reason: str) -> None:
    assert fallbacks.reason_of(error) == reason
    assert f"fallback_{reason}" in measure.NAMES


def test_fallbacks_are_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    said = fallbacks.Fallbacks(lambda: now)
    before = measure.counters.read()["fallback_full"]
    with caplog.at_level(logging.WARNING):
        said.count("full", 1, "no room")
        for _ in range(3):
            said.count("full", 2, "still no room")
        said.count("absent", 1, "gone")
        assert (
            len(caplog.messages) == 1 and "1 full" in caplog.messages[0] and "no room" in caplog.messages[0]
        )
        now = 61.0
        said.count("full", 1, "again no room")
    assert len(caplog.messages) == 2
    assert "1 absent, 7 full" in caplog.messages[1] and "again no room" in caplog.messages[1]
    assert measure.counters.read()["fallback_full"] - before == 8


def test_counters_are_read_while_they_count(tmp_path: Path) -> None:
    counters = measure.Counters(str(tmp_path), "scheduler-0")
    counters.add("takes")
    counters.add("inputs_ns", 1 << 40)
    (tmp_path / "half.counters").write_bytes(b"{")
    assert measure.read(tmp_path)["scheduler-0"]["takes"] == 1
    counters.add("takes", 2)
    found = measure.read(tmp_path)
    assert found["scheduler-0"] == counters.read() and found["scheduler-0"]["inputs_ns"] == 1 << 40
    assert set(found) == {"scheduler-0"}


def test_the_tested_versions_are_those_with_seams() -> None:
    assert set(settings.TESTED) == set(seams.VERSIONS)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({settings.TRANSPORT: "carrier pigeon"}, "MMBROKER_TRANSPORT='carrier pigeon'"),
        ({settings.WAIT: "soon"}, "MMBROKER_WAIT='soon'"),
        ({settings.WAIT: "-1"}, "MMBROKER_WAIT='-1'"),
        ({settings.WAIT: "nan"}, "MMBROKER_WAIT='nan'"),
        ({settings.SHARE_OUTPUTS: "on"}, "MMBROKER_SHARE_OUTPUTS='on'"),
    ],
)
def test_senseless_settings_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.read(environ)


def test_settings() -> None:
    assert settings.read({}) == settings.Settings()
    environ = {settings.TRANSPORT: "broker", settings.PATH: "/x", settings.WAIT: "2.5"}
    name = settings.name_engine(environ)
    assert settings.name_engine(environ) == name, "drawn once"
    assert settings.read(environ) == settings.Settings(True, "/x", 2.5, name)


@pytest.mark.parametrize(
    ("word", "shared"),
    [("", True), ("1", True), ("True", True), ("0", False), ("no", False), ("False", False)],
)
def test_outputs_are_shared_unless_that_is_turned_off(word: str, shared: bool) -> None:
    assert settings.read({settings.SHARE_OUTPUTS: word}).share_outputs is shared


class Use:
    releases = 0

    def release(self, stream: object) -> None:
        self.releases += 1


def test_uses_end_once_and_stay_in_their_process() -> None:
    item = output().mm_items[0]
    use: Any = Use()
    uses.hang_on(item).append(use)
    assert "uses" not in str(item.model_specific_data)
    twin = copy.copy(item)
    other = pickle.loads(pickle.dumps(item))
    uses.release(other)
    assert use.releases == 0
    uses.release(item)
    uses.release(item)
    uses.release(twin)
    # Where items are dataclasses a copy shares the uses, and a use's release is idempotent.
    assert use.releases == (1 if kit.NEWEST else 2)


# --- sizes of pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "grid", "expected"),
    [
        # Qwen2.5-VL: patches of 14 x 14 pixels, 3 channels, 2 frames: 28 x 42 pixels, and another of 14 x 14.
        (torch.zeros(7, 1176), [[1, 2, 3], [1, 1, 1]], [(28 * 42, 6 * 4704), (196, 4704)]),
        (torch.zeros(6, 1536), [[1, 2, 3]], [(6 * 256, 6 * 6144)]),  # Qwen3-VL: 16 x 16
        (torch.zeros(4, 588), [1, 2, 2], [(4 * 196, 4 * 2352)]),  # one frame
        (torch.zeros(4, 100), [[1, 2, 2]], [(None, 1600)]),
        (torch.zeros(2, 3, 8, 10), None, [(160, 1920)]),  # two tiles of one picture
        ([torch.zeros(3, 8, 10), torch.zeros(3, 4, 4)], None, [(80, 1152)]),
        (torch.zeros(5, 5), None, [(None, 100)]),
        ({**REFERENCE, "shape": [3, 8, 10], "nbytes": 960}, None, [(80, 960)]),
        (None, None, [(None, 0)]),
    ],
)
def test_sizes_of_pictures(feature: Any, grid: Any, expected: list[tuple[int | None, int]]) -> None:
    data = {} if grid is None else {"image_grid_thw": torch.tensor(grid)}
    item = SimpleNamespace(modality=SimpleNamespace(name="IMAGE"), feature=feature, model_specific_data=data)
    assert list(pictures._pictures(item)) == expected
    item.modality.name = "AUDIO"
    assert list(pictures._pictures(item)) == []


def test_what_was_seen_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And costs nothing, and keeps nothing, where nobody exports it."""
    from prometheus_client import REGISTRY

    monkeypatch.setattr(pictures, "seen", None)
    pictures.look(SimpleNamespace(mm_items=None))
    worker = export.Export("sizes", None)
    several = output()
    for item in several.mm_items:
        item.feature = torch.zeros(4, 1176)
    pictures.look(several)
    pictures.look(SimpleNamespace(mm_items=[]))
    pictures.look(SimpleNamespace(mm_items=[SimpleNamespace(modality="of another kind")]))
    worker.update_pictures()
    worker.update_pictures()

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"mmbroker_engine_{name}", {"engine": "sizes"})

    assert (value("request_pictures_count"), value("request_pictures_sum")) == (1, 2)
    assert (value("picture_megapixels_count"), value("picture_bytes_sum")) == (2, 2 * 4 * 4704)
    assert value("picture_megapixels_sum") == pytest.approx(2 * 4 * 196 / 1e6)
    for _ in range(2 * pictures._KEPT):
        pictures.look(several)
    assert pictures.seen is not None and len(pictures.seen) == pictures._KEPT


@pytest.mark.parametrize(("before", "after"), [(0.005, turns.INTERVAL), (0.0001, 0.0001)])
def test_who_has_joined_a_broker_takes_turns_sooner(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture, before: float, after: float
) -> None:
    """A process without a broker is left as it is."""
    usual = sys.getswitchinterval()
    asked = settings.Settings(engine="e", path=str(broker.directory))
    try:
        sys.setswitchinterval(before)
        absent = joining.Joining(settings.Settings(engine="e", path="/nowhere"), "absent")
        eventually(lambda: "has no broker yet" in caplog.text, "an attempt that failed")
        assert sys.getswitchinterval() == pytest.approx(before)
        absent.close()
        joined = joining.Joining(asked, "tokenizer")
        assert joined.joined.wait(20)
        assert sys.getswitchinterval() == pytest.approx(after)
        joined.close()
    finally:
        sys.setswitchinterval(usual)
