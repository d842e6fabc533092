"""The local table: takes, releases, dismissals, tensors that outlive them, and references that do not fit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import mmbroker
from mmbroker.proto.errors import BrokerError, FeatureMissing, StaleReference
from mmbroker.proto.form import Part
from mmbroker.proto.reference import Reference
from tests.kit import eventually
from tests.rig import Rig, a_rig, bits, same, values


def stats(rig: Rig, *names: str) -> tuple[int, ...]:
    found = rig.table.stats()
    return tuple(found[name] for name in names)


def put(rig: Rig, seed: int = 0, **options: Any) -> tuple[mmbroker.Held, torch.Tensor]:
    tensor = values(torch.float32, (50, 60), seed=seed)
    return rig.client.put(tensor, to="a", **options), tensor


def receiver_has_seen(rig: Rig) -> None:
    """The rank has handled everything that the producer caused before: the broker's grants arrive in order."""
    with rig.client.put(torch.zeros(0), to="a", key="barrier"):
        pass


# --- taking and releasing -------------------------------------------------------------------------------------------


def test_take_and_release(rig: Rig) -> None:
    held, tensor = put(rig)
    assert stats(rig, "entries", "idle", "busy") == (1, 1, 0)
    use = rig.table.take(held.ref)
    assert stats(rig, "entries", "idle", "busy") == (1, 0, 1)
    assert use.tensor is use.tensor
    assert use.tensors == [use.tensor]
    assert (use.ref, use.digest) == (held.ref, held.digest)
    assert same(use.tensor, tensor)
    use.release()
    use.release()
    use.park()
    assert stats(rig, "entries", "idle", "busy") == (1, 1, 0)
    for after in (lambda: use.tensor, lambda: use.tensors, lambda: use.digest, lambda: use.ref):
        with pytest.raises(FeatureMissing, match="released"):
            after()
    held.drop()
    rig.settled()


@pytest.mark.parametrize(
    "form",
    [
        lambda ref: ref,
        lambda ref: ref.to_wire(),
        lambda ref: {**ref.to_wire(), "shape": ref.shape},
        lambda ref: msgspec.msgpack.decode(msgspec.msgpack.encode(ref.to_wire())),
        lambda ref: dict(reversed(ref.to_wire().items())),
        lambda ref: type("Wire", (dict,), {})(ref.to_wire()),
        lambda ref: Reference.from_wire(ref.to_wire()),
    ],
    ids=["reference", "wire", "tuple shape", "msgpack", "order", "subclass", "parsed"],
)
@pytest.mark.parametrize("many", [False, True], ids=["tensor", "list"])
def test_however_the_reference_travels(rig: Rig, form: Callable[[Reference], Any], many: bool) -> None:
    tensors = [torch.arange(3), torch.ones(2, 2)]
    held = rig.client.put_list(tensors, to="a") if many else rig.client.put(tensors[0], to="a")
    with held, rig.table.take(form(held.ref)) as use:
        assert same(use.tensors[0], tensors[0])


@pytest.mark.parametrize("end", ["release", "park", "with", "forgotten"])
def test_uses_are_counted(rig: Rig, end: str) -> None:
    """Taken several times, ended in every way: the entry is settled after the last."""
    held, tensor = put(rig)
    uses = [rig.table.take(held.ref) for _ in range(3)]
    assert len({id(use.tensor) for use in uses}) == 3
    held.drop()
    eventually(lambda: stats(rig, "entries", "unsettled") == (0, 1), "the dismissal")
    while uses:
        assert stats(rig, "unsettled") == (1,)
        use = uses.pop()
        assert same(use.tensor, tensor)
        match end:
            case "release":
                use.release()
            case "park":
                use.park()
            case "with":
                with use:
                    pass
        del use
    rig.settled()


def test_taken_again_after_a_release(rig: Rig) -> None:
    """Retraction, chunked prefill, several samples: the same reference, until its hold is over."""
    held, tensor = put(rig)
    for n in range(5):
        with rig.table.take(held.ref) as use:
            if n % 2:
                assert same(use.tensor, tensor)
            use.park()
    held.drop()
    rig.settled()
    with pytest.raises(FeatureMissing):
        rig.table.take(held.ref)


