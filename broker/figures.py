"""Figures: how long things took and how large they were, as counts in buckets. Pure; nothing but ints and floats.

A bucket count costs a bisection when something happens and nothing when nobody asks, whatever happens in between.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

#: Upper bounds of buckets; whatever is larger is counted in one more.
SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
BYTES: Final = tuple(float(4**power) for power in range(5, 16))  # 1 KiB to 1 GiB
ITEMS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)


class Histogram:
    """Values counted by size: a value goes to the first bucket whose bound it does not exceed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def report(self) -> dict[str, Any]:
        """As msgpack-native values: `counts` has one more than `bounds`."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}


class Figures:
    """What the state machine measures. Times are in seconds, from event to event as the broker sees them."""

    def __init__(self) -> None:
        self.wait_seconds = Histogram(
            SECONDS
        )  # a create or lookup that could not be served at once, until it was
        self.lease_seconds = Histogram(SECONDS)  # from a lease to its seal: the writer's time
        self.grant_seconds = Histogram(SECONDS)  # from a grant to the rank's word that it has the entry
        self.hold_seconds = Histogram(SECONDS)  # from a hold to its end: about a request's time
        self.settle_seconds = Histogram(SECONDS)  # from a dismissal to the rank's word that it let go
        self.load_seconds = Histogram(SECONDS)  # from a place on the device to the loader's word
        self.create_items = Histogram(ITEMS)  # features of one create: about the pictures of one request
        self.feature_bytes = Histogram(BYTES)  # of features that were given a slot

    def report(self) -> dict[str, dict[str, Any]]:
        return {name: histogram.report() for name, histogram in vars(self).items()}


def quantile(histogram: dict[str, Any], share: float) -> float | None:
    """The value that `share` of all are below, by interpolation in its bucket; None: there are no values.

    Beyond the last bound the last bound is all that is known.
    """
    counts: list[int] = histogram["counts"]
    bounds: list[float] = histogram["bounds"]
    if not any(counts):
        return None
    rank, low = share * sum(counts), 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and rank <= count:
            return low + (bound - low) * rank / count
        rank -= count
        low = bound
    return low


def since(histogram: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """What was counted since an earlier report of the same histogram."""
    if before is None or len(before["counts"]) != len(histogram["counts"]):
        return histogram
    counts = [now - then for now, then in zip(histogram["counts"], before["counts"], strict=True)]
    return {**histogram, "counts": counts, "sum": histogram["sum"] - before["sum"]}
