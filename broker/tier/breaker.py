"""When the store is left alone. Pure: the time is passed in, in seconds of any steady clock.

Closed: the store is asked. Some failures in a row open it: then nothing is asked until a pause is over, when one trial
decides (half-open). A trial that fails makes the next pause twice as long; so does a store that answers trials and then
fails again at once.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

#: Failures in a row that open it.
FAILURES: Final = 3
#: First and longest pause, in seconds.
PAUSE: Final = (0.5, 30.0)


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """`opened` counts how often it opened. Not thread-safe."""

    def __init__(self, failures: int = FAILURES, pause: tuple[float, float] = PAUSE) -> None:
        self.state = State.CLOSED
        self.opened = 0
        self.why = ""
        self._limit = failures
        self._first, self._longest = pause
        self._failures = 0
        self._pause = self._first
        self._until = 0.0  # open until then
        self._closed_at = float("-inf")

    def succeeded(self) -> None:
        """The store did what it was asked, in time."""
        self._failures = 0

    def failed(self, now: float, why: str) -> bool:
        """The store failed, or was too slow. True if that has opened it."""
        if self.state is not State.CLOSED:
            return False  # asked before it opened
        self._failures += 1
        if self._failures < self._limit:
            return False
        if now - self._closed_at > 2 * self._pause:
            self._pause = self._first  # it was well for longer than it was left alone
        self._open(now, why)
        self.opened += 1
        return True

    def due(self, now: float) -> bool:
        """Is it time for a trial? Then it is half-open, until `tried`."""
        if self.state is not State.OPEN or now < self._until:
            return False
        self.state = State.HALF_OPEN
        return True

    def tried(self, now: float, why: str | None) -> bool:
        """What came of the trial: None if it went well. True if that has closed it."""
        if self.state is not State.HALF_OPEN:
            return False
        if why is not None:
            self._open(now, why)
            return False
        self.state, self.why = State.CLOSED, ""
        self._failures, self._closed_at = 0, now
        return True

    def left(self, now: float) -> float | None:
        """Seconds until the next trial is due; None: there is none to wait for."""
        return max(0.0, self._until - now) if self.state is State.OPEN else None

    def _open(self, now: float, why: str) -> None:
        self.state, self.why = State.OPEN, why
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._longest)
