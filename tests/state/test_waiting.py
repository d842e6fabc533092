"""What is evicted, and who waits for what."""

from __future__ import annotations

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind

from .shell import PAGE, Shell, form, item, key
from .world import cache, exists, failed, hit, kinds, results

# --- eviction -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    a, b, c, d = (item(n) for n in "abcd")
    cache(peer, a, b, c, d)
    peer.drop(hit(peer, a))
    peer.put(item("new", 2))
    assert exists(shell, a, b, c, d) == [True, False, False, True]


def test_what_is_held_is_never_evicted() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    (held,) = peer.put(item("held"))
    cache(peer, item("idle"), item("other"), item("more"))
    seq = peer.create(item("big", 4))
    assert seq not in peer.answers
    assert exists(shell, item("held")) == [True]
    peer.drop(held)
    assert kinds(peer, seq) == ["Leased"]


def test_a_batch_does_not_evict_its_own_hits() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    cache(peer, item("old"), item("x"), item("y"), item("z"))
    seq = peer.create(item("old"), item("new", 3))
    assert kinds(peer, seq) == ["Hit", "Leased"]


def test_nothing_is_evicted_for_what_cannot_be_served() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    peer.put(item("held", 2))
    cache(peer, item("x"), item("y"))
    peer.create(item("big", 3))
    assert exists(shell, item("x"), item("y")) == [True, True]


def test_a_share_of_the_arena_is_kept_free_of_idle_features() -> None:
    shell = Shell(pages=10, segment=10, watermark=0.2)
    peer = shell.client()
    held = [ref for n in range(10) for ref in peer.put(item(n))]
    assert shell.report()["pool"]["used"] == 10 * PAGE, "held features may fill the arena"
    for ref in held:
        peer.drop(ref)
    assert shell.report()["pool"]["used"] == 8 * PAGE
    assert exists(shell, *(item(n) for n in range(3))) == [False, False, True]
    assert shell.counters()["evictions_watermark"] == 2


def test_the_number_of_idle_features_is_limited() -> None:
    shell = Shell(cached_features=3)
    peer = shell.client()
    cache(peer, *(m.Item(key(n), form(0)) for n in range(5)))
    assert shell.report()["features_idle"] == 3
    assert exists(shell, *(item(n) for n in range(5))) == [False, False, True, True, True]
    assert shell.counters()["evictions_count"] == 2


def test_another_namespaces_idle_segments_are_taken_whole() -> None:
    shell = Shell(pages=16, segment=8)
    a, b = shell.client(namespace="a"), shell.client(namespace="b")
    cache(a, item(1, 4), item(2, 4), item(3, 8))
    assert len(shell.report()["arenas"]) == 1
    (lease,) = results(b, b.create(item("x", 8)))
    assert isinstance(lease, m.Leased)
    by_name = {arena["namespace"]: arena for arena in shell.report()["arenas"]}
    assert by_name["a"]["bytes"] == by_name["b"]["bytes"] == 8 * PAGE
    assert len(a.retired) == 1, "its clients are told to unmap it"
    assert lease.segment not in a.retired, "numbers are not used twice"


def test_a_segment_with_anything_in_use_stays_with_its_namespace() -> None:
    shell = Shell(pages=16, segment=8)
    a, b = shell.client(namespace="a"), shell.client(namespace="b")
    one = a.put(item(1, 7))
    two = a.put(item(2, 7))
    cache(a, item(3), item(4))
    seq = b.create(item("x", 4))
    assert seq not in b.answers
    a.drop(*one)
    assert kinds(b, seq) == ["Leased"]
    assert exists(shell, item(2)) == [True]
    a.drop(*two)


# --- waiting --------------------------------------------------------------------------------------------------------


