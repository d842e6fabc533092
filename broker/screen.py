"""What `status` and `ls` show a person: tables that fit 80 columns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .check import BROKEN, Check


def size(nbytes: float) -> str:
    """Bytes for people: three digits are enough."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB" if nbytes < 1000 else f"{nbytes:,.0f} GiB"


def span(seconds: float) -> str:
    """A time for people, in its largest fitting unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"


def table(title: str, *columns: str) -> Table:
    """A table. ``>`` before a heading aligns its column right, ``~`` lets it shrink where the screen is narrow."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        heading = column.lstrip("~>")
        marks = column.removesuffix(heading)
        made.add_column(
            heading,
            justify="right" if ">" in marks else "left",
            overflow="ellipsis",
            no_wrap="~" not in marks,
        )
    return made


def console() -> Console:
    """Standard output; 80 columns where nobody says how many there are. Names of others are shown as they are."""
    return Console(highlight=False, emoji=False, markup=False)


def show_checks(checks: Iterable[Check], to: Console | None = None) -> None:
    """Print what the doctor found, and what to do about it."""
    made = table("", "check", "", "~found")
    for check in checks:
        state = check.state.upper() if check.state == BROKEN else check.state
        made.add_row(check.name, state, Text(check.found))
        if check.advice:
            made.add_row("", "", Text(f"-> {check.advice}", style="bold"))
    (to or console()).print(made)


def show_status(report: Mapping[str, Any], to: Console | None = None) -> None:
    """Print what the broker reports about itself."""
    out = to or console()
    daemon = report["daemon"]
    out.print(Text(f"broker at {daemon['directory']}", style="bold"))
    out.print(
        f"process {daemon['pid']}, up {span(daemon['uptime'])}, "
        f"{size(daemon['rss'])} resident apart from features"
        + (", ending" if report["halting"] else "")
        + (", draining: it takes no new work" if report["draining"] else "")
    )
    if not (health := report["health"])["ok"]:
        idle = span(health["last_finished_s"])
        out.print(Text(f"NOT WELL: work is pending, and nothing has finished for {idle}", style="bold red"))
        for sentence in health["stuck"]:
            out.print(Text(f"-> {sentence}", style="red"))
    parts = [_memory(report), _arenas(report), _sessions(report), *_engines(report), movers(report["movers"])]
    parts.append(_waiting(report))
    for part in parts:
        if part is not None:
            out.print()
            out.print(part)
    for line in _keys(report):
        out.print()
        out.print(line)
    told = _sum(session["tally"] for session in report["sessions"])
    for title, counts in (
        ("Counted by the broker", _sum([report["counters"], daemon["counters"]])),
        ("Told by its clients", told),
    ):
        if any(counts.values()):
            out.print()
            out.print(Text(title, style="bold"))
            out.print(_counts(counts))
    if fallbacks := sum(value for name, value in told.items() if name.startswith("fallback")):
        out.print()
        out.print(Text(f"{fallbacks} features went the engine's own way: its log says why", style="yellow"))


def _keys(report: Mapping[str, Any]) -> Iterable[Text]:
    """Whose pictures are found before they are decoded, and whose only after they were preprocessed."""
    for counter, words in (
        ("sglang_derived", "Derived keys, found before decoding"),
        ("sglang_content", "Content keys only, found after preprocessing"),
    ):
        names = sorted({session["name"] for session in report["sessions"] if session["tally"].get(counter)})
        if names:
            yield Text(f"{words}: {', '.join(names)}")


def _memory(report: Mapping[str, Any]) -> Table:
    pool = report["pool"]
    made = table(
        "Memory",
        "tier",
        ">limit",
        ">used",
        ">cached",
        ">free",
        ">taken",
        ">features",
        ">leases",
        ">holds",
    )
    made.add_row(
        pool["tier"],
        size(pool["limit"]),
        size(pool["used"]),
        size(pool["idle"]),
        size(pool["limit"] - pool["used"]),
        size(pool["capacity"]),
        str(report["features"]),
        str(report["leases"]),
        str(report["holds"]),
    )
    if report["quarantined"]:
        made.caption = (
            f"{size(report['quarantined'])} wait for the end of processes that may still write there"
        )
    if pool["growth_blocked"]:
        made.caption = f"no new segments for now: {pool['growth_blocked']}"
    return made


def _arenas(report: Mapping[str, Any]) -> Table | None:
    if not report["arenas"]:
        return None
    made = table("Arenas", "tier", "~namespace", ">segments", ">size", ">used", ">largest gap", "~")
    for arena in report["arenas"]:
        notes = [f"{arena[state]} {state}" for state in ("growing", "retired") if arena[state]]
        made.add_row(
            arena["tier"],
            arena["namespace"],
            str(arena["segments"]),
            size(arena["bytes"]),
            size(arena["used"]),
            size(arena["largest_free"]),
            ", ".join(notes),
        )
    return made


def _sessions(report: Mapping[str, Any]) -> Table | None:
    others = [s for s in report["sessions"] if s["pid"] != os.getpid()]
    rows = [(s, "") for s in others] + [(s, "ended, process lives") for s in report["ghosts"]]
    made = table("Sessions", "~name", ">process", ">user", ">age", ">leases", ">holds", ">grants", "~notes")
    for session, note in rows:
        notes = [note] if note else []
        if session["engine"]:
            notes.append("a rank")
        if session["waiting"]:
            notes.append(f"{session['waiting']} calls wait")
        if share := _share(report["budget"], session):
            notes.append(f"{share:.0%} of its budget")
        if session["quarantined"]:
            notes.append(f"{size(session['quarantined'])} quarantined")
        if not session["traceable"]:
            notes.append("its end cannot be seen")
        made.add_row(
            session["name"],
            str(session["pid"]),
            str(session["uid"]),
            span(session["age"]),
            *(str(session[what]) for what in ("leases", "holds", "grants")),
            ", ".join(notes),
        )
    return made if rows else None


