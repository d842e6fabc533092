"""The work of fake GPUs: streams whose work is done late, by a thread, in any order across streams.

Each time, the thread picks one of the streams whose first piece of work can be done, by chance, lets some time pass,
and does it. The same seed and the same work make the same choices, if all the work is there when it begins (`held`).
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: What the destination of a copy holds until the copy is done.
POISON: Final = 0xDB


class Work:
    """One piece of work. `done` never goes back; this one does nothing, as an event's record does."""

    def __init__(self) -> None:
        self.done = False

    def ready(self) -> bool:
        return True

    def run(self) -> None:
        pass

    def touches(self, address: int, nbytes: int) -> bool:
        return False


class Wait(Work):
    """Lets a stream wait until other work is done."""

    def __init__(self, other: Work) -> None:
        super().__init__()
        self.other = other

    def ready(self) -> bool:
        return self.other.done


class Copy(Work):
    """Bytes from one address to another: those that are there when it is done, or a `snapshot` from before."""

    def __init__(self, dst: int, src: int, nbytes: int, snapshot: bool) -> None:
        super().__init__()
        self.dst, self.src, self.nbytes = dst, src, nbytes
        self._bytes = ctypes.string_at(src, nbytes) if snapshot else None

    def run(self) -> None:
        ctypes.memmove(self.dst, self._bytes if self._bytes is not None else self.src, self.nbytes)

    def touches(self, address: int, nbytes: int) -> bool:
        ranges = (self.dst, self.src) if self._bytes is None else (self.dst,)
        return any(start < address + nbytes and address < start + self.nbytes for start in ranges)


class Engine:
    """All streams of a process. Stream 0 is always there. `late`: microseconds, on average."""

    def __init__(self, seed: int, late: float) -> None:
        self._random = random.Random(seed)
        self._late = late / 1e6
        self._changed = threading.Condition()
        self._pause = threading.Event()
        self._streams: dict[int, deque[Work]] = {0: deque()}
        self._leaving: set[int] = set()  # destroyed, with work left
        self._number = 0
        self._holds = 0
        self._thread: threading.Thread | None = None
        self.order: deque[int] = deque(maxlen=10_000)  # the streams whose work was done last

    def add_stream(self) -> int:
        with self._changed:
            self._number += 1
            self._streams[self._number] = deque()
            return self._number

    def remove_stream(self, stream: int) -> None:
        """Raises KeyError for a stream that is not there. Its work is still done."""
        with self._changed:
            if stream in self._leaving or not stream:
                raise KeyError(stream)
            if self._streams[stream]:
                self._leaving.add(stream)
            else:
                del self._streams[stream]

    def add(self, stream: int, work: Work, before: Callable[[], None] | None = None) -> None:
        """Put work at a stream's end; `before` runs first, while nothing is begun. Raises KeyError."""
        with self._changed:
            queue = self._streams[stream]
            if stream in self._leaving:
                raise KeyError(stream)
            if before is not None:
                before()
            queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mmbroker-fake-gpu", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, work: Work) -> None:
        """Wait until work is done."""
        with self._changed:
            self._changed.wait_for(lambda: work.done)

    def finish_all(self) -> None:
        """Wait until no work is left."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._streams.values()))

    def touched(self, address: int, nbytes: int) -> bool:
        """Whether work that is not done yet reads or writes any of these bytes."""
        with self._changed:
            return any(work.touches(address, nbytes) for queue in self._streams.values() for work in queue)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is done meanwhile."""
        with self._changed:
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    @contextmanager
    def blocked(self, stream: int) -> Iterator[None]:
        """What comes into one stream meanwhile is not done before the end."""
        gate = Work()
        self.add(stream, Wait(gate))
        try:
            yield
        finally:
            with self._changed:
                gate.done = True
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; work that is left is forgotten."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._streams.clear()
            self._changed.notify_all()
        self._pause.set()
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._thread is None or self._ready())
                if self._thread is None:
                    return
                stream = self._random.choice(self._ready())
                work = self._streams[stream][0]
                pause = self._random.expovariate(1.0) * self._late
            self._pause.wait(pause)
            with self._changed:
                if self._holds:
                    continue
            work.run()
            with self._changed:
                if stream not in self._streams:  # closed
                    continue
                self._streams[stream].popleft()
                if stream in self._leaving and not self._streams[stream]:
                    self._leaving.remove(stream)
                    del self._streams[stream]
                self.order.append(stream)
                work.done = True
                self._changed.notify_all()

    def _ready(self) -> list[int]:
        if self._holds:
            return []
        return [stream for stream, queue in sorted(self._streams.items()) if queue and queue[0].ready()]
