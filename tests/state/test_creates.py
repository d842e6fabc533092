"""Creates: hits, leases, batches and what never fits. And one key, two writers."""

from __future__ import annotations

from typing import Any

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Kind

from .shell import PAGE, Shell, form, item, key
from .world import cache, exists, kinds, results

IMPATIENT = pytest.mark.parametrize("kind", [Kind.CONTENT, Kind.CALLER])
ANY_KIND = pytest.mark.parametrize("kind", list(Kind))


# --- creates --------------------------------------------------------------------------------------------------------


@ANY_KIND
def test_what_exists_is_a_hit_and_is_not_written_again(kind: Kind) -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    (first,) = one.put(item("x", kind=kind))
    (hit,) = results(two, two.create(item("x", kind=kind)))
    assert isinstance(hit, m.Hit)
    assert hit.ref.hold != first.hold, "a hold of one's own"
    assert (hit.ref.feature, hit.ref.generation) == (first.feature, first.generation)
    assert hit.ref.digest == key("x", kind).value
    assert shell.counters()["leases"] == 1
    assert shell.report()["holds"] == 2


def test_the_slot_comes_with_the_segment_to_write() -> None:
    shell = Shell(grow=None)
    peer = shell.client()
    seq = peer.create(item("x"))
    assert seq not in peer.answers
    (grow,) = shell.growing
    effects = shell.handle(e.SegmentReady(grow.segment))
    shell.growing.popleft()
    sent, answered = [type(effect) for effect in effects[:2]]
    assert (sent, answered) == (e.SendSegment, e.Respond), "the descriptor goes before the answer"
    assert peer.segments == {(grow.segment, True)}
    effects = shell.handle(e.Called(peer.number, 99, 5.0, m.Create([item("y")])))
    assert not any(isinstance(effect, e.SendSegment) for effect in effects), "once is enough"


def test_kinds_never_match_each_other() -> None:
    shell = Shell()
    peer = shell.client()
    for kind in Kind:
        peer.put(item("x", kind=kind))
    assert shell.counters()["misses"] == len(Kind)
    assert shell.report()["features"] == len(Kind)


def test_equal_keys_in_one_batch_are_one_lease() -> None:
    shell = Shell()
    peer = shell.client()
    seq = peer.create(item("x"), item("y"), item("x"), item("x"))
    assert kinds(peer, seq) == ["Leased", "Leased", "Pending", "Pending"]
    assert shell.report()["pool"]["used"] == 2 * PAGE
    peer.seal([r for r in results(peer, seq) if isinstance(r, m.Leased)])
    assert kinds(peer, peer.create(item("x"), item("x"))) == ["Hit", "Hit"]


def test_a_batch_mixes_hits_leases_and_others_leases() -> None:
    shell = Shell()
    peer, other = shell.client(), shell.client()
    peer.put(item("old"))
    other.lease(item("theirs"))
    seq = peer.create(item("old"), item("new"), item("theirs"))
    assert kinds(peer, seq) == ["Hit", "Leased", "Pending"]


def test_a_batch_is_granted_whole_or_waits_whole() -> None:
    shell = Shell(pages=8, segment=8)
    peer, other = shell.client(), shell.client()
    held = other.put(item("a", 3))
    seq = peer.create(item("b", 3), item("c", 3))
    assert seq not in peer.answers
    assert shell.report()["pool"]["used"] == 3 * PAGE, "it holds nothing while it waits"
    other.drop(*held)
    assert kinds(peer, seq) == ["Leased", "Leased"]


def test_a_batch_that_pieces_are_too_small_for_keeps_none_of_them() -> None:
    shell = Shell(pages=16, segment=8)
    peer, other = shell.client(), shell.client()
    held = other.put(item("a", 5)) + other.put(item("b", 5))
    seq = peer.create(item("c", 2), item("d", 2), item("e", 2))
    assert seq not in peer.answers
    assert shell.report()["pool"]["used"] == 10 * PAGE
    other.drop(held[0])
    assert kinds(peer, seq) == ["Leased"] * 3


