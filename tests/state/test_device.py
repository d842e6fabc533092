"""Places on the device: who loads, who waits for a load, who is offered what comes free. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.reference import Reference

from .shell import Peer, Shell, item

DEVICE = "GPU-1"
MIB = 1 << 20


def shell(device_mib: int = 4, **limits: Any) -> Shell:
    return Shell(
        pages=4096, segment=512, device=DEVICE, device_bytes=device_mib * MIB, segment_linger=3000.0, **limits
    )


def attached(one: Shell, name: str, path: str = "device", prompt: bool = True, **options: Any) -> Peer:
    peer = one.client(name)
    peer.prompt = prompt
    answer = peer.ask(attach(name, path, **options))
    assert answer.tier == ("device" if path == "device" else "host")
    return peer


def attach(name: str, path: str = "device", **options: Any) -> m.Attach:
    return m.Attach(name, 0, 1, DEVICE, options.pop("access", "readonly"), path=path, **options)


def place(peer: Peer, hold: int) -> m.DevicePlace | None:
    """Where the broker told a rank to have a feature on the device, in the grant or later."""
    return peer.offered.get(hold) or {**peer.granted, **peer.entries}[hold].device


def test_a_rank_moves_to_the_device() -> None:
    """It was full when the rank attached: what was granted on the host is offered a place, the oldest first."""
    one = shell()
    producer = one.client()
    rank = attached(one, "a", "pinned")
    refs = [producer.put(item(i, 300), to="a")[0] for i in range(3)]
    assert not any(place(rank, ref.hold) for ref in refs)
    assert not one.broker.pressed
    assert rank.ask(attach("a")).tier == "device"
    assert [bool(place(rank, ref.hold)) for ref in refs] == [True, True, False]
    assert one.broker.pressed  # the third waits for a place
    rank.cast(m.Loaded([ref.hold for ref in refs[:2]]))
    producer.drop(refs[0])
    assert place(rank, refs[2].hold)
    assert not one.broker.pressed
    assert rank.ask(attach("a")).tier == "device"  # said twice, as after an answer that was lost
    for ref in refs[1:]:
        producer.drop(ref)
    assert one.report()["holds"] == 0


def test_only_the_path_of_a_rank_changes() -> None:
    one = shell()
    rank = attached(one, "a", "pinned")
    rank.failure(attach("a", "pinned"), "InvalidMessage")
    rank.failure(attach("b"), "InvalidMessage")
    rank.failure(attach("a", access="copy"), "InvalidMessage")
    rank.failure(attach("a", lazy=True), "InvalidMessage")
    rank.failure(m.Attach("a", 0, 2, DEVICE, "readonly", path="device"), "InvalidMessage")
    (engine,) = one.report()["engines"]
    assert engine["ranks"][0]["path"] == "pinned"


def test_a_rank_that_copies_or_loads_late_is_offered_nothing_when_it_moves() -> None:
    one = shell()
    producer = one.client()
    for name, options in (("a", {"access": "copy"}), ("b", {"lazy": True})):
        rank = attached(one, name, "pinned", **options)
        (ref,) = producer.put(item(name), to=name)
        rank.ask(attach(name, **options))
        assert place(rank, ref.hold) is None


def test_what_can_never_fit_stands_in_nobodys_way() -> None:
    one = shell(device_mib=2)
    producer = one.client()
    rank = attached(one, "a")
    (large,) = producer.put(item("large", 513), to="a")
    (small,) = producer.put(item("small", 500), to="a")
    assert place(rank, large.hold) is None and place(rank, small.hold)
    rank.cast(m.Want([large.hold]))
    assert one.report()["device"]["wanting"] == 0
    assert one.counters()["device_too_large"] == 1


def test_what_cannot_be_had_for_now_is_passed_by() -> None:
    """The GPU is full, so the arena cannot grow: what needs a larger segment waits, and what does not, does not."""
    one = shell(device_mib=8, grow_retry=60.0)
    producer = one.client()
    names = {"first": 300, "large": 1000, "small": 100, "other": 150}
    for name, pages in names.items():
        producer.drop(*producer.put(item(name, pages)))
    rank = attached(one, "a")

    def granted(name: str) -> Reference:
        (ref,) = producer.ask(m.Lookup([item(name).key], "a")).refs
        return ref

    first = granted("first")
    rank.cast(m.Loaded([first.hold]))
    one.grow = False
    large, small, other = granted("large"), granted("small"), granted("other")
    assert place(rank, large.hold) is None and place(rank, small.hold) and place(rank, other.hold) is None
    producer.drop(first)
    assert place(rank, other.hold) and place(rank, large.hold) is None
    one.grow = True
    one.advance(61.0)
    assert place(rank, large.hold)


def test_a_device_segment_has_one_descriptor() -> None:
    """Whoever is granted, loads, shares or writes there is sent it once, whatever came first."""
    one = shell(device_mib=8)
    producer = one.client()
    rank = attached(one, "a")
    refs = []
    for number in range(4):
        seq = producer.call(m.Create([item(number, 300)], tier="device"))
        one.advance(0.0)
        (lease,) = producer.answers[seq].results  # type: ignore[union-attr]
        assert isinstance(lease, m.Leased) and (lease.segment, True) in producer.segments
        refs += producer.answers[producer.seal([lease], "a")].refs  # type: ignore[union-attr]
    granted = {**rank.granted, **rank.entries}
    assert len({granted[ref.hold].segment for ref in refs}) > 1
    assert all(granted[ref.hold].tier == "device" for ref in refs)
    assert {(granted[ref.hold].segment, True) for ref in refs} == rank.segments


def test_copies_on_the_device_are_not_the_namespaces() -> None:
    """They come and go with room; what a namespace may have is what its clients asked for."""
    one = shell(device_mib=8, namespace_bytes=4 * 4096, client_budget_bytes=4 * 4096)
    producer = one.client()
    rank = attached(one, "a")
    (ref,) = producer.put(item("x", 3), to="a")
    assert place(rank, ref.hold)
    producer.put(item("y", 1), to="a")
    producer.failure(m.Create([item("z", 5)], "a"), "QuotaExceeded")
    (namespace,) = one.report()["namespaces"]
    assert namespace["bytes"] == 4 * 4096


@pytest.mark.parametrize("over", [False, True])
def test_a_load_is_told_with_the_next_grants_ack(over: bool) -> None:
    """Before what it settles: a place that is let go of before it is loaded would be another's to load."""
    one = shell()
    producer = one.client()
    loader, other = attached(one, "a"), attached(one, "b")
    (first,) = producer.put(item(1), to="a")
    looking = producer.call(m.Lookup([item(1).key], "b"))
    assert looking not in producer.answers  # until it is loaded
    loader.prompt = False
    if over:
        producer.drop(first)
    producer.seal(producer.lease(item(2), to="a"), "a")
    loader.ack(settled=loader.dismissed, loaded=[first.hold])
    assert isinstance(producer.answers[looking], m.Found)
    (shared,) = [grant.device for grant in other.entries.values()]
    assert shared is not None and not shared.load
    assert one.counters()["loads"] == 1
    assert "loads_lost" not in one.counters()