def test_who_waits_for_room_is_served_in_order() -> None:
    shell = Shell(pages=8, segment=8)
    peer, one, two, three = (shell.client() for _ in range(4))
    held = [peer.put(item(n, 2))[0] for n in range(4)]
    first, second, third = one.create(item("a", 4)), two.create(item("b", 2)), three.create(item("c", 2))
    peer.drop(held[0])
    assert not two.answers, "small ones do not overtake"
    peer.drop(held[1])
    assert kinds(one, first) == ["Leased"]
    assert not two.answers
    peer.drop(held[2])
    assert kinds(two, second) == ["Leased"]
    assert not three.answers
    peer.drop(held[3])
    assert kinds(three, third) == ["Leased"]


def test_a_newcomer_does_not_overtake() -> None:
    shell = Shell(pages=8, segment=8)
    peer, one, two = (shell.client() for _ in range(3))
    peer.put(item("held", 4))
    waiting = one.create(item("a", 8))
    assert two.create(item("b", 2)) not in two.answers, "there is room, and somebody before it"
    two.ask(m.Lookup([key("held")]))
    assert kinds(two, two.create(item("held", 4))) == ["Hit"], "a hit needs no room"
    assert waiting not in one.answers


def test_the_next_gets_its_turn_when_the_first_gives_up() -> None:
    shell = Shell(pages=8, segment=8)
    peer, one, two = (shell.client() for _ in range(3))
    peer.put(item("held", 4))
    big = one.create(item("a", 8), timeout=1.0)
    small = two.create(item("b", 2), timeout=9.0)
    shell.advance(1.0)
    failed(one, big, "PoolFull")
    assert kinds(two, small) == ["Leased"]


def test_the_next_gets_its_turn_when_the_first_dies() -> None:
    shell = Shell(pages=8, segment=8)
    peer, one, two = (shell.client() for _ in range(3))
    peer.put(item("held", 4))
    one.create(item("a", 8))
    small = two.create(item("b", 2))
    one.end()
    assert kinds(two, small) == ["Leased"]


def test_a_wait_for_room_ends_at_its_deadline() -> None:
    shell = Shell(pages=8, segment=8)
    peer, waiter = shell.client(), shell.client()
    peer.put(item("held", 5))
    seq = waiter.create(item("x", 4), timeout=2.5)
    shell.advance(2.25)
    assert seq not in waiter.answers
    assert shell.report()["waiting"] == [
        {
            "client": "worker-2",
            "namespace": "a",
            "for": "room",
            "items": 1,
            "bytes": 4 * PAGE,
            "engine": None,
            "age": 2.25,
        }
    ]
    shell.advance(0.25)
    failure = failed(waiter, seq, "PoolFull")
    assert failure.figures == {"requested": 4 * PAGE, "free": 3 * PAGE, "limit": 8 * PAGE}
    for word in (
        "full of held features",
        str(4 * PAGE),
        str(3 * PAGE),
        str(8 * PAGE),
        "drop holds",
        "--host-mib",
    ):
        assert word in failure.message
    assert not shell.report()["waiting"]


def test_no_time_at_all_is_an_answer_at_once() -> None:
    shell = Shell(pages=8, segment=8)
    peer = shell.client()
    peer.put(item("held", 8))
    peer.failure(m.Create([item("x")]), "PoolFull", timeout=0.0)
    peer.failure(m.Create([item("y")]), "InvalidMessage", timeout=float("inf"))
    peer.failure(m.Create([item("y")]), "InvalidMessage", timeout=float("nan"))


def test_an_hour_is_the_longest_wait() -> None:
    shell = Shell(pages=8, segment=8)
    peer = shell.client()
    peer.put(item("held", 8))
    seq = peer.create(item("x"), timeout=1e9)
    shell.advance(3600.0)
    failed(peer, seq, "PoolFull")


def test_an_engine_over_its_budget_waits_only_for_itself() -> None:
    shell = Shell(pages=16, segment=16)
    one, two, other = (shell.client() for _ in range(3))
    shell.engine("left")
    shell.engine("right")
    held = one.put(item("a", 6), to="left")
    over = one.create(item("b", 4), to="left")
    behind = two.create(item("c", 1), to="left")
    assert over not in one.answers
    assert behind not in two.answers, "in order within an engine"
    other.put(item("d", 4), to="right")
    other.drop(*other.put(item("e", 4)))
    one.drop(*held)
    assert kinds(one, over) == kinds(two, behind) == ["Leased"]


