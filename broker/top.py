"""`mmbroker top`: one screen that says how a broker is doing, drawn anew every second; 80 columns are enough."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mmbroker.proto.errors import BrokerError

from .overview import overview
from .screen import latency, movers, size, span, table

#: What clients can be sorted by: key, the largest first; names from a.
SORTS: Final = ("bytes", "holds", "leases", "grants", "waiting", "fallbacks", "age", "name")
_HEADINGS: Final = {"bytes": "held"}
_BAR: Final = 30

View = Mapping[str, Any]
#: A report, with the daemon's part.
Ask = Callable[[], dict[str, Any]]


def once(ask: Ask, out: Console, sort: str) -> None:
    """Print one screen: rates and latencies since the broker's start."""
    out.print(draw(overview(ask()), sort, clients=20))


def watch(ask: Ask, out: Console, sort: str, interval: float) -> None:
    """Draw until `q` is pressed. A broker that goes away is waited for."""
    before: dict[str, Any] | None = None
    shown: RenderableType = Text("asking the broker")
    view: View | None = None
    at = SORTS.index(sort)
    with _keys() as key, Live(shown, console=out, screen=True, auto_refresh=False) as live:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                due = now + interval
                try:
                    report = ask()
                    view, before = overview(report, before), report
                except BrokerError as error:
                    view, before = None, None
                    live.update(Text(f"mmbroker: {error}", style="yellow"), refresh=True)
            if view is not None:
                others = len(view["engines"]) + len(view["movers"]) + 4 * bool(view["movers"])
                rows = max(3, out.height - 20 - others)
                live.update(Group(_keys_line(SORTS[at]), draw(view, SORTS[at], rows)), refresh=True)
            pressed = key(max(0.0, due - time.monotonic()))
            if pressed in ("q", "Q", "\x03", "\x04"):
                return
            if pressed in ("s", "S"):
                at = (at + (1 if pressed == "s" else -1)) % len(SORTS)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed: a function that waits so many seconds for one, and gives "" if there was none."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def key(seconds: float) -> str:
        readable, _, _ = select.select([fd], [], [], seconds)
        if not readable:
            return ""
        return os.read(fd, 1).decode("ascii", "replace") or "q"  # the terminal is gone

    try:
        tty.setcbreak(fd)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# --- the screen -----------------------------------------------------------------------------------------------------


def draw(view: View, sort: str, clients: int) -> Group:
    """One screen of an `overview`."""
    parts: list[RenderableType] = [
        _head(view),
        *_stuck(view),
        *map(_tier, view["tiers"]),
        *_rates(view),
        Text(),
    ]
    parts += [_latencies(view), Text()]
    if view["waiting"] or view["fallbacks"]:
        parts += [*_trouble(view), Text()]
    if view["engines"]:
        parts += [_engines(view), Text()]
    if (beyond := movers(view["movers"])) is not None:
        parts += [beyond, Text()]
    parts.append(_clients(view, sort, clients))
    return Group(*parts)


def _keys_line(sort: str) -> Text:
    return Text(f"q quit   s, S sort clients (now by {_HEADINGS.get(sort, sort)})", style="dim")


def _head(view: View) -> Text:
    head = Text(f"mmbroker {view['instance']}", style="bold")
    head.append(f"  process {view['pid']}, up {span(view['uptime'])}  ", style="not bold")
    if not view["health"]["ok"]:
        head.append("work does not get on", style="bold red")
    elif view["draining"]:
        head.append("draining", style="bold yellow")
    else:
        head.append("healthy", style="bold green")
    return head


def _stuck(view: View) -> Iterator[Text]:
    for sentence in view["health"]["stuck"]:
        yield Text(f"  {sentence}", style="red")


