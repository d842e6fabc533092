"""What a person reads: one table a section, 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mmbroker.screen import table

from . import producer, ways


def number(value: float | None) -> str:
    """Three significant digits, and no exponent."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def show(found: Mapping[str, Any]) -> None:
    """Print a table for every section that was measured, and the goals."""
    console = Console(width=100, highlight=False, emoji=False)
    machine = found["machine"]
    console.print(
        f"{found['date']}  {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, load before {machine['load_before']}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for section, make in SECTIONS.items():
        if section in found:
            for made in make(found[section]):
                _print(console, made)
    if found["goals"]:
        _print(console, goals_table(found["goals"]))


def _print(console: Console, made: Table) -> None:
    """Title and caption may be wider than the table."""
    title, made.title = made.title, None
    caption, made.caption = made.caption, None
    console.print()
    console.print(title, style="bold")
    console.print(made)
    if caption:
        console.print(caption)


def _rows(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table(
        "The scheduler thread, microseconds for one feature: from its message to a tensor with its hash",
        ">MB", "transport", ">p50", ">p99", ">first read p50", ">p99", ">end of use p50", ">n",
    )  # fmt: skip
    for line in lines:
        figures = (
            "scheduler_us_p50",
            "scheduler_us_p99",
            "first_read_us_p50",
            "first_read_us_p99",
            "end_us_p50",
        )
        made.add_row(
            f"{line['mb']:g}", line["transport"], *(number(line[name]) for name in figures), str(line["n"])
        )
    yield made


def _take(found: dict[str, dict[str, dict[str, float]]]) -> Iterable[Table]:
    made = table("Take and release alone, microseconds", "access", "what", ">p50", ">p99", ">n")
    for access, kinds in found.items():
        for kind, one in kinds.items():
            made.add_row(
                access, kind.replace("_", ", "), number(one["p50"]), number(one["p99"]), str(one["n"])
            )
    yield made


def _producer(found: dict[str, Any]) -> Iterable[Table]:
    made = table(
        f"The producer, microseconds for one feature ({found['hash_threads']} hash threads; SGLang's hash: "
        f"{found['sglang_hash_threads']})",
        ">MB", ">at once", "way", ">p50", ">p99", ">times hash + copy", ">n",
    )  # fmt: skip
    for line in found["lines"]:
        made.add_row(
            f"{line['mb']:g}",
            str(line["batch"]),
            line["way"],
            number(line["us_p50"]),
            number(line["us_p99"]),
            f"{line['times_yardstick']:.2f}",
            str(line["n"]),
        )
    yield made


def _round_trips(found: dict[str, Any]) -> Iterable[Table]:
    made = table("Messages, microseconds", "what", ">p50", ">p99", ">growing: p50", ">p99", ">n")
    names = {
        "control": "control round trip (lookup of a missing key)",
        "bare_zeromq": "bare DEALER and ROUTER, asyncio on uvloop",
        "seal_to_answer": f"seal to answer, one idle rank, {found['seal_mb']:g} MB",
    }
    growing = found["while_growing"]
    for name, title in names.items():
        quiet, busy = found[name], growing[name]
        made.add_row(
            title, *(number(one[p]) for one in (quiet, busy) for p in ("p50", "p99")), str(quiet["n"])
        )
    made.caption = (
        f"a request with 8 new images: {found['put_many_of_8']['round_trips']} round trips; "
        f"segments grown meanwhile: {growing['segments_grown']}"
    )
    yield made


def _throughput(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table(
        f"Features a second, producers to one rank, {lines[0]['batch']} in a request",
        ">MB", "kind", ">producers", ">features/s", ">GB/s",
    )  # fmt: skip
    for line in lines:
        figures = (number(line["features_per_second"]), number(line.get("gb_per_second")))
        made.add_row(f"{line['mb']:g}", line["kind"], str(line["producers"]), *figures)
    yield made


def _loop(lines: list[dict[str, Any]]) -> Iterable[Table]:
    made = table(
        "A scheduler-like loop on one core, all else on another: microseconds a step, medians of rounds",
        ">MB", ">per s", "transport", ">reached", ">step", ">on core", ">waited", ">slower %", ">quartiles",
        ">gap ms", ">worst",
    )  # fmt: skip
    for line in lines:
        slower = ("slowdown_percent", "slowdown_percent_low", "slowdown_percent_high")
        median, low, high = (f"{line[name]:.1f}" for name in slower)
        bare = line["transport"] == ways.PRIVATE
        made.add_row(
            f"{line['mb']:g}",
            f"{line['asked_per_second']:g}",
            line["transport"],
            f"{line['reached_per_second']:.0f}",
            *(f"{line[name]:.0f}" for name in ("iteration_us", "cpu_us")),
            number(line["waited_us"]),
            *(("", "") if bare else (median, f"{low}..{high}")),
            *(f"{line[name]:.1f}" for name in ("gap_ms", "gap_ms_worst")),
        )
    yield made


def _memory(found: dict[str, Any]) -> Iterable[Table]:
    made = table(
        f"Memory, MiB, while {found['features']} features of {found['mb']:g} MB ({found['feature_mib']} MiB) are held",
        "process", ">PSS", ">RSS", ">RSS without segments",
    )  # fmt: skip
    for line in found["processes"]:
        figures = ("pss_mib", "rss_mib", "rss_without_segments_mib")
        made.add_row(line["process"], *(f"{line[name]:.1f}" for name in figures))
    yield made


def goals_table(goals: list[dict[str, Any]]) -> Table:
    made = table("Goals", "what", ">goal", ">measured", "")
    for goal in goals:
        bound = f"{'<=' if goal['at_most'] else '>='} {goal['goal']:g}"
        made.add_row(goal["what"], bound, number(goal["measured"]), "met" if goal["met"] else "MISSED")
    return made


SECTIONS: dict[str, Callable[[Any], Iterable[Table]]] = {
    "rows": _rows,
    "take": _take,
    "producer": _producer,
    "round_trips": _round_trips,
    "throughput": _throughput,
    "loop": _loop,
    "memory": _memory,
}


def goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was measured; only of sections that were."""
    made: list[dict[str, Any]] = []

    def goal(what: str, bound: float, measured: float | None, at_most: bool = True) -> None:
        if measured is not None:
            met = measured <= bound if at_most else measured >= bound
            made.append(
                {"what": what, "goal": bound, "at_most": at_most, "measured": round(measured, 2), "met": met}
            )

    def of(section: str, name: str, **where: Any) -> float | None:
        lines = found.get(section) or []
        for line in lines["lines"] if isinstance(lines, dict) else lines:
            if all(line[key] == value for key, value in where.items()):
                return float(line[name])
        return None

    for access, kinds in found.get("take", {}).items():
        goal(f"take and release of an entry, {access}, us", 3.0, kinds["take_release"]["p50"])
    for way in ways.ACCESS:
        ours = of("rows", "scheduler_us_p50", mb=9.6, transport=way)
        theirs = of("rows", "scheduler_us_p50", mb=9.6, transport=ways.SGLANG)
        if ours and theirs:
            goal(
                f"scheduler thread, 9.6 MB: sglang against {way}, times", 200.0, theirs / ours, at_most=False
            )
    for batch in (1, producer.BATCH):
        times = of("producer", "times_yardstick", mb=9.6, batch=batch, way=producer.PUT)
        goal(f"producer, 9.6 MB, {batch} at once, times hash + copy", 1.3, times)
    if trips := found.get("round_trips"):
        goal("control round trip, p50 us", 250.0, trips["control"]["p50"])
        goal("seal to answer, p50 us", 600.0, trips["seal_to_answer"]["p50"])
        goal("round trips of a request with 8 images", 2.0, trips["put_many_of_8"]["round_trips"])
    slowdown = of("loop", "slowdown_percent", mb=9.6, asked_per_second=200.0, transport=ways.READONLY)
    goal("loop beside 200 x 9.6 MB a second, readonly, % slower", 5.0, slowdown)
    for line in found.get("memory", {}).get("processes", []):
        if line["process"].startswith("broker"):
            goal(f"{line['process']}: RSS without segments, MiB", 60.0, line["rss_without_segments_mib"])
    return made
