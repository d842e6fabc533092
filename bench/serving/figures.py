"""Figures of one run: percentiles with their own spread, and how fast requests were answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from bench.stats import percentile

from .client import Answer, Sent

#: How often a run is drawn anew from its own requests, to see how much its figures would differ.
DRAWS: Final = 200
#: Of these, so many lie within the bounds that are told.
SURE: Final = 95.0
STATISTICS: Final[dict[str, Callable[[Sequence[float]], float]]] = {
    "p50": lambda values: percentile(values, 50),
    "p95": lambda values: percentile(values, 95),
    "p99": lambda values: percentile(values, 99),
    "mean": lambda values: sum(values) / len(values),
}
#: What is told of each request, in milliseconds.
TIMES: Final = ("ttft", "tpot", "itl", "e2e")


def samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Milliseconds of every request that was answered; `itl` of every gap between two pieces of text."""
    good = [answer for answer in answers if not answer.error]
    return {
        "ttft": [_ms(answer.first - answer.sent) for answer in good],
        "tpot": [_ms((answer.end - answer.first) / max(1, answer.tokens - 1)) for answer in good],
        "itl": [_ms(gap) for answer in good for gap in answer.gaps],
        "e2e": [_ms(answer.end - answer.sent) for answer in good],
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def summary(sent: Sent, in_flight: int, draws: int = DRAWS) -> dict[str, Any]:
    """What the senders saw. Each figure has `value`, and `low` and `high` within which it would lie again.

    Requests a second are those in flight by the mean time of one: each is followed by the next as soon as it is
    answered. Not answers by the seconds that they took, which are kept beside it: an engine that prefills before it
    decodes ends all that is in flight within a moment, once every few seconds, and how many such waves a run has seen
    is chance.
    """
    answers = sent.answers
    good = [answer for answer in answers if not answer.error]
    failed = [answer for answer in answers if answer.error]
    found: dict[str, Any] = {
        "answered": len(good),
        "failed": len(failed),
        "errors": sorted({answer.error for answer in failed})[:5],
        "cut": sent.cut,
        "seconds": round(sent.seconds, 3),
        "short_answers": sum(answer.tokens == 0 for answer in good),
    }
    if not good:
        return found
    ends = sent.ends[: len(good)]
    found["answers_per_second"] = {"value": round(len(ends) / ends[-1], 3)}
    chance = random.Random(len(good))
    rates: list[float] = []
    # One draw of requests serves all of their figures; gaps are drawn with their requests.
    everything = samples(good)
    by_request = [[_ms(gap) for gap in answer.gaps] for answer in good]
    drawn: dict[tuple[str, str], list[float]] = {}
    for _ in range(draws):
        chosen = chance.choices(range(len(good)), k=len(good))
        for name in TIMES:
            if name == "itl":
                values = [gap for index in chosen for gap in by_request[index]]
            else:
                values = [everything[name][index] for index in chosen]
            if values:
                values.sort()
                for statistic, of in STATISTICS.items():
                    drawn.setdefault((name, statistic), []).append(of(values))
        rates.append(_rate(in_flight, drawn["e2e", "mean"][-1]))
    mean = STATISTICS["mean"](everything["e2e"])
    found["requests_per_second"] = _figure(_rate(in_flight, mean), sorted(rates), 3)
    for name in TIMES:
        if values := sorted(everything[name]):
            found[f"{name}_ms"] = {
                statistic: _figure(of(values), sorted(drawn[name, statistic]), 2)
                for statistic, of in STATISTICS.items()
            }
    return found


def _rate(in_flight: int, mean: float) -> float:
    """By Little's law; `mean` in milliseconds."""
    return 1000 * in_flight / max(1e-6, mean)


def _figure(value: float, drawn: Sequence[float], digits: int) -> dict[str, float]:
    low, high = ((100 - SURE) / 2, (100 + SURE) / 2)
    return {
        "value": round(value, digits),
        "low": round(percentile(drawn, low), digits),
        "high": round(percentile(drawn, high), digits),
    }
