"""Many producers and engines on a small arena, and everything that may make one of them wait for another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import eventually

from . import restarts, stopped
from .conftest import SEED
from .load import FINE, Load
from .scene import Stage

FEATURES = 1600
MIB = 1 << 20


@pytest.fixture
def stage() -> Iterator[Stage]:
    found = Stage(host_mib=32, segment_mib=8)
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.fixture
def work(stage: Stage) -> Iterator[Load]:
    found = Load(stage.clients, stage.directory, SEED)
    try:
        yield found
    finally:
        found.close()


def test_sixteen_producers_and_four_engines(stage: Stage, work: Load) -> None:
    """1 byte to 8 MiB, a quarter under content keys, a tenth put again: every byte right, every book at zero."""
    for name in "abcd":
        work.engine(name, access="copy" if name == "d" else "readonly")
    for n in range(8):
        work.producer(f"p{n}", list("abcd"), count=FEATURES // 16)
    counts = work.finish()
    assert set(counts) == FINE
    assert counts["features"] == counts["right"] == FEATURES
    status = eventually(lambda: (s := stage.status()) and not s["holds"] and s, "the last holds' end")
    assert (status["holds"], status["leases"], status["quarantined"], status["waiting_count"]) == (0, 0, 0, 0)
    assert status["pool"]["used"] == status["pool"]["idle"]
    messages = status["daemon"]["messages_in"] + status["daemon"]["messages_out"]
    assert messages < 12 * FEATURES


def test_a_modest_namespace_beside_a_greedy_one(stage: Stage, work: Load) -> None:
    """Half of the arena is its engine's: six threads that always want more get less each than one that shares with
    nobody."""
    work.engine("greedy-engine", namespace="greedy")
    work.engine("modest-engine", namespace="modest")
    for n in range(3):
        work.producer(f"greedy-{n}", ["greedy-engine"], namespace="greedy", size=4 * MIB)
    modest = work.producer("modest", ["modest-engine"], namespace="modest", threads=1, count=40, size=4 * MIB)
    modest.post("join")
    done = modest.answer()["result"]
    assert set(done) == FINE
    assert done["features"] == done["right"] == 40
    counts = work.finish("end")
    assert not [name for name in counts if name.startswith(("fell", "broke"))]
    assert counts["right"] - 40 < 40 * 6, "each greedy thread got as much, or more"


def test_a_stopped_engine_delays_nobody() -> None:
    assert stopped.run()["slow_engine_in_flight_mib"] > 0


def test_everybody_returns_after_restarts() -> None:
    restarts.run([0.01, 0.1, 0.5], SEED)
