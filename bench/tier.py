"""The tier beside what it replaces: bytes against plain TCP, a hit against making it again, and what a miss costs.

    python bench/tier.py [--json FILE] [--only SECTION ...] [--quick]

Two machines on one: two brokers with their movers, a worker at each, one master, all on loopback. The wire is as fast
as the cores that copy, and everything shares them: it is no network, and what it shows is what the cores are busy for.
A full run takes about two minutes on two cores, which should have nothing else to do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from bench import frame, machine, stats, store, tables, transfer
from bench.frame import Say
from bench.machines import Mover, Processor, Worker, size, tier_of, wait_until
from bench.operators import cpu_s
from bench.processes import Remote, Workshop
from bench.store import Master
from mmbroker.screen import table


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    sizes: tuple[float, ...] = (0.6, 9.6, 38.0)
    transfers: int = 120
    features: int = 24
    misses: int = 1500
    pictures: int = 8
    picture: tuple[int, int] = (1920, 1080)


#: The same in a few seconds: to see that everything works, not to learn anything.
QUICK = Plan(sizes=(0.6,), transfers=6, features=2, misses=20, pictures=1, picture=(320, 240))
#: How long a worker may wait for the store where the time that it takes is what is measured, in ms.
PATIENT_MS = 2000
#: What is charged for a feature of this bench, in us: dear enough to be stored at once.
COST = 100_000
#: MiB that may be stored in a second where the budget is not what is measured.
UNBOUNDED = 10_000
#: Blocks that the misses are divided into, so that brokers take turns.
BLOCKS = 10


def transfers(shop: Workshop, plan: Plan, say: Say) -> list[dict[str, Any]]:
    return transfer.measure(shop, list(plan.sizes), plan.transfers, say)


# --- hits -----------------------------------------------------------------------------------------------------------


def hits(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    """How long a worker waits for what another machine has, and which processes are busy for it."""
    mib = round(max(plan.sizes) * plan.features * 2.5) + 64
    with Master(shop.place("master")) as master, Machines(shop, master, mib) as two:
        lines = []
        for mb in plan.sizes:
            say(f"hits: {mb:g} MB")
            lines.append(_hits_of(two, master, mb, plan.features))
        told = tier_of(two.second)
    return {"lines": lines, "fetched": told["found"], "altered": told.get("tier_altered", 0)}


class Machines:
    """Two of them: one makes and stores, the other asks. A context manager."""

    def __init__(self, shop: Workshop, master: Master, mib: int) -> None:
        self._stack = ExitStack()
        enter = self._stack.enter_context
        self.first, self.second = (enter(shop.broker(host_mib=mib)) for _ in range(2))
        self.maker = enter(shop.worker("first").make(Worker, self.first.path, "bench-first"))
        self.asker = enter(shop.worker("second").make(Worker, self.second.path, "bench-second"))
        patient = {"wait_ms": PATIENT_MS, "write_mib_s": UNBOUNDED}
        self.storing = enter(Mover(self.first, master.address, 2 * mib, **patient))
        self.asking = enter(Mover(self.second, master.address, **patient))
        self.stored = 0

    def store(self, numbers: list[int]) -> None:
        """Wait until so many more are stored."""
        self.stored += len(numbers)
        wait_until(self.first, "all is stored", "tier_puts", self.stored)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)


def _hits_of(two: Machines, master: Master, mb: float, count: int) -> dict[str, Any]:
    for numbers in ([*range(count)], [*range(count, 2 * count)]):  # the first warms: arenas and connections
        before = cpu_s(two.storing.pid)
        two.maker.call("make", mb, numbers, COST)
        two.store(numbers)
        put_cpu = cpu_s(two.storing.pid) - before
        pids = {
            "asking mover": two.asking.pid,
            "storing mover": two.storing.pid,
            "broker": two.second.pid,
            "master": master.pid,
        }
        spent = {name: cpu_s(pid) for name, pid in pids.items()}
        fetched = two.asker.call("get", size(mb), numbers)
        spent = {name: cpu_s(pid) - spent[name] for name, pid in pids.items()}
        here = two.asker.call("get", size(mb), numbers)
        two.second.evict()
    two.first.evict()
    return {
        "mb": mb,
        "fetched": stats.us(fetched),
        "here": stats.us(here),
        "within_20_ms_percent": round(100 * sum(took <= 20e6 for took in fetched) / count, 1),
        "cpu_ms": {name: round(1e3 * cpu / count, 3) for name, cpu in spent.items()},
        "put_cpu_ms": round(1e3 * put_cpu / count, 3),
    }


# --- misses ---------------------------------------------------------------------------------------------------------


def misses(shop: Workshop, plan: Plan, say: Say) -> list[dict[str, Any]]:
    """How long a worker waits to learn that nobody has something: without a tier, with one, with one that is down."""
    found: dict[str, list[int]] = {}
    with ExitStack() as stack:
        master = stack.enter_context(Master(shop.place("master")))
        bare = stack.enter_context(shop.broker(host_mib=64))
        shared = stack.enter_context(shop.broker(host_mib=64))
        without = stack.enter_context(shop.worker("first").make(Worker, bare.path, "bench-first"))
        having = stack.enter_context(shop.worker("second").make(Worker, shared.path, "bench-second"))
        each = max(1, plan.misses // BLOCKS)

        def turns(*ways: tuple[str, Remote]) -> None:
            for block in range(-1, BLOCKS):
                for name, worker in ways:
                    times = worker.call("miss", each)
                    if block >= 0:
                        found.setdefault(name, []).extend(times)

        say("misses: the store is there")
        mover = stack.enter_context(Mover(shared, master.address))
        turns(("no tier", without), ("the store has not got it", having))
        say("misses: the store is gone")
        master.kill()
        while tier_of(shared)["open"]:
            having.call("miss", 1)
        turns(("no tier, later", without), ("the store is left alone", having))
        mover.close()
    return [{"what": name, **stats.us(times)} for name, times in found.items()]


# --- a picture ------------------------------------------------------------------------------------------------------


def picture(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    """A picture that one machine preprocesses, and another fetches."""
    width, height = plan.picture
    numbers = [*range(plan.pictures + 1)]  # the first warms
    mib = (width * height * 24 * len(numbers) * 5 // 4 >> 20) + 64  # 24 bytes a pixel, as float32 patches
    with Master(shop.place("master")) as master, Machines(shop, master, mib) as two:
        say("picture: the image processor starts")
        worker = shop.worker("processor")
        with worker.make(Processor, two.first.path, "bench-processor", width, height) as processor:
            say("picture: made and fetched")
            made, nbytes = processor.call("process", "picture", numbers)
        two.store(numbers)
        fetched = two.asker.call("get", "picture", numbers)
        here = two.asker.call("get", "picture", numbers)
    made_ms, fetched_ms, here_ms = (statistics.median(times[1:]) / 1e6 for times in (made, fetched, here))
    return {
        "size": [width, height],
        "mb": round(nbytes / 1e6, 2),
        "made_ms": round(made_ms, 2),
        "fetched_ms": round(fetched_ms, 2),
        "here_ms": round(here_ms, 3),
        "times": round(made_ms / fetched_ms, 2),
        "n": plan.pictures,
    }


SECTIONS: dict[str, Callable[[Workshop, Plan, Say], Any]] = {
    "transfers": transfers,
    "hits": hits,
    "misses": misses,
    "picture": picture,
}


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was measured; only of sections that were."""
    made = []

    def goal(what: str, bound: float, measured: float, at_most: bool) -> None:
        met = measured <= bound if at_most else measured >= bound
        made.append(
            {"what": what, "goal": bound, "at_most": at_most, "measured": round(measured, 2), "met": met}
        )

    rates = {(line["mb"], line["way"], line["what"]): line["gb_per_s"] for line in found.get("transfers", ())}
    if (9.6, transfer.STORE, transfer.GET) in rates:
        ours, plain = (rates[9.6, way, transfer.GET] for way in (transfer.STORE, transfer.TCP))
        goal("get of 9.6 MB, % of plain TCP's rate", 60.0, 100 * ours / plain, at_most=False)
    p50 = {line["what"]: line["p50"] for line in found.get("misses", ())}
    if p50:
        more = (p50["the store is left alone"] - p50["no tier, later"]) / 1000
        goal("a miss while the store is left alone, ms more than without a tier", 1.0, more, at_most=True)
    if "hits" in found:
        goal("features that came altered", 0.0, found["hits"]["altered"], at_most=True)
    if "picture" in found:
        goal(
            "a fetched picture against making it, times faster", 1.0, found["picture"]["times"], at_most=False
        )
    return made


