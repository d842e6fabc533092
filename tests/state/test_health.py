"""Health means progress: bad when work is pending and nothing has finished for two seconds; it says what is stuck."""

from __future__ import annotations

from typing import Any

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind

from .shell import Peer, Shell, item
from .world import hit, kinds


def health(shell: Shell) -> dict[str, Any]:
    return shell.report()["health"]


def fine(shell: Shell) -> None:
    assert health(shell)["ok"]
    assert health(shell)["stuck"] == []


def stuck(shell: Shell, *words: str) -> None:
    """It is bad, and one sentence has all these words."""
    found = health(shell)
    assert not found["ok"], found
    assert any(all(word in sentence for word in words) for sentence in found["stuck"]), found


def full() -> tuple[Shell, Peer, Peer]:
    """An arena without room, its holder, and one who waits."""
    shell = Shell(pages=8, segment=8)
    holder, waiter = shell.client("holder"), shell.client("waiter")
    holder.put(item("held", 8))
    waiter.create(item("x"), timeout=60.0)
    return shell, holder, waiter


def test_a_broker_that_nobody_uses_is_fine() -> None:
    shell = Shell()
    assert health(shell) == {"ok": True, "stuck": [], "oldest_pending_s": 0.0, "last_finished_s": 0.0}
    peer = shell.client()
    peer.put(item("x"))
    shell.advance(3600.0)
    assert health(shell) == {"ok": True, "stuck": [], "oldest_pending_s": 0.0, "last_finished_s": 3600.0}


def test_work_that_begins_after_an_hour_without_any_is_not_stuck() -> None:
    shell = Shell(pages=8, segment=8)
    peer = shell.client()
    peer.put(item("held", 8))
    shell.advance(3600.0)
    peer.create(item("x"), timeout=60.0)
    shell.advance(1.75)
    fine(shell)
    assert health(shell)["oldest_pending_s"] == 1.75
    shell.advance(0.25)
    stuck(shell, "1 call waits", "full of held features", "for 2.0 s")


def test_it_is_well_again_as_soon_as_something_finishes() -> None:
    shell, holder, waiter = full()
    shell.advance(2.0)
    stuck(shell, "'waiter-2' (pid 10002)", "4096 bytes requested", "drop holds")
    holder.drop(1)
    assert kinds(waiter, 1) == ["Leased"]
    fine(shell)
    assert health(shell)["last_finished_s"] == 0.0


def test_one_wait_is_no_matter_while_others_get_on() -> None:
    shell, holder, _ = full()
    for _ in range(10):
        shell.advance(1.0)
        holder.drop(hit(holder, item("held", 8)))
    assert health(shell)["oldest_pending_s"] == 10.0
    fine(shell)


def test_a_call_that_is_served_is_progress_for_all() -> None:
    """Nothing else has finished: a lease was given back."""
    shell = Shell(pages=8, segment=8)
    writer, small, large = (shell.client() for _ in range(3))
    lease, _ = writer.lease(item("a", 4), item("b", 4))
    served = small.create(item("x", 4), timeout=60.0)
    large.create(item("y", 8), timeout=60.0)
    shell.advance(3.0)
    stuck(shell, "2 calls wait")
    writer.abort(lease)
    assert kinds(small, served) == ["Leased"]
    assert health(shell)["oldest_pending_s"] == 3.0
    fine(shell)


@pytest.mark.parametrize(
    "noise",
    [
        lambda peer: peer.status(),
        lambda peer: peer.ask(m.Lookup([item("unknown").key])),
        lambda peer: peer.failure(m.Create([item("x")], "nobody"), "NoSuchEngine"),
        lambda peer: peer.failure(m.Create([item("y")]), "PoolFull", timeout=0.0),
        lambda peer: peer.cast(m.Tally({"puts": 1})),
        lambda peer: peer.shell.handle(e.Tick()),
        lambda peer: peer.shell.client("passer-by").end(),
    ],
    ids=["status", "a miss", "a refusal", "a deadline", "a tally", "a tick", "a client comes and goes"],
)
def test_asking_is_no_progress(noise: Any) -> None:
    shell, _, _ = full()
    asker = shell.client("asker")
    for _ in range(3):
        shell.advance(1.0)
        noise(asker)
    stuck(shell, "1 call waits")