def test_a_batch_does_not_evict_its_own_hits_to_make_room_for_the_rest() -> None:
    """Six there and six new do not fit ten: refused before anything is evicted. Four and six do."""
    shell = Shell(pages=10, segment=10)
    peer = shell.client()
    cached = [item(n) for n in range(6)]
    cache(peer, *cached)
    new = [item(n) for n in range(6, 12)]
    peer.failure(m.Create(cached + new), "PoolFull")
    assert exists(shell, *cached) == [True] * 6
    seq = peer.create(*cached[:4], *new)
    assert kinds(peer, seq) == ["Hit"] * 4 + ["Leased"] * 6


def test_a_feature_without_bytes_needs_no_segment() -> None:
    shell = Shell()
    peer = shell.client()
    empty = m.Item(key("empty"), form(0))
    (lease,) = peer.lease(empty)
    assert (lease.segment, lease.offset) == (0, 0)
    assert lease.generation > 0
    assert not peer.segments
    peer.seal([lease])
    assert kinds(peer, peer.create(empty)) == ["Hit"]


@pytest.mark.parametrize("items", [[item("x", 17)], [item(n, 3) for n in range(6)]], ids=["one", "batch"])
def test_what_can_never_fit_is_told_at_once(items: list[m.Item]) -> None:
    """A batch larger than the arena does not wait for what cannot come, and names figures and next step."""
    shell = Shell(pages=16)
    peer = shell.client()
    requested = sum(i.form.nbytes for i in items)
    failure = peer.failure(m.Create(items), "PoolFull", timeout=3000.0)
    assert failure.figures == {"requested": requested, "free": 16 * PAGE, "limit": 16 * PAGE}
    for word in ("larger than the arena", str(requested), str(16 * PAGE), "smaller batches", "--host-mib"):
        assert word in failure.message
    assert not shell.growing
    peer.put(item("x", 16))


def test_figures_tell_what_is_free_now() -> None:
    shell = Shell(pages=16)
    peer = shell.client()
    peer.put(item("held", 5))
    failure = peer.failure(m.Create([item("x", 17)]), "PoolFull")
    assert failure.figures == {"requested": 17 * PAGE, "free": 11 * PAGE, "limit": 16 * PAGE}


def test_twins_count_once_towards_the_size_of_a_batch() -> None:
    shell = Shell(pages=16)
    peer = shell.client()
    seq = peer.create(*[item("x", 8)] * 5)
    assert kinds(peer, seq) == ["Leased"] + ["Pending"] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        m.Create([m.Item(key("x"), m.Form("uint8", (5,), 6))]),
        m.Create([m.Item(key("x"), m.Form("uint9", (5,), 5))]),
        m.Create([m.Item(key("x"), m.Form("uint8", (-5,), -5))]),
        m.Create([item("x")], tier="moon"),
    ],
)
def test_a_form_that_cannot_be_is_refused(wrong: m.Create) -> None:
    shell = Shell()
    peer = shell.client()
    peer.failure(wrong, "InvalidMessage")
    assert shell.report()["leases"] == 0


@pytest.mark.parametrize("other", [form(2), form(1, "audio"), tensor_form("int8", (PAGE,), "image")])
def test_another_form_under_a_key_is_a_conflict(other: Any) -> None:
    shell = Shell()
    peer = shell.client()
    peer.put(item("x"))
    failure = peer.failure(m.Create([item("y"), m.Item(key("x"), other)]), "DigestConflict")
    assert failure.figures == {"requested": other.nbytes, "existing": PAGE}
    assert "which stays" in failure.message
    assert kinds(peer, peer.create(item("x"))) == ["Hit"], "the first stays"
    assert shell.report()["leases"] == 0


def test_a_lookup_finds_and_waits_for_nobody() -> None:
    shell = Shell()
    peer, other = shell.client(), shell.client()
    (ref,) = peer.put(item("x"))
    other.lease(item("written"))
    answer = peer.ask(m.Lookup([key("x"), key("written"), key("none")]))
    assert isinstance(answer, m.Found)
    found = answer.refs[0]
    assert found is not None
    assert found.feature == ref.feature
    assert answer.refs[1:] == [None, None]


# --- single flight --------------------------------------------------------------------------------------------------


@ANY_KIND
def test_the_second_waits_for_the_first_ones_seal(kind: Kind) -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    leases = one.lease(item("x", kind=kind))
    seq = two.create(item("x", kind=kind))
    shell.advance(0.2)
    assert seq not in two.answers
    one.seal(leases)
    assert kinds(two, seq) == ["Hit"]
    assert shell.report()["pool"]["used"] == PAGE