def run(sections: list[str], plan: Plan) -> dict[str, Any]:
    started = time.monotonic()
    say = frame.saying(started)
    found = frame.origin(mooncake=machine.version(store.PACKAGE))
    with Workshop() as shop:
        for section in sections:
            found[section] = SECTIONS[section](shop, plan, say)
    found["goals"] = goals(found)
    found["seconds"] = round(time.monotonic() - started, 1)
    return found


# --- what a person reads --------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    console = Console(width=100, highlight=False, emoji=False)
    console.print(frame.heading(found))
    for section, make in TABLES.items():
        if section in found:
            console.print(make(found[section]))
    if found["goals"]:
        console.print(tables.goals_table(found["goals"]))


def _transfers(lines: list[dict[str, Any]]) -> Table:
    made = table("Between two processes", ">MB", "what", "way", ">ms p50", ">p99", ">GB/s", ">CPU ms", ">n")
    for line in lines:
        figures = (tables.number(line[name]) for name in ("ms_p50", "ms_p99", "gb_per_s", "cpu_ms"))
        made.add_row(f"{line['mb']:g}", line["what"], line["way"], *figures, str(line["n"]))
    return made


def _hits(told: dict[str, Any]) -> Table:
    made = table(
        "A worker's hits on what another machine made; CPU ms of each fetched",
        ">MB", ">ms p50", ">p99", ">within 20 ms", ">here p50", *(f">{name}" for name in told["lines"][0]["cpu_ms"]),
        ">of a put",
    )  # fmt: skip
    for line in told["lines"]:
        made.add_row(
            f"{line['mb']:g}",
            *(tables.number(line["fetched"][p] / 1000) for p in ("p50", "p99")),
            f"{line['within_20_ms_percent']:g} %",
            tables.number(line["here"]["p50"] / 1000),
            *(tables.number(value) for value in (*line["cpu_ms"].values(), line["put_cpu_ms"])),
        )
    return made


def _misses(lines: list[dict[str, Any]]) -> Table:
    made = table("A worker's misses, microseconds", "what", ">p50", ">p99", ">n")
    for line in lines:
        made.add_row(line["what"], tables.number(line["p50"]), tables.number(line["p99"]), str(line["n"]))
    return made


def _picture(told: dict[str, Any]) -> Table:
    width, height = told["size"]
    made = table(
        f"A picture of {width}x{height}, {told['mb']:g} MB, ms",
        ">made",
        ">fetched",
        ">here already",
        ">times",
    )
    made.add_row(*(tables.number(told[name]) for name in ("made_ms", "fetched_ms", "here_ms", "times")))
    return made


TABLES: dict[str, Callable[[Any], Table]] = {
    "transfers": _transfers,
    "hits": _hits,
    "misses": _misses,
    "picture": _picture,
}


def main() -> None:
    asked = frame.asked(__doc__, SECTIONS)
    found = run(asked.sections, QUICK if asked.quick else Plan())
    show(found)
    if asked.file is not None:
        frame.write(asked.file, found)


if __name__ == "__main__":
    main()