def _tier(tier: View) -> Text:
    full = tier["in_use"] / tier["limit"] * _BAR
    cached = tier["cached"] / tier["limit"] * _BAR
    first = min(_BAR, round(full) or bool(tier["in_use"]))
    second = min(_BAR - first, round(cached) or bool(tier["cached"]))
    line = Text(f"{tier['tier']:6} ")
    line.append("█" * first, style="green")
    line.append("▒" * second, style="cyan")
    line.append("·" * (_BAR - first - second), style="dim")
    line.append(f" {size(tier['in_use'])} used + {size(tier['cached'])} cached of {size(tier['limit'])}")
    if tier["segments"]:
        line.append(
            f"\n       {tier['segments']} segments of {size(tier['taken'])}, largest gap {size(tier['largest_free'])}, "
            f"{tier['fragmentation']:.0%} fragmented",
            style="dim",
        )
    if tier["blocked"]:
        line.append(f"\n       cannot grow: {tier['blocked']}", style="red")
    return line


def _rates(view: View) -> Iterator[Text]:
    rates = view["rates"]
    found = "none asked for" if view["hit_rate"] is None else f"{view['hit_rate']:.0%} found"
    yield Text(
        f"{rates['features']:,.1f} written/s  {rates['hits']:,.1f} found/s  {found}  "
        f"{rates['evictions']:,.1f} evicted/s  {rates['messages']:,.0f} messages/s"
    )
    yield Text(
        f"{view['features']['held']} held, {view['features']['cached']} cached, {view['leases']} leases, "
        f"{view['holds']} holds, loop {latency(view['loop_lag'])} late, {size(view['resident'])} resident"
    )


def _latencies(view: View) -> Table:
    made = table(f"Latencies in the last {span(view['seconds'])}", "", ">count", ">p50", ">p99")
    for name, found in view["latencies"].items():
        if found["count"]:
            made.add_row(name, f"{found['count']:,}", *(latency(found[p]) for p in ("p50", "p99")))
    if not made.row_count:
        made.add_row("nothing happened", "", "", "")
    return made


def _trouble(view: View) -> Iterator[Text]:
    if view["waiting"]:
        waits = ", ".join(f"{count} for {what}" for what, count in sorted(view["waiting"].items()))
        oldest = max((call["age"] for call in view["waiting_calls"]), default=0.0)
        yield Text(f"Waiting: {waits}; the oldest for {span(oldest)}", style="yellow")
    if view["fallbacks"]:
        lost = ", ".join(f"{count:,} {reason}" for reason, count in sorted(view["fallbacks"].items()))
        rate = view["rates"]["fallbacks"]
        yield Text(f"Went the engine's own way: {lost} ({rate:.1f}/s now)", style="yellow")


def _engines(view: View) -> Table:
    made = table("Engines", "~engine", ">rank", ">process", "path", ">grants", ">unanswered", "~state")
    for engine in view["engines"]:
        for rank in engine["ranks"]:
            state = Text("ready", style="green")
            if rank["lagging"]:
                state = Text(f"silent for {span(rank['unacked_for'])}", style="red")
            elif not engine["complete"]:
                state = Text(f"{len(engine['ranks'])} of {engine['world']} ranks", style="yellow")
            made.add_row(
                engine["engine"],
                str(rank["rank"]),
                str(rank["pid"]),
                rank["path"],
                str(rank["grants"]),
                str(rank["unacked"]),
                state,
            )
    return made


def _clients(view: View, sort: str, count: int) -> Table:
    columns = ("~name", ">process", ">age", ">held", ">holds", ">leases", ">waits", ">fell back", "~")
    made = table("Clients", *columns)
    others = [client for client in view["clients"] if client["pid"] != os.getpid()]
    if sort == "name":
        ordered = sorted(others, key=lambda client: str(client["name"]))
    else:
        ordered = sorted(others, key=lambda client: -client[sort])
    for client in ordered[:count]:
        made.add_row(
            client["name"],
            str(client["pid"]),
            span(client["age"]),
            size(client["bytes"]),
            *(str(client[name]) for name in ("holds", "leases", "waiting", "fallbacks")),
            "ended" if client["ended"] else "rank" if client["engine"] else "",
        )
    return made
