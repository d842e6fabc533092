"""Ends: of producers and of ranks. What may still be touched is not used again."""

from __future__ import annotations

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind

from .shell import PAGE, Peer, Shell, item
from .world import exists, hit, kinds, refs, results

# --- producers ------------------------------------------------------------------------------------------------------


def test_a_dead_writers_slot_is_its_own_until_its_process_is_gone() -> None:
    shell = Shell(pages=4, segment=4)
    peer, waiter = shell.client(), shell.client()
    (lease,) = peer.lease(item("x", 4))
    seq = waiter.create(item("y", 4), timeout=3000.0)
    peer.end(alive=True)
    assert (shell.report()["leases"], shell.report()["quarantined"]) == (0, 4 * PAGE)
    shell.advance(1000.0)
    assert seq not in waiter.answers, "it could still write"
    peer.gone()
    (own,) = results(waiter, seq)
    assert isinstance(own, m.Leased)
    assert own.generation > lease.generation
    assert shell.report()["quarantined"] == 0


def test_a_dead_writers_key_is_free_at_once() -> None:
    shell = Shell()
    peer, waiter = shell.client(), shell.client()
    peer.lease(item("x", kind=Kind.DERIVED))
    seq = waiter.create(item("x", kind=Kind.DERIVED))
    peer.end(alive=True)
    assert kinds(waiter, seq) == ["Leased"]


def test_a_writer_whose_process_has_gone_already_leaves_nothing() -> None:
    shell = Shell()
    peer = shell.client()
    peer.lease(item("x"))
    peer.end(alive=False)
    report = shell.report()
    assert (report["pool"]["used"], report["ghosts"], report["sessions"]) == (0, [], [])


def test_a_retained_slot_stays_until_the_process_is_gone() -> None:
    shell = Shell()
    peer = shell.client()
    refs(peer, peer.seal(peer.lease(item("x")), retained=True))
    peer.end(alive=True)
    assert (shell.report()["writer_pins"], shell.report()["features_idle"]) == (1, 0)
    peer.gone()
    assert (shell.report()["writer_pins"], shell.report()["features_idle"]) == (0, 1)


def test_a_dead_producers_holds_go_on_for_the_grace_time() -> None:
    shell = Shell(producer_grace=30.0)
    peer = shell.client()
    (rank,) = shell.engine()
    (ref,) = peer.put(item("x"), to="engine")
    peer.end()
    shell.advance(29.75)
    assert list(rank.entries) == [ref.hold], "a request that was sent is still served"
    rank.prompt = False
    shell.advance(0.25)
    assert list(rank.dismissed) == [ref.hold]
    rank.settle()
    assert shell.report()["holds"] == 0


