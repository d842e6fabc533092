"""Percentiles of measured times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below `percent` of all; of few values, a high percentile is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def us(nanoseconds: Sequence[int]) -> dict[str, float]:
    """p50 and p99 of times in nanoseconds, as microseconds, and how many there were."""
    return {
        "p50": round(statistics.median(nanoseconds) / 1000, 2),
        "p99": round(percentile(nanoseconds, 99) / 1000, 2),
        "n": len(nanoseconds),
    }


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, and the middle half's ends, of figures of repeated rounds."""
    return {
        "median": round(statistics.median(values), digits),
        "low": round(percentile(values, 25), digits),
        "high": round(percentile(values, 75), digits),
    }
