"""Room: slots for a whole batch in one tier, by eviction and by growth, or none at all. Decides nothing about order."""

from __future__ import annotations

from .arena.allocator import round_up
from .books import DEVICE_PAGE, Books
from .events import Grow
from .pool import Pool, Segment, Slot
from .records import Feature


class Room:
    def __init__(self, books: Books, pool: Pool) -> None:
        self.books = books
        self.pool = pool
        self.blocked = ""  # why no segment can be had at present
        self.refused = ""  # why the last one that was asked for could not be had

    def allocate(
        self, namespace: str, sizes: list[int], hits: list[Feature], now: float
    ) -> list[Slot] | None:
        """Slots for all sizes (bytes), or none. Evicts what is idle, except `hits`; asks for a segment if need be.

        With the slots, `hits` are idle no more: they have to be claimed.
        """
        books = self.books
        sizes = [round_up(nbytes) for nbytes in sizes]
        need = sum(sizes)
        stirred = books.stirred  # what is evicted here is for this request, and no news to those behind it
        resting = [feature for feature in hits if not feature.pinned]
        for feature in resting:
            books.wake(feature)
        slots = self._all(namespace, sizes, now) if need <= self.pool.limit - self.pool.held else None
        if slots is None:
            for feature in resting:
                books.rest(feature, now)
        # If its segment was retired meanwhile, it is a hit no more, and there is more room than was looked at.
        books.stirred = stirred or any(feature.number not in books.numbered for feature in resting)
        if slots and need:
            self._grow_ahead(namespace)
        return slots

    def _all(self, namespace: str, sizes: list[int], now: float) -> list[Slot] | None:
        """The largest first: where it goes decides. If pieces are too small, one segment for the whole batch is not."""
        slots: dict[int, Slot] = {}
        for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            slot = self._one(namespace, sizes[at], now)
            if slot is None:
                for taken in slots.values():
                    self.books.unallocate(taken, now)
                if not self.pool.growing(namespace):
                    self._clear(namespace, sum(sizes), now)
                return None
            slots[at] = slot
        return [slots[at] for at in range(len(sizes))]

    def _one(self, namespace: str, nbytes: int, now: float) -> Slot | None:
        books, pool = self.books, self.pool
        slot = pool.allocate(namespace, nbytes)
        if slot is not None or pool.growing(namespace, nbytes):
            return slot
        if pool.adopt(namespace, nbytes):
            return pool.allocate(namespace, nbytes)
        if self._grow(namespace, nbytes):
            return None
        if any(s.ready and s.allocator.nbytes >= nbytes for s in pool.arena(namespace)):
            while books.evict_next([(pool.tier, namespace)], "room", now):
                slot = pool.allocate(namespace, nbytes)
                if slot is not None:
                    return slot
        self._clear(namespace, nbytes, now)
        return None

    def fits(self, nbytes: int) -> bool:
        """Is the arena large enough for that?"""
        return self._whole(nbytes) <= self.pool.limit

    def possible(self, namespace: str, nbytes: int) -> bool:
        """Could so much be had at present, if nothing in the arena were held?"""
        return not self.blocked or any(
            s.allocator.nbytes >= round_up(nbytes) for s in self.pool.arena(namespace) if s.ready
        )

    def _clear(self, namespace: str, nbytes: int, now: float) -> None:
        """Have a segment for so much made in place of others that hold nothing but idle features, if that is enough."""
        pool, need = self.pool, self._whole(nbytes)
        loose = [s for s in pool.segments.values() if s.ready and not (s.held or s.retired or s.reserved)]
        if self.blocked or pool.limit - pool.capacity + sum(s.allocator.nbytes for s in loose) < need:
            return
        for segment in loose:
            if pool.limit - pool.capacity < need and segment.number in pool.segments:
                self.books.empty(pool, segment, "room", now)
                if segment.number in pool.segments:  # else a tainted feature has taken it along
                    self.books.discard(pool, segment)
        self._grow(namespace, nbytes)

    def _whole(self, nbytes: int) -> int:
        page = DEVICE_PAGE if self.pool.tier == "device" else 1
        return -(-round_up(nbytes) // page) * page

    def _grow(self, namespace: str, nbytes: int) -> bool:
        size = None if self.blocked else self.pool.next_size(self._whole(nbytes))
        if size is None:
            return False
        self._ask(namespace, size)
        return True

    def _ask(self, namespace: str, size: int) -> Segment:
        segment = self.pool.grow(namespace, size)
        self.books.counters["segments_grown"] += 1
        self.books.out.add(Grow(segment.number, self.pool.tier, size))
        return segment

    def _grow_ahead(self, namespace: str) -> None:
        """Have the next segment on its way before somebody has to wait for it."""
        pool = self.pool
        free = max((s.allocator.largest_free for s in pool.arena(namespace)), default=0)
        if free < pool.segment_bytes // 4 and not pool.growing(namespace):
            self._grow(namespace, pool.segment_bytes // 4)

    def reserve(self, nbytes: int) -> None:
        """Take segments that are never given back; the first namespace that needs one gets it."""
        pool = self.pool
        while size := min(self._whole(max(nbytes, 0)), pool.segment_bytes, pool.limit - pool.capacity):
            self._ask("", size).reserved = True
            nbytes -= size

    def segment_ready(self, number: int, now: float) -> None:
        segment = self.pool.segments[number]
        segment.ready = True
        segment.empty_since = now
        self.refused = ""
        self.books.watch_empty(self.pool, segment)
        self.books.announce(self.pool, segment)
        self.books.stirred = True

    def segment_failed(self, number: int, reason: str, now: float) -> None:
        """No segment can be had: what waits is told at its deadline, or at once if it can never fit what there is."""
        self.pool.remove(number)
        self.books.counters["segments_refused"] += 1
        self.blocked = self.refused = reason
        self.books.timers.at(now + self.books.limits.grow_retry, self._unblock)
        self.books.stirred = True

    def _unblock(self, now: float) -> None:
        self.blocked = ""
        self.books.stirred = True
