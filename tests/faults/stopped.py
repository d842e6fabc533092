"""One engine stands still, and another runs several arena sizes through: nobody else waits for the first."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

from tests.kit import eventually

from .load import FINE, Load
from .scene import MIB, Stage
from .zygote import readable

ARENA_MIB = 32


def run(seconds: float = 0.0, rounds: int = 3) -> dict[str, Any]:
    """Stop an engine for at least so long, and until `rounds` times the arena has gone through the other one."""
    stage = Stage(host_mib=ARENA_MIB)
    work = Load(stage.clients, stage.directory, 0)
    slow, sender = stage.spawn(), stage.spawn()
    try:
        stage.start()
        for actor, name in ((slow, "slow"), (sender, "sender")):
            actor.ask("connect", path=str(stage.directory), name=name, namespace="load")
        slow.ask("attach", engine="slow", access="readonly")
        work.engine("fast")
        slow.signal(signal.SIGSTOP)
        eventually(lambda: slow.stopped, "a stop")
        refused = flood(sender)
        before = in_flight(stage, "slow")
        sender.post("put", seeds=[0], sizes=[MIB], to="slow", timeout=600.0)  # waits all the time
        eventually(lambda: stage.status()["waiting_count"], "a put that waits for the stopped engine")

        started = time.monotonic()
        work.producer("p", ["fast"], size=MIB)
        while work.counts()["right"] < rounds * ARENA_MIB or time.monotonic() < started + seconds:
            readable([], 0.1)
        took = time.monotonic() - started
        counts = work.finish("end")
        assert set(counts) == FINE, counts
        status = stage.status()
        assert status["waiting_count"] == 1
        assert in_flight(stage, "slow") == before

        slow.signal(signal.SIGCONT)
        assert "result" in sender.answer()  # at once, now that there is somebody to read
        assert slow.ask("stats")["table_failed"] == 0
        return {
            "stopped_seconds": round(took, 1),
            "features": counts["features"],
            "mib": counts["features"],
            "fallbacks": 0,
            "longest_put_ms": counts["longest_put_ms"],
            "refused": dict(refused),
            "slow_engine_in_flight_mib": before // MIB,
        }
    finally:
        for child in (slow, sender):
            child.end()
        work.close()
        stage.close()


def flood(sender: Any) -> Counter[str]:
    """Put to the stopped engine until its budget is used up; by error."""
    errors: Counter[str] = Counter()
    for seed in range(1, ARENA_MIB + 1):
        sender.post("put", seeds=[seed], sizes=[MIB], to="slow", timeout=0.05)
        errors[sender.answer()["error"]] += 1
    return errors


def in_flight(stage: Stage, name: str) -> int:
    (engine,) = [e for e in stage.status()["engines"] if e["engine"] == name]
    assert engine["in_flight"] <= engine["budget"]
    nbytes: int = engine["in_flight"]
    return nbytes
