"""Looks into a server: how long requests waited in its queue, its loop's turns, and what its thread was doing."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmbroker import profiling
from mmbroker.proto.errors import BrokerError

from . import loop_probe

#: The histogram of seconds that requests waited before they ran, in each release that has one.
QUEUE: Final = "sglang:queue_time_seconds"
#: How often py-spy looks, in Hz.
RATE: Final = 100
#: What counts as transport of the scheduler's thread: features coming in, hashed, made into tensors, copied back to the
#: CPU after the encoder, and this project's own look-ups. `mmbroker.profiling.RULES` lists the functions by name.
TRANSPORT: Final = (*profiling.SAVED, "broker")

#: A server that answers one word within so many seconds, so many times in a row, is idle.
PROMPT: Final = (0.25, 3)
#: The most frequent stacks that are kept.
STACKS: Final = 300

Buckets = dict[float, float]


def queue(url: str) -> tuple[Buckets, float, float] | None:
    """Cumulative counts by upper bound, the sum of seconds, and how many; None if the server has no such figures."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    buckets: Buckets = {}
    total = count = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{QUEUE}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name == f"{QUEUE}_sum":
                total += sample.value
            elif sample.name == f"{QUEUE}_count":
                count += sample.value
    return (buckets, total, count) if count else None


def waited(
    before: tuple[Buckets, float, float] | None, after: tuple[Buckets, float, float] | None
) -> dict[str, float] | None:
    """Milliseconds in the queue between two looks: exact mean; percentiles within their buckets, evenly spread."""
    if after is None:
        return None
    buckets, total, count = after
    then, sum_then, count_then = before or ({}, 0.0, 0.0)
    count -= count_then
    if count <= 0:
        return None
    counts = {bound: value - then.get(bound, 0.0) for bound, value in sorted(buckets.items())}
    found = {"mean": round(1000 * (total - sum_then) / count, 2), "n": count}
    for percent in (50, 95, 99):
        found[f"p{percent}"] = round(1000 * _within(counts, count * percent / 100), 2)
    return found


def _within(counts: Mapping[float, float], rank: float) -> float:
    low = seen = 0.0
    for bound, cumulative in counts.items():
        if cumulative >= rank:
            if bound == float("inf"):
                return low
            share = (rank - seen) / (cumulative - seen) if cumulative > seen else 1.0
            return low + share * (bound - low)
        low, seen = bound, cumulative
    return low


def turns(before: Sequence[int], after: Sequence[int]) -> dict[str, float] | None:
    """Milliseconds of the loop's turns in which a batch ran, between two looks."""
    counts = [b - a for a, b in zip(loop_probe.turns([*before]), loop_probe.turns([*after]), strict=True)]
    n = sum(counts)
    if n <= 0:
        return None
    lengths = [(loop_probe.length(index) / 1e6, count) for index, count in enumerate(counts) if count]
    found = {"mean": round(sum(ms * count for ms, count in lengths) / n, 3), "n": float(n)}
    for percent in (50, 95, 99):
        seen = 0
        for ms, count in lengths:
            seen += count
            if seen >= n * percent / 100:
                found[f"p{percent}"] = round(ms, 3)
                break
    return found


def profile(pid: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """What the scheduler's thread was doing, in shares of its time, and stacks; `left_out` says why it is unknown."""
    try:
        process = profiling.schedulers(pid)[0]
        seen = profiling.record(process.pid, seconds, RATE)
    except BrokerError as error:
        return {"left_out": str(error)}, []
    report = profiling.report(seen, process, seconds)
    found = {
        "samples": report["samples"],
        "shares": {kind: round(share, 4) for kind, share in report["shares"].items()},
        "transport": round(seen.share(*TRANSPORT), 4),
        "functions": {
            kind: {name: round(count / seen.samples, 4) for name, count in names.items()}
            for kind, names in report["functions"].items()
        },
    }
    return found, [f"{';'.join(stack)} {count}" for stack, count in seen.stacks.most_common(STACKS)]


def busiest(processes: Sequence[Mapping[str, Any]], seconds: float) -> list[str]:
    """Who had Python's interpreter in the tokenizer that took most of the CPU: stacks of all its threads."""
    tokenizers = [one for one in processes if one["role"] == "tokenizer"]
    if not tokenizers:
        return []
    pid = max(tokenizers, key=lambda one: one["cores"])["pid"]
    try:
        lines = profiling.raw(pid, seconds, RATE, "--gil", "--threads")
    except BrokerError as error:
        return [str(error)]
    return sorted(lines, key=lambda line: -int(line.rpartition(" ")[2] or 0))[:STACKS]


def freeze(url: str) -> bool:
    """Have a server's garbage collector leave alone what has been made so far, as SGLang advises once it is warm: a
    full collection goes over everything that the imports have left, and takes the scheduler's thread for so long."""
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}/freeze_gc", method="POST"), timeout=30).close()
    except OSError:
        return False
    return True


def settle(url: str, model: str, patience: float) -> bool:
    """Wait until a server has nothing left of what it was asked before; False: it still has.

    Its own gauges are of no use here: it writes them only while it works. A request of one word waits behind all
    others; when some in a row do not wait, there are no others.
    """
    messages = [{"role": "user", "content": "a"}]
    body = json.dumps({"model": model, "max_tokens": 1, "messages": messages}).encode()
    headers = {"Content-Type": "application/json"}
    deadline, in_a_row = time.monotonic() + patience, 0
    while (left := deadline - time.monotonic()) > 0 and in_a_row < PROMPT[1]:
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
        started = time.monotonic()
        try:
            urllib.request.urlopen(request, timeout=max(1.0, left)).close()
        except OSError:
            return False
        in_a_row = in_a_row + 1 if time.monotonic() - started < PROMPT[0] else 0
    return in_a_row == PROMPT[1]