def test_an_unread_entry_is_cancelled(rig: Rig) -> None:
    """Granted and never taken: the drop is all it needs."""
    before = rig.broker.status()["pool"]["held"]
    held = [rig.client.put(values(torch.uint8, (10_000,), seed=n), to="a") for n in range(100)]
    for one in held:
        one.drop()
    rig.settled()
    eventually(lambda: rig.broker.status()["pool"]["held"] == before, "free slots")


def test_two_holds_are_two_entries(rig: Rig) -> None:
    (first, tensor), (second, _) = put(rig), put(rig)
    assert first.ref.feature == second.ref.feature
    first.drop()
    receiver_has_seen(rig)
    with pytest.raises(FeatureMissing):
        rig.table.take(first.ref)
    with rig.table.take(second.ref) as use:
        assert same(use.tensor, tensor)
    second.drop()
    rig.settled()


# --- tensors that live on -------------------------------------------------------------------------------------------


def numpy_bytes(array: Any) -> bytes:
    return bytes(array.tobytes())


@pytest.mark.parametrize(
    ("keep", "read"),
    [
        (lambda t: t, bits),
        (lambda t: t[3:], bits),
        (lambda t: t.t(), bits),
        (lambda t: t.detach(), bits),
        (lambda t: t.numpy(), numpy_bytes),
        (lambda t: t.untyped_storage(), bytes),
        (lambda t: memoryview(t.numpy()), bytes),
        (lambda t: [1, {"deep": t[0, :]}], lambda kept: bits(kept[1]["deep"])),
    ],
    ids=["tensor", "slice", "transposed", "detached", "numpy", "storage", "memoryview", "container"],
)
def test_a_tensor_kept_after_release(
    rig: Rig, keep: Callable[[torch.Tensor], Any], read: Callable[[Any], bytes]
) -> None:
    """Its bytes stay right while it lives, and its slot is not given to another."""
    held, tensor = put(rig, seed=5)
    use = rig.table.take(held.ref)
    kept = keep(use.tensor)
    use.release()
    held.drop()
    eventually(lambda: stats(rig, "unsettled", "kept") == (1, 1), "a kept entry")
    for n in range(20):
        put(rig, seed=100 + n)[0].drop()
    eventually(lambda: stats(rig, "entries", "unsettled", "kept") == (0, 1, 1), "still kept")
    assert read(kept) == read(keep(tensor))
    del kept
    rig.settled()


def test_a_kept_tensor_is_counted_in_the_brokers_status(rig: Rig) -> None:
    held, _ = put(rig)
    use = rig.table.take(held.ref)
    kept = use.tensor
    use.release()
    held.drop()

    def told() -> int:
        tallies = {s["name"]: s["tally"] for s in rig.broker.status()["sessions"]}
        return int(tallies["engine"].get("table_kept", 0))

    eventually(lambda: told() == 1, "the tally")
    del kept
    eventually(lambda: told() == 0, "the next tally")


# --- private copies -------------------------------------------------------------------------------------------------


def test_writing_into_a_copy_harms_nobody() -> None:
    with a_rig("copy") as rig:
        held, tensor = put(rig)
        other, _ = put(rig)
        with rig.table.take(held.ref) as use:
            use.tensor.fill_(7)
        with rig.table.take(other.ref) as use:
            assert same(use.tensor, tensor)
        again, _ = put(rig)
        with rig.table.take(again.ref) as use:
            assert same(use.tensor, tensor)


def test_buffers_are_used_again() -> None:
    with a_rig("copy") as rig:
        for n in range(30):
            held, tensor = put(rig, seed=n)
            with rig.table.take(held.ref) as use:
                assert same(use.tensor, tensor)
            held.drop()
            rig.settled()
        assert 0 < rig.table.stats()["buffer_bytes"] < 2 * tensor.nbytes


