"""What a process may still touch is nobody else's: dead writers, writers and readers that lost their session, and
kernels that cannot tell when a process has gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit import eventually

from . import killed
from .scene import MIB, Stage
from .zygote import Child, Lost


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """With bystanders; also on a kernel that gives no pidfd."""
    found = Stage()
    try:
        found.start(traceable=request.param)
        found.bystanders()
        yield found
    finally:
        found.close()


@pytest.fixture
def traced() -> Iterator[Stage]:
    found = Stage()
    try:
        found.start()
        found.bystanders()
        yield found
    finally:
        found.close()


def client(stage: Stage, name: str, **arm: Any) -> Child:
    child = stage.spawn(**arm)
    child.ask("connect", path=str(stage.directory), name=name)
    return child


def lose_session(child: Child) -> None:
    before = child.ask("reconnects")
    child.ask("cut", which="lifeline")
    assert child.ask("connected", reconnects=before + 1)


def work_through(stage: Stage, scribbler: Child) -> None:
    """The bystanders use the arena over and over while somebody writes to what was once leased."""
    for value in range(12):
        refs_and_bytes = put(stage)
        scribbler.ask("scribble", value=value)
        check(stage, *refs_and_bytes)


def put(stage: Stage) -> tuple[list[Any], list[int], list[int]]:
    sizes = [3 * MIB, 2 * MIB, 1]
    seeds = [next(stage.seeds) for _ in sizes]
    return stage.others[0].ask("put", seeds=seeds, sizes=sizes, to="c"), seeds, sizes


def check(stage: Stage, refs: list[Any], seeds: list[int], sizes: list[int]) -> None:
    read = stage.others[1].ask("check", refs=refs, seeds=seeds, sizes=sizes)
    assert read == {"missing": [], "wrong": []}
    stage.others[0].ask("drop")


@pytest.mark.parametrize("step", ["write", "write.half", "written", "seal.ask"])
def test_what_was_not_sealed_is_never_seen(traced: Stage, step: str) -> None:
    """The writer is killed with nothing, half or all of it written."""
    writer = client(traced, "writer", step=step, action="kill")
    with pytest.raises(Lost):
        writer.ask("put", seeds=[7], sizes=[3 * MIB], to=None)
    writer.end()
    assert traced.others[0].ask("lookup", seed=7, nbytes=3 * MIB, to=None) is None
    refs = traced.others[0].ask("put", seeds=[7], sizes=[3 * MIB], to="c")
    check(traced, refs, [7], [3 * MIB])
    traced.sweep()
    traced.audit()


def test_a_writer_that_lost_its_session_writes_on(stage: Stage) -> None:
    """Its slot stays its own. Without a pidfd nobody would learn of its end: the whole segment is used no more."""
    writer = client(stage, "writer")
    for seed in range(2):
        writer.ask("lease", seed=seed, nbytes=MIB)
    lose_session(writer)
    assert stage.status()["leases"] == 0
    quarantined = stage.status()["quarantined"]
    assert quarantined == (2 * MIB if stage.traceable else 0)
    work_through(stage, writer)
    assert stage.status()["quarantined"] == quarantined
    assert stage.status()["counters"].get("slots_abandoned", 0) == (0 if stage.traceable else 2)
    writer.ask("let_go")  # and says so
    stage.sweep()
    writer.end()
    stage.audit()


def test_a_writer_that_lost_its_session_is_killed(stage: Stage) -> None:
    writer = client(stage, "writer")
    writer.ask("lease", seed=1, nbytes=MIB)
    lose_session(writer)
    writer.end()
    stage.sweep()
    stage.audit()


def test_a_stopped_writer_that_lost_its_session(traced: Stage) -> None:
    """It has not heard of it, and writes as soon as it goes on."""
    writer = client(traced, "writer", step="write.half", action="stop")
    writer.post("put", seeds=[5], sizes=[MIB], to=None)
    eventually(lambda: writer.stopped, "a stop")
    traced.living.ask("arm", step="tick", action="cut lifeline", pids=[writer.pid])
    refs = put(traced)
    eventually(lambda: traced.status()["quarantined"] == MIB, "the session's end")
    check(traced, *refs)
    refs = put(traced)
    writer.signal(signal.SIGCONT)
    assert writer.answer()["error"] in ("BrokerLost", "LeaseBroken")
    check(traced, *refs)
    eventually(lambda: not traced.status()["quarantined"], "it has let go")
    writer.end()
    traced.sweep()
    traced.audit()


def test_a_reader_that_lost_its_session_reads_on(stage: Stage) -> None:
    """Its entries are right for as long as it uses them, whatever the others do."""
    producer, engine = client(stage, "producer"), client(stage, "engine")
    engine.ask("attach", engine="a", access="readonly")
    seeds, sizes = [11, 12], [2 * MIB, MIB]
    refs = producer.ask("put", seeds=seeds, sizes=sizes, to="a")
    engine.ask("hold_on", refs=refs)
    lose_session(engine)
    producer.ask("drop")
    for _ in range(6):
        check(stage, *put(stage))
        assert engine.ask("still_reads", seeds=seeds, sizes=sizes)
    engine.ask("release")
    assert engine.ask("at_rest"), "it was not told that its requests are over"
    stage.sweep()
    for child in (producer, engine):
        child.end()
    stage.audit()


def test_a_killed_engines_hundred_features_are_reusable_within_a_second() -> None:
    assert killed.run()["reusable_ms"]["worst"] > 0
