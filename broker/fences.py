"""Where work on a GPU ends: behind what is in one stream, or behind everything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from .cuda import DriverError

_log = logging.getLogger("mmbroker")

#: In place of an event: a thread waits.
_AWAITED: Final = -1
#: After a failure, in seconds.
_AGAIN: Final = 1.0


class Fence:
    """`event` is 0 once everything behind which it was made is done."""

    __slots__ = ("event",)

    def __init__(self, event: int) -> None:
        self.event = event

    @property
    def recorded(self) -> int:
        """The event that tells, if one does, and has not yet."""
        return max(0, self.event)


class Drain:
    """Fences behind everything that a process has told a GPU, in streams that nobody knows, too. No event tells that,
    so a thread waits: `wait` until all is done that there is when it is called. If it raises `DriverError`, it is
    called again a little later."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._lock = threading.Lock()
        self._next: Fence | None = None  # nobody waits yet
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def fence(self) -> Fence:
        """Behind everything that there is by now."""
        with self._lock:
            if self._next is None:
                self._next = Fence(_AWAITED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mmbroker-drain", daemon=True)
                self._thread.start()
            return self._next

    def _run(self) -> None:
        while True:
            with self._lock:
                fence, self._next = self._next, None
                if fence is None:
                    self._thread = None
                    return
            if self._waited():
                fence.event = 0

    def _waited(self) -> bool:
        told = False
        while not self._over.is_set():
            try:
                self._wait()
                return True
            except DriverError as error:
                if not told:
                    _log.warning("mmbroker: features stay unsettled, the GPU does not finish: %s", error)
                told = True
            self._over.wait(_AGAIN)
        return False

    def close(self) -> None:
        """The GPU has done everything, or never will: fences that are not passed are of no use any more."""
        self._over.set()
        if (thread := self._thread) is not None:
            thread.join()