def test_a_rank_that_waits_for_anothers_load_says_for_whose() -> None:
    one = shell()
    producer = one.client()
    loader, waiter = (one.client(f"rank-{rank}") for rank in range(2))
    for rank, peer in enumerate((loader, waiter)):
        peer.prompt = True
        peer.ask(m.Attach("e", rank, 2, DEVICE, "readonly", path="device"))
    (first,) = producer.put(item("first"), to="e")  # it makes the broker get a segment
    loader.cast(m.Loaded([first.hold]))
    loader.prompt = waiter.prompt = False
    producer.seal(producer.lease(item("x"), to="e"), "e", timeout=60.0)
    loader.ack()  # and then it does not get on with the load
    one.advance(3.0)
    stuck = one.report()["health"]["stuck"]
    assert f"rank 1 (pid {waiter.pid}) of engine 'e' has waited 3.0 s for " in stuck[0]
    assert f"(pid {loader.pid}) to load feature 2 (1 in all)" in stuck[0]


def test_a_hold_is_dropped_by_nobody_before_its_reference_is_there() -> None:
    """A number that a producer guessed: its call is answered as any other, though its grant is held back."""
    one = shell()
    producer, others = one.client(), one.client()
    loader = attached(one, "a")
    rank = attached(one, "b", prompt=False)
    (ref,) = others.put(item(1), to="a")
    first, second = (producer.call(m.Lookup([item(1).key], "b"), timeout) for timeout in (1.0, 3.0))
    producer.drop(ref.hold + 1, ref.hold + 2)
    one.advance(2.0)
    late = producer.answers[first]
    assert isinstance(late, m.Failed)
    assert late.error == "EngineLagging"
    loader.cast(m.Loaded([ref.hold]))
    rank.ack()
    assert isinstance(producer.answers[second], m.Found)
    assert one.counters()["unknown_holds"] == 2
    producer.drop(ref.hold + 2)
    rank.settle()
    others.drop(ref)
    assert one.report()["holds"] == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_detaches_hears_of_nothing_that_was_held_back(again: bool) -> None:
    """Whoever waits is told at once: the other rank's load is of no use to this one any more."""
    one = shell()
    producer = one.client()
    loader, rank = attached(one, "a"), attached(one, "b", prompt=False)
    (ref,) = producer.put(item(1), to="a")
    seq = producer.call(m.Lookup([item(1).key], "b"))
    assert rank.ask(m.Detach()) == m.Done()
    answer = producer.answers[seq]
    assert isinstance(answer, m.Failed)
    assert answer.error == "NoSuchEngine"
    if again:
        rank.attach("c")
    loader.cast(m.Loaded([ref.hold]))
    assert not rank.granted
    producer.drop(ref)
    assert one.report()["holds"] == 0