@pytest.mark.parametrize("ends", ["killed", "settled", "detached"])
@pytest.mark.parametrize("producer_first", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_a_dead_producers_holds_end_with_the_engine(world: int, producer_first: bool, ends: str) -> None:
    """Nobody is left whom the grace time would serve, whoever of them was the first to go."""
    shell = Shell(producer_grace=30.0)
    peer = shell.client()
    ranks = shell.engine(world=world)
    (ref,) = peer.put(item("x"), to="engine")
    if producer_first:
        peer.end()
    for rank in ranks:
        assert shell.report()["holds"] == 1
        if ends == "killed":
            rank.end(alive=True)
            rank.gone()
        elif ends == "settled":
            rank.cast(m.Settle([ref.hold]))
        else:
            rank.cast(m.Settle([ref.hold]))
            rank.call(m.Detach())
    if not producer_first:
        assert shell.report()["holds"] == 1, "the producer still has it"
        peer.end()
    report = shell.report()
    assert (report["holds"], report["features_idle"]) == (0, 1)


def test_a_dead_producers_own_holds_end_at_once() -> None:
    shell = Shell(pages=4, segment=4)
    peer, waiter = shell.client(), shell.client()
    peer.put(item("x", 4))
    seq = waiter.create(item("y", 4))
    peer.end(alive=True)
    assert kinds(waiter, seq) == ["Leased"]


def test_what_a_dead_producer_was_still_asking_for_is_over_at_once() -> None:
    shell = Shell()
    peer = shell.client()
    (rank,) = shell.engine(prompt=False)
    seq = peer.seal(peer.lease(item("x")), "engine")
    rank.ack()
    seq = peer.seal(peer.lease(item("y")), "engine")
    assert seq not in peer.answers
    (asked,) = rank.granted
    peer.end()
    assert list(rank.dismissed) == [asked], "nobody has seen that reference"
    assert seq not in peer.answers, "nor is anybody there to be told"


def test_what_a_dead_client_waited_for_is_forgotten() -> None:
    shell = Shell(pages=4, segment=4)
    peer, waiter = shell.client(), shell.client()
    (held,) = peer.put(item("x", 4))
    waiter.create(item("y", 4))
    waiter.end()
    peer.drop(held)
    assert (shell.report()["leases"], shell.report()["waiting"]) == (0, [])


def test_after_its_end_a_session_is_not_heard() -> None:
    shell = Shell()
    peer = shell.client()
    (lease,) = peer.lease(item("x"))
    peer.end(alive=True)
    assert (
        shell.broker.handle(e.Called(peer.number, 50, 5.0, m.Seal([m.Sealing(lease.lease)])), shell.now) == []
    )
    assert shell.broker.handle(e.Called(peer.number, 0, 0.0, m.Abort([lease.lease])), shell.now) == []
    assert shell.broker.handle(e.Called(peer.number, 51, 5.0, m.Create([item("y")])), shell.now) == []
    assert (shell.report()["quarantined"], shell.report()["leases"]) == (PAGE, 0)


# --- ranks ----------------------------------------------------------------------------------------------------------


def held_by_rank(shell: Shell) -> tuple[Peer, Peer, int]:
    """A producer that let go of a feature of 4 pages that a rank has not settled, and a create that waits for it."""
    peer = shell.client()
    (rank,) = shell.engine()
    (ref,) = peer.put(item("x", 4), to="engine")
    rank.prompt = False
    peer.drop(ref)
    return peer, rank, peer.create(item("y", 4), timeout=3000.0)


def test_a_rank_has_settled_everything_when_its_process_is_gone() -> None:
    shell = Shell(pages=4, segment=4)
    peer, rank, seq = held_by_rank(shell)
    rank.end(alive=True)
    shell.advance(1000.0)
    assert seq not in peer.answers, "the end of its session is not the end of its tensors"
    assert [ghost["grants"] for ghost in shell.report()["ghosts"]] == [1]
    rank.gone()
    assert kinds(peer, seq) == ["Leased"]
    assert not shell.report()["ghosts"]


def test_a_rank_whose_process_has_gone_already() -> None:
    shell = Shell(pages=4, segment=4)
    peer, rank, seq = held_by_rank(shell)
    rank.end(alive=False)
    assert kinds(peer, seq) == ["Leased"]


def test_a_process_may_confirm_that_it_let_go_of_an_earlier_session() -> None:
    shell = Shell(pages=4, segment=4)
    peer, rank, seq = held_by_rank(shell)
    rank.end(alive=True)
    back = shell.client(pid=rank.pid)
    back.attach("engine")
    assert seq not in peer.answers, "attaching again is no confirmation"
    assert isinstance(back.ask(m.Released(rank.number)), m.Done)
    assert kinds(peer, seq) == ["Leased"]


def test_who_attaches_again_hears_of_holds_that_ended_meanwhile() -> None:
    """Its table still has them: they would stay until they expire there."""
    shell = Shell()
    peer = shell.client()
    (rank,) = shell.engine()
    early, late = peer.put(item("x"), to="engine") + peer.put(item("y"), to="engine")
    rank.end(alive=True)
    peer.drop(early)
    back = shell.client(pid=rank.pid)
    back.attach("engine")
    back.cast(m.Kept([early.hold, late.hold]))
    assert back.told == {early.hold}
    peer.drop(late)
    assert back.told == {early.hold, late.hold}
    assert shell.report()["holds"] == 2, "it has yet to say that it let go"
    back.ask(m.Released(rank.number))
    assert shell.report()["holds"] == 0


def test_who_cannot_be_traced_hears_of_them_too() -> None:
    """The broker has forgotten its earlier session, but not what was granted to it."""
    shell = Shell()
    peer, rank = shell.client(), shell.client(traceable=False)
    rank.prompt = True
    rank.attach("engine")
    early, late = peer.put(item("x"), to="engine") + peer.put(item("y"), to="engine")
    rank.end(alive=True)
    peer.drop(early)
    assert shell.report()["ghosts"] == []
    back = shell.client(traceable=False)
    back.attach("engine")
    back.cast(m.Kept([early.hold, late.hold]))
    assert back.told == {early.hold}
    peer.drop(late)
    assert back.told == {early.hold, late.hold}
    assert (shell.report()["holds"], shell.report()["counters"].get("unknown_holds", 0)) == (0, 0)


def test_nobody_learns_of_another_engines_holds() -> None:
    """Numbers of what lives, of what is over and of what never was are answered alike, and nothing follows."""
    shell = Shell()
    peer = shell.client()
    shell.engine()
    living, over = peer.put(item("x"), to="engine") + peer.put(item("y"), to="engine")
    peer.drop(over)
    for namespace, engine in (("a", "other"), ("b", "engine")):
        stranger = shell.client(namespace=namespace)
        stranger.attach(engine)
        stranger.cast(m.Kept([living.hold, over.hold, 10**6]))
        assert stranger.told == {living.hold, over.hold, 10**6}
    unattached, (for_none,) = shell.client(), peer.put(item("z"))
    unattached.cast(m.Kept([living.hold, for_none.hold]))
    assert unattached.told == {living.hold, for_none.hold}
    assert shell.report()["holds"] == 2


def test_being_told_keeps_nothing() -> None:
    """A rank that says it keeps what it was never granted delays no slot, and hears of its end once."""
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    first, second = shell.engine(world=2)
    (ref,) = peer.put(item("x", 4), to="engine")
    late = shell.client(pid=first.pid)
    late.prompt = True
    first.end(alive=False)
    late.attach("engine", 0, 2)
    for _ in range(2):
        late.cast(m.Kept([ref.hold]))
    (other,) = peer.put(item("y", 0), to="engine")
    late.cast(m.Kept([other.hold]))
    peer.drop(ref)
    assert late.told == {ref.hold}
    assert not second.entries.keys() - {other.hold}
    late.ask(m.Detach())
    peer.drop(other)
    assert shell.report()["holds"] == 0


def test_nobody_else_may_confirm_that() -> None:
    shell = Shell(pages=4, segment=4)
    peer, rank, seq = held_by_rank(shell)
    rank.end(alive=True)
    for stranger in (peer, shell.client(), shell.client(namespace="b", pid=rank.pid)):
        stranger.failure(m.Released(rank.number), "UnknownSession")
    assert seq not in peer.answers
    assert isinstance(peer.ask(m.Released(10**6)), m.Done), "what is not known has been let go of"


def test_a_confirmation_may_come_before_the_end() -> None:
    """The new session can be quicker than the news of the old one's end."""
    shell = Shell(pages=4, segment=4)
    peer, rank, seq = held_by_rank(shell)
    back = shell.client(pid=rank.pid)
    back.ask(m.Released(rank.number))
    assert seq not in peer.answers
    rank.end(alive=True)
    assert kinds(peer, seq) == ["Leased"]


def test_a_lost_rank_leaves_the_others_and_the_holds_alone() -> None:
    shell = Shell()
    peer = shell.client()
    one, two = shell.engine(world=2)
    (ref,) = peer.put(item("x"), to="engine")
    one.end()
    assert list(two.entries) == [ref.hold]
    peer.drop(ref)
    assert shell.report()["holds"] == 0
    assert not two.entries


def test_a_segment_that_an_untraceable_process_may_write_is_never_used_again() -> None:
    shell = Shell(pages=8, segment=4)
    peer, ghost = shell.client(), shell.client(traceable=False)
    (neighbour,) = peer.put(item("neighbour"))
    peer.drop(*peer.put(item("idle")))
    (lease,) = ghost.lease(item("x"))
    ghost.end(alive=True)
    assert not shell.report()["ghosts"], "nothing more will be heard of it"
    assert [arena["retired"] for arena in shell.report()["arenas"]] == [1]
    assert exists(shell, item("neighbour"), item("idle")) == [True, False]
    (fresh,) = peer.lease(item("fresh"))
    assert fresh.segment != lease.segment
    assert not peer.retired, "what is held in it stays"
    peer.drop(neighbour)
    assert peer.retired == [lease.segment]
    assert exists(shell, item("neighbour")) == [False]
    assert shell.report()["pool"]["used"] == PAGE


@pytest.mark.parametrize("what", ["reads", "retains"])
def test_what_an_untraceable_process_may_touch_stays_readable_and_takes_its_segment_along(what: str) -> None:
    shell = Shell(pages=4, segment=4)
    peer, ghost = shell.client(), shell.client(traceable=False)
    if what == "reads":
        ghost.attach("engine")
        ghost.prompt = True
        (ref,) = peer.put(item("x"), to="engine")
        (grant,) = ghost.entries.values()
        segment = grant.segment
        ghost.end(alive=True)
        peer.drop(ref)
    else:
        (lease,) = ghost.lease(item("x"))
        segment = lease.segment
        refs(ghost, ghost.seal([lease], retained=True))
        ghost.end(alive=True)
    peer.drop(hit(peer, item("x")))
    assert not peer.retired
    (lease,) = peer.lease(item("y", 4))
    assert lease.segment != segment
    assert shell.counters()["segments_discarded"] == 1


def test_what_an_untraceable_writer_kept_of_a_lost_race_takes_its_segment_along() -> None:
    shell = Shell(pages=4, segment=4)
    peer, ghost = shell.client(), shell.client(traceable=False)
    (slow,) = ghost.lease(item("x"))
    seq = peer.create(item("x"))
    shell.advance(0.25)
    peer.drop(
        *refs(peer, peer.seal([result for result in results(peer, seq) if isinstance(result, m.Leased)]))
    )
    ghost.drop(*refs(ghost, ghost.seal([slow], retained=True)))
    ghost.end(alive=True)
    assert shell.report()["pool"]["capacity"] == 0, "nobody else had anything there"
    (fresh,) = peer.lease(item("y", 4))
    assert fresh.segment != slow.segment


def test_an_untraceable_writers_segment_loses_all_its_idle_features_first() -> None:
    shell = Shell(pages=8, segment=8)
    peer, ghost = shell.client(), shell.client(traceable=False)
    (lease,) = ghost.lease(item("x"))
    for name in range(3):
        peer.drop(*peer.put(item(name)))
    ghost.end(alive=True)
    assert peer.retired == [lease.segment]
    assert shell.report()["features"] == 0
    assert shell.report()["pool"]["capacity"] == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_hit_whose_segment_is_retired_while_room_is_made(elsewhere: bool) -> None:
    """It is held if there is room for the rest of the batch, and else made again, with all the room there is."""
    shell = Shell(pages=16 if elsewhere else 8)
    peer, ghost = shell.client(), shell.client(traceable=False)
    ghost.attach("engine")
    ghost.prompt = True
    refs = [*peer.put(item("tainted", 3)), *peer.put(item("hit", 3))]
    if elsewhere:
        refs += peer.put(item("old", 7))
    seq = peer.call(m.Lookup([item("tainted").key], "engine"))
    answer = peer.answers[seq]
    assert isinstance(answer, m.Found)
    ghost.end(alive=True)
    peer.drop(*filter(None, answer.refs), *refs)  # the tainted one is evicted first
    created = peer.ask(m.Create([item("hit", 3), item("new", 5)]))
    assert isinstance(created, m.Created), created
    hit, new = created.results
    assert isinstance(new, m.Leased)
    if elsewhere:
        assert isinstance(hit, m.Hit)
        peer.drop(hit.ref)
    else:
        assert isinstance(hit, m.Leased)
        peer.abort(hit)
    peer.abort(new)
    assert shell.report()["pool"]["held"] == 0
    peer.put(item("all of it", 8), item("more", 8) if elsewhere else item("nothing", 0))
