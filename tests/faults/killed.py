"""An engine that has a hundred features in use is killed: how soon is their space somebody else's?"""

from __future__ import annotations

import signal
import time
from statistics import median
from typing import Any

from .scene import Stage

FEATURES = 100
#: Seconds until everything that a dead engine held can be had by others.
SOON = 1.0


def run(times: int = 1) -> dict[str, Any]:
    """Kill so many engines, one after the other; milliseconds until a lease of the whole arena was given."""
    stage = Stage()
    took = []
    try:
        stage.start()
        stage.bystanders()
        for _ in range(times):
            took.append(once(stage))
            stage.audit()
    finally:
        stage.close()
    return {
        "features": FEATURES,
        "times": times,
        "reusable_ms": {"median": round(median(took), 1), "worst": round(max(took), 1)},
    }


def once(stage: Stage) -> float:
    producer, engine = stage.spawn(), stage.spawn()
    try:
        for child, name in ((producer, "producer"), (engine, "engine")):
            child.ask("connect", path=str(stage.directory), name=name)
        engine.ask("attach", engine="a", access="readonly")
        seeds, sizes = [next(stage.seeds) for _ in range(FEATURES)], [100_000] * FEATURES
        refs = producer.ask("put", seeds=seeds, sizes=sizes, to="a")
        engine.ask("hold_on", refs=refs)
        assert engine.ask("still_reads", seeds=seeds, sizes=sizes)
        producer.ask("drop")
        assert stage.status()["holds"] == FEATURES
        engine.signal(signal.SIGKILL)
        started = time.monotonic()
        stage.others[0].ask("lease", seed=seeds[0], nbytes=stage.limit, timeout=SOON)
        took = time.monotonic() - started
        stage.others[0].ask("let_go")
        return took * 1000
    finally:
        for child in (producer, engine):
            child.end()
