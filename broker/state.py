"""The broker as a pure state machine: an event in, effects out. No I/O, no clock, no torch.

`Broker.handle(event, now)` is the whole interface, with `next_deadline` for the shell's one timer. An exception out of
`handle` means that the broker's own books are wrong: the shell logs it and exits, and the engines carry on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mmbroker.proto import messages as m
from mmbroker.proto.errors import plain
from mmbroker.proto.form import Form

from . import report
from .admission import Admission
from .books import NAME_LIMIT, Books
from .events import (
    Called,
    Drain,
    Effect,
    Event,
    Grow,
    Halt,
    Limits,
    ProcessGone,
    SegmentFailed,
    SegmentReady,
    SessionEnded,
    SessionOpened,
    Tick,
)
from .holds import Holds
from .records import Engine, Feature, Session
from .room import Room
from .tallies import Tallies

_NOTHING = Form("uint8", (0,), 0)
#: What a client tells rather than asks.
CASTS = (m.Abort, m.Drop, m.Unpin, m.Ack, m.Settle, m.Kept, m.Loaded, m.Park, m.Want, m.Tally)


class Broker:
    """Sessions, and who answers which call. Slots, leases and holds are kept by the parts."""

    def __init__(self, limits: Limits, boot: bytes) -> None:
        self.limits = limits
        self.boot = boot
        self.books = Books(limits, boot)
        self.rooms = {tier: Room(self.books, pool) for tier, pool in self.books.pools.items()}
        self.holds = Holds(self.books, self.rooms.get("device"))
        self.admission = Admission(self.books, self.holds, self.rooms)
        self.leases = self.admission.leases
        self.seeking = self.admission.seeking
        self.tallies = Tallies()
        self.halting = False
        self._halted = False
        self._calls: dict[type, Callable[[Session, int, Any, float, float], None]] = {
            m.Create: self._create,
            m.Lookup: self._lookup,
            m.Promise: self._promise,
            m.Seal: self._seal,
            m.Attach: self._attach,
            m.Tier: self._tier,
            m.Detach: self._detach,
            m.Released: self._released,
            m.Status: self._status,
            m.Shutdown: self._shutdown,
            m.Drain: self._set_draining,
            m.Evict: self._evict,
            m.Abort: lambda s, _seq, call, now, _: self.leases.abort(s, call.leases, now),
            m.Drop: lambda s, _seq, call, now, _: self.holds.drop(s, call.holds, now),
            m.Unpin: lambda s, _seq, call, now, _: self.leases.unpin(s, call.leases, now),
            m.Ack: lambda s, _seq, call, now, _: self.holds.ack(s, call, now),
            m.Settle: lambda s, _seq, call, now, _: self.holds.settle(s, call.holds, now),
            m.Kept: lambda s, _seq, call, now, _: self.holds.kept(s, call.holds),
            m.Loaded: lambda s, _seq, call, now, _: self.holds.loaded(s, call.holds, now),
            m.Park: self._device_call,
            m.Want: self._device_call,
            m.Tally: self._tally,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What follows from an event. `now` is in seconds on a clock that never goes back."""
        books = self.books
        if books.finished is None:
            books.finished = now  # nothing was pending before
        match event:
            case Called():
                session = books.sessions.get(event.session)
                if session is not None and not session.ended:
                    self._call(session, event, now)
            case SessionOpened():
                books.sessions[event.session] = Session(
                    event.session, event.uid, event.pid, event.name, event.namespace, event.traceable, now
                )
                books.counters["sessions"] += 1
            case SessionEnded():
                self._ended(event.session, event.alive, now)
            case ProcessGone():
                session = books.sessions.get(event.session)
                if session is not None and session.ended:
                    self._gone(session, now)
            case SegmentReady():
                self._room(event.segment).segment_ready(event.segment, now)
            case SegmentFailed():
                self._room(event.segment).segment_failed(event.segment, event.reason, now)
            case Drain():
                self._drain(event.grace, now)
            case Tick():
                pass
        books.timers.run(now)
        books.trim(now)
        stirred = self.books.stirred
        self.admission.pump(now)
        while (due := books.timers.next()) is not None and due <= now:  # a wait that began too late to be one
            books.timers.run(now)
            self.admission.pump(now)
        if stirred and self.holds.replicas is not None:
            self.holds.replicas.offer(now)
        if self.halting and not self._halted and not self.leases.open and not self._tickets():
            self._halt("drained")
        return books.out.flush()

    def start(self) -> list[Grow]:
        """What has to be done before the first event: the device's reserve."""
        if "device" in self.rooms:
            self.rooms["device"].reserve(self.limits.device_reserve_bytes)
        return [effect for effect in self.books.out.flush() if isinstance(effect, Grow)]

    def _room(self, segment: int) -> Room:
        return next(room for room in self.rooms.values() if segment in room.pool.segments)

    @property
    def pressed(self) -> bool:
        """Is a create waiting for room, or an entry for a place on the device?"""
        replicas = self.holds.replicas
        return bool(self.admission.queue or (replicas is not None and replicas.wanting))

    def next_deadline(self) -> float | None:
        """When the shell must send a `Tick`, at the latest; None: whenever the next event comes."""
        return self.books.timers.next()

    def remembers(self, session: int) -> bool:
        """Is there anything left of a session, living or ended?"""
        return session in self.books.sessions

    def waits_for(self, session: int, seq: int) -> str:
        """What a call that was not answered yet waits for: a `Wait`, or ``ranks``; empty: it is not known."""
        caller = self.books.sessions.get(session)
        if caller is None:
            return ""
        request = caller.requests.get(seq)
        return request.reason.value if request is not None else "ranks" if seq in caller.tickets else ""

    def report(self, now: float, features: int = 0) -> dict[str, Any]:
        """Everything an operator may ask, as msgpack-native values; `features` largest features are listed."""
        return report.make(self, now, features)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _call(self, session: Session, event: Called, now: float) -> None:
        seq, body = event.seq, event.body
        self.books.counters[type(body).__name__.lower() + "_calls"] += 1
        self.seeking.heard(session)
        casts = isinstance(body, CASTS)
        if seq == 0:
            if casts:
                self._calls[type(body)](session, 0, body, now, now)
            else:
                self.books.counters["unanswerable_calls"] += 1
            return
        if seq in session.answers:
            self.books.counters["repeated_calls"] += 1
            self.books.out.answer(session.number, seq, session.answers[seq])
            return
        if seq in session.requests or seq in session.tickets:
            self.books.counters["repeated_calls"] += 1
            return
        if not 0 < seq < 1 << 63 or seq <= session.forgotten:
            text = f"call number {seq} is not new, and its answer is no longer kept: number calls upwards"
            self.books.out.answer(
                session.number, max(0, min(seq, (1 << 63) - 1)), m.Failed("InvalidMessage", text)
            )
            return
        if not math.isfinite(event.timeout):
            self.books.respond(
                session, seq, m.Failed("InvalidMessage", "a timeout is a finite number of seconds")
            )
            return
        if refused := self.admission.quotas.one_more_call(session):
            self.books.respond(session, seq, refused)
            return
        deadline = now + min(max(event.timeout, 0.0), self.limits.max_timeout)
        self._calls[type(body)](session, seq, body, now, deadline)
        if casts:
            self.books.respond(session, seq, m.Done())

    def _create(self, session: Session, seq: int, call: m.Create, now: float, deadline: float) -> None:
        if call.tier not in self.rooms:
            text = f"this broker has no arena of tier {call.tier[:64]!r}: use tier='host', or start it with --gpu"
            self.books.respond(session, seq, m.Failed("InvalidMessage", text))
            return
        engine, refusal = self._engine(session, call.to)
        if refusal is not None:
            self.books.respond(session, seq, refusal)
            return
        self.admission.submit(session, seq, call.items, engine, call.private, now, deadline, tier=call.tier)

    def _lookup(
        self,
        session: Session,
        seq: int,
        call: m.Lookup | m.Promise,
        now: float,
        deadline: float,
        promise: bool = False,
    ) -> None:
        engine, refusal = self._engine(session, call.to)
        if refusal is not None:
            self.books.respond(session, seq, refusal)
            return
        items = [m.Item(key, _NOTHING) for key in call.keys]
        self.admission.submit(
            session, seq, items, engine, call.private, now, deadline, lookup=True, promise=promise
        )

    def _promise(self, session: Session, seq: int, call: m.Promise, now: float, deadline: float) -> None:
        if session.mover is not None:
            text = "a tier promises what is sought of it, and nothing else: look up, or create"
            self.books.respond(session, seq, m.Failed("InvalidMessage", text))
            return
        self._lookup(session, seq, call, now, deadline, promise=True)

    def _seal(self, session: Session, seq: int, call: m.Seal, now: float, deadline: float) -> None:
        engine, refusal = self._engine(session, call.to)
        if refusal is not None:
            self.books.respond(session, seq, refusal)
            return
        self.leases.seal(session, seq, call, engine, now, deadline)

    def _engine(self, session: Session, name: str | None) -> tuple[Engine | None, m.Failed | None]:
        """The attached engine of that name in the session's namespace."""
        if name is None:
            return None, None
        engine = self.books.engines.get((session.namespace, name))
        if engine is not None and engine.complete and (not engine.mover or session.engine is engine):
            return engine, None
        return None, self.books.no_such_engine(session.namespace, name)

    def _attach(self, session: Session, seq: int, call: m.Attach, now: float, deadline: float) -> None:
        refusal = self._attach_refusal(session, call)
        if refusal:
            self.books.respond(session, seq, m.Failed("InvalidMessage", refusal))
            return
        place = (session.namespace, call.engine)
        engine = self.books.engines.get(place)
        if engine is None:
            engine = self.books.engines[place] = Engine(
                call.engine, session.namespace, call.world, session.mover is not None
            )
        engine.ranks[call.rank] = session.number
        session.engine, session.engine_name, session.rank = engine, engine.name, call.rank
        session.device, session.access, session.lazy = call.device, call.access, call.lazy
        session.gpu = call.path == "device" and bool(self.limits.device) and call.device == self.limits.device
        session.path, session.why = plain(call.path, NAME_LIMIT), plain(call.why, 500)
        if session.gpu and self.holds.replicas is not None:
            self.holds.replicas.moved(session)
        if session.device != "cpu":
            for segment in self.books.pool.arena(session.namespace):
                if segment.ready:
                    self.books.announce(self.books.pool, segment)
        self.books.stirred = True
        self.books.respond(session, seq, m.Attached(engine.complete, "device" if session.gpu else "host"))

    def _attach_refusal(self, session: Session, call: m.Attach) -> str:
        for what, name in (("an engine", call.engine), ("a device", call.device)):
            if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
                return f"{what}'s name has 1 to {NAME_LIMIT} printable characters"
        if not 0 <= call.rank < call.world <= 4096:
            return f"rank {call.rank} of {call.world} is not possible: ranks count from 0, and a world has at most 4096"
        if call.access not in ("readonly", "copy"):
            return f"access is 'readonly' or 'copy', not {call.access[:64]!r}"
        mine = session.engine
        if mine is not None:
            stands = (mine.name, session.rank, mine.world, session.access, session.lazy)
            if call.path == "device" and stands == (
                call.engine,
                call.rank,
                call.world,
                call.access,
                call.lazy,
            ):
                return ""  # it stays who it is, and moves there
            return (
                f"this client is rank {session.rank} of engine {mine.name!r} already: "
                "close that table, or connect another client"
            )
        engine = self.books.engines.get((session.namespace, call.engine))
        if engine is None:
            return ""
        if engine.mover or session.mover is not None:
            return f"engine {call.engine!r} is attached, and a tier reads alone: give each engine a name of its own"
        if engine.world != call.world:
            return f"engine {call.engine!r} is attached with a world of {engine.world}, not {call.world}"
        other = engine.ranks.get(call.rank)
        if other is not None:
            holder = self.books.sessions[other]
            return (
                f"rank {call.rank} of engine {call.engine!r} is attached by {holder.name!r} (pid {holder.pid}): "
                "give each engine a name of its own"
            )
        return ""

    def _tier(self, session: Session, seq: int, call: m.Tier, now: float, deadline: float) -> None:
        refusal = self.seeking.say(session, call)
        self.books.respond(session, seq, m.Failed("InvalidMessage", refusal) if refusal else m.Done())

    def _detach(self, session: Session, seq: int, call: m.Detach, now: float, deadline: float) -> None:
        self._leave_engine(session)
        self.holds.leave(session, now)
        self.books.respond(session, seq, m.Done())

    def _leave_engine(self, session: Session) -> None:
        """No further grants to this rank."""
        engine = session.engine
        if engine is not None:
            session.engine = None
            session.kept.clear()
            del engine.ranks[session.rank]
            if not engine.ranks:
                del self.books.engines[engine.namespace, engine.name]
            self.admission.lacks(engine)
            self.books.stirred = True

    def _released(self, session: Session, seq: int, call: m.Released, now: float, deadline: float) -> None:
        old = self.books.sessions.get(call.session)
        if old is None or old is session:
            self.books.respond(session, seq, m.Done())
            return
        if old.process != session.process:
            text = "that session belongs to another process, or is not known: release only your own"
            self.books.respond(session, seq, m.Failed("UnknownSession", text))
            return
        old.released = True
        if old.ended:
            self._gone(old, now)
        self.books.respond(session, seq, m.Done())

    def _status(self, session: Session, seq: int, call: m.Status, now: float, deadline: float) -> None:
        self.books.respond(session, seq, m.Report(self.report(now, min(max(call.features, 0), 1000))))

    def _shutdown(self, session: Session, seq: int, call: m.Shutdown, now: float, deadline: float) -> None:
        self.books.respond(session, seq, m.Done())
        self._drain(Drain().grace, now)

    def _set_draining(self, session: Session, seq: int, call: m.Drain, now: float, deadline: float) -> None:
        if call.on:
            self.admission.drain()
        elif not self.halting:
            self.admission.draining = False
        self.books.respond(session, seq, m.Done())

    def _evict(self, session: Session, seq: int, call: m.Evict, now: float, deadline: float) -> None:
        before = sum(pool.used for pool in self.books.pools.values())
        features = self.books.evict_some(call.most, call.namespace, now)
        freed = before - sum(pool.used for pool in self.books.pools.values())
        self.books.respond(session, seq, m.Evicted(features, freed))

    def _device_call(self, session: Session, seq: int, call: Any, now: float, deadline: float) -> None:
        replicas = self.holds.replicas
        if replicas is None:
            self.books.counters["unknown_holds"] += len(call.holds)
            return
        act = {m.Park: replicas.park, m.Want: replicas.want}[type(call)]
        act(session, call.holds, now)

    def _tally(self, session: Session, seq: int, call: m.Tally, now: float, deadline: float) -> None:
        if not self.tallies.hear(session, call.counts):
            self.books.counters["tallies_refused"] += 1

    # --- ends -------------------------------------------------------------------------------------------------------

    def _ended(self, number: int, alive: bool, now: float) -> None:
        """The lifeline is cut. What the process may still touch stays its own until the process is gone."""
        session = self.books.sessions.get(number)
        if session is None or session.ended:
            return
        session.ended = True
        self.admission.forget_session(session)
        self.seeking.end(session)
        self.holds.orphan(session, now)
        self.leases.break_all(session, now)
        self._leave_engine(session)
        self.tallies.end(session)
        self.books.untold(session)
        session.answers.clear()
        self.holds.detach(session, now)
        if not alive or session.released or not (session.grants or session.pins or session.quarantine):
            self._gone(session, now)
        elif not session.traceable:
            self._untraceable(session, now)

    def _gone(self, session: Session, now: float) -> None:
        """The process is gone, or has said that it let go: it has settled everything."""
        self.holds.settle(session, list(session.grants), now)
        self.leases.unpin(session, list(session.pins), now)
        for slot in session.quarantine:
            self.books.free(slot, now)
        session.quarantine.clear()
        del self.books.sessions[session.number]

    def _untraceable(self, session: Session, now: float) -> None:
        """Nobody will ever tell when the process is gone: what it can touch is never reused."""
        for hold in session.grants.values():
            hold.feature.tainted = True
        for replica in session.replicas.values():
            replica.tainted = True
        slots, session.quarantine = session.quarantine, []
        for number, pinned in list(session.pins.items()):
            if isinstance(pinned, Feature):
                pinned.tainted = True
            else:
                slots.append(pinned)
                del session.pins[number]
        for slot in slots:
            self.books.abandon(slot, now)
        self._gone(session, now)

    def _tickets(self) -> bool:
        return any(session.tickets for session in self.books.sessions.values())

    def _drain(self, grace: float, now: float) -> None:
        if not self.halting:
            self.halting = True
            self.admission.drain()
            self.books.timers.at(
                now + grace, lambda _: self._halt(f"{len(self.leases.open)} lease(s) left open")
            )

    def _halt(self, reason: str) -> None:
        if not self._halted:
            self._halted = True
            self.books.out.add(Halt(reason))