def test_who_waited_for_room_keeps_nobody_waiting_once_its_engine_is_over_its_budget() -> None:
    shell = Shell(pages=16, segment=16)
    one, two, other = (shell.client() for _ in range(3))
    shell.engine("left")
    shell.engine("right")
    one.put(item("a", 4), to="left")
    blocking = other.put(item("full", 12))
    first, second = one.create(item("b", 4), to="left"), two.create(item("c", 2), to="left")
    shell.engine("third")  # every engine's share is smaller now
    other.drop(*blocking)
    assert first not in one.answers
    assert second not in two.answers
    other.put(item("d", 2))


def test_an_engines_budget_is_named_at_the_deadline() -> None:
    shell = Shell(pages=16, segment=16)
    peer = shell.client()
    shell.engine("left")
    shell.engine("right")
    peer.put(item("a", 6), to="left")
    seq = peer.create(item("b", 4), to="left", timeout=1.0)
    shell.advance(1.0)
    failure = failed(peer, seq, "PoolFull")
    assert failure.figures == {"requested": 4 * PAGE, "free": 2 * PAGE, "limit": 8 * PAGE}
    for word in ("'left'", str(6 * PAGE), str(8 * PAGE), "end some of its requests"):
        assert word in failure.message


def test_an_engine_with_nothing_in_flight_may_take_more_than_its_share() -> None:
    shell = Shell(pages=16, segment=16)
    peer = shell.client()
    shell.engine("left")
    shell.engine("right")
    peer.put(item("a", 12), to="left")
    seq = peer.create(item("b", 1), to="left")
    assert seq not in peer.answers


def test_a_feature_counts_once_for_an_engine_however_often_it_is_held() -> None:
    shell = Shell(pages=16, segment=16)
    peer = shell.client()
    shell.engine("left")
    shell.engine("right")
    peer.put(item("a", 8), to="left")
    for _ in range(3):
        hit(peer, item("a", 8), "left")
    (left, _) = shell.report()["engines"]
    assert (left["in_flight"], left["features"], left["budget"]) == (8 * PAGE, 1, 8 * PAGE)


def test_who_waits_for_an_engine_is_told_when_it_goes() -> None:
    shell = Shell(pages=8, segment=8)
    peer = shell.client()
    (rank,) = shell.engine()
    peer.put(item("held", 8))
    seq = peer.create(item("x"), to="engine")
    rank.end()
    failed(peer, seq, "NoSuchEngine")


@pytest.mark.parametrize("end", ["detach", "end"])
def test_who_waits_for_a_writer_is_told_when_the_engine_goes(end: str) -> None:
    shell = Shell()
    writer, peer = shell.client(), shell.client()
    (rank,) = shell.engine("engine")
    shell.engine("other")
    derived = item("x", kind=Kind.DERIVED)
    writer.ask(m.Promise([derived.key]))
    for_engine = [
        peer.create(derived, to="engine", timeout=60.0),
        peer.call(m.Promise([derived.key], "engine")),
    ]
    for_other = peer.create(derived, to="other", timeout=60.0)
    rank.ask(m.Detach()) if end == "detach" else rank.end(alive=True)
    for seq in for_engine:
        failed(peer, seq, "NoSuchEngine")
    assert for_other not in peer.answers
    writer.end()
    assert kinds(peer, for_other) == ["Leased"]


def test_time_that_stands_still_changes_nothing() -> None:
    """Tick after tick at one moment: no answer, no eviction, no deadline moves nearer."""
    shell = Shell(pages=8, segment=8)
    peer, other = shell.client(), shell.client()
    cache(peer, item("idle", 2))
    peer.put(item("held", 5))
    other.create(item("x", 4), timeout=1.0)
    before, due = shell.report(), shell.broker.next_deadline()
    for _ in range(1000):
        assert shell.handle(e.Tick()) == []
    assert shell.report() == before
    assert shell.broker.next_deadline() == due == shell.now + 1.0
