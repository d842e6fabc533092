"""Seals, grants, dismissals: when a call is answered, and when a slot may be used again."""

from __future__ import annotations

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m

from .shell import PAGE, Peer, Shell, form, item, key
from .world import exists, failed, hit, kinds, of_type, refs, results


def slow_engine(shell: Shell, world: int = 2) -> list[Peer]:
    return shell.engine(world=world, prompt=False)


# --- seals ----------------------------------------------------------------------------------------------------------


def test_a_seal_is_answered_when_every_rank_has_acknowledged() -> None:
    shell = Shell()
    peer = shell.client()
    one, two = slow_engine(shell)
    leases = peer.lease(item("x"), item("y"), to="engine")
    seq = peer.seal(leases, "engine")
    assert [len(rank.granted) for rank in (one, two)] == [2, 2]
    one.ack()
    x, y = two.granted
    two.ack([x])
    assert seq not in peer.answers
    two.ack([y])
    assert [ref.hold for ref in refs(peer, seq)] == [x, y]


def test_a_rank_gets_the_descriptor_before_the_grant() -> None:
    shell = Shell()
    peer = shell.client()
    (rank,) = slow_engine(shell, 1)
    (lease,) = peer.lease(item("x"), to="engine")
    effects = shell.handle(e.Called(peer.number, 77, 5.0, m.Seal([m.Sealing(lease.lease)], "engine")))
    mine = [f for f in effects if isinstance(f, e.SendSegment | e.Notify) and f.session == rank.number]
    assert [type(f) for f in mine] == [e.SendSegment, e.Notify]
    assert mine[0] == e.SendSegment(rank.number, lease.segment, writable=False), "ranks only read"
    (grant,) = rank.granted.values()
    assert (grant.segment, grant.offset, grant.ref.generation) == (
        lease.segment,
        lease.offset,
        lease.generation,
    )
    assert (grant.ref.dtype, grant.ref.shape, grant.ref.nbytes, grant.modality) == (
        "uint8",
        (PAGE,),
        PAGE,
        "image",
    )


def test_a_hit_with_an_engine_is_answered_when_every_rank_has_acknowledged() -> None:
    shell = Shell()
    peer = shell.client()
    peer.put(item("x"))
    one, two = slow_engine(shell)
    seq = peer.create(item("x"), item("y"), to="engine")
    one.ack()
    assert seq not in peer.answers
    two.ack()
    assert kinds(peer, seq) == ["Hit", "Leased"]


def test_a_lookup_with_an_engine_is_answered_when_every_rank_has_acknowledged() -> None:
    shell = Shell()
    peer = shell.client()
    peer.put(item("x"))
    (rank,) = slow_engine(shell, 1)
    seq = peer.call(m.Lookup([key("x"), key("none")], "engine"))
    assert seq not in peer.answers
    rank.ack()
    answer = peer.answers[seq]
    assert isinstance(answer, m.Found)
    assert [ref is not None for ref in answer.refs] == [True, False]


@pytest.mark.parametrize("private", [False, True])
def test_a_grant_says_whether_it_is_private(private: bool) -> None:
    shell = Shell()
    peer = shell.client()
    (rank,) = slow_engine(shell, 1)
    (lease,) = peer.lease(item("x"))
    peer.call(m.Seal([m.Sealing(lease.lease)], "engine", private))
    assert [grant.private for grant in rank.granted.values()] == [private]


def test_the_first_seal_wins_and_another_form_is_a_conflict() -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    first, second = one.lease(item("x")), two.create(m.Item(key("x"), form(2)))
    shell.advance(0.25)
    (lease,) = results(two, second)
    assert isinstance(lease, m.Leased)
    one.seal(first)
    failure = failed(two, two.seal([lease]), "DigestConflict")
    assert failure.figures == {"requested": 2 * PAGE, "existing": PAGE}
    assert hit(two, item("x")).shape == (PAGE,), "the first stays"
    assert shell.report()["pool"]["used"] == PAGE, "the other one's slot is free"


def test_a_conflict_seals_nothing_of_its_batch() -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    (clean,) = two.lease(item("clean"))
    first, second = one.lease(item("x")), two.create(m.Item(key("x"), form(2)))
    shell.advance(0.25)
    (lease,) = results(two, second)
    assert isinstance(lease, m.Leased)
    one.seal(first)
    failed(two, two.seal([clean, lease]), "DigestConflict")
    assert exists(shell, item("clean")) == [False]
    assert len(refs(two, two.seal([clean]))) == 1, "its other lease is still open"


def test_a_lease_is_sealed_once_and_by_its_owner() -> None:
    shell = Shell()
    peer, other = shell.client(), shell.client()
    (lease,) = peer.lease(item("x"))
    assert "never yours" in failed(other, other.seal([lease]), "LeaseClosed").message
    failed(peer, peer.seal([lease, lease]), "InvalidMessage")
    refs(peer, peer.seal([lease]))
    failed(peer, peer.seal([lease]), "LeaseClosed")


