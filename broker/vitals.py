"""How the process itself is doing: what `status` adds to the state machine's report, and complaints, counted."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from functools import cache
from importlib import metadata
from typing import Any, Final

from mmbroker.proto.errors import plain

log = logging.getLogger("mmbroker")

#: The same complaint is written once in so many seconds; it is counted every time.
COMPLAINT_INTERVAL: Final = 60.0
#: How often the event loop's lateness is measured, in seconds.
LAG_INTERVAL: Final = 1.0

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Vitals:
    """Counters, and the event loop's lateness: how long after its time a timer ran."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since = time.monotonic()
        self._said: dict[str, float] = {}
        self.counters: Counter[str] = Counter()
        self._lag = self._worst_lag = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def complain(self, name: str, text: str) -> None:
        """Count something that should not happen, and say so once a minute."""
        self.counters[name] += 1
        now = time.monotonic()
        if now - self._said.get(name, -COMPLAINT_INTERVAL) >= COMPLAINT_INTERVAL:
            self._said[name] = now
            log.warning("%s (%s: %d so far)", plain(text, 1000), name, self.counters[name])

    def watch_loop(self) -> None:
        """Measure the loop's lateness from now on."""
        due = time.monotonic() + LAG_INTERVAL
        self._timer = self._loop.call_later(LAG_INTERVAL, self._measure, due)

    def _measure(self, due: float) -> None:
        self._lag = max(0.0, time.monotonic() - due)
        self._worst_lag = max(self._worst_lag, self._lag)
        self.watch_loop()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def report(self) -> dict[str, Any]:
        """Seconds, bytes and counts, as msgpack-native values."""
        return {
            "pid": os.getpid(),
            "version": version(),
            "uptime": round(time.monotonic() - self._since, 3),
            "rss": resident(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "loop_lag": round(self._lag, 6),
            "loop_lag_worst": round(self._worst_lag, 6),
            "counters": dict(self.counters),
        }


@cache
def version() -> str:
    """The version that is installed; ``unknown`` where the package is only on the path."""
    try:
        return metadata.version("mmbroker")
    except metadata.PackageNotFoundError:
        return "unknown"


def resident() -> int:
    """This process's resident memory, in bytes."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE
