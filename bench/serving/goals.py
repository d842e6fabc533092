"""What was promised, beside what was measured; and whether the transports' texts agree."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final

#: Of a load, how many times the requests/s of another transport's.
_FASTER: Final = (
    ("one", "cpu", 2.0),
    ("one", "cuda_ipc", 1.2),
    ("eight", "cpu", 3.0),
    ("eight", "cuda_ipc", 1.35),
    ("one-x4", "cuda_ipc", 1.5),
    ("eight-x4", "cuda_ipc", 1.5),
    ("eight-x10", "cuda_ipc", 2.0),
)
_QUICKER: Final = ("one", "eight")
_SHARE: Final = 0.03
_MEMORY: Final = 1 / 3


def runs(found: Mapping[str, Any], transport: str, load: str) -> list[dict[str, Any]]:
    """The complete turns of a load, at full length."""
    mine = [run for run in found["runs"] if run["transport"] == transport and run["load"]["name"] == load]
    return [run for run in mine if run["figures"].get("answered") and not run["figures"]["cut"]]


def value(found: Mapping[str, Any], transport: str, load: str, *path: str) -> float | None:
    """A figure; of several turns the median."""
    values = []
    for run in runs(found, transport, load):
        one: Any = run
        for name in path:
            one = one.get(name) if isinstance(one, dict) else None
        if isinstance(one, dict):
            one = one.get("value")
        if one is not None:
            values.append(float(one))
    return statistics.median(values) if values else None


def memory(found: Mapping[str, Any], transport: str, load: str) -> float | None:
    """MiB of GPU memory of tokenizers and broker at their peak; None if the driver does not tell."""
    peaks = _memories(found, transport, load)
    return statistics.median(map(sum, peaks)) if peaks else None


def _memories(found: Mapping[str, Any], transport: str, load: str) -> list[tuple[float, float]]:
    """Of each turn MiB of the tokenizers, and of the broker; nothing if the driver does not tell.

    The driver counts by context, and the broker has none: what it has is what its own books say, if that is more.
    """
    peaks = []
    for run in runs(found, transport, load):
        if run["watch"]["gpu_left_out"]:
            return []
        told = dict.fromkeys(("tokenizer", "broker"), 0.0)
        for process in run["watch"]["processes"]:
            if process["role"] in told:
                told[process["role"]] += process["gpu_mib"] or 0.0
        peaks.append((told["tokenizer"], max(told["broker"], run.get("device_arena_mib") or 0.0)))
    return peaks


def carried(found: Mapping[str, Any], transport: str, load: str) -> float | None:
    """MiB of GPU memory that a transport takes: the broker's, and what tokenizers have beyond those whose features stay
    on the CPU. That some have less, because they are not on the GPU at all, is no merit of it."""
    bare, mine = (_memories(found, one, load) for one in ("cpu", transport))
    if not (bare and mine):
        return None
    alone = statistics.median(tokenizers for tokenizers, _ in bare)
    return statistics.median(broker + max(0.0, tokenizers - alone) for tokenizers, broker in mine)


def judge(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each goal that the runs say something about."""
    made: list[dict[str, Any]] = []

    def goal(what: str, bound: float, measured: float | None, at_most: bool) -> None:
        if measured is not None:
            met = measured <= bound if at_most else measured >= bound
            line = {"what": what, "goal": round(bound, 4), "at_most": at_most}
            made.append({**line, "measured": round(measured, 4), "met": met})

    for ours in sorted({run["transport"] for run in found["runs"] if run["transport"].startswith("broker")}):
        for load, theirs, times in _FASTER:
            mine, other = (value(found, t, load, "figures", "requests_per_second") for t in (ours, theirs))
            if mine and other:
                goal(f"{ours}, {load}: times the requests/s of {theirs}", times, mine / other, False)
        for load in _QUICKER:
            for theirs in ("cpu", "cuda_ipc"):
                mine, other = (value(found, t, load, "figures", "ttft_ms", "p99") for t in (ours, theirs))
                if mine is not None and other is not None:
                    goal(f"{ours}, {load}: TTFT p99 lower than {theirs}'s, ms", other, mine, True)
            goal(
                f"{ours}, {load}: share of the scheduler thread in transport",
                _SHARE,
                value(found, ours, load, "profile", "transport"),
                True,
            )
            mine, other = (carried(found, t, load) for t in (ours, "cuda_ipc"))
            if mine is not None and other is not None:
                what = f"{ours}, {load}: GPU memory for transport, MiB (a third of cuda_ipc's)"
                goal(what, other * _MEMORY, mine, True)
    return made


def texts(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each load whose texts were kept, which transports' answers differ from the first one's, and where."""
    made = []
    kept: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in found["runs"]:
        if run.get("texts") and run["load"]["concurrency"] == 1:
            kept.setdefault((run["load"]["name"], run["turn"]), []).append(run)
    for (load, turn), those in kept.items():
        first = those[0]
        for other in those[1:]:
            pairs = list(zip(first["texts"], other["texts"], strict=False))
            differing = [number for number, (a, b) in enumerate(pairs) if a != b]
            line = {"load": load, "turn": turn, "transports": [first["transport"], other["transport"]]}
            made.append({**line, "requests": len(pairs), "differing": differing})
    return made