@IMPATIENT
def test_a_quarter_second_is_enough_patience_with_a_content_or_caller_key(kind: Kind) -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    slow = one.lease(item("x", kind=kind))
    seq = two.create(item("x", kind=kind))
    shell.advance(0.249)
    assert seq not in two.answers
    shell.advance(0.002)
    (own,) = results(two, seq)
    assert isinstance(own, m.Leased)
    two.seal([own])
    answer = one.answers[one.seal(slow)]
    assert isinstance(answer, m.Sealed), "the later seal is no failure"
    assert answer.refs[0].generation == own.generation, "the first seal wins"
    assert shell.report()["pool"]["used"] == PAGE, "the other slot is free"


def test_a_derived_key_is_waited_for_as_long_as_the_deadline_allows() -> None:
    shell = Shell()
    one, two, three = (shell.client() for _ in range(3))
    leases = one.lease(item("x", kind=Kind.DERIVED))
    long, short = (
        two.create(item("x", kind=Kind.DERIVED), timeout=60.0),
        three.create(item("x", kind=Kind.DERIVED), timeout=2.0),
    )
    shell.advance(1.9)
    assert short not in three.answers
    shell.advance(0.1)
    failed = three.answers[short]
    assert isinstance(failed, m.Failed)
    assert failed.error == "DeadlineExceeded"
    assert failed.figures == {"waited_ms": 2000}
    assert "worker-1" in failed.message, "it names who has the lease"
    shell.advance(50.0)
    assert long not in two.answers
    one.seal(leases)
    assert kinds(two, long) == ["Hit"]


@ANY_KIND
def test_an_abort_hands_over_to_the_next(kind: Kind) -> None:
    shell = Shell()
    one, two, three = (shell.client() for _ in range(3))
    (lease,) = one.lease(item("x", kind=kind))
    second, third = two.create(item("x", kind=kind)), three.create(item("x", kind=kind))
    one.abort(lease)
    assert kinds(two, second) == ["Leased"]
    assert third not in three.answers, "one at a time"
    two.end()
    assert kinds(three, third) == ["Leased"]


@ANY_KIND
def test_nobody_waits_for_a_writer_with_a_lease_in_hand(kind: Kind) -> None:
    """Two writers, two keys in opposite order: each is told that the other's key is pending, and none is stuck."""
    shell = Shell()
    one, two = shell.client(), shell.client()
    (x,) = one.lease(item("x", kind=kind))
    (y,) = two.lease(item("y", kind=kind))
    ones, twos = (
        one.create(item("y", kind=kind), item("z1", kind=kind)),
        two.create(item("x", kind=kind), item("z2", kind=kind)),
    )
    assert kinds(one, ones) == kinds(two, twos) == ["Pending", "Leased"]
    one.seal([x])
    two.seal([y])
    assert (
        kinds(one, one.create(item("y", kind=kind)))
        == kinds(two, two.create(item("x", kind=kind)))
        == ["Hit"]
    )


@ANY_KIND
def test_x_and_y_in_opposite_order(kind: Kind) -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    x, y = item("x", kind=kind), item("y", kind=kind)
    mine = one.lease(x, y)
    seq = two.create(y, x)
    one.seal(mine[:1])
    assert seq not in two.answers
    one.seal(mine[1:])
    assert kinds(two, seq) == ["Hit", "Hit"]


def test_two_batches_of_sixty_percent_are_served_one_after_the_other() -> None:
    shell = Shell(pages=10, segment=10)
    one, two = shell.client(), shell.client()
    first = one.lease(item("a", 3), item("b", 3))
    seq = two.create(item("c", 3), item("d", 3))
    assert shell.report()["pool"]["used"] == 6 * PAGE
    assert seq not in two.answers
    refs = one.answers[one.seal(first)]
    assert isinstance(refs, m.Sealed)
    assert seq not in two.answers
    one.drop(*refs.refs)
    assert kinds(two, seq) == ["Leased", "Leased"]


def test_a_wait_for_a_key_takes_no_room_from_others() -> None:
    shell = Shell(pages=8, segment=8)
    one, two, three = (shell.client() for _ in range(3))
    one.lease(item("x", 4, Kind.DERIVED))
    two.create(item("x", 4, Kind.DERIVED))
    three.put(item("y", 4))
