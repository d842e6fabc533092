"""The tables that the parts of the state machine share, and the moves that keep them in balance."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import count

from mmbroker.proto.messages import Dismissed, Failed, Grant, Granted, Reply, Report, Retired

from .arena.allocator import round_up
from .events import Discard, Effect, Limits, Notify, Respond, SendSegment
from .pool import Pool, Segment, Slot
from .records import Engine, Feature, Lease, Place, Session
from .timers import Timers

NAME_LIMIT = 128  # characters of an engine's name


class Outbox:
    """Collects what one event causes, and puts it into the order that clients rely on:
    descriptors, then notices, then answers, then the rest."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._segments: list[Effect] = []
        self._granted: dict[int, list[Grant]] = {}
        self._dismissed: dict[int, list[int]] = {}
        self._answers: list[Effect] = []
        self._rest: list[Effect] = []

    def segment(self, session: Session, number: int, writable: bool) -> None:
        """Make sure the session has this segment's descriptor."""
        if number and (number, writable) not in session.segments:
            session.segments.add((number, writable))
            self._segments.append(SendSegment(session.number, number, writable))

    def grant(self, session: int, grant: Grant) -> None:
        self._granted.setdefault(session, []).append(grant)

    def dismiss(self, session: int, hold: int) -> None:
        self._dismissed.setdefault(session, []).append(hold)

    def answer(self, session: int, seq: int, body: Reply) -> None:
        self._answers.append(Respond(session, seq, body))

    def add(self, effect: Effect) -> None:
        self._rest.append(effect)

    def flush(self) -> list[Effect]:
        effects = self._segments
        effects += [Notify(session, Granted(grants)) for session, grants in self._granted.items()]
        effects += [Notify(session, Dismissed(holds)) for session, holds in self._dismissed.items()]
        effects += self._answers
        effects += self._rest
        self._clear()
        return effects


