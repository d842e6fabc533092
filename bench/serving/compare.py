"""Two results side by side: what got better or worse beyond the runs' own spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from .figures import STATISTICS, TIMES

#: More of these is better; of all others, less.
_MORE: Final = ("requests_per_second",)


class Figure(NamedTuple):
    """`spread`: half the width within which 95 % of repeats would lie."""

    value: float
    spread: float


class Change(NamedTuple):
    transport: str
    load: str
    name: str
    before: Figure
    after: Figure

    @property
    def percent(self) -> float:
        return 100 * (self.after.value / self.before.value - 1) if self.before.value else 0.0

    @property
    def verdict(self) -> str:
        """Empty if the difference may be chance."""
        difference = self.after.value - self.before.value
        chance = (self.before.spread**2 + self.after.spread**2) ** 0.5
        if abs(difference) <= chance:
            return ""
        more_is_better = self.name in _MORE
        return "better" if (difference > 0) == more_is_better else "worse"


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every figure that both have, of the same load on the same transport."""
    old, new = _all(before), _all(after)
    return [Change(*key, old[key], new[key]) for key in old if key in new]


def _all(found: Mapping[str, Any]) -> dict[tuple[str, str, str], Figure]:
    """By transport, load and name; of several turns the median, and the larger of both spreads."""
    shapes: dict[tuple[str, str, str], list[Figure]] = {}
    for run in found["runs"]:
        if run["figures"]["cut"]:
            continue
        for name, figure in _of(run):
            shapes.setdefault((run["transport"], run["load"]["name"], name), []).append(figure)
    made = {}
    for key, turns in shapes.items():
        values = [turn.value for turn in turns]
        own = statistics.median(turn.spread for turn in turns)
        made[key] = Figure(statistics.median(values), max(own, (max(values) - min(values)) / 2))
    return made


def _of(run: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    figures = run["figures"]
    if rate := figures.get("requests_per_second"):
        yield "requests_per_second", _figure(rate)
    for time in TIMES:
        for statistic in STATISTICS:
            if statistic in figures.get(f"{time}_ms", {}):
                yield f"{time}_ms {statistic}", _figure(figures[f"{time}_ms"][statistic])
    if "failed" in figures:
        yield "failed", Figure(float(figures["failed"]), 0.0)
    profile = run.get("profile") or {}
    if "transport" in profile:
        share, samples = profile["transport"], max(1, profile["samples"])
        # Samples of a share; those close together are not independent, so the width is doubled.
        yield "thread in transport", Figure(share, 2 * 1.96 * (share * (1 - share) / samples) ** 0.5)


def _figure(figure: Mapping[str, float]) -> Figure:
    return Figure(figure["value"], (figure["high"] - figure["low"]) / 2)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What else is not the same in the two results, in words."""
    made = []
    for what in ("versions", "machine"):
        for name in before[what]:
            was, now = before[what][name], after[what].get(name)
            if was != now and name != "load_before":
                made.append(f"{name}: {was} before, {now} after")
    return made
