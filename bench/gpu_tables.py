"""The GPU's bench for people: a table a section, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mmbroker.screen import table

from . import gpu_loop, gpu_rows, gpu_sglang
from .tables import _print, goals_table, number


def show(found: Mapping[str, Any]) -> None:
    """Print what was measured."""
    console = Console(width=100, highlight=False, emoji=False)
    machine, gpu = found["machine"], found["gpu"]
    console.print(
        f"{found['date']}  {machine['cores']} cores, Linux {machine['kernel']}, load before "
        f"{machine['load_before']}, GPU {gpu['uuid']} ({gpu['driver']} driver), {found['seconds']} s"
    )
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for section, make in SECTIONS.items():
        if section in found:
            for made in make(found[section]):
                _print(console, made)
    if left := found.get("left_out"):
        console.print(f"\nleft out: {', '.join(left['ways'])}: {left['why']}")
    if found.get("goals"):
        _print(console, goals_table(found["goals"]))
    for section, why in found["failed"].items():
        console.print(f"\nFAILED: {section}: {why}")


def _rows(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table(
        "The scheduler thread, microseconds for one feature that is loaded",
        ">MB", "way", "when", ">p50", ">p99", ">times ours", ">n", ">wrong",
    )  # fmt: skip
    for line in sorted(lines, key=lambda line: line["mb"]):
        ours = _of(lines, "p50", mb=line["mb"], way=gpu_rows.OURS, load=line["load"])
        made.add_row(
            f"{line['mb']:g}",
            line["way"],
            "load" if line["load"] else "idle",
            number(line["p50"]),
            number(line["p99"]),
            number(line["p50"] / ours) if ours else "-",
            str(line["n"]),
            str(line.get("wrong", line.get("not_on_device"))),
        )
    made.caption = (
        "wrong: tensors of SGLang's with other bytes; of ours: features that were not on the device"
    )
    yield made


def _bandwidth(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table("Host to device, GB/s, median", ">MB", ">arena", ">plain pinned", ">% of plain")
    for line in lines:
        made.add_row(
            f"{line['mb']:g}", *(number(line[name]) for name in ("arena", "plain", "percent_of_plain"))
        )
    yield made


def _latency(found: dict[str, Any]) -> Iterable[Table]:
    made = table(
        f"Seal to loaded, {found['mb']:g} MB, microseconds",
        "segments",
        ">p50",
        ">p99",
        ">worst",
        ">imports",
        ">n",
    )
    for name in ("there", "growing"):
        one = found[name]
        made.add_row(
            name, *(number(one[key]) for key in ("p50", "p99", "worst")), str(one["imports"]), str(one["n"])
        )
    yield made


def _memory(found: dict[str, Any]) -> Iterable[Table]:
    made = table("GPU memory, MiB more for", "what", ">MiB")
    for name, value in found.items():
        made.add_row(name.replace("_", " "), f"{value:g}")
    yield made


def _loop(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table(
        "A scheduler-like loop with short kernels, microseconds a step, medians of rounds",
        ">MB", ">per s", ">by", "loop", ">reached", ">step", ">p99", ">on core", ">waited", ">slower %", ">quartiles",
    )  # fmt: skip
    for line in lines:
        made.add_row(
            f"{line['mb']:g}",
            f"{line['asked_per_second']:g}",
            str(line["together"]),
            line["transport"],
            f"{line['reached_per_second']:.0f}",
            *(f"{line[name]:.0f}" for name in ("iteration_us", "iteration_us_p99", "cpu_us")),
            number(line["waited_us"]),
            f"{line['slowdown_percent']:.1f}",
            f"{line['slowdown_percent_low']:.1f}..{line['slowdown_percent_high']:.1f}",
        )
    yield made


def _growth(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table(
        "The loop's steps while arenas grow, microseconds",
        "what", ">MB", ">per s", ">p50", ">p99", ">worst", ">imports", ">loads",
    )  # fmt: skip
    for line in lines:
        made.add_row(
            line["what"],
            f"{line['mb']:g}",
            f"{line['per_second']:g}",
            *(number(line[name]) for name in ("p50", "p99", "worst_us")),
            *(str(line[name]) for name in ("imports", "loads")),
        )
    yield made


def _pairs(title: str) -> Callable[[dict[str, Any]], Iterable[Table]]:
    def make(found: dict[str, Any]) -> Iterable[Table]:
        made = table(title, "what", ">figure")
        for name, value in found.items():
            made.add_row(name.replace("_", " "), str(value))
        yield made

    return make


SECTIONS: dict[str, Callable[[Any], Iterable[Table]]] = {
    "memory": _memory,
    "rows": _rows,
    "bandwidth": _bandwidth,
    "latency": _latency,
    "loop": _loop,
    "growth": _growth,
    "killed": _pairs("The broker killed under load"),
    "storm": _pairs("Random sizes through a small device arena, two engines"),
}


def _of(lines: list[dict[str, Any]], name: str, **where: Any) -> float | None:
    for line in lines:
        if all(line[key] == value for key, value in where.items()):
            return float(line[name])
    return None


def goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was measured; only of sections that were."""
    made: list[dict[str, Any]] = []

    def goal(what: str, bound: float, measured: float | None, at_most: bool = True) -> None:
        if measured is not None:
            met = measured <= bound if at_most else measured >= bound
            made.append(
                {"what": what, "goal": bound, "at_most": at_most, "measured": round(measured, 2), "met": met}
            )

    if memory := found.get("memory"):
        goal("GPU memory of an idle broker, MiB", 8, memory["broker_idle"])
        goal("GPU memory of a broker with one segment, MiB", 72, memory["broker_with_one_segment"])
        goal("GPU memory of a CPU-only worker, MiB", 0, memory["cpu_worker"])
        goal("an engine beside a broker has less, MiB", 8, memory["engine_beside_has_less"])
    rows = found.get("rows", [])
    for mb in dict.fromkeys(line["mb"] for line in rows):
        ours = _of(rows, "p50", mb=mb, way=gpu_rows.OURS, load=False)
        theirs = _of(rows, "p50", mb=mb, way=gpu_sglang.CACHED, load=False)
        goal(f"scheduler thread, {mb:g} MB, p50 us", 4, ours)
        if ours and theirs:
            goal(
                f"scheduler thread, {mb:g} MB, cuda_ipc with its cache against ours, times",
                25,
                theirs / ours,
                False,
            )
    for line in found.get("bandwidth", []):
        if line["mb"] >= 8:
            goal(f"host to device, {line['mb']:g} MB, GB/s", 48, line["arena"], False)
            goal(f"host to device, {line['mb']:g} MB, % of plain", 90, line["percent_of_plain"], False)
    if latency := found.get("latency"):
        goal(f"seal to loaded, {latency['mb']:g} MB, p50 us", 1000, latency["there"]["p50"])
    for line in found.get("loop", []):
        if line["transport"] == gpu_loop.ARRIVING and line["asked_per_second"] == 200:
            by = f", {line['together']} a request" if line["together"] > 1 else ""
            goal(f"loop beside 200 features a second{by}, % slower", 2, line["slowdown_percent"])
    if storm := found.get("storm"):
        goal(f"wrong numbers of {storm['features']} features", 0, storm["wrong"])
        goal("device arena back to its reserve, s", 15, storm["back_to_reserve_s"])
    if killed := found.get("killed"):
        goal("wrong numbers after the broker was killed", 0, killed["wrong_later"])
        goal("takes refused after the broker was killed", 0, killed["refused"])
    return made
