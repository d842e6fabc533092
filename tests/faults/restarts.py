"""The broker is killed and started again under load, at intervals of 10 ms to 10 s.

Whatever was granted is read, right; what has no broker meanwhile falls back; and everybody returns by themselves.
"""

from __future__ import annotations

import time
from typing import Any

from tests.kit import eventually

from .load import FINE, Load
from .scene import ENGINE_AWAY, OUTAGE, Stage
from .zygote import readable

#: Restarts at each interval.
TIMES = 3


def run(intervals: list[float], seed: int) -> dict[str, Any]:
    """Seconds from a broker's start until all have sent through it again, by interval; and what was counted."""
    stage = Stage(host_mib=32)
    stage.start()
    work = Load(stage.clients, stage.directory, seed)
    returned: dict[str, float] = {}
    restarts = 0
    try:
        for name in ("a", "b"):
            work.engine(name)
        for n in range(4):
            work.producer(f"p{n}", ["a", "b"])
        for interval in intervals:
            for _ in range(TIMES):
                readable([], interval)
                stage.restart()
                restarts += 1
            started = time.monotonic()
            through(stage, work)
            returned[f"{interval:g}"] = round(time.monotonic() - started, 3)
        counts = work.finish("end")
        fallbacks = {n.removeprefix("fell back: "): v for n, v in counts.items() if n.startswith("fell back")}
        assert set(counts) - {f"fell back: {n}" for n in fallbacks} == FINE, counts
        assert set(fallbacks) <= OUTAGE | ENGINE_AWAY, fallbacks
        eventually(lambda: not (stage.status()["holds"] or stage.status()["leases"]), "books in balance")
        return {"restarts": restarts, "seconds_until_all_returned": returned, "counts": dict(counts)}
    finally:
        work.close()
        stage.close()


def through(stage: Stage, work: Load) -> None:
    """Wait until every producer has had features read that went through this broker."""

    def told() -> bool:
        status = stage.status()
        puts = [
            s["holds"] or s["tally"].get("puts", 0) for s in status["sessions"] if s["name"].startswith("p")
        ]
        return len(puts) == len(work.producers) and all(e["complete"] for e in status["engines"])

    eventually(told, "everybody is back")
    before = {name: child.ask("counts").get("right", 0) for name, child in work.producers.items()}
    eventually(
        lambda: all(
            child.ask("counts").get("right", 0) > before[name] + 10 for name, child in work.producers.items()
        ),
        "features of every producer",
    )
