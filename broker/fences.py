"""Where work on a GPU ends: behind what is in one stream, or behind everything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from .cuda import DriverError

_log = logging.getLogger("mmbroker")

#: In place of an event: a thread waits.
_AWAITED: Final = -1
#: How long after a failure it waits again, and how often it looks whether it may, in seconds.
_AGAIN: Final = 1.0
_LOOK: Final = 0.02


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
    so a thread waits, which there is once it is needed.

    `wait` returns when all is done that there was when it was called. If it raises `DriverError`, it is called again a
    little later. It is not begun while `forbidden`.
    """

    def __init__(self, wait: Callable[[], None], forbidden: Callable[[], bool]) -> None:
        self._wait = wait
        self._forbidden = forbidden
        self._asked: SimpleQueue[Fence | None] = SimpleQueue()  # may be put to in a finaliser, at any moment
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self.idle = threading.Event()  # nothing is waited for
        self.idle.set()

    def fence(self) -> Fence:
        """Behind everything that there is by now. Never fails, and never waits for it."""
        fence = Fence(_AWAITED)
        self._asked.put(fence)
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="mmbroker-drain", daemon=True)
                    thread.start()
                    self._thread = thread
            except RuntimeError as error:  # the next one tries again
                _log.warning("mmbroker: features stay unsettled: %s", str(error))
            finally:
                self._starting.release()
        return fence

    def _run(self) -> None:
        while (fence := self._asked.get()) is not None:
            fences = [fence]
            try:
                while (more := self._asked.get_nowait()) is not None:
                    fences.append(more)
                self._asked.put(None)  # the end comes after these
            except Empty:
                pass
            if self._waited():
                for one in fences:
                    one.event = 0

    def _waited(self) -> bool:
        told = False
        while not self._over.is_set():
            self.idle.clear()  # and then look: who forbids it looks in the other order
            try:
                if not self._forbidden():
                    self._wait()
                    return True
            except DriverError as error:
                if not told:
                    _log.warning("mmbroker: features stay unsettled, the GPU does not finish: %s", str(error))
                told = True
            finally:
                self.idle.set()
            self._over.wait(_AGAIN if told else _LOOK)
        return False

    def close(self) -> None:
        """The GPU has done everything, or never will: fences that are not passed are of no use any more."""
        self._over.set()
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()