# --- engines --------------------------------------------------------------------------------------------------------


def test_an_unknown_engine_is_told_with_those_that_are_attached() -> None:
    shell = Shell()
    peer = shell.client()
    shell.engine("beta")
    shell.engine("alpha")
    shell.engine("foreign", namespace="b")
    (lease,) = peer.lease(item("x"))
    for body in (
        m.Create([item("y")], "gamma"),
        m.Lookup([key("y")], "gamma"),
        m.Seal([m.Sealing(lease.lease)], "gamma"),
    ):
        failure = peer.failure(body, "NoSuchEngine")
        assert "'gamma'" in failure.message
        assert "attached engines: alpha, beta;" in failure.message, "and nothing of another namespace"
    refs(peer, peer.seal([lease]))


def test_no_engine_at_all() -> None:
    shell = Shell()
    failure = shell.client().failure(m.Create([item("y")], "gamma"), "NoSuchEngine")
    assert "attached engines: none" in failure.message


def test_an_engine_is_there_when_all_its_ranks_are() -> None:
    shell = Shell()
    peer = shell.client()
    ranks = [shell.client() for _ in range(3)]
    assert not ranks[1].attach("engine", 1, 3).complete
    assert "lacks rank(s) [0, 2]" in peer.failure(m.Create([item("x")], "engine"), "NoSuchEngine").message
    assert not ranks[0].attach("engine", 0, 3).complete
    assert ranks[2].attach("engine", 2, 3).complete
    assert kinds(peer, peer.create(item("x"), to="engine")) == ["Leased"]
    ranks[0].ask(m.Detach())
    (lease,) = peer.lease(item("y"))
    for body in (m.Create([item("z")], "engine"), m.Seal([m.Sealing(lease.lease)], "engine")):
        assert "lacks rank(s) [0]" in peer.failure(body, "NoSuchEngine").message
    refs(peer, peer.seal([lease]))


@pytest.mark.parametrize(
    ("engine", "rank", "world", "access", "says"),
    [
        ("engine", 0, 2, "copy", "is attached by 'engine-rank-1' (pid 10001)"),
        ("engine", 1, 3, "copy", "world of 2, not 3"),
        ("", 0, 1, "copy", "name has 1 to"),
        ("e" * 129, 0, 1, "copy", "name has 1 to"),
        ("other", 2, 2, "copy", "rank 2 of 2 is not possible"),
        ("other", -1, 2, "copy", "rank -1 of 2 is not possible"),
        ("other", 0, 5000, "copy", "at most 4096"),
        ("other", 0, 1, "writable", "not 'writable'"),
    ],
)
def test_an_attach_that_cannot_be(engine: str, rank: int, world: int, access: str, says: str) -> None:
    shell = Shell()
    shell.engine("engine", 2)
    peer = shell.client()
    assert says in peer.failure(m.Attach(engine, rank, world, access=access), "InvalidMessage").message
    peer.attach("other")
    assert "already" in peer.failure(m.Attach("third", 0, 1), "InvalidMessage").message


def test_a_failed_grant_fails_the_seal_and_names_the_rank() -> None:
    shell = Shell()
    peer = shell.client()
    one, two = slow_engine(shell)
    seq = peer.seal(peer.lease(item("x")), "engine")
    (hold,) = two.granted
    two.ack([], [hold], "cannot map segment 1")
    assert seq not in peer.answers, "all ranks are heard first"
    one.ack()
    failure = failed(peer, seq, "FeatureError")
    for word in ("rank 1", "'engine'", f"pid {two.pid}", "cannot map segment 1", "another way"):
        assert word in failure.message
    assert list(one.dismissed) == [hold], "the other rank lets go of its entry"
    assert shell.report()["pool"]["idle"] == 0
    one.settle()
    assert shell.report()["holds"] == 0
    assert shell.report()["pool"]["idle"] == PAGE, "the feature itself stays"


def test_a_rank_that_does_not_answer_is_named_at_the_deadline() -> None:
    shell = Shell()
    peer = shell.client()
    one, two = slow_engine(shell)
    seq = peer.seal(peer.lease(item("x"), item("y")), "engine", timeout=3.5)
    one.ack()
    shell.advance(3.25)
    assert seq not in peer.answers
    shell.advance(0.25)
    failure = failed(peer, seq, "EngineLagging")
    assert failure.figures == {"rank": 1, "pid": two.pid, "waited_ms": 3500}
    for word in ("'engine'", f"rank 1 (pid {two.pid})", "3.5 s"):
        assert word in failure.message
    assert "rank 0" not in failure.message
    assert len(one.dismissed) == 2, "nobody has the references: the holds are over"