def test_a_rank_that_does_not_acknowledge_is_named_with_its_oldest_feature() -> None:
    """One of eight ranks stands still: who, which process, which feature, since when."""
    shell = Shell()
    ranks = shell.engine(world=8)
    producer = shell.client()
    producer.put(item("before"), to="engine")
    ranks[5].prompt = False
    producer.seal(producer.lease(item("x")), "engine", timeout=60.0)
    shell.advance(0.5)
    producer.seal(producer.lease(item("y")), "engine", timeout=60.0)
    shell.advance(2.0)
    stuck(
        shell, "rank 5 (pid 10006)", "'engine'", "feature 2 (2 in all)", "for 2.5 s", "stopped or overloaded"
    )
    assert len(health(shell)["stuck"]) == 1
    ranks[5].ack()
    fine(shell)


def test_calls_that_give_up_early_do_not_hide_a_rank_that_stands_still() -> None:
    shell = Shell()
    (rank,) = shell.engine(prompt=False)
    producer = shell.client()
    for name in range(4):
        producer.seal(producer.lease(item(name), to="engine"), "engine", timeout=0.5)
        shell.advance(0.75)
    stuck(shell, f"(pid {rank.pid})", "(4 in all)", "for 3.0 s")


def test_a_rank_that_ended_is_waited_for_no_more() -> None:
    shell = Shell()
    (rank,) = shell.engine(prompt=False)
    producer = shell.client()
    producer.seal(producer.lease(item("x")), "engine", timeout=60.0)
    shell.advance(5.0)
    stuck(shell, f"(pid {rank.pid})")
    rank.end(alive=True)
    fine(shell)


def test_whoever_writes_a_key_is_named() -> None:
    shell = Shell()
    writer, waiter = shell.client("writer"), shell.client("waiter")
    writer.lease(item("x", kind=Kind.DERIVED))
    waiter.create(item("x", kind=Kind.DERIVED), timeout=60.0)
    shell.advance(1.0)
    waiter.create(item("x", kind=Kind.DERIVED), timeout=60.0)
    shell.advance(3.0)
    stuck(shell, "2 calls wait", "for 4.0 s", "'writer-1' (pid 10001) must seal the same key first")


def test_an_engines_budget_is_named() -> None:
    shell = Shell()
    shell.engine("left")
    shell.engine("right")
    peer = shell.client()
    peer.put(item("a", 6), to="left")
    peer.create(item("b", 4), to="left", timeout=60.0)
    shell.advance(2.0)
    stuck(shell, "engine 'left' has 24576 bytes in flight of its budget of 32768", "end some of its requests")


def test_memory_that_does_not_come_is_named() -> None:
    shell = Shell(grow=None)
    peer = shell.client()
    peer.create(item("held", 8))
    shell.grown(True)
    peer.create(item("x"), timeout=60.0)
    shell.advance(2.0)
    stuck(shell, "the next segment is not there yet")
    shell.grown(False)
    stuck(shell, "the arena cannot grow: memory limit of cgroup test is reached", "raise that limit")
    shell.advance(1.0)
    shell.grown(True)
    fine(shell)


def test_how_long_is_a_setting() -> None:
    shell = Shell(pages=8, segment=8, stuck_after=0.5)
    peer = shell.client()
    peer.put(item("held", 8))
    peer.create(item("x"), timeout=60.0)
    shell.advance(0.25)
    fine(shell)
    shell.advance(0.25)
    stuck(shell, "for 0.5 s")


def test_the_report_stays_short_however_much_is_stuck() -> None:
    """The oldest first; what is left out is younger."""
    shell = Shell(pages=8, segment=8)
    shell.client("holder").put(item("held", 8))
    for waiter in reversed([shell.client(namespace=f"n{n}") for n in range(40)]):
        waiter.create(item("x"), timeout=60.0)
        shell.advance(0.125)
    shell.advance(2.0)
    sentences = health(shell)["stuck"]
    assert len(sentences) == 16
    assert all(f"for {7 - n / 8:.1f} s" in sentence for n, sentence in enumerate(sentences)), sentences
