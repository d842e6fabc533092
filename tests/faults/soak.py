"""The long form: load with memory watched, every fault, restarts, stopped and killed engines. `make soak` runs it.

    python -m tests.faults.soak [--features 200000] [--seed N] [--json FILE] [PART ...]

Its parts are ``load``, ``stopped``, ``killed``, ``restarts`` and ``campaign``. What they found is written as JSON,
after each of them and at each tenth of the load, so that a run that was cut off has said something, too.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click

from bench import machine
from tests.kit import eventually

from . import campaign, killed, restarts, stopped
from .load import FINE, Load, Memory
from .scene import Stage
from .zygote import readable

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PROCESSES, THREADS = 8, 2
ENGINES = {"a": "readonly", "b": "readonly", "c": "readonly", "d": "copy"}
ARENA_MIB = 32
#: How much more memory a process may have at the end than after the first tenth.
GROWTH = 0.05
#: How long a put or an engine's answer may take, in seconds: a machine that has other things to do must not fail the
#: soak. What stands still is found otherwise: by `STILL` and `OVERTAKEN`.
WAIT = 900.0
#: How long nobody at all may finish anything, in seconds.
STILL = 120.0
#: How many features of its own process may be finished while one put waits. Who comes first is served first, so
#: few are, however slow the machine is.
OVERTAKEN = 200

Note = Callable[[dict[str, Any]], None]


def load(features: int, seed: int, note: Note) -> dict[str, Any]:
    """16 producers and 4 engines; every process's memory in each tenth."""
    stage = Stage(host_mib=ARENA_MIB, segment_mib=8)
    stage.start()
    work = Load(stage.clients, stage.directory, seed, WAIT)
    found: dict[str, Any] = {"asked": features, "arena_mib": ARENA_MIB, "tenths": []}
    try:
        for name, access in ENGINES.items():
            work.engine(name, access=access)
        before, started = stage.status()["daemon"], time.monotonic()
        for n in range(PROCESSES):
            work.producer(f"p{n}", [*ENGINES], threads=THREADS, count=-(-features // (PROCESSES * THREADS)))
        finished, moved = 0, started
        for tenth in range(1, 11):
            memory: dict[str, Memory] = {}
            while True:
                counts = work.counts()
                assert set(counts) <= FINE, counts
                if counts["features"] > finished:
                    finished, moved = counts["features"], time.monotonic()
                assert time.monotonic() < moved + STILL, f"all stand still: {stage.status()}"
                for name, child in {"broker": stage.living, **work.producers, **work.engines}.items():
                    memory[name] = Memory.of(child.pid).beside(memory.get(name))
                if (done := counts["features"]) >= features * tenth // 10:
                    break
                readable([], 0.25)
            seconds = round(time.monotonic() - started, 1)
            found["tenths"].append(
                {"features": done, "seconds": seconds, "memory": {n: asdict(m) for n, m in memory.items()}}
            )
            print(
                f"{done:9} features, {seconds:8} s, {done / seconds:6.0f} a second; "
                f"broker {memory['broker'].least >> 10} KiB",
                flush=True,
            )
            note(found | _sums(work, stage, before, started))
        counts = work.finish(timeout=STILL)
        found |= _sums(work, stage, before, started) | {"growth": growth(found["tenths"])}
        assert set(counts) == FINE, counts
        assert counts["features"] == counts["right"] >= features
        assert counts["longest_overtaken"] <= OVERTAKEN, counts
        status = eventually(lambda: (s := stage.status()) and not s["holds"] and s, "the last holds' end")
        assert not (status["holds"] or status["leases"] or status["quarantined"])
        too_much = {n: g for n, g in found["growth"].items() if g > GROWTH}
        assert not too_much, f"more memory than after the first tenth: {too_much}"
        return found
    finally:
        work.close()
        stage.close()


def _sums(work: Load, stage: Stage, before: dict[str, Any], started: float) -> dict[str, Any]:
    counts, daemon, seconds = work.counts(), stage.status()["daemon"], time.monotonic() - started
    sums = {name: daemon[name] - before[name] for name in ("messages_in", "messages_out")}
    done = max(1, counts["features"])
    return {
        "counts": dict(counts),
        "seconds": round(seconds, 1),
        "features_per_second": round(done / seconds, 1),
        **sums,
        "messages_per_feature": round(sum(sums.values()) / done, 2),
        "loop_lag_worst_ms": round(daemon["loop_lag_worst"] * 1000, 1),
    }


def growth(tenths: list[dict[str, Any]]) -> dict[str, float]:
    """By how much each process's own memory has grown since the first tenth, as a share: the least of the last tenth
    beside that of the second, because what is on its way at a moment comes and goes."""
    early, late = tenths[1]["memory"], tenths[-1]["memory"]
    return {name: round(late[name]["least"] / early[name]["least"] - 1, 4) for name in early}


def every_fault(seed: int, note: Note) -> dict[str, Any]:
    found = campaign.play(list(campaign.everything()), seed, note)
    assert not found["failed"], list(found["failed"])
    return found


@click.command()
@click.option("--features", default=200_000, show_default=True)
@click.option("--seed", default=lambda: int(time.time()), type=int)
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.argument("parts", nargs=-1, type=click.Choice(["load", "stopped", "killed", "restarts", "campaign"]))
def main(features: int, seed: int, path: Path | None, parts: tuple[str, ...]) -> None:
    path = path or RESULTS / f"soak-{date.today()}.json"
    results: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "seed": seed,
    }
    work: dict[str, Callable[[Note], dict[str, Any]]] = {
        "load": lambda note: load(features, seed, note),
        "stopped": lambda note: stopped.run(60.0),
        "killed": lambda note: killed.run(20),
        "restarts": lambda note: restarts.run([0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0], seed),
        "campaign": lambda note: every_fault(seed, note),
    }
    failed = False
    for name in parts or work:
        print(f"{name}, seed {seed}", flush=True)

        def note(found: dict[str, Any], name: str = name) -> None:
            results[name] = found
            path.write_text(json.dumps(results, indent=1) + "\n")

        try:
            note(work[name](note))
        except Exception as error:
            traceback.print_exc()
            note({**results.get(name, {}), "failed": f"{type(error).__name__}: {error}"})
            failed = True
    print(path)
    sys.exit(failed)


if __name__ == "__main__":
    main()