def test_a_lagging_rank_is_reported_and_other_engines_carry_on() -> None:
    shell = Shell()
    peer = shell.client()
    slow_engine(shell, 1)
    shell.engine("brisk")
    seq = peer.seal(peer.lease(item("x")), "engine", timeout=10.0)
    shell.advance(2.0)
    lagging = {engine["engine"]: engine["ranks"][0]["lagging"] for engine in shell.report()["engines"]}
    assert lagging == {"engine": True, "brisk": False}
    peer.put(item("y"), to="brisk")
    assert seq not in peer.answers


def test_a_rank_that_goes_away_fails_the_seal_at_once() -> None:
    shell = Shell()
    peer = shell.client()
    one, two = slow_engine(shell)
    seq = peer.seal(peer.lease(item("x")), "engine")
    one.ack()
    two.end()
    assert f"rank 1 (pid {two.pid})" in failed(peer, seq, "NoSuchEngine").message
    assert len(one.dismissed) == 1


# --- dismissals -----------------------------------------------------------------------------------------------------


def test_a_slot_is_used_again_when_every_rank_has_settled() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    one, two = slow_engine(shell)
    for rank in (one, two):
        rank.prompt = True
    held = peer.put(item("x", 3), to="engine")
    for rank in (one, two):
        rank.prompt = False
    seq = peer.create(item("y", 3))
    peer.drop(*held)
    assert [list(rank.dismissed) for rank in (one, two)] == [[held[0].hold]] * 2
    one.settle()
    assert seq not in peer.answers, "the other may still read it"
    two.settle()
    assert kinds(peer, seq) == ["Leased"]


def test_two_holds_on_one_feature() -> None:
    shell = Shell(pages=4, segment=4)
    one, two = shell.client(), shell.client()
    (rank,) = shell.engine()
    (first,) = one.put(item("x", 3), to="engine")
    second = hit(two, item("x", 3), "engine")
    rank.prompt = False
    seq = one.create(item("y", 3))
    one.drop(first)
    rank.settle()
    assert seq not in one.answers
    assert list(rank.entries) == [second.hold]
    two.drop(second)
    assert seq not in one.answers
    rank.settle()
    assert kinds(one, seq) == ["Leased"]


def test_dismissed_features_stay_cached() -> None:
    shell = Shell()
    peer = shell.client()
    (rank,) = shell.engine()
    (ref,) = peer.put(item("x"), to="engine")
    peer.drop(ref)
    assert not rank.entries
    again = hit(peer, item("x"), "engine")
    assert (again.feature, again.generation) == (ref.feature, ref.generation)
    assert again.hold != ref.hold


def test_a_slot_used_again_has_a_new_generation() -> None:
    shell = Shell(pages=1, segment=1)
    peer = shell.client()
    (one,) = peer.put(item("x"))
    peer.drop(one)
    (two,) = peer.put(item("y"))
    assert two.generation > one.generation


def test_each_hold_is_dismissed_once_for_each_rank() -> None:
    shell = Shell()
    peer = shell.client()
    shell.engine(world=2)
    (ref,) = peer.put(item("x"), to="engine")
    effects = shell.handle(e.Called(peer.number, 0, 0.0, m.Drop([ref.hold, ref.hold])))
    assert len(of_type(effects, e.Notify)) == 2
    assert not shell.handle(e.Called(peer.number, 0, 0.0, m.Drop([ref.hold])))


def test_a_writers_tensor_pins_the_slot() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    (lease,) = peer.lease(item("x", 3))
    (ref,) = refs(peer, peer.seal([lease], retained=True))
    seq = peer.create(item("y", 3))
    peer.drop(ref)
    assert shell.report()["writer_pins"] == 1
    assert seq not in peer.answers, "the writer could still write over it"
    peer.cast(m.Unpin([lease.lease]))
    assert kinds(peer, seq) == ["Leased"]


def test_a_pinned_slot_that_lost_the_race_waits_for_its_writer_too() -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    (first,), seq = one.lease(item("x")), two.create(item("x"))
    shell.advance(0.25)
    (second,) = results(two, seq)
    assert isinstance(second, m.Leased)
    one.seal([first])
    refs(two, two.seal([second], retained=True))
    assert shell.report()["pool"]["used"] == 2 * PAGE
    two.cast(m.Unpin([second.lease]))
    assert shell.report()["pool"]["used"] == PAGE


@pytest.mark.parametrize("alive", [False, True], ids=["process over", "session over"])
def test_a_rank_that_reads_for_itself_ends_with_its_call(alive: bool) -> None:
    """Its own session's end is what ends the hold: there is nobody to dismiss."""
    shell = Shell()
    (rank,) = shell.engine(prompt=False)
    maker = shell.client()
    maker.drop(*maker.put(item("x")))
    seq = rank.call(m.Lookup([key("x")], "engine"), 60.0)
    assert rank.granted and seq not in rank.answers
    rank.end(alive)
    if alive:
        rank.gone()
    assert shell.report()["holds"] == 0
