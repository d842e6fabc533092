"""Features on a GPU: what the scheduler thread pays, how fast they come, what they take, and whether they are right.

    python bench/gpu.py [--json FILE] [--only SECTION ...] [--features N] [--quick]

The tables go to standard output, progress to standard error. A full run takes about eight minutes on a GPU machine.
With MMBROKER_FAKE_CUDA it runs without a GPU, to see that it works: its figures then mean nothing. SGLang's own ways
are measured where its code can be imported, and named as left out where not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import gpu_loading, gpu_loop, gpu_memory, gpu_rows, gpu_sglang, gpu_storm, gpu_tables, machine
from bench.gpu_peers import fake, uuid
from bench.processes import Workshop


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    sizes: tuple[float, ...] = (0.6, 2.4, 9.6, 38.0)
    takes: int = 600
    bandwidth_sizes: tuple[float, ...] = (0.6, 2.4, 9.6, 38.0)
    repeats: int = 9
    run: int = gpu_loading.RUN
    latency_mb: float = 10.0
    latencies: int = 200
    growing: int = 60
    loads: tuple[tuple[float, float, int], ...] = ((9.6, 200.0, 1), (9.6, 200.0, 4), (2.4, 1000.0, 1))
    loop_seconds: float = 0.8
    loop_rounds: int = 11
    growth_mb: float = 9.6
    growth: int = 120
    growth_rate: float = 40.0
    features: int = 100_000
    storm_sizes: tuple[int, int] = (4096, 8 << 20)
    storm_device_mib: int = 256
    storm_host_mib: int = 2048
    held: int = 64
    sglang: bool = True


#: The same in a few seconds, and in little memory: to see that everything works, not to learn anything.
QUICK = Plan(
    sizes=(0.1, 0.3),
    takes=24,
    bandwidth_sizes=(0.1,),
    repeats=1,
    run=1,
    latency_mb=0.5,
    latencies=3,
    growing=3,
    loads=((0.1, 50.0, 1), (0.1, 50.0, 2)),
    loop_seconds=0.05,
    loop_rounds=1,
    growth_mb=0.5,
    growth=4,
    growth_rate=40.0,
    features=160,
    storm_sizes=(64, 200_000),
    storm_device_mib=16,
    storm_host_mib=96,
    held=6,
)

Settings = dict[str, Any]
Say = Callable[[str], None]


def _rows(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    why = "it was not asked for" if not plan.sglang else gpu_sglang.missing(shop)
    found: dict[str, Any] = {"rows": gpu_rows.measure(shop, plan.sizes, plan.takes, not why, settings, say)}
    if why:
        found["left_out"] = {"ways": list(gpu_sglang.WAYS), "why": why}
    return found


def _bandwidth(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    return {
        "bandwidth": gpu_loading.bandwidth(shop, plan.bandwidth_sizes, plan.repeats, plan.run, settings, say)
    }


def _latency(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    return {
        "latency": gpu_loading.latency(shop, plan.latency_mb, plan.latencies, plan.growing, settings, say)
    }


def _memory(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    return {"memory": gpu_memory.measure(shop, settings, say)}


def _loop(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    return {"loop": gpu_loop.measure(shop, plan.loads, plan.loop_seconds, plan.loop_rounds, settings, say)}


def _growth(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    return {"growth": gpu_loop.growth(shop, plan.growth_mb, plan.growth, plan.growth_rate, settings, say)}


def _storm(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    sizes, device, host = plan.storm_sizes, plan.storm_device_mib, plan.storm_host_mib
    return {"storm": gpu_storm.storm(shop, plan.features, sizes, device, host, settings, say)}


def _killed(shop: Workshop, plan: Plan, settings: Settings, say: Say) -> dict[str, Any]:
    return {"killed": gpu_storm.killed(shop, plan.held, plan.storm_sizes, settings, say)}


SECTIONS: dict[str, Callable[[Workshop, Plan, Settings, Say], dict[str, Any]]] = {
    "memory": _memory,
    "rows": _rows,
    "bandwidth": _bandwidth,
    "latency": _latency,
    "loop": _loop,
    "growth": _growth,
    "killed": _killed,
    "storm": _storm,
}


def run(sections: list[str], plan: Plan, file: Path | None) -> dict[str, Any]:
    """Measure. A section that fails says why, and the others go on; `file` has what was found, after each section."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    # A fake GPU is small, and has its own segments; a real one keeps its usual headroom.
    settings: Settings = {"device_headroom_mib": 0, "segment_mib": 4} if fake() else {}
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "gpu": {"uuid": uuid(), "driver": "fake" if fake() else "cuda"},
        "failed": {},
    }
    with ExitStack() as stack:
        shop = stack.enter_context(Workshop())
        for section in sections:
            try:
                found |= SECTIONS[section](shop, plan, settings, say)
            except Exception as error:
                traceback.print_exc()
                found["failed"][section] = f"{type(error).__name__}: {error}"
                stack.close()  # its processes are in no state that anybody knows
                shop = stack.enter_context(Workshop())
            found["goals"] = gpu_tables.goals(found)
            found["seconds"] = round(time.monotonic() - started, 1)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1) + os.linesep)
    say("done")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument(
        "--only", choices=SECTIONS, action="append", help="measure this alone; may be repeated"
    )
    parser.add_argument("--features", type=int, metavar="N", help="how many go through the small arena")
    parser.add_argument("--takes", type=int, metavar="N", help="how many of each size are taken")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    parser.add_argument("--without-sglang", action="store_true", help="leave SGLang's own ways out")
    options = parser.parse_args()
    plan = replace(QUICK if options.quick else Plan(), sglang=not options.without_sglang)
    if options.features is not None:
        plan = replace(plan, features=options.features)
    if options.takes is not None:
        plan = replace(plan, takes=options.takes)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up on the way
    found = run([name for name in SECTIONS if name in (options.only or SECTIONS)], plan, options.json)
    gpu_tables.show(found)
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
