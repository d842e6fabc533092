"""Deadlines of the state machine: what is due, and when the next one is. Time is whatever the caller says it is."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timer:
    """One deadline. `cancel` is cheap: the queue sweeps cancelled ones out when they are the majority."""

    __slots__ = ("_queue", "action", "when")

    def __init__(self, queue: Timers, when: float, action: Callable[[float], None]) -> None:
        self._queue = queue
        self.when = when
        self.action: Callable[[float], None] | None = action

    def cancel(self) -> None:
        if self.action is not None:
            self.action = None
            self._queue.cancelled += 1


class Timers:
    """A queue of deadlines."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self.cancelled = 0

    def __len__(self) -> int:
        return len(self._heap) - self.cancelled

    def at(self, when: float, action: Callable[[float], None]) -> Timer:
        """Have `action(now)` called by the first `run` at or after `when`."""
        if self.cancelled > 64 and self.cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        timer = Timer(self, when, action)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def next(self) -> float | None:
        """When the earliest deadline is, or None."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
            self.cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Call everything that is due, in order of its deadline."""
        while (when := self.next()) is not None and when <= now:
            timer = heapq.heappop(self._heap)[2]
            action, timer.action = timer.action, None
            assert action is not None
            action(now)
