"""What a person reads: a table for each load, 110 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.tables import number
from mmbroker.screen import table

from .compare import Change

WIDTH: Final = 110


def console() -> Console:
    return Console(width=WIDTH, highlight=False, emoji=False)


def show(found: Mapping[str, Any], out: Console | None = None) -> None:
    """Print everything."""
    out = out or console()
    machine = found["machine"]
    out.print(
        f"{found['date']}  {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, load before {machine['load_before']}"
    )
    out.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for made in (*loads(found), *costs(found)):
        out.print()
        out.print(made)
    for line in problems(found):
        out.print(line, style="yellow", soft_wrap=True)
    if found.get("goals"):
        out.print()
        out.print(_goals(found["goals"]))


def loads(found: Mapping[str, Any]) -> Iterator[Table]:
    """How fast, and how late: a table for each load."""
    for name in _names(found):
        runs = [run for run in found["runs"] if run["load"]["name"] == name]
        load = runs[0]["load"]
        width, height = load["size"]
        repeats = f", each {load['repeats']} times" if load["repeats"] > 1 else ""
        made = table(
            f"{name}: {load['images']} x {width}x{height}{repeats}, {load['words']} words, "
            f"{load['concurrency']} in flight, {load['requests']} requests, {load['tokens']} tokens",
            "transport", ">req/s", ">TTFT p50", ">p95", ">p99", ">mean", ">TPOT p50", ">p99", ">ITL p50", ">p99",
            ">E2E p50", ">p99", ">mean", ">failed",
        )  # fmt: skip
        for run in runs:
            made.add_row(run["transport"] + (" (cut)" if run["figures"]["cut"] else ""), *_times(run))
        yield made


def _times(run: Mapping[str, Any]) -> list[str]:
    figures = run["figures"]

    def of(name: str, *statistics: str) -> list[str]:
        return [number(figures.get(name, {}).get(one, {}).get("value")) for one in statistics]

    return [
        number(figures.get("requests_per_second", {}).get("value")),
        *of("ttft_ms", "p50", "p95", "p99", "mean"),
        *of("tpot_ms", "p50", "p99"),
        *of("itl_ms", "p50", "p99"),
        *of("e2e_ms", "p50", "p99", "mean"),
        str(figures["failed"]),
    ]


def costs(found: Mapping[str, Any]) -> Iterator[Table]:
    """What the processes did meanwhile."""
    inside = table(
        "Inside: ms in the queue, ms of the loop's turns, shares of the scheduler's thread, and of the GPU's time",
        "load", "transport", ">queue p50", ">p99", ">mean", ">loop p50", ">p99", ">mean", ">transport", ">idle",
        ">GPU busy",
    )  # fmt: skip
    beside = table(
        "Processes: peaks of GPU memory in MiB, processor in cores",
        "load", "transport", ">tokenizers", ">broker", ">schedulers", ">cores: tok.", ">broker", ">sched.", ">detok.",
    )  # fmt: skip
    for run in found["runs"]:
        name = (run["load"]["name"], run["transport"])
        queue, loop = run.get("queue_ms") or {}, run.get("loop_ms") or {}
        profile, watch = run["profile"], run["watch"]
        shares = (profile.get("transport"), profile.get("shares", {}).get("idle"), watch.get("gpu_busy"))
        inside.add_row(
            *name,
            *(number(one.get(p)) for one in (queue, loop) for p in ("p50", "p99", "mean")),
            *("-" if share is None else f"{share:.1%}" for share in shares),
        )
        beside.add_row(
            *name,
            *(number(_sum(run, role, "gpu_mib")) for role in ("tokenizer", "broker", "scheduler")),
            *(
                number(_sum(run, role, "cores"))
                for role in ("tokenizer", "broker", "scheduler", "detokenizer")
            ),
        )
    yield inside
    yield beside


def _sum(run: Mapping[str, Any], role: str, what: str) -> float | None:
    values = [one[what] for one in run["watch"].get("processes", ()) if one["role"] == role]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _names(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(run["load"]["name"] for run in found["runs"]))


def problems(found: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know beside the tables."""
    for line in found.get("texts", ()):
        first, other = line["transports"]
        if line["differing"]:
            yield f"TEXTS DIFFER: {other} and {first}, load {line['load']}, requests {line['differing']}"
        else:
            yield f"texts: {other} and {first} agree in all {line['requests']} answers of {line['load']}"
    for run in found["runs"]:
        where = f"{run['transport']}, {run['load']['name']}"
        if run["figures"]["errors"]:
            yield f"{where}: {run['figures']['failed']} failed: {run['figures']['errors'][0]}"
        if "left_out" in run["profile"]:
            yield f"{where}: no profile: {run['profile']['left_out']}"
        if run["watch"].get("gpu_left_out"):
            yield f"{where}: no GPU memory: {run['watch']['gpu_left_out']}"
        if off := [path for path in run.get("paths", ()) if path["why"]]:
            yield f"{where}: a rank is on the path {off[0]['path']}: {off[0]['why']}"
    for line in found["left_out"]:
        yield f"left out: {line['transport']}, {line['load']}: {line['why']}"


def _goals(lines: Sequence[Mapping[str, Any]]) -> Table:
    made = table("Goals", "what", ">goal", ">measured", "")
    for goal in lines:
        bound = f"{'<=' if goal['at_most'] else '>='} {goal['goal']:g}"
        made.add_row(goal["what"], bound, f"{goal['measured']:.4g}", "met" if goal["met"] else "MISSED")
    return made


def show_changes(
    changes: Sequence[Change], differences: Sequence[str], everything: bool, out: Console | None = None
) -> None:
    """What got better or worse; all figures if asked."""
    out = out or console()
    for line in differences:
        out.print(line, style="yellow")
    told = [change for change in changes if everything or change.verdict]
    if not changes:
        out.print("The two results have no load on the same transport in common.")
    elif not told:
        out.print(f"None of {len(changes)} figures changed by more than the runs' own spread.")
    else:
        made = table("", "transport", "load", "figure", ">before", ">+-", ">after", ">+-", ">%", "")
        for one in told:
            made.add_row(
                one.transport, one.load, one.name,
                number(one.before.value), number(one.before.spread),
                number(one.after.value), number(one.after.spread),
                f"{one.percent:+.1f}", one.verdict,
            )  # fmt: skip
        out.print(made)
        out.print(
            f"{len([c for c in changes if c.verdict])} of {len(changes)} figures changed beyond chance."
        )
