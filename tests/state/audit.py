"""The broker's own books, added up again from scratch."""

from __future__ import annotations

from collections import Counter

from mmbroker.arena.allocator import round_up
from mmbroker.holds import AWAITED
from mmbroker.records import Feature, Rank
from mmbroker.state import Broker


def audit(broker: Broker) -> None:
    """Raise AssertionError unless every sum and every cross reference of the state machine is right."""
    abandoned = slots(broker)
    holders(broker)
    engines(broker)
    waiting(broker)
    limits(broker, abandoned)


def slots(broker: Broker) -> Counter[str]:
    """Every byte of every segment is free or has exactly one owner, and the pools' sums are the sums. Returns the bytes
    of each namespace on the host that were abandoned."""
    books = broker.books
    owned: dict[int, dict[int, int]] = {n: {} for pool in books.pools.values() for n in pool.segments}
    held: Counter[int] = Counter()
    abandoned: Counter[str] = Counter()
    idle_bytes = dict.fromkeys(books.pools, 0)

    def own(slot, idle: bool = False) -> None:  # type: ignore[no-untyped-def]
        if slot.segment:
            assert slot.segment in books.pools[slot.tier].segments
            assert slot.offset not in owned[slot.segment], f"slot {slot} has two owners"
            owned[slot.segment][slot.offset] = slot.nbytes
            held[slot.segment] += slot.nbytes * (not idle)
            idle_bytes[slot.tier] += slot.nbytes * idle

    for lease in broker.leases.open.values():
        own(lease.slot)
    for feature in books.numbered.values():
        idle = not feature.pinned
        own(feature.slot, idle)
        assert books.features[feature.place] is feature
        resting = books.idle.get((feature.slot.tier, feature.place[0]), {})
        assert (resting.get(feature.slot.generation) is feature) == idle
        if (replica := feature.replica) is not None:
            own(replica.slot, not replica.pins)
            assert (
                replica.feature is feature and replica.slot.tier == "device" and feature.slot.tier == "host"
            )
            assert replica.ready or replica.pins, "nobody loads it"
            resting = books.idle.get(("device", feature.place[0]), {})
            assert (resting.get(replica.slot.generation) is replica) == (not replica.pins)
    for session in books.sessions.values():
        for slot in session.quarantine:
            own(slot)
        for what in session.pins.values():
            if not isinstance(what, Feature):
                own(what)
        for number, replica in session.replicas.items():
            assert (number, session.number) in replica.pins and number in session.grants
            assert replica.feature.replica is replica
    for segment in (segment for pool in books.pools.values() for segment in pool.segments.values()):
        allocator = segment.allocator
        allocator.check()
        told = {
            s.number
            for s in books.sessions.values()
            if not s.ended and segment.number in {n for n, _ in s.segments}
        }
        assert segment.sessions == told, "who is told when it goes"
        lost = {o: n for o, n in allocator._slots.items() if o not in owned[segment.number]}
        assert len(lost) == segment.abandoned, (
            f"{len(lost)} slots without owner, {segment.abandoned} abandoned"
        )
        assert owned[segment.number].items() <= allocator._slots.items(), "an owned slot is not allocated"
        assert segment.held == held[segment.number] + sum(lost.values())
        if segment.number in books.pool.segments:
            abandoned[segment.namespace] += sum(lost.values())
        assert not segment.abandoned or segment.retired
        assert (segment.empty_since is not None) == (segment.ready and allocator.empty) or not segment.ready
    for tier, pool in books.pools.items():
        assert pool.capacity == sum(s.allocator.nbytes for s in pool.segments.values()) <= pool.limit
        assert pool.used == sum(s.allocator.used for s in pool.segments.values())
        assert pool.idle == idle_bytes[tier]
    assert len(books.features) == len(books.numbered)
    assert books.idle_count == sum(
        isinstance(entry, Feature) for resting in books.idle.values() for entry in resting
    )
    return abandoned


