"""Holds and grants: from the first claim on a feature to the last rank's word that it can no longer touch it.

This is the broker's half of the grant protocol. A slot may be reused when every hold on its feature is over and every
rank that was granted one has settled, or its process is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from mmbroker.proto.errors import plain
from mmbroker.proto.messages import Ack, DevicePlace, Failed, Reply

from .books import Books
from .records import Engine, Feature, Hold, Lease, Rank, Session, Ticket
from .replicas import Replicas
from .room import Room

#: States in which the broker still waits for a rank's acknowledgement.
AWAITED = (Rank.GRANTED, Rank.DEFERRED)
#: Of so many engines it is remembered what was theirs first, for each engine: they come and go.
_MAKERS = 64


class Holds:
    def __init__(self, books: Books, device: Room | None) -> None:
        """`device`: the room on the device that the broker serves, if it serves one."""
        self.books = books
        self.replicas = Replicas(books, device, self._grant) if device is not None else None
        self.open: dict[int, Hold] = {}
        self._numbers = count(1)

    # --- the producer's side ----------------------------------------------------------------------------------------

    def claim(
        self, feature: Feature, owner: Session, engine: Engine | None, private: bool, now: float
    ) -> Hold:
        """A new hold, granted to every rank of the engine."""
        books = self.books
        books.wake(feature)
        hold = Hold(next(self._numbers), feature, engine, owner.number, private, now)
        self.open[hold.number] = hold
        feature.holds.add(hold.number)
        owner.holds[hold.number] = hold
        books.claim(owner, feature.place[0], feature.slot)
        books.charge(engine, feature)
        books.counters["holds"] += 1
        if engine is not None:
            _note(engine, feature)
        for number in engine.ranks.values() if engine is not None else ():
            session = books.sessions[number]
            session.grants[hold.number] = hold
            place = self.replicas.place(hold, session, now) if self.replicas is not None else None
            if isinstance(place, Rank):
                hold.ranks[number] = place
                session.unacked[hold.number] = now
            else:
                self._grant(hold, session, place, now)
        return hold

    def _grant(self, hold: Hold, session: Session, place: DevicePlace | None, now: float) -> None:
        """Tell a rank about a hold, and where the bytes are."""
        books = self.books
        hold.ranks[session.number] = Rank.GRANTED
        session.unacked[hold.number] = now
        books.send(session, hold.feature.slot, writable=False)
        books.out.grant(session.number, hold.grant(books.boot, place))
        books.counters["grants"] += 1

    def answer_when_acked(
        self, session: Session, seq: int, engine: Engine | None, holds: list[Hold], answer: Callable[[], Reply],
        undo: Callable[[float], None], now: float, deadline: float,
    ) -> None:  # fmt: skip
        """Answer a call as soon as every rank has acknowledged its holds, or at its deadline with `EngineLagging`."""
        missing = sum(rank in AWAITED for hold in holds for rank in hold.ranks.values())
        if engine is None or not missing:
            if holds:
                self.books.finished = now
            self.books.respond(session, seq, answer())
            return
        ticket = Ticket(session.number, seq, engine, holds, answer, undo, now, missing)
        for hold in holds:
            hold.ticket = ticket
        session.tickets[seq] = ticket
        ticket.timer = self.books.timers.at(deadline, lambda at: self._late(ticket, at))

    def unreachable(self, features: Iterable[Feature | Lease], engine: Engine) -> Failed | None:
        """Why an engine cannot be granted these: they are on a device only, and one of its ranks is not on it."""
        if all(feature.slot.tier == "host" for feature in features):
            return None
        for rank, number in engine.ranks.items():
            session = self.books.sessions[number]
            if not session.gpu:
                text = (
                    f"the feature is on {self.books.limits.device} only, and rank {rank} of engine {engine.name!r} "
                    f"is on {session.device}: put it with tier='host'"
                )
                return Failed("FeatureError", text)
        return None

    def drop(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """The producer's word that holds are over."""
        for number in numbers:
            hold = session.holds.get(number)
            if hold is None or hold.ticket is not None:  # or it has not been told of it yet
                self.books.counters["unknown_holds"] += 1
            else:
                self.end(hold, now)

    def end(self, hold: Hold, now: float) -> None:
        """A hold is over: its ranks are dismissed, and it closes when they have settled."""
        if hold.over:
            return
        hold.over, hold.ended = True, now
        self.books.counters["dismissals"] += 1
        self.books.figures.hold_seconds.observe(now - hold.since)
        if hold.expiry is not None:
            hold.expiry.cancel()
        owner = self.books.sessions[hold.owner] if hold.owner is not None else None
        if owner is not None and owner.holds.pop(hold.number, None) is not None:
            self.books.disclaim(owner, hold.feature.slot)
        for number, rank in list(hold.ranks.items()):
            if rank is Rank.DEFERRED:  # it never heard of the hold
                session = self.books.sessions[number]
                del hold.ranks[number], session.grants[hold.number]
                session.unacked.pop(hold.number, None)
            elif rank is not Rank.DETACHED:
                self.books.dismiss(number, hold.number)
        engine = self._engine(hold)
        for number in engine.ranks.values() if engine is not None else ():
            kept = self.books.sessions[number].kept
            if hold.number in kept:
                kept.discard(hold.number)
                self.books.dismiss(number, hold.number)
        self._close_if_settled(hold, now)

    # --- the ranks' side --------------------------------------------------------------------------------------------

    def ack(self, session: Session, ack: Ack, now: float) -> None:
        """A rank has made its entries; a grant that `failed` there counts as settled."""
        self.loaded(session, ack.loaded, now)
        for number in ack.holds:
            hold = session.grants.get(number)
            if hold is None or hold.ranks[session.number] is not Rank.GRANTED:
                self.books.counters["unknown_holds"] += 1
                continue
            hold.ranks[session.number] = Rank.ACKED
            self.books.figures.grant_seconds.observe(now - session.unacked.pop(number, now))
            self.books.finished = now
            self._heard(hold, now)
        for number in ack.failed:
            hold = session.grants.get(number)
            if hold is None or hold.ranks[session.number] is not Rank.GRANTED:
                self.books.counters["unknown_holds"] += 1
                continue
            self.books.counters["grants_failed"] += 1
            self._refused(hold, session, plain(ack.reason, 500) or "no reason given")
            self.settle(session, [number], now)
        self.settle(session, ack.settled, now)

    def loaded(self, session: Session, numbers: Sequence[int], now: float) -> None:
        """A rank has copied to the device what it was told to."""
        if self.replicas is not None:
            self.replicas.loaded(session, numbers, now)
        else:
            self.books.counters["unknown_holds"] += len(numbers)

    def settle(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """A rank can no longer touch the features of these holds."""
        for number in numbers:
            hold = session.grants.pop(number, None)
            if hold is None:
                self.books.counters["unknown_holds"] += 1
                continue
            rank = hold.ranks.pop(session.number)
            session.unacked.pop(number, None)
            self.books.counters["settled"] += 1
            if hold.over:
                self.books.figures.settle_seconds.observe(now - hold.ended)
            if self.replicas is not None:
                self.replicas.release(session, number, now)
            if rank in AWAITED:
                self._refused(hold, session, "it let go before it acknowledged")
                self._heard(hold, now)
            if hold.owner is None and not hold.ranks:
                self.end(hold, now)  # its requests ended with the engine: there is nothing to be graceful to
            self._close_if_settled(hold, now)

    def leave(self, session: Session, now: float) -> None:
        """A rank takes no more: it answers what it was granted, and what was held back it never hears of."""
        for hold in list(session.grants.values()):
            if hold.ticket is not None and hold.ranks.get(session.number) is Rank.DEFERRED:
                self._lost(hold.ticket, session, now)

    def detach(self, session: Session, now: float) -> None:
        """Nobody waits for this rank's word any more, but its process may still read what it was granted."""
        waiting = [hold for hold in session.grants.values() if hold.ranks[session.number] in AWAITED]
        for hold in session.grants.values():
            hold.ranks[session.number] = Rank.DETACHED
        session.unacked.clear()
        for hold in waiting:
            if hold.ticket is not None:
                self._lost(hold.ticket, session, now)
        if self.replicas is not None:
            self.replicas.loader_ended(session, now)

    def kept(self, session: Session, numbers: Iterable[int]) -> None:
        """A rank has attached anew, and its table still has what was granted to sessions that it lost. It does not know
        when their requests are over: it is told. That settles nothing; its process's end does, or `Released`."""
        engine = session.engine
        for number in numbers:
            hold = self.open.get(number)
            if hold is None or hold.over or engine is None or self._engine(hold) is not engine:
                self.books.dismiss(session.number, number)
            else:
                session.kept.add(number)

    def _engine(self, hold: Hold) -> Engine | None:
        """The engine that a hold is for, as it is attached now."""
        old = hold.engine
        return self.books.engines.get((old.namespace, old.name)) if old is not None else None

    def orphan(self, session: Session, now: float) -> None:
        """A producer has ended: what it was still asking for is over, what it may have sent goes on for a while."""
        for ticket in list(session.tickets.values()):
            self._cancel(ticket, now)
        grace = self.books.limits.producer_grace
        for hold in list(session.holds.values()):
            if hold.engine is None or not hold.ranks:
                self.end(hold, now)
            else:
                hold.owner = None
                self.books.disclaim(session, hold.feature.slot)
                hold.expiry = self.books.timers.at(now + grace, lambda at, hold=hold: self.end(hold, at))  # type: ignore[misc]
                self.books.counters["holds_orphaned"] += 1
        session.holds.clear()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _close_if_settled(self, hold: Hold, now: float) -> None:
        if hold.over and not hold.ranks and self.open.pop(hold.number, None) is not None:
            feature = hold.feature
            feature.holds.discard(hold.number)
            self.books.finished = now
            self.books.close(feature.place[0])
            self.books.credit(hold.engine, feature)
            self.books.rest(feature, now)

    def _refused(self, hold: Hold, session: Session, reason: str) -> None:
        """A rank has no entry for a grant: the call that waits for it fails, for all ranks alike."""
        if hold.ticket is not None and not hold.ticket.failure:
            who = f"rank {session.rank} of engine {hold.ticket.engine.name!r} (pid {session.pid})"
            hold.ticket.failure = f"{who} could not take the feature: {reason}"

    def _heard(self, hold: Hold, now: float) -> None:
        ticket = hold.ticket
        if ticket is None:
            return
        ticket.missing -= 1
        if ticket.missing:
            return
        session = self.books.sessions[ticket.session]
        if ticket.failure:
            self._cancel(ticket, now)
            self.books.respond(
                session, ticket.seq, Failed("FeatureError", ticket.failure + "; send it another way")
            )
        else:
            self._settle_ticket(ticket)
            self.books.respond(session, ticket.seq, ticket.answer())

    def _lost(self, ticket: Ticket, rank: Session, now: float) -> None:
        """A rank's session ended before it acknowledged: it may have no entry where the other ranks have one."""
        self._cancel(ticket, now)
        self.books.respond(
            self.books.sessions[ticket.session],
            ticket.seq,
            Failed(
                "NoSuchEngine",
                f"rank {rank.rank} (pid {rank.pid}) of engine {ticket.engine.name!r} went away while it was being "
                "granted: send to another engine, or again when it has started",
            ),
        )

    def _settle_ticket(self, ticket: Ticket) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
        for hold in ticket.holds:
            hold.ticket = None
        self.books.sessions[ticket.session].tickets.pop(ticket.seq, None)

    def _cancel(self, ticket: Ticket, now: float) -> None:
        """The call will not be answered with these holds: nobody has seen their references."""
        self._settle_ticket(ticket)
        ticket.undo(now)
        for hold in ticket.holds:
            self.end(hold, now)

    def _late(self, ticket: Ticket, now: float) -> None:
        sessions = self.books.sessions
        silent = sorted(
            {
                (sessions[number].rank, sessions[number].pid)
                for hold in ticket.holds
                for number, rank in hold.ranks.items()
                if rank in AWAITED
            }
        )
        ranks = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in silent)
        waited = now - ticket.since
        self._cancel(ticket, now)
        self.books.counters["engine_lagging"] += 1
        self.books.respond(
            sessions[ticket.session],
            ticket.seq,
            Failed(
                "EngineLagging",
                f"engine {ticket.engine.name!r}: {ranks} did not acknowledge {len(ticket.holds)} feature(s) within "
                f"{waited:.1f} s; check whether that process is stopped or overloaded, or send another way",
                {"rank": silent[0][0], "pid": silent[0][1], "waited_ms": int(waited * 1000)},
            ),
        )


def _note(engine: Engine, feature: Feature) -> None:
    """Who has whose features, for `status`."""
    more = Counter(features=1, bytes=feature.slot.nbytes)
    engine.granted += more
    if engine.mover:
        return
    feature.maker = feature.maker or engine.name
    if feature.maker == engine.name:
        return
    if feature.maker not in engine.reused and len(engine.reused) == _MAKERS:
        del engine.reused[next(iter(engine.reused))]
    engine.reused.setdefault(feature.maker, Counter()).update(more)
