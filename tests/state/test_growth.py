"""When segments come and go, and what the limits say."""

from __future__ import annotations

from typing import Any

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.form import list_form
from mmbroker.proto.keys import Kind

from .shell import PAGE, Peer, Shell, form, item, key
from .world import failed, kinds, refs, results

# --- growth ---------------------------------------------------------------------------------------------------------


def test_a_segment_is_asked_for_once() -> None:
    shell = Shell(grow=None, pages=16, segment=8)
    peer, other = shell.client(), shell.client()
    empty = other.lease(m.Item(key("empty"), form(0)))
    first, second = peer.create(item("x", 2)), other.create(item("y", 2))
    other.abort(*empty)  # whoever waits is looked at again
    assert [(grow.tier, grow.nbytes) for grow in shell.growing] == [("host", 8 * PAGE)]
    shell.grown(True)
    assert kinds(peer, first) == kinds(other, second) == ["Leased"]


def test_the_next_segment_is_on_its_way_before_it_is_needed() -> None:
    shell = Shell(grow=None, pages=16, segment=8)
    peer = shell.client()
    peer.create(item("x", 6))
    shell.grown(True)
    assert not shell.growing
    peer.lease(item("y"))
    assert len(shell.growing) == 1, "less than a quarter of a segment is free"
    peer.lease(item("z"))
    assert len(shell.growing) == 1


def test_a_feature_larger_than_a_segment_gets_one_of_its_own() -> None:
    shell = Shell(grow=None, pages=16, segment=4)
    shell.client().create(item("x", 11))
    assert [grow.nbytes for grow in shell.growing] == [11 * PAGE]


def test_the_last_segment_is_what_the_limit_leaves() -> None:
    shell = Shell(pages=11, segment=8)
    peer = shell.client()
    peer.put(item("x", 8))
    peer.put(item("y", 3))
    pool = shell.report()["pool"]
    assert (pool["capacity"], pool["limit"]) == (11 * PAGE, 11 * PAGE)


def test_memory_that_is_not_to_be_had_is_told_at_once_if_it_can_never_fit() -> None:
    shell = Shell(grow=None)
    peer = shell.client()
    seq = peer.create(item("x", 2), timeout=60.0)
    shell.grown(False, "cgroup /a: 10 bytes left of memory.max")
    failure = failed(peer, seq, "PoolFull")
    assert "cgroup /a: 10 bytes left of memory.max" in failure.message
    assert "free memory" in failure.message
    assert failure.figures == {"requested": 2 * PAGE, "free": 0, "limit": 0}
    assert shell.report()["pool"]["growth_blocked"] == "cgroup /a: 10 bytes left of memory.max"


def test_refused_memory_leaves_what_is_there_to_wait_for() -> None:
    shell = Shell(grow=None, pages=16, segment=8)
    peer, other = shell.client(), shell.client()
    seq = peer.create(item("x", 5))
    shell.grown(True)
    (held,) = refs(peer, peer.seal([r for r in results(peer, seq) if isinstance(r, m.Leased)]))
    seq = other.create(item("y", 5))
    shell.grown(False)
    assert seq not in other.answers, "it fits when the first is done"
    peer.drop(held)
    assert kinds(other, seq) == ["Leased"]


def test_refused_memory_is_asked_for_again_after_a_while() -> None:
    shell = Shell(grow=None, grow_retry=1.5)
    peer = shell.client()
    peer.create(item("x"))
    shell.grown(False)
    peer.failure(m.Create([item("x")]), "PoolFull")
    assert not shell.growing, "not at once"
    shell.advance(1.5)
    seq = peer.create(item("x"))
    assert len(shell.growing) == 1
    shell.grown(True)
    assert kinds(peer, seq) == ["Leased"]


def test_memory_that_was_refused_is_told_while_it_is_asked_for_again() -> None:
    """Whose time is over in that moment hears why there was none, not that some is on its way."""
    shell = Shell(grow=None, pages=32, segment=8, grow_retry=1.5)
    peer, other = shell.client(), shell.client()
    peer.create(item("x", 7))
    shell.grown(True)
    shell.grown(False, "Too many open files")  # the next one, ahead of demand
    seq = other.create(item("y", 5), timeout=2.0)
    shell.advance(1.5)
    assert len(shell.growing) == 1
    shell.advance(0.5)
    assert "Too many open files" in failed(other, seq, "PoolFull").message
    shell.grown(True)
    other.create(item("z", 8))
    seq = other.create(item("w", 8), timeout=1.0)
    shell.advance(1.0)
    assert "not there yet" in failed(other, seq, "PoolFull").message, "the refusal is over"