def holders(broker: Broker) -> None:
    """Sessions and holds, leases and keys agree with each other."""
    books = broker.books
    leases = {n: lease for s in books.sessions.values() for n, lease in s.leases.items()}
    assert leases == broker.leases.open
    promises = {n: promise for s in books.sessions.values() for n, promise in s.promises.items()}
    flights = sorted(x.number for writing in books.flights.values() for x in writing)
    assert flights == sorted([n for n, lease in leases.items() if lease.awaited] + [*promises])
    for place, writing in books.flights.items():
        assert writing and all(writer.place == place for writer in writing)
        assert sum(writer.number in promises for writer in writing) <= 1, "promised twice"
    by_feature = {
        n: hold for f in books.numbered.values() for n in f.holds for hold in (broker.holds.open[n],)
    }
    assert by_feature == broker.holds.open
    for hold in broker.holds.open.values():
        assert hold.feature.number in books.numbered
        owned = not hold.over and hold.owner is not None
        assert not owned or books.sessions[hold.owner].holds[hold.number] is hold  # type: ignore[index]
        assert not hold.over or hold.ranks, "a hold that is over and settled is still there"
        for number, rank in hold.ranks.items():
            session = books.sessions[number]
            assert session.grants[hold.number] is hold
            assert (rank is Rank.DETACHED) == session.ended
            assert (hold.number in session.unacked) == (rank in AWAITED)
    for session in books.sessions.values():
        assert all(broker.holds.open[n] is hold and not hold.over for n, hold in session.holds.items())
        assert all(broker.holds.open[n] is hold for n, hold in session.grants.items())
        assert session.unacked.keys() <= session.grants.keys()
        assert all(n in broker.holds.open and not broker.holds.open[n].over for n in session.kept)
        assert session.engine is not None or not session.kept
        assert len(session.answers) <= books.limits.answers_kept
        for number, what in session.pins.items():
            assert not isinstance(what, Feature) or number in what.pins
        slots = [x.slot for x in session.leases.values()] + [x.feature.slot for x in session.holds.values()]
        assert session.nbytes == sum(slot.nbytes for slot in slots)
        if session.ended:
            assert not (session.leases or session.promises or session.holds)
            assert not (session.requests or session.tickets)
            assert session.engine is None
    claims = Counter(lease.place[0] for lease in broker.leases.open.values())
    claims.update(promise.place[0] for promise in promises.values())
    claims.update(hold.feature.place[0] for hold in broker.holds.open.values())
    assert books.claims == claims and all(books.claims.values())
    pins = {n for f in books.numbered.values() for n in f.pins}
    assert pins == {n for s in books.sessions.values() for n, w in s.pins.items() if isinstance(w, Feature)}


def engines(broker: Broker) -> None:
    """What each engine has in flight."""
    books = broker.books
    uses: dict[tuple[str, str], Counter[int]] = {place: Counter() for place in books.engines}
    for place, engine in books.engines.items():
        assert engine.ranks and (engine.namespace, engine.name) == place
        for rank, number in engine.ranks.items():
            session = books.sessions[number]
            assert session.engine is engine and session.rank == rank and not session.ended
        for hold in broker.holds.open.values():
            if hold.engine is engine:
                assert hold.feature.place[0] == engine.namespace
                uses[place][hold.feature.number] += 1
        slots = [books.numbered[n].slot for n in uses[place]]
        leased = [lease.slot for lease in broker.leases.open.values() if lease.engine is engine]
        slots += leased
        assert engine.uses == uses[place] and engine.leases == len(leased)
        for tier in books.pools:
            in_flight = sum(slot.nbytes for slot in slots if slot.tier == tier)
            assert engine.in_flight[tier] == in_flight, (engine.name, tier)


def waiting(broker: Broker) -> None:
    """Every call that waits is in exactly one place, and has a deadline."""
    books, admission = broker.books, broker.admission
    queued = dict(admission.queue)
    flying: dict[int, object] = {}
    for place, requests in admission.flying.items():
        assert requests, "an empty queue for a key"
        assert place in books.flights, "waits for a key that nobody writes"
        for number, request in requests.items():
            assert place in request.flights
            flying[number] = request
    assert not queued.keys() & flying.keys()
    mine = {r.number: r for s in books.sessions.values() for r in s.requests.values()}
    assert mine == queued | flying
    for request in mine.values():
        assert request.timer is not None and request.timer.action is not None
        assert request.nbytes == sum({i.key: round_up(i.form.nbytes) for i in request.items}.values())
    for session in books.sessions.values():
        assert not session.requests.keys() & session.tickets.keys()
        assert not session.answers.keys() & (session.requests.keys() | session.tickets.keys())
        assert len(session.requests) + len(session.tickets) <= books.limits.pending_per_session
        for ticket in session.tickets.values():
            open_ranks = sum(r in AWAITED for h in ticket.holds for r in h.ranks.values())
            assert ticket.missing == open_ranks > 0
            assert all(h.ticket is ticket for h in ticket.holds)
            assert ticket.timer is not None and ticket.timer.action is not None
    assert not books.stirred, "something changed and nobody looked"


def limits(broker: Broker, abandoned: Counter[str]) -> None:
    """Nobody has more than the limits say; but an engine's share of bytes shrinks when another one attaches, and what
    was cached until it was abandoned came on top of what was in use."""
    books, most = broker.books, broker.limits
    for session in books.sessions.values():
        for has, limit in (
            (session.features, most.features_per_session),
            (session.features, most.client_budget_features),
            (session.nbytes, most.session_bytes),
            (session.nbytes, most.client_budget_bytes),
        ):
            assert not limit or has <= limit
    for engine in books.engines.values():
        assert engine.features <= most.features_per_engine
    for namespace, count in books.claims.items():
        assert count <= most.features_per_namespace
        in_use = books.pool.held_by(namespace) - abandoned[namespace]
        assert not most.namespace_bytes or in_use <= most.namespace_bytes
