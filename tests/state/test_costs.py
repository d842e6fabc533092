"""What one event costs, in calls of functions and lines of code, never in time: it must not grow with what there is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.form import Form

from .shell import PAGE, Peer, Shell, form, item, key

TINY = Form("uint8", (8,), 8)


def steps(action: Callable[[], Any]) -> int:
    """Lines executed and functions called, those of C included, by `action`.

    A loop inside C (a sort, a copy of a dict) counts as one step.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        sys.settrace(before)
    return count


def roomy(**limits: Any) -> Shell:
    """A shell that checks nothing, with room for anything here."""
    shell = Shell(pages=1 << 16, segment=1 << 16, features_per_session=1 << 20, **limits)
    shell.checks = False
    return shell


def fill(peer: Peer, first: int, last: int, to: str | None = None) -> list[int]:
    """Put so many small features; their holds."""
    holds = []
    for start in range(first, last, 100):
        numbers = range(start, min(start + 100, last))
        refs = peer.put(*(m.Item(key(n), TINY) for n in numbers), to=to)
        holds += [ref.hold for ref in refs]
    return holds


def test_the_counter_sees_loops_and_calls() -> None:
    assert steps(lambda: [abs(n) for n in range(1000)]) > 1000
    assert steps(lambda: None) < 10


def test_an_operation_costs_the_same_with_twenty_thousand_outstanding() -> None:
    """The life of one more item, step by step, among 100 others and among 20,000."""
    shell = roomy()
    peer = shell.client()
    (rank,) = shell.engine(prompt=False)

    def life(n: int) -> dict[str, int]:
        small = m.Item(key(f"one-{n}"), TINY)

        def call(body: m.Body) -> list[e.Effect]:
            return shell.broker.handle(e.Called(peer.number, next(peer.seqs), 5.0, body), shell.now)

        def cast(who: Peer, body: m.Body) -> list[e.Effect]:
            return shell.broker.handle(e.Called(who.number, 0, 0.0, body), shell.now)

        created: list[e.Effect] = []
        costs = {"create": steps(lambda: created.extend(call(m.Create([small], "engine"))))}
        (lease,) = [
            result.lease
            for f in created
            if isinstance(f, e.Respond) and isinstance(f.body, m.Created)
            for result in f.body.results
            if isinstance(result, m.Leased)
        ]
        sealed: list[e.Effect] = []
        costs["seal"] = steps(lambda: sealed.extend(call(m.Seal([m.Sealing(lease)], "engine"))))
        hold = next(
            grant.ref.hold
            for f in sealed
            if isinstance(f, e.Notify) and isinstance(f.notice, m.Granted)
            for grant in f.notice.grants
        )
        costs["ack"] = steps(lambda: cast(rank, m.Ack([hold])))
        costs["drop"] = steps(lambda: cast(peer, m.Drop([hold])))
        costs["settle"] = steps(lambda: cast(rank, m.Settle([hold])))
        costs["lookup"] = steps(lambda: call(m.Lookup([small.key])))
        costs["tick"] = steps(lambda: shell.broker.handle(e.Tick(), shell.now))
        return costs

    rank.prompt = True
    fill(peer, 0, 100, "engine")
    life(0)
    few = life(1)
    fill(peer, 100, 20_000, "engine")
    assert shell.report()["holds"] > 20_000
    life(2)
    many = life(3)
    for what, cost in few.items():
        assert many[what] <= cost + 100, f"{what}: {cost} steps among 100, {many[what]} among 20,000"


def test_an_eviction_costs_the_same_however_much_is_cached() -> None:
    """The next create evicts one feature, and does not look at the others."""

    def one_more(count: int) -> int:
        shell = Shell(pages=count, segment=count)
        shell.checks = False
        peer = shell.client()
        holds = [ref.hold for n in range(count) for ref in peer.put(item(n))]
        peer.cast(m.Drop(holds))
        seqs: list[int] = []
        cost = steps(lambda: seqs.append(peer.create(item("one more"))))
        assert isinstance(peer.answers[seqs[0]], m.Created)
        assert shell.counters()["evictions"] == 1
        return cost

    few, many = one_more(50), one_more(2000)
    assert many <= few + 100, f"{few} steps among 50, {many} among 2,000"


