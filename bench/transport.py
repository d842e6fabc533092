"""The transports side by side: what the scheduler thread, the producer and a scheduler-like loop pay.

    python bench/transport.py [--json FILE] [--only SECTION ...] [--quick]

The tables go to standard output, progress to standard error. A full run takes about five minutes on two cores, which
should have nothing else to do. Times are wall-clock times of one thread; sizes are megabytes of 10^6 bytes, float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import loop, machine, memory, producer, roundtrips, rows, tables, throughput
from bench.processes import Workshop


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    sizes: tuple[float, ...] = (0.6, 2.4, 9.6, 38.0)
    arrivals: int = 800
    takes: int = 20_000
    puts: int = 120
    trips: int = 4000
    seal_mb: float = 9.6
    throughput_sizes: tuple[float, ...] = (0.6, 9.6)
    throughput_seconds: float = 2.0
    loads: tuple[tuple[float, float], ...] = ((9.6, 50.0), (9.6, 200.0), (0.6, 1000.0))
    loop_seconds: float = 0.6
    loop_pairs: int = 6
    held_mb: float = 9.6
    held: int = 16
    sglang: bool = True


#: The same in a few seconds: to see that everything works, not to learn anything.
QUICK = Plan(
    sizes=(0.6, 2.4),
    arrivals=10,
    takes=50,
    puts=2,
    trips=40,
    seal_mb=0.6,
    throughput_sizes=(0.6,),
    throughput_seconds=0.1,
    loads=((0.6, 200.0), (2.4, 2000.0)),
    loop_seconds=0.05,
    loop_pairs=1,
    held_mb=0.6,
    held=2,
)

Say = Callable[[str], None]


def _rows(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    found = rows.measure(shop, list(plan.sizes), plan.arrivals, plan.takes, plan.sglang, say)
    return {"rows": found["rows"], "take": found["take"]}


def _producer(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    return {"producer": producer.measure(shop, list(plan.sizes), plan.puts, plan.sglang, say)}


def _round_trips(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    return {"round_trips": roundtrips.measure(shop, plan.trips, plan.seal_mb, say)}


def _throughput(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    return {"throughput": throughput.measure(shop, list(plan.throughput_sizes), plan.throughput_seconds, say)}


def _loop(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    lines = loop.measure(shop, list(plan.loads), plan.loop_seconds, plan.loop_pairs, plan.sglang, say)
    return {"loop": lines}


def _memory(shop: Workshop, plan: Plan, say: Say) -> dict[str, Any]:
    return {"memory": memory.measure(shop, plan.held_mb, plan.held, say)}


SECTIONS: dict[str, Callable[[Workshop, Plan, Say], dict[str, Any]]] = {
    "rows": _rows,
    "producer": _producer,
    "round_trips": _round_trips,
    "throughput": _throughput,
    "loop": _loop,
    "memory": _memory,
}


def run(sections: list[str], plan: Plan) -> dict[str, Any]:
    """Measure, and put what belongs together into one place."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    with Workshop() as shop:
        for section in sections:
            found |= SECTIONS[section](shop, plan, say)
    if "rows" in found and "producer" in found:
        _join(found["rows"], found["producer"]["lines"])
    found["goals"] = tables.goals(found)
    found["seconds"] = round(time.monotonic() - started, 1)
    say("done")
    return found


def _join(lines: list[dict[str, Any]], producers: list[dict[str, Any]]) -> None:
    """The producer's figures, one feature at a time, into the rows of its transport."""
    by_way = {(line["mb"], line["way"]): line for line in producers if line["batch"] == 1}
    for line in lines:
        one = by_way.get((line["mb"], producer.ROWS.get(line["transport"])))
        if one is not None:
            line |= {"producer_us_p50": one["us_p50"], "producer_us_p99": one["us_p99"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument(
        "--only", choices=SECTIONS, action="append", help="measure this alone; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    parser.add_argument("--without-sglang", action="store_true", help="leave SGLang's own transport out")
    options = parser.parse_args()
    plan = replace(QUICK if options.quick else Plan(), sglang=not options.without_sglang)
    if plan.sglang and importlib.util.find_spec("sglang") is None:
        parser.error(
            "SGLang is not installed here: `make env` builds an environment, or use --without-sglang"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up on the way
    found = run([name for name in SECTIONS if name in (options.only or SECTIONS)], plan)
    tables.show(found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