def test_whoever_waits_when_memory_was_refused_gets_it_when_it_is_there() -> None:
    shell = Shell(grow=None, pages=16, segment=8, grow_retry=1.5)
    peer, other = shell.client(), shell.client()
    seq = peer.create(item("x", 7))
    shell.grown(True)
    assert kinds(peer, seq) == ["Leased"]
    shell.grown(False)  # the next one, ahead of demand
    seq = other.create(item("y", 5))
    assert not shell.growing
    shell.advance(1.5)
    shell.grown(True)
    assert kinds(other, seq) == ["Leased"]


def test_an_empty_segment_goes_after_a_while() -> None:
    shell = Shell(segment_linger=4.0, cached_features=0)
    peer = shell.client()
    (lease,) = peer.lease(item("x"))
    shell.advance(100.0)
    peer.abort(lease)
    shell.advance(3.75)
    assert shell.report()["pool"]["capacity"] == 8 * PAGE
    shell.advance(0.25)
    assert shell.report()["pool"]["capacity"] == 0
    assert peer.retired == [lease.segment]
    (again,) = peer.lease(item("x"))
    assert again.segment > lease.segment
    assert (again.segment, True) in peer.segments, "the new one's descriptor was sent"


def test_a_segment_that_is_used_again_stays() -> None:
    shell = Shell(segment_linger=4.0, cached_features=0)
    peer = shell.client()
    (lease,) = peer.lease(item("x"))
    peer.abort(lease)
    shell.advance(3.0)
    (again,) = peer.lease(item("y"))
    shell.advance(3.0)
    peer.abort(again)
    shell.advance(3.75)
    assert not peer.retired
    shell.advance(0.25)
    assert peer.retired == [lease.segment]


def test_a_segment_lingers_from_when_it_was_last_empty() -> None:
    shell = Shell(segment_linger=4.0, cached_features=0)
    peer = shell.client()
    (lease,) = peer.lease(item("x"))
    peer.abort(lease)
    shell.advance(1.0)
    peer.abort(*peer.lease(item("y")))
    shell.advance(3.75)
    assert not peer.retired
    shell.advance(0.25)
    assert peer.retired == [lease.segment]


# --- quotas ---------------------------------------------------------------------------------------------------------


def quota(peer: Peer, body: m.Body, requested: int, used: int, limit: int) -> str:
    failure = peer.failure(body, "QuotaExceeded")
    assert failure.figures == {"requested": requested, "used": used, "limit": limit}
    assert str(limit) in failure.message
    return failure.message


@pytest.mark.parametrize("lookup", [False, True])
def test_items_of_one_call(lookup: bool) -> None:
    shell = Shell(items_per_call=3)
    peer = shell.client()
    items = [item(n) for n in range(4)]
    body: Any = m.Lookup([i.key for i in items]) if lookup else m.Create(items)
    assert "split the batch" in quota(peer, body, 4, 0, 3)
    assert kinds(peer, peer.create(*items[:3])) == ["Leased"] * 3


def test_parts_of_one_call() -> None:
    shell = Shell(parts_per_call=5)
    peer = shell.client()
    parts = list_form([("uint8", (8,))] * 3, "image")
    assert "split the batch" in quota(peer, m.Create([m.Item(key(n), parts) for n in "ab"]), 6, 0, 5)
    assert kinds(peer, peer.create(m.Item(key("a"), parts))) == ["Leased"]


def test_leases_holds_and_waits_of_one_session() -> None:
    shell = Shell(features_per_session=4)
    peer, other = shell.client(), shell.client()
    theirs = other.lease(item("theirs", kind=Kind.DERIVED))
    (held,) = peer.put(item("held"))
    (leased,) = peer.lease(item("leased"))
    peer.create(item("theirs", kind=Kind.DERIVED))
    for body in (m.Create([item(1), item(2)]), m.Lookup([key("held"), key("leased")])):
        assert "raise the setting `features_per_session`" in quota(peer, body, 2, 3, 4)
    assert kinds(peer, peer.create(item("last"))) == ["Leased"]
    quota(peer, m.Create([item(1)]), 1, 4, 4)
    other.put(item(1))
    peer.drop(held)
    peer.abort(leased)
    assert kinds(peer, peer.create(item(1), item(2))) == ["Hit", "Leased"]
    other.seal(theirs)


def test_calls_of_one_session_that_wait() -> None:
    shell = Shell(pages=8, segment=8, pending_per_session=2)
    peer, other = shell.client(), shell.client()
    (held,) = other.put(item("held", 8))
    (rank,) = shell.engine(prompt=False)
    seqs = [peer.create(item("x", 2)), peer.call(m.Lookup([key("held")], "engine"))]
    assert not set(seqs) & set(peer.answers)
    for body in (m.Create([item("y")]), m.Status()):
        assert "raise the setting `pending_per_session`" in quota(peer, body, 1, 2, 2)
    assert isinstance(other.ask(m.Status()), m.Report), "nobody else is touched"
    rank.ack()
    assert isinstance(peer.ask(m.Status()), m.Report)
    assert shell.counters()["quota_refusals"] == 2
    other.drop(held)