def test_an_eviction_costs_the_same_whatever_costs_there_are() -> None:
    """The next to go is found by one look at each cost, not at each feature."""

    def one_more(count: int) -> int:
        shell = Shell(pages=count, segment=count, features_per_session=count + 2)
        shell.checks = False
        peer = shell.client()
        for n in range(count):
            (lease,) = peer.lease(item(n))
            sealed = peer.ask(m.Seal([m.Sealing(lease.lease, cost=4 << n % 16)]))
            peer.drop(*sealed.refs)
        return steps(lambda: peer.create(item("one more")))

    few, many = one_more(50), one_more(2000)
    assert many <= few + 100, f"{few} steps among 50, {many} among 2,000"


def test_keeping_a_limit_costs_the_same_however_much_is_cached() -> None:
    """One idle feature too many is one eviction, of the oldest, and no look at the others."""

    def one_too_many(count: int) -> int:
        shell = roomy(cached_features=count)
        peer = shell.client()
        peer.cast(m.Drop(fill(peer, 0, count)))
        (last,) = fill(peer, count, count + 1)
        cost = steps(lambda: peer.drop(last))
        assert shell.counters()["evictions_count"] == 1
        return cost

    few, many = one_too_many(50), one_too_many(2000)
    assert many <= few + 100, f"{few} steps among 50, {many} among 2,000"


def test_a_death_costs_what_the_dead_had() -> None:
    """Ten items of a dead client are cleaned up with ten items' work, whatever the others have."""

    def death(others: int) -> int:
        shell = roomy(producer_grace=1.0)
        bystander, victim = shell.client(), shell.client()
        shell.engine()
        fill(bystander, 0, others, "engine")
        fill(victim, 1_000_000, 1_000_010, "engine")
        victim.lease(*(m.Item(key(f"lease-{n}"), TINY) for n in range(10)))
        cost = steps(lambda: shell.broker.handle(e.SessionEnded(victim.number, True), shell.now))
        cost += steps(lambda: shell.broker.handle(e.ProcessGone(victim.number), shell.now))
        assert not shell.broker.remembers(victim.number)
        assert shell.counters()["leases_broken"] == shell.counters()["holds_orphaned"] == 10
        cost += steps(lambda: shell.broker.handle(e.Tick(), shell.now + 1.0))
        assert shell.report()["holds_dismissed"] == 10
        return cost

    few, many = death(100), death(10_000)
    assert many <= few + 200, f"{few} steps beside 100 items, {many} beside 10,000"


def test_a_ranks_death_costs_what_the_rank_had() -> None:
    def death(others: int) -> int:
        shell = roomy()
        peer = shell.client()
        shell.engine("busy")
        (rank,) = shell.engine("small")
        fill(peer, 0, others, "busy")
        fill(peer, 1_000_000, 1_000_010, "small")
        cost = steps(lambda: shell.broker.handle(e.SessionEnded(rank.number, True), shell.now))
        return cost + steps(lambda: shell.broker.handle(e.ProcessGone(rank.number), shell.now))

    few, many = death(100), death(10_000)
    assert many <= few + 100, f"{few} steps beside 100 items, {many} beside 10,000"


def test_a_large_death_is_linear() -> None:
    """Twice as many items, twice the work."""

    def death(items: int) -> int:
        shell = roomy()
        victim = shell.client()
        fill(victim, 0, items)
        return steps(lambda: shell.broker.handle(e.SessionEnded(victim.number, False), shell.now))

    small, large = death(1000), death(4000)
    assert large < 5 * small, f"{small} steps for 1,000 items, {large} for 4,000"


def test_a_waiting_queue_is_not_looked_at_when_nothing_has_changed() -> None:
    def tick(waiting: int) -> int:
        shell = Shell(pages=8, segment=8, pending_per_session=10_000)
        shell.checks = False
        peer, other = shell.client(), shell.client()
        peer.put(item("held", 8))
        for n in range(waiting):
            other.create(m.Item(key(n), form(1)))
        assert shell.report()["waiting_count"] == waiting
        return steps(lambda: shell.broker.handle(e.Tick(), shell.now))

    assert tick(1000) <= tick(10) + 10


def test_cancelled_deadlines_do_not_pile_up() -> None:
    """Every create has a deadline that is cancelled when it is answered."""
    shell = roomy()
    peer = shell.client()
    for n in range(2000):
        peer.drop(*peer.put(m.Item(key(n % 10), TINY)) if n < 10 else ())
        peer.call(m.Lookup([key("nothing")]), 3000.0)
    assert shell.report()["timers"] <= 1 + 1, "a segment's linger at most"
    assert len(shell.broker.books.timers._heap) < 300
    assert shell.report()["pool"]["capacity"] == (1 << 16) * PAGE
