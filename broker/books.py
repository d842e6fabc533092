"""The tables that the parts of the state machine share, and the moves that keep them in balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TypeVar

from mmbroker.proto.messages import (
    Dismissed,
    Failed,
    Fresh,
    Grant,
    Granted,
    Reply,
    Report,
    Retired,
    Sought,
    Wanted,
    Worth,
)

from .arena.allocator import PAGE, round_up
from .events import Discard, Effect, Limits, Notify, Respond, SendSegment
from .figures import Figures
from .pool import Pool, Segment, Slot
from .records import Engine, Feature, Lease, Place, Promise, Replica, Session
from .shelves import COPIES, Shelves, shelf_of
from .timers import Timers

#: Device segments come in whole pages of the GPU, which are 2 MiB on every one that can share them.
DEVICE_PAGE = 2 << 20
_Thing = TypeVar("_Thing")
_NOTICE_WEIGHT = 2048.0  # grants and parts in one message, of some 200 bytes each
_MOVER_SHARE = 16  # of such a part of the arena a mover may hold at once what it reads
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
        self._sought: dict[int, list[Wanted]] = {}
        self._fresh: dict[int, list[Worth]] = {}
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

    def sought(self, session: int, wanted: Wanted) -> None:
        self._sought.setdefault(session, []).append(wanted)

    def fresh(self, session: int, feature: Worth) -> None:
        self._fresh.setdefault(session, []).append(feature)

    def answer(self, session: int, seq: int, body: Reply) -> None:
        self._answers.append(Respond(session, seq, body))

    def add(self, effect: Effect) -> None:
        self._rest.append(effect)

    def flush(self) -> list[Effect]:
        effects = self._segments
        for session, grants in self._granted.items():
            weights = [1 + len(grant.ref.parts or ()) for grant in grants]
            effects += [Notify(session, Granted(some)) for some in _split(grants, weights)]
        for session, holds in self._dismissed.items():
            effects += [Notify(session, Dismissed(some)) for some in _split(holds, [0.1] * len(holds))]
        for session, wanted in self._sought.items():
            effects += [Notify(session, Sought(keys)) for keys in _split(wanted, [0.5] * len(wanted))]
        for session, features in self._fresh.items():
            effects += [Notify(session, Fresh(some)) for some in _split(features, [0.5] * len(features))]
        effects += self._answers
        effects += self._rest
        self._clear()
        return effects


def _split(things: list[_Thing], weights: Sequence[float]) -> Iterator[list[_Thing]]:
    """In order, so many at a time as fit a message: one event may cause more, and a client reads no longer ones."""
    start, weight = 0, 0.0
    for end, more in enumerate(weights):
        if end > start and weight + more > _NOTICE_WEIGHT:
            yield things[start:end]
            start, weight = end, 0.0
        weight += more
    yield things[start:]


class Books:
    """Who has what. Nothing here decides; it only moves things from one table to another."""

    def __init__(self, limits: Limits, boot: bytes) -> None:
        self.limits = limits
        self.boot = boot
        segments, generations = count(1), count(1)
        self.pool = Pool(
            "host", limits.host_bytes // PAGE * PAGE, round_up(limits.segment_bytes), limits.segment_linger, segments,
            generations,
        )  # fmt: skip
        self.pools = {"host": self.pool}
        if limits.device:
            self.pools["device"] = Pool(
                "device", limits.device_bytes // DEVICE_PAGE * DEVICE_PAGE,
                -(-limits.segment_bytes // DEVICE_PAGE) * DEVICE_PAGE, limits.device_segment_linger, segments,
                generations,
            )  # fmt: skip
        self.timers = Timers()
        self.out = Outbox()
        self.counters: Counter[str] = Counter()
        self.figures = Figures()
        self.sessions: dict[int, Session] = {}
        self.engines: dict[tuple[str, str], Engine] = {}
        self.features: dict[Place, Feature] = {}
        self.numbered: dict[int, Feature] = {}
        #: By tier and namespace, by generation.
        self.idle: dict[tuple[str, str], Shelves[Feature | Replica]] = {}
        self.idle_count = 0  # of features
        self.clock = 0  # of the cache: see `shelves`
        self.claims: Counter[str] = Counter()  # open leases, promises and holds, by namespace
        self.flights: dict[Place, list[Lease | Promise]] = {}  # keys that are being written
        self.stirred = False  # room or budget may have become free: look at what waits
        self.finished: float | None = None  # when something that was pending last got done (see `health`)

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

    def dismiss(self, session: int, hold: int) -> None:
        """Tell a rank that a hold is over, unless its own session is, which may be what ends the hold."""
        if not self.sessions[session].ended:
            self.out.dismiss(session, hold)

    # --- features ---------------------------------------------------------------------------------------------------

    def enter(self, feature: Feature) -> None:
        """A sealed feature, pinned by whoever sealed it."""
        self.features[feature.place] = feature
        self.numbered[feature.number] = feature

    def rest(self, feature: Feature, now: float) -> None:
        """Call when a feature may have lost its last hold or pin: it stays as a cache."""
        if feature.pinned or feature.number not in self.numbered:
            return
        self.idle_count += 1
        self._lay(feature, feature.place[0], now)

    def wake(self, feature: Feature) -> None:
        """Call before an idle feature gets a hold: it can be evicted no more."""
        if self._lift(feature, feature.place[0]):
            self.idle_count -= 1

    def rest_replica(self, replica: Replica, now: float) -> None:
        """A loaded replica without grants is kept for a while, for the next engine or request that wants it."""
        due = now + self.limits.device_linger
        replica.timer = self.timers.at(due, lambda at: self.evict(replica, "linger", at))
        self._lay(replica, replica.feature.place[0], now)

    def wake_replica(self, replica: Replica) -> None:
        if self._lift(replica, replica.feature.place[0]) and replica.timer is not None:
            replica.timer.cancel()

    def _lay(self, entry: Feature | Replica, namespace: str, now: float) -> None:
        slot = entry.slot
        self.pools[slot.tier].set_idle(slot, True)
        shelf = COPIES if isinstance(entry, Replica) else shelf_of(entry.cost, slot.nbytes)
        resting = self.idle.setdefault((slot.tier, namespace), Shelves())
        resting.lay(slot.generation, entry, shelf, self.clock)
        self.stirred = True
        if slot.segment and self.pools[slot.tier].segments[slot.segment].retired:
            self.evict(entry, "retired", now)

    def _lift(self, entry: Feature | Replica, namespace: str) -> bool:
        slot = entry.slot
        place = (slot.tier, namespace)
        resting = self.idle.get(place)
        if resting is None or not resting.lift(slot.generation):
            return False
        self.pools[slot.tier].set_idle(slot, False)
        if not resting:
            del self.idle[place]
        return True

    def evict(self, entry: Feature | Replica, reason: str, now: float) -> None:
        """Forget an idle feature, or an idle replica of one; its slot is free."""
        if isinstance(entry, Replica):
            self.wake_replica(entry)
            entry.feature.replica = None
            self.counters["replicas_evicted"] += 1
            self.counters[f"replicas_evicted_{reason}"] += 1
        else:
            if entry.replica is not None:
                self.evict(entry.replica, reason, now)
            self.wake(entry)
            del self.features[entry.place]
            del self.numbered[entry.number]
            self.counters["evictions"] += 1
            self.counters[f"evictions_{reason}"] += 1
        if entry.tainted:
            self.abandon(entry.slot, now)
        else:
            self.free(entry.slot, now)

    def evict_next(
        self, arenas: Iterable[tuple[str, str]], reason: str, now: float, copies: bool = True
    ) -> bool:
        """Evict what is worth the least of what rests in these arenas; without `copies`, of the features. The rest is
        worth that much less from now on. False if nothing rests there."""
        nexts = [found for arena in arenas if arena in self.idle and (found := self.idle[arena].next(copies))]
        if not nexts:
            return False
        due, entry = min(nexts, key=lambda found: found[0])
        self.clock = max(self.clock, due)
        self.evict(entry, reason, now)
        return True

    def evict_some(self, most: int, namespace: str | None, now: float) -> int:
        """Forget idle features as an operator wishes, those of all namespaces or of one; how many went. A tainted one
        takes along what is idle in its segment, which may be more than were asked for."""
        before = len(self.numbered)
        for arena in [arena for arena in self.idle if namespace in (None, arena[1])]:
            while (
                before - len(self.numbered) < most
                and arena in self.idle
                and (found := self.idle[arena].next(copies=False))
            ):  # and no clock: it is not for want of room
                self.evict(found[1], "request", now)
        return before - len(self.numbered)

    def trim(self, now: float) -> None:
        """Keep the watermark's share of the host arena free, and the number of idle features bounded."""
        pool, limits = self.pool, self.limits
        high = pool.limit - int(pool.limit * limits.watermark)
        while self.idle_count and (
            (full := pool.used > high and pool.idle) or self.idle_count > limits.cached_features
        ):
            arenas = [arena for arena in self.idle if arena[0] == "host" or not full]
            if not self.evict_next(arenas, "watermark" if full else "count", now, copies=False):
                break

    # --- slots and segments -----------------------------------------------------------------------------------------

    def segment_of(self, slot: Slot) -> Segment:
        return self.pools[slot.tier].segments[slot.segment]

    def free(self, slot: Slot, now: float) -> None:
        """A slot that nobody can touch any more."""
        self.stirred = True
        self.unallocate(slot, now)

    def unallocate(self, slot: Slot, now: float) -> None:
        """`free` without the news: for a slot that was taken for a batch that cannot be served whole."""
        if slot.segment:
            pool = self.pools[slot.tier]
            pool.free(slot, now)
            segment = pool.segments[slot.segment]
            self.sweep(pool, segment)
            self.watch_empty(pool, segment)

    def abandon(self, slot: Slot, now: float) -> None:
        """A slot that somebody untraceable may touch for ever: its segment takes nothing new and goes when it can."""
        if slot.segment:
            self.counters["slots_abandoned"] += 1
            pool = self.pools[slot.tier]
            pool.abandon(slot)
            segment = pool.segments[slot.segment]
            self.empty(pool, segment, "retired", now)
            self.sweep(pool, segment)

    def empty(self, pool: Pool, segment: Segment, reason: str, now: float) -> None:
        """Evict everything idle from a segment."""
        resting = self.idle.get((pool.tier, segment.namespace), Shelves[Feature | Replica]())
        for entry in [entry for entry in resting if entry.slot.segment == segment.number]:
            if entry.slot.generation in resting:  # else evicted with one before it, that was tainted too
                self.evict(entry, reason, now)

    def sweep(self, pool: Pool, segment: Segment) -> None:
        """Give a retired segment's memory back once only abandoned slots are left in it."""
        if (
            segment.retired
            and segment.allocator.slots == segment.abandoned
            and segment.number in pool.segments
        ):
            self.discard(pool, segment)

    def discard(self, pool: Pool, segment: Segment) -> None:
        """Give a segment back; clients that map it are told to unmap it."""
        pool.remove(segment.number)
        self.out.add(Discard(segment.number))
        for number in segment.sessions:
            session = self.sessions.get(number)
            if session is not None and not session.ended:
                session.segments -= {(segment.number, True), (segment.number, False)}
                self.out.add(Notify(number, Retired([segment.number])))
        self.counters["segments_discarded"] += 1
        self.stirred = True

    def watch_empty(self, pool: Pool, segment: Segment) -> None:
        """Give an empty segment back once it has been empty for a while: one timer for each, however often it fills."""
        if (
            segment.empty_since is None
            or segment.watched
            or segment.reserved
            or segment.number not in pool.segments
        ):
            return
        segment.watched = True
        self.timers.at(
            self._linger_ends(pool, segment.empty_since), lambda at: self._shrink(pool, segment, at)
        )

    @staticmethod
    def _linger_ends(pool: Pool, since: float) -> float:
        return since + max(pool.linger, 0.05)  # whoever asked for it has yet to use it

    def _shrink(self, pool: Pool, segment: Segment, now: float) -> None:
        segment.watched = False
        if segment.number not in pool.segments or segment.empty_since is None:
            return
        if now >= self._linger_ends(
            pool, segment.empty_since
        ):  # never the difference: it may be less, by rounding
            self.discard(pool, segment)
        else:
            self.watch_empty(pool, segment)

    def announce(self, pool: Pool, segment: Segment) -> None:
        """Ranks on a GPU get a host segment before they need it, because pinning it takes milliseconds."""
        for session in self.sessions.values() if pool.tier == "host" else ():
            on_gpu = session.engine is not None and session.device != "cpu"
            if on_gpu and not session.ended and session.namespace == segment.namespace:
                segment.sessions.add(session.number)
                self.out.segment(session, segment.number, False)

    def send(self, session: Session, slot: Slot, writable: bool) -> None:
        """Make sure a session can map the slot's segment. One on the device has but one descriptor, for both maps."""
        if slot.segment:
            self.segment_of(slot).sessions.add(session.number)
            self.out.segment(session, slot.segment, writable or slot.tier == "device")

    def untold(self, session: Session) -> None:
        """A session has ended: nobody tells it when a segment goes."""
        for pool in self.pools.values():
            for number, _ in session.segments:
                if number in pool.segments:
                    pool.segments[number].sessions.discard(session.number)

    # --- claims -----------------------------------------------------------------------------------------------------

    def claim(self, session: Session, namespace: str, slot: Slot) -> None:
        """One lease or hold more of a client."""
        self.claims[namespace] += 1
        session.nbytes += slot.nbytes

    def disclaim(self, session: Session, slot: Slot) -> None:
        """A lease or hold is the client's no more. A hold may go on without it: see `close`."""
        session.nbytes -= slot.nbytes
        if session.requests:
            self.stirred = True

    def close(self, namespace: str) -> None:
        """A lease, promise or hold is over for everybody."""
        self.claims[namespace] -= 1
        if not self.claims[namespace]:
            del self.claims[namespace]

    # --- engines ----------------------------------------------------------------------------------------------------

    def budget(self, tier: str = "host", engine: Engine | None = None) -> int:
        """Bytes that one engine may have in flight: an equal share of the arena for each that is attached, or less. A
        mover reads, and takes nothing from them: it has a small part of the arena for that."""
        if engine is not None and engine.mover:
            return self.pools[tier].limit // _MOVER_SHARE
        attached = sum(engine.complete and not engine.mover for engine in self.engines.values())
        share = self.pools[tier].limit // max(1, attached)
        return min(share, self.limits.engine_bytes or share)

    def no_such_engine(self, namespace: str, name: str) -> Failed:
        """Why nothing can be granted to an engine: it is not there, or not complete."""
        self.counters["no_such_engine"] += 1
        engine = self.engines.get((namespace, name))
        attached = sorted(
            e.name for e in self.engines.values() if e.namespace == namespace and e.complete and not e.mover
        )
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
                engine.in_flight[feature.slot.tier] += feature.slot.nbytes

    def credit(self, engine: Engine | None, feature: Feature) -> None:
        """One hold less."""
        if engine is not None:
            engine.uses[feature.number] -= 1
            if not engine.uses[feature.number]:
                del engine.uses[feature.number]
                engine.in_flight[feature.slot.tier] -= feature.slot.nbytes
                self.stirred = True
