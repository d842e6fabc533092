"""What is stored, and when. Pure: the time is passed in, in seconds of any steady clock.

A feature is worth storing at once if making it again costs enough for its size, and otherwise when it has been found
again often enough. What is worth storing waits in a backlog, the dearest per byte first, and leaves it as fast as a
budget of bytes per second allows. The backlog is bounded: what is cheapest per byte is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from mmbroker.proto.keys import Key
from mmbroker.proto.messages import Worth

MIB: Final = 1 << 20
#: Features that wait to be stored.
BACKLOG: Final = 1024
#: Names that are remembered as stored.
REMEMBERED: Final = 65536


@dataclass(frozen=True)
class Policy:
    """`min_cost`: microseconds for each MiB that a feature costs to make, to be stored at once; one whose cost is not
    known counts as free. `reuse`: how often another must have been found. `ttl`: for how many seconds it is served."""

    min_cost: float = 0.0
    reuse: int = 1
    ttl: float | None = None

    def wants(self, worth: Worth) -> bool:
        return cost_per_mib(worth) >= self.min_cost or worth.hits >= self.reuse


def cost_per_mib(worth: Worth) -> float:
    """Microseconds."""
    return (worth.cost or 0) * MIB / max(worth.nbytes, 1)


class Bucket:
    """A budget of bytes per second. What was not spent is kept for a second.

    A feature may be larger than that: then it goes into debt, and the next one waits for so much longer.
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._tokens = rate
        self._at = now

    def spend(self, nbytes: int, now: float) -> bool:
        """May so many bytes be written now? Then they count as written."""
        self._refill(now)
        if self._tokens < min(nbytes, self.rate):
            return False
        self._tokens -= nbytes
        return True

    def left(self, nbytes: int, now: float) -> float:
        """Seconds until so many may be written."""
        self._refill(now)
        return max(0.0, (min(nbytes, self.rate) - self._tokens) / self.rate)

    def _refill(self, now: float) -> None:
        self._tokens = min(self.rate, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = max(now, self._at)


class Backlog:
    """Features that are to be stored. `dropped` counts what had no place. Not thread-safe."""

    def __init__(self, bucket: Bucket, most: int = BACKLOG) -> None:
        self.dropped = 0
        self._bucket = bucket
        self._most = most
        self._waiting: dict[Key, Worth] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, worth: Worth) -> None:
        """A feature that was there already is there once, as it is worth now."""
        self._waiting[worth.key] = worth
        if len(self._waiting) > self._most:
            del self._waiting[min(self._waiting.values(), key=cost_per_mib).key]
            self.dropped += 1

    def take(self, now: float) -> Worth | None:
        """What is to be stored now, if the budget allows anything."""
        if not self._waiting:
            return None
        best = max(self._waiting.values(), key=cost_per_mib)
        if not self._bucket.spend(best.nbytes, now):
            return None
        return self._waiting.pop(best.key)

    def left(self, now: float) -> float | None:
        """Seconds until `take` has something; None: nothing waits."""
        if not self._waiting:
            return None
        return self._bucket.left(max(self._waiting.values(), key=cost_per_mib).nbytes, now)

    def clear(self) -> None:
        self.dropped += len(self._waiting)
        self._waiting.clear()


class Stored:
    """Names of what is in the store as far as is known here, the latest last, and when each is to be removed.

    What is doubtful is stored again, and removed in its time all the same. Not thread-safe."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._until: OrderedDict[str, float | None] = OrderedDict()
        self._doubtful: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._until and name not in self._doubtful

    def __len__(self) -> int:
        return len(self._until)

    def add(self, name: str, until: float | None) -> None:
        """`until`: when its time is over; None: never."""
        self.forget(name)
        self._until[name] = until
        if len(self._until) > self._most:
            self.forget(next(iter(self._until)))

    def forget(self, name: str) -> None:
        self._until.pop(name, None)
        self._doubtful.discard(name)

    def doubt(self) -> None:
        """The store may have lost everything."""
        self._doubtful.update(self._until)

    def left(self, now: float) -> float | None:
        """Seconds until the time of one is over; None: of none that is known."""
        until = next(iter(self._until.values()), None)
        return None if until is None else max(0.0, until - now)

    def due(self, now: float) -> bool:
        return self.left(now) == 0.0

    def over(self, now: float) -> str | None:
        """A name whose time is over, which is forgotten. All have one time to live, so the oldest are over first."""
        if not self.due(now):
            return None
        name = next(iter(self._until))
        self.forget(name)
        return name