def test_a_private_grant_outlives_its_hold(rig: Rig) -> None:
    """Session items: settled at the dismissal, and still there for whoever took them."""
    held, tensor = put(rig, private=True)
    use, unread = rig.table.take(held.ref), rig.table.take(held.ref)
    assert use.tensor is not None
    held.drop()
    rig.settled()
    eventually(lambda: not rig.broker.status()["holds"], "the end of the hold")
    for n in range(20):
        put(rig, seed=50 + n)[0].drop()
    assert same(use.tensor, tensor)
    assert same(unread.tensor, tensor)  # built only now
    use.tensor.zero_()
    use.release()
    unread.release()


# --- references that do not fit -------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "hold": 1 << 40,
    "feature": 99,
    "generation": 99,
    "digest": bytes(32),
    "dtype": "int32",
    "shape": [60, 50],
    "nbytes": 11,
    "boot": bytes(16),
    "parts": [["float32", [50, 60], 0]],
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("parsed", [False, True], ids=["wire", "reference"])
def test_a_forged_reference(rig: Rig, field: str, parsed: bool) -> None:
    held, _ = put(rig)
    wire = {**held.ref.to_wire(), field: WRONG[field]}
    with pytest.raises(FeatureMissing if field == "hold" else StaleReference) as caught:
        rig.table.take(Reference.from_wire(wire) if parsed else wire)
    assert "producer" in str(caught.value)
    if field not in ("hold", "boot"):
        assert field in str(caught.value)
    held.drop()
    rig.settled()