class Books:
    """Who has what. Nothing here decides; it only moves things from one table to another."""

    def __init__(self, limits: Limits, boot: bytes) -> None:
        self.limits = limits
        self.boot = boot
        self.pool = Pool(limits.host_bytes // 4096 * 4096, round_up(limits.segment_bytes))
        self.timers = Timers()
        self.out = Outbox()
        self.counters: Counter[str] = Counter()
        self.sessions: dict[int, Session] = {}
        self.engines: dict[tuple[str, str], Engine] = {}
        self.features: dict[Place, Feature] = {}
        self.numbered: dict[int, Feature] = {}
        self.idle: dict[str, OrderedDict[int, Feature]] = {}  # by namespace, least recently used first
        self.idle_count = 0
        self._rests = count(1)
        self.flights: dict[Place, list[Lease]] = {}  # keys that are being written
        self.stirred = False  # room or budget may have become free: look at what waits

    # --- answers ----------------------------------------------------------------------------------------------------

    def respond(self, session: Session, seq: int, body: Reply) -> None:
        """Answer a call, once; remembered so that a repeat of the call gets the same answer."""
        if not seq or session.ended:
            return
        if not isinstance(body, Report):
            session.answers[seq] = body
            if len(session.answers) > self.limits.answers_kept:
                session.forgotten = max(session.forgotten, session.answers.popitem(last=False)[0])
        self.out.answer(session.number, seq, body)

    # --- features ---------------------------------------------------------------------------------------------------

    def enter(self, feature: Feature) -> None:
        """A sealed feature, pinned by whoever sealed it."""
        self.features[feature.place] = feature
        self.numbered[feature.number] = feature
        if feature.slot.segment:
            self.pool.segments[feature.slot.segment].features.add(feature.number)

    def rest(self, feature: Feature, now: float) -> None:
        """Call when a feature may have lost its last hold or pin: it stays as a cache."""
        if feature.pinned or feature.number not in self.numbered:
            return
        self.pool.set_idle(feature.slot, True)
        feature.rested = next(self._rests)
        namespace = feature.place[0]
        self.idle.setdefault(namespace, OrderedDict())[feature.number] = feature
        self.idle_count += 1
        self.stirred = True
        segment = self.pool.segments.get(feature.slot.segment)
        if segment is not None and segment.retired:
            self.evict(feature, "retired", now)

    def wake(self, feature: Feature) -> None:
        """Call before an idle feature gets a hold: it can be evicted no more."""
        namespace = feature.place[0]
        resting = self.idle.get(namespace)
        if resting is not None and resting.pop(feature.number, None) is not None:
            self.idle_count -= 1
            self.pool.set_idle(feature.slot, False)
            if not resting:
                del self.idle[namespace]

    def evict(self, feature: Feature, reason: str, now: float) -> None:
        """Forget an idle feature; its slot is free."""
        self.wake(feature)
        del self.features[feature.place]
        del self.numbered[feature.number]
        if feature.slot.segment:
            self.pool.segments[feature.slot.segment].features.discard(feature.number)
        self.counters["evictions"] += 1
        self.counters[f"evictions_{reason}"] += 1
        if feature.tainted:
            self.abandon(feature.slot, now)
        else:
            self.free(feature.slot, now)

    def trim(self, now: float) -> None:
        """Keep the watermark's share of the arena free ahead of demand, and the number of idle features bounded."""
        pool, limits = self.pool, self.limits
        high = pool.limit - int(pool.limit * limits.watermark)
        while self.idle_count and (pool.used > high or self.idle_count > limits.cached_features):
            reason = "watermark" if pool.used > high else "count"
            oldest = (next(iter(resting.values())) for resting in self.idle.values())
            self.evict(min(oldest, key=lambda feature: feature.rested), reason, now)

    # --- slots and segments -----------------------------------------------------------------------------------------

    def free(self, slot: Slot, now: float) -> None:
        """A slot that nobody can touch any more."""
        self.stirred = True
        self.unallocate(slot, now)

    def unallocate(self, slot: Slot, now: float) -> None:
        """`free` without the news: for a slot that was taken for a batch that cannot be served whole."""
        if slot.segment:
            self.pool.free(slot, now)
            segment = self.pool.segments[slot.segment]
            self.sweep(segment)
            self.watch_empty(segment, now)

    def abandon(self, slot: Slot, now: float) -> None:
        """A slot that somebody untraceable may touch for ever: its segment takes nothing new and goes when it can."""
        if slot.segment:
            self.counters["slots_abandoned"] += 1
            self.pool.abandon(slot)
            segment = self.pool.segments[slot.segment]
            for number in list(segment.features):
                feature = self.numbered.get(number)  # None: evicted with one before it, that was tainted too
                if feature is not None and not feature.pinned:
                    self.evict(feature, "retired", now)
            self.sweep(segment)

    def sweep(self, segment: Segment) -> None:
        """Give a retired segment's memory back once only abandoned slots are left in it."""
        if segment.retired and segment.pinned == segment.abandoned and segment.number in self.pool.segments:
            self.discard(segment)

    def discard(self, segment: Segment) -> None:
        """Give a segment back; clients that map it are told to unmap it."""
        self.pool.remove(segment.number)
        self.out.add(Discard(segment.number))
        for number in segment.sessions:
            session = self.sessions.get(number)
            if session is not None and not session.ended:
                session.segments -= {(segment.number, True), (segment.number, False)}
                self.out.add(Notify(number, Retired([segment.number])))
        self.counters["segments_discarded"] += 1
        self.stirred = True

    def watch_empty(self, segment: Segment, now: float) -> None:
        """Give an empty segment back once it has been empty for a while: one timer for each, however often it fills."""
        if segment.empty_since is None or segment.watched or segment.number not in self.pool.segments:
            return
        segment.watched = True
        self.timers.at(self._linger_ends(segment.empty_since), lambda at: self._shrink(segment, at))

    def _linger_ends(self, since: float) -> float:
        return since + max(self.limits.segment_linger, 0.05)  # whoever asked for it has yet to use it

    def _shrink(self, segment: Segment, now: float) -> None:
        segment.watched = False
        if segment.number not in self.pool.segments or segment.empty_since is None:
            return
        if now >= self._linger_ends(segment.empty_since):  # never the difference: it may be less, by rounding
            self.discard(segment)
        else:
            self.watch_empty(segment, now)

    def send(self, session: Session, slot: Slot, writable: bool) -> None:
        """Make sure a session can map the slot's segment."""
        if slot.segment:
            self.pool.segments[slot.segment].sessions.add(session.number)
            self.out.segment(session, slot.segment, writable)

    # --- engines ----------------------------------------------------------------------------------------------------

    def budget(self) -> int:
        """Bytes that one engine may have in flight: an equal share of the arena for each that is attached."""
        return self.pool.limit // max(1, sum(engine.complete for engine in self.engines.values()))

    def no_such_engine(self, namespace: str, name: str) -> Failed:
        """Why nothing can be granted to an engine: it is not there, or not complete."""
        self.counters["no_such_engine"] += 1
        engine = self.engines.get((namespace, name))
        attached = sorted(e.name for e in self.engines.values() if e.namespace == namespace and e.complete)
        have = ", ".join(attached) if attached else "none"
        if engine is not None and not engine.complete:
            missing = sorted(set(range(engine.world)) - set(engine.ranks))
            text = f"engine {name[:NAME_LIMIT]!r} lacks rank(s) {missing}; attached engines: {have}"
        else:
            text = f"no engine {name[:NAME_LIMIT]!r} is attached; attached engines: {have}"
        return Failed("NoSuchEngine", text + "; start it, or seal with to=None")

    def charge(self, engine: Engine | None, feature: Feature) -> None:
        """One hold more of this engine on the feature."""
        if engine is not None:
            uses = engine.uses.get(feature.number, 0)
            engine.uses[feature.number] = uses + 1
            if not uses:
                engine.in_flight += feature.slot.nbytes

    def credit(self, engine: Engine | None, feature: Feature) -> None:
        """One hold less."""
        if engine is not None:
            engine.uses[feature.number] -= 1
            if not engine.uses[feature.number]:
                del engine.uses[feature.number]
                engine.in_flight -= feature.slot.nbytes
                self.stirred = True