def _share(budget: Mapping[str, int], session: Mapping[str, Any]) -> float:
    """How much of its budget a client has, by count or by bytes, whichever is more."""
    has = {"features": session["leases"] + session["holds"], "bytes": session["bytes"]}
    return max((has[what] / most for what, most in budget.items() if most), default=0.0)


def _engines(report: Mapping[str, Any]) -> Iterator[Table | Text]:
    for engine in report["engines"]:
        attached = f"{len(engine['ranks'])} of {engine['world']} ranks attached"
        flight = f"{size(engine['in_flight'])} of its {size(engine['budget'])} in flight"
        made = table(
            f"Engine {engine['engine']}: {attached}, {flight}",
            *(">rank", ">process", "device", "access", ">grants", ">unanswered", "~state"),
        )
        for rank in engine["ranks"]:
            state = Text("ready", style="green")
            if rank["lagging"]:
                state = Text(f"lagging, silent for {span(rank['unacked_for'])}", style="red")
            elif not engine["complete"]:
                state = Text("waits for the other ranks", style="yellow")
            made.add_row(
                str(rank["rank"]),
                str(rank["pid"]),
                rank["device"],
                rank["access"],
                str(rank["grants"]),
                str(rank["unacked"]),
                state,
            )
        yield made
        yield from _sharing(engine)


def movers(found: Iterable[Mapping[str, Any]]) -> Table | None:
    """Who is asked for what nobody here has, and what came of it."""
    made = table(
        "Beyond this machine",
        *("~mover", "~namespace", ">process", "state", ">sought", ">found", ">absent", ">late", ">busy"),
    )
    for mover in found:
        state = Text("open", style="green") if mover["open"] else Text("closed", style="yellow")
        counts = mover["counts"]
        made.add_row(
            mover["name"],
            mover["namespace"],
            str(mover["pid"]),
            state,
            f"{mover['sought']} of {mover['most']}",
            *(f"{counts[what]:,}" for what in ("found", "absent", "late", "busy")),
        )
    return made if made.row_count else None


def _sharing(engine: Mapping[str, Any]) -> Iterator[Text]:
    """What it has in common with others, now and so far."""
    granted = engine["granted"]
    for one in engine["shares"]:
        yield Text(f"{_features(one)} in use with {one['engine']}")
    for one in engine["reused"]:
        yield Text(f"{_features(one)} of {_features(granted)} so far from {one['engine']}")


def _features(counts: Mapping[str, Any]) -> str:
    return f"{counts['features']:,} features, {size(counts['bytes'])}"


def _waiting(report: Mapping[str, Any]) -> Table | None:
    if not report["waiting"]:
        return None
    made = table(
        f"Waiting ({report['waiting_count']})", "~client", "for", ">items", ">size", "~engine", ">age"
    )
    for request in report["waiting"]:
        made.add_row(
            request["client"],
            request["for"],
            str(request["items"]),
            size(request["bytes"]),
            request["engine"] or "",
            span(request["age"]),
        )
    return made


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def _counts(counts: Mapping[str, int]) -> Columns:
    shown = [f"{name} {value:,}" for name, value in sorted(counts.items()) if value]
    return Columns(shown, padding=(0, 3), column_first=True)


def show_features(report: Mapping[str, Any], to: Console | None = None) -> None:
    """Print the features that were asked for, largest first."""
    out = to or console()
    made = table("", ">#", ">size", "~tensor", "modality", "key", ">holds", ">hits")
    for feature in report["largest"]:
        made.add_row(
            str(feature["feature"]),
            size(feature["bytes"]),
            f"{feature['dtype']} {'x'.join(map(str, feature['shape']))}",
            feature["modality"],
            f"{feature['kind']} {feature['key'][:8]}",
            str(feature["holds"]),
            str(feature["hits"]),
        )
    out.print(made)
    out.print(f"{len(report['largest'])} of {report['features']} features in {size(report['pool']['used'])}")


def latency(seconds: float | None) -> str:
    """A short time for people."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else span(seconds)


def show_bench(found: Mapping[str, Any], to: Console | None = None) -> None:
    """Print what the self-test measured."""
    out = to or console()
    made = table("", "~", ">here", ">limit", "~that is")
    for line in found["lines"]:
        shown = [
            f"{value / 1e9:.3g} GB/s" if line["unit"] == "B/s" else latency(value)
            for value in (line["value"], line["limit"])
        ]
        made.add_row(line["name"], *shown, Text(line["verdict"], style="" if line["fine"] else "yellow"))
    out.print(made)
    out.print(Text(found["verdict"], style="bold"))


def show_profile(told: Mapping[str, Any], to: Console | None = None) -> None:
    """Print what a thread spends its time on."""
    out = to or console()
    out.print(Text(f"process {told['pid']}: {told['title']}"[: out.width], style="bold"))
    made = table(f"{told['samples']} samples in {span(told['seconds'])}", "", ">share", "~mostly")
    for kind, share in told["shares"].items():
        functions = ", ".join(told["functions"].get(kind, {}))
        made.add_row(kind, f"{share:.1%}", functions)
    out.print(made)
    out.print(Text(told["verdict"], style="bold"))
