"""Slots and segments of one tier: who has which bytes, how much there is, and when to grow or shrink. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .arena.allocator import Allocator, round_up


@dataclass(frozen=True, slots=True)
class Slot:
    """One use of a place in a segment. Segment 0 holds nothing: the slot of a feature without bytes."""

    segment: int
    offset: int
    nbytes: int  # whole pages
    generation: int
    tier: str = "host"


@dataclass(slots=True, eq=False)
class Segment:
    number: int
    namespace: str
    allocator: Allocator
    ready: bool = False
    retired: bool = False  # nothing new is put here, because a writer that cannot be traced may still write
    held: int = 0  # bytes of slots that must stay: everything but idle features
    reserved: bool = False  # taken at the start, and never given back
    abandoned: int = 0  # slots that will never be given back
    empty_since: float | None = None
    watched: bool = False  # a timer will look whether it is still empty
    sessions: set[int] = field(default_factory=set)  # that were sent its descriptor


class Pool:
    """All segments of a tier, in one arena for each namespace, under one limit in bytes."""

    def __init__(
        self,
        tier: str,
        limit: int,
        segment_bytes: int,
        linger: float,
        numbers: Iterator[int],
        generations: Iterator[int],
    ) -> None:
        """`numbers` and `generations` are shared by all tiers of a broker: they name segments and slots for good."""
        self.tier = tier
        self.limit = limit
        self.segment_bytes = segment_bytes
        self.linger = linger  # seconds that an empty segment is kept
        self.segments: dict[int, Segment] = {}
        self.capacity = 0  # bytes of all segments, the growing ones included
        self.used = 0  # bytes of all slots
        self.idle = 0  # of these, bytes of features that could be evicted
        self._numbers = numbers
        self._generations = generations

    @property
    def held(self) -> int:
        """Bytes that cannot be had by evicting."""
        return self.used - self.idle

    def held_by(self, namespace: str) -> int:
        """As `held`, of one namespace."""
        return sum(segment.held for segment in self.segments.values() if segment.namespace == namespace)

    def arena(self, namespace: str) -> Iterator[Segment]:
        """The namespace's segments that take new slots."""
        return (s for s in self.segments.values() if s.namespace == namespace and not s.retired)

    def allocate(self, namespace: str, nbytes: int) -> Slot | None:
        """A slot of `nbytes` in a segment that is there; None if no free run is long enough."""
        generation = next(self._generations)
        if nbytes == 0:
            return Slot(0, 0, 0, generation, self.tier)
        for segment in self.arena(namespace):
            if segment.ready and (offset := segment.allocator.alloc(nbytes)) is not None:
                size = round_up(nbytes)
                self.used += size
                segment.held += size
                segment.empty_since = None
                return Slot(segment.number, offset, size, generation, self.tier)
        return None

    def free(self, slot: Slot, now: float) -> None:
        """Give back a slot that nobody can touch any more."""
        if slot.segment:
            segment = self.segments[slot.segment]
            segment.allocator.free(slot.offset)
            self.used -= slot.nbytes
            segment.held -= slot.nbytes
            if segment.allocator.empty:
                segment.empty_since = now

    def abandon(self, slot: Slot) -> None:
        """A slot whose writer cannot be traced: its segment is used no more."""
        if slot.segment:
            segment = self.segments[slot.segment]
            segment.abandoned += 1
            segment.retired = True

    def set_idle(self, slot: Slot, idle: bool) -> None:
        """An idle slot's feature may be evicted at any time."""
        if slot.segment:
            self.segments[slot.segment].held += -slot.nbytes if idle else slot.nbytes
            self.idle += slot.nbytes if idle else -slot.nbytes

    def growing(self, namespace: str, nbytes: int = 0) -> bool:
        """Is a segment for at least `nbytes` on its way?"""
        return any(not s.ready and s.allocator.nbytes >= nbytes for s in self.arena(namespace))

    def next_size(self, nbytes: int) -> int | None:
        """Size of a new segment that can hold `nbytes` under the limit, or None."""
        room = self.limit - self.capacity
        size = max(min(self.segment_bytes, room), round_up(nbytes))
        return size if 0 < size <= room else None

    def adopt(self, namespace: str, nbytes: int) -> bool:
        """Give the namespace a segment of the reserve, which nobody has used yet."""
        for segment in self.segments.values():
            if not segment.namespace and segment.ready and segment.allocator.nbytes >= nbytes:
                segment.namespace = namespace
                return True
        return False

    def grow(self, namespace: str, size: int) -> Segment:
        """Enter a segment that is not there yet; `ready` is set once it is. Without a namespace it is reserve."""
        segment = Segment(next(self._numbers), namespace, Allocator(size))
        self.segments[segment.number] = segment
        self.capacity += size
        return segment

    def remove(self, number: int) -> Segment:
        """Strike a segment out of the books; slots that were abandoned in it go with it."""
        segment = self.segments.pop(number)
        self.capacity -= segment.allocator.nbytes
        self.used -= segment.allocator.used
        return segment