@pytest.mark.parametrize(
    "thing",
    [
        None, 3, "ref", b"ref", [], {}, {"mmbroker": 1}, {"mmbroker": 2}, {"boot": [], "hold": {}},
        {"mmbroker": 1, "boot": bytes(16), "hold": "1"}, torch.ones(2), object(), Part("int8", (1,), 0),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_reference(rig: Rig, thing: Any) -> None:
    before = rig.table.stats()["stale"]
    with pytest.raises(StaleReference):
        rig.table.take(thing)
    assert rig.table.stats()["stale"] == before + 1


def test_a_tensor_inside_a_reference(rig: Rig) -> None:
    held, _ = put(rig)
    with pytest.raises(StaleReference):
        rig.table.take({**held.ref.to_wire(), "shape": torch.ones(2)})
    held.drop()


def test_misses_are_told_apart_and_counted(rig: Rig) -> None:
    held, _ = put(rig)
    held.drop()
    rig.settled()
    misses, stale = stats(rig, "misses", "stale")
    with pytest.raises(FeatureMissing, match="rank 0 of engine 'a'"):
        rig.table.take(held.ref)
    with pytest.raises(StaleReference, match="has not seen"):
        rig.table.take(msgspec.structs.replace(held.ref, boot=bytes(16)))
    assert stats(rig, "misses", "stale") == (misses + 1, stale + 1)


# --- threads --------------------------------------------------------------------------------------------------------


def test_any_thread_may_take_and_release(rig: Rig) -> None:
    """Also the garbage collector, in whatever thread it runs."""
    held = [put(rig, seed=n) for n in range(8)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            cycle: list[Any] = []
            for n in range(400):
                one, tensor = held[(seed + n) % len(held)]
                use = rig.table.take(one.ref.to_wire())
                assert use.tensor[0, 0] == tensor[0, 0]
                if n % 3:
                    use.release()
                else:
                    cycle = [use]
                    cycle.append(cycle)
        except BaseException as error:
            errors.append(error)

    def collect() -> None:
        while not stop.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    collector.join()
    assert not errors
    for one, _ in held:
        one.drop()
    gc.collect()
    rig.settled()
    assert stats(rig, "busy", "unsettled") == (0, 0)


def test_takes_race_with_dismissals(rig: Rig) -> None:
    """A take either misses, or has the right bytes until its release."""
    started = threading.Barrier(2)
    refs: list[tuple[Reference, int]] = []
    taken = 0

    def scheduler() -> None:
        nonlocal taken
        started.wait()
        for n in range(200):
            started.wait()
            ref, value = refs[n]
            while True:
                try:
                    use = rig.table.take(ref)
                except FeatureMissing:
                    break
                taken += 1
                assert int(use.tensor[0]) == value == int(use.tensor[-1])
                use.release()

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            scheduler()
        except BaseException as error:
            errors.append(error)
            started.abort()

    thread = threading.Thread(target=guarded)
    thread.start()
    started.wait()
    for n in range(200):
        held = rig.client.put(torch.full((1000,), n), to="a")
        refs.append((held.ref, n))
        started.wait()
        held.drop()
    thread.join()
    assert not errors
    assert taken
    rig.settled()


def test_a_dismissal_in_the_middle_of_a_take(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the entry was found, before its mark was set: the take sees it, and misses."""
    held, _ = put(rig)
    use = mmbroker.Use

    def dismissed_first(entry: Any) -> mmbroker.Use:
        held.drop()
        rig.settled()
        return use(entry)

    monkeypatch.setattr("mmbroker.table.Use", dismissed_first)
    with pytest.raises(FeatureMissing):
        rig.table.take(held.ref)
    assert stats(rig, "busy", "unsettled") == (0, 0)


# --- attaching ------------------------------------------------------------------------------------------------------


def test_one_table_at_a_time(rig: Rig) -> None:
    with pytest.raises(BrokerError, match="attached already"):
        rig.engine.attach(engine="b")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"access": "write"}, "'copy' or 'readonly'"),
        ({"device": "meta"}, "'cpu', 'cuda'"),
    ],
)
def test_arguments_that_make_no_sense(rig: Rig, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        rig.client.attach(engine="b", **options)


def test_a_refused_attachment_leaves_no_table(rig: Rig) -> None:
    for rank, world in ((0, 1), (5, 2), (-1, 1), (0, 0)):
        with pytest.raises(BrokerError):
            rig.client.attach(engine="a", rank=rank, world=world)
    table = rig.client.attach(engine="mine")
    table.close()
    table.close()
    rig.client.attach(engine="mine").close()


def test_a_closed_table_settles_when_it_can(rig: Rig) -> None:
    with mmbroker.connect(rig.broker.directory) as engine:
        table = engine.attach(engine="short", access=rig.access)
        held = [rig.client.put(torch.full((100,), n), to="short") for n in range(4)]
        used = table.take(held[0].ref)
        kept_use = table.take(held[1].ref)
        kept = kept_use.tensor
        kept_use.release()
        table.close()
        assert not table.attached
        with pytest.raises(FeatureMissing):
            table.take(held[2].ref)
        for one in held:
            one.drop()
        eventually(lambda: rig.broker.status()["holds"] == 2, "the two idle ones")
        assert used.tensor[0] == 0
        used.release()
        eventually(lambda: rig.broker.status()["holds"] == 1, "the used one")
        assert int(kept[-1]) == 1
        del kept
        eventually(lambda: rig.broker.status()["holds"] == 0, "the kept one")
        assert not [name for name in engine.stats() if name.startswith("table_")]  # the table is forgotten


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_entry_before_the_reference_is_out(rig: Rig, ranks: int) -> None:
    clients = [mmbroker.connect(rig.broker.directory) for _ in range(ranks)]
    try:
        tables = [
            client.attach(engine="tp", rank=rank, world=ranks, access=rig.access)
            for rank, client in enumerate(clients)
        ]
        for n in range(50):
            with rig.client.put(torch.full((10,), n), to="tp") as held:
                for table in tables:
                    with table.take(held.ref) as use:
                        assert int(use.tensor[0]) == n
        assert {table.stats()["takes"] for table in tables} == {50}
        assert {table.stats()["misses"] for table in tables} == {0}
    finally:
        for client in clients:
            client.close()


def test_a_grant_that_cannot_be_entered_fails_the_seal(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer learns which rank, and why; the rank goes on."""
    with mmbroker.connect(rig.broker.directory) as engine:
        table = engine.attach(engine="ill", access=rig.access)

        def fail(*_: object) -> None:
            raise OSError(12, "out of maps")

        monkeypatch.setattr(engine._link, "segment", fail)
        with pytest.raises(mmbroker.FeatureError, match=r"rank 0 of engine 'ill'.*out of maps"):
            rig.client.put(values(torch.int8, (10,), seed=71), to="ill")
        assert table.stats()["failed"] == 1
        monkeypatch.undo()
        with rig.client.put(values(torch.int8, (10,), seed=71), to="ill") as held:
            assert table.take(held.ref).tensor is not None
