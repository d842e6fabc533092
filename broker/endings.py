"""Entries that are out of a table, and can still be read there: when they are looked at, and when they are settled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .buffers import BufferPool
from .entry import Entry
from .residence import Residence

if TYPE_CHECKING:
    from .link import Link

#: How long what was dismissed with grants waits for more of it, in nanoseconds. Nobody waited for what it frees when
#: they were sent, and to find out that nothing reads it any more takes this thread as long as a grant does.
_TOGETHER: Final = 15_000_000
#: How soon what was dismissed alone is looked at for the second time, in seconds.
_SECOND_LOOK: Final = 0.001


class Endings:
    """Of one table. For the receiver thread; `add`, and to iterate, for any. Times are of `time.perf_counter_ns`."""

    def __init__(self, link: Link, residence: Residence, buffers: BufferPool) -> None:
        self.settled = 0  # ever
        self._link = link
        self._residence = residence
        self._buffers = buffers
        self._over: deque[Entry] = deque()
        self._due = 0

    def __len__(self) -> int:
        return len(self._over)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._over))

    def add(self, entry: Entry) -> None:
        """An entry that is `gone`."""
        self._over.append(entry)

    def due(self, now: int) -> bool:
        """Is it time to look again, however often somebody could?"""
        return now >= self._due

    def hasten(self) -> None:
        """The next look is due at once."""
        self._due = 0

    def look_again(self) -> None:
        """Have somebody look in a moment at what is behind a fence: it takes a moment to be passed, also in a stream
        that has nothing to do. Whoever comes then looks; whoever comes before does not, and does not put it off."""
        if any(entry.fences for entry in self):
            self._due = min(self._due, time.perf_counter_ns() + int(_SECOND_LOOK * 1e9))
            self._link.hasten(_SECOND_LOOK)

    def fence(self) -> bool:
        """Find out where what has read them comes to its end; False: that is known already."""
        gpu = self._residence.gpu
        if gpu is None or not self._over or gpu.quiet:
            return False
        return self._residence.fence([entry for entry in self if not entry.uses], gpu)

    def settle(self, now: int) -> list[int]:
        """Let go of what can no longer be touched: the holds that the broker is to be told of."""
        self._due = now + _TOGETHER
        over, session, untouchable = self._over, self._link.session, self._residence.untouchable
        settled: list[int] = []
        for _ in range(len(over)):
            entry = over.popleft()
            if not untouchable(entry):
                over.append(entry)
                continue
            self.settled += 1
            if entry.session == session:
                settled.append(entry.ref.hold)
            if entry.buffer is not None and not entry.private:
                self._buffers.give(entry.buffer, time.monotonic())
        return settled
