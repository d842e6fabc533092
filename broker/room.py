"""Room: slots for a whole batch, by eviction and by growth, or none at all. Decides nothing about order."""

from __future__ import annotations

from mmbroker.proto.messages import Item

from .arena.allocator import round_up
from .books import Books
from .events import Grow
from .pool import Segment, Slot
from .records import Feature


class Room:
    def __init__(self, books: Books) -> None:
        self.books = books
        self.blocked = ""  # why no segment can be had at present

    def allocate(
        self, namespace: str, items: list[Item], hits: list[Feature], now: float
    ) -> list[Slot] | None:
        """Slots for all items, or none at all. Evicts what is idle, except `hits`; asks for a segment if need be."""
        books = self.books
        sizes = [round_up(item.form.nbytes) for item in items]
        need = sum(sizes)
        stirred = books.stirred  # what is evicted here is for this request, and no news to those behind it
        resting = [feature for feature in hits if not feature.pinned]
        for feature in resting:
            books.wake(feature)
        slots = self._all(namespace, sizes, now) if need <= books.pool.limit - books.pool.held else None
        for feature in resting:
            books.rest(feature, now)
        books.stirred = stirred
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
                if not self.books.pool.growing(namespace):
                    self._clear(namespace, sum(sizes), now)
                return None
            slots[at] = slot
        return [slots[at] for at in range(len(sizes))]

    def _one(self, namespace: str, nbytes: int, now: float) -> Slot | None:
        books, pool = self.books, self.books.pool
        slot = pool.allocate(namespace, nbytes)
        if slot is not None or pool.growing(namespace, nbytes):
            return slot
        if self._grow(namespace, nbytes):
            return None
        if any(s.ready and s.allocator.nbytes >= nbytes for s in pool.arena(namespace)):
            while resting := books.idle.get(namespace):
                books.evict(next(iter(resting.values())), "room", now)
                slot = pool.allocate(namespace, nbytes)
                if slot is not None:
                    return slot
        self._clear(namespace, nbytes, now)
        return None

    def _clear(self, namespace: str, nbytes: int, now: float) -> None:
        """Have a segment for so much made in place of others that hold nothing but idle features, if that is enough."""
        pool = self.books.pool
        loose = [s for s in pool.segments.values() if s.ready and not s.pinned and not s.retired]
        if self.blocked or pool.limit - pool.capacity + sum(s.allocator.nbytes for s in loose) < nbytes:
            return
        for segment in loose:
            if pool.limit - pool.capacity < nbytes and segment.number in pool.segments:
                self._empty(segment, now)
        self._grow(namespace, nbytes)

    def _empty(self, segment: Segment, now: float) -> None:
        """Evict everything from a segment that has nothing but idle features, and give it back."""
        while segment.features:
            self.books.evict(self.books.numbered[next(iter(segment.features))], "room", now)
        if segment.number in self.books.pool.segments:  # else a tainted one has taken it along
            self.books.discard(segment)

    def _grow(self, namespace: str, nbytes: int) -> bool:
        size = None if self.blocked else self.books.pool.next_size(nbytes)
        if size is None:
            return False
        segment = self.books.pool.grow(namespace, size)
        self.books.counters["segments_grown"] += 1
        self.books.out.add(Grow(segment.number, "host", size))
        return True

    def _grow_ahead(self, namespace: str) -> None:
        """Have the next segment on its way before somebody has to wait for it."""
        pool = self.books.pool
        free = max((s.allocator.largest_free for s in pool.arena(namespace)), default=0)
        if free < pool.segment_bytes // 4 and not pool.growing(namespace):
            self._grow(namespace, pool.segment_bytes // 4)

    def segment_ready(self, number: int, now: float) -> None:
        segment = self.books.pool.segments[number]
        segment.ready = True
        segment.empty_since = now
        self.books.watch_empty(segment, now)
        self.books.stirred = True

    def segment_failed(self, number: int, reason: str, now: float) -> None:
        """No segment can be had: what waits is told at its deadline, or at once if it can never fit what there is."""
        self.books.pool.remove(number)
        self.books.counters["segments_refused"] += 1
        self.blocked = reason
        self.books.timers.at(now + self.books.limits.grow_retry, self._unblock)
        self.books.stirred = True

    def _unblock(self, now: float) -> None:
        self.blocked = ""
        self.books.stirred = True
