"""What namespaces, repeats and nonsense may not do; how the broker ends; what it says about itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind

from .shell import BOOT, PAGE, Shell, form, item, key
from .world import failed, of_type, refs

# --- namespaces -----------------------------------------------------------------------------------------------------


def test_another_namespaces_features_do_not_exist() -> None:
    """A miss looks the same whether nobody has the key, or somebody of another namespace."""
    answers = []
    for foreign in (False, True):
        shell = Shell()
        a, b = shell.client(namespace="a"), shell.client(namespace="b")
        a.put(item("x") if foreign else item("unrelated"))
        answers.append([b.ask(m.Lookup([key("x")])), b.ask(m.Create([item("x")]))])
    assert answers[0] == answers[1]
    assert answers[0][0] == m.Found([None])


@pytest.mark.parametrize("kind", list(Kind))
def test_another_namespaces_writer_is_not_waited_for(kind: Kind) -> None:
    shell = Shell()
    a, b = shell.client(namespace="a"), shell.client(namespace="b")
    (theirs,) = a.lease(item("x", kind=kind))
    (mine,) = b.lease(item("x", kind=kind))
    assert theirs.segment != mine.segment, "and lives in another segment"
    assert a.segments == {(theirs.segment, True)}
    assert b.segments == {(mine.segment, True)}
    a.seal([theirs])
    (ref,) = refs(b, b.seal([mine]))
    assert ref.generation == mine.generation
    assert shell.report()["features"] == 2


def test_another_namespaces_form_is_no_conflict() -> None:
    shell = Shell()
    shell.client(namespace="a").put(item("x", 2))
    shell.client(namespace="b").put(m.Item(key("x"), form(1)))


def test_engines_are_of_one_namespace() -> None:
    shell = Shell()
    shell.engine(namespace="a")
    b = shell.client(namespace="b")
    b.failure(m.Create([item("x")], "engine"), "NoSuchEngine")
    shell.engine(namespace="b")
    b.put(item("x"), to="engine")


# --- repeats and nonsense -------------------------------------------------------------------------------------------


def test_a_repeated_call_gets_the_same_answer_and_does_nothing() -> None:
    shell = Shell()
    peer = shell.client()
    seq = peer.create(item("x"))
    first = peer.answers.pop(seq)
    peer.call(m.Create([item("x")]), seq=seq)
    assert peer.answers[seq] is first
    assert shell.report()["leases"] == 1
    assert shell.counters()["repeated_calls"] == 1


def test_a_repeat_of_a_call_that_waits_is_answered_once() -> None:
    shell = Shell(pages=4, segment=4)
    peer, other = shell.client(), shell.client()
    (held,) = other.put(item("x", 4))
    seq = peer.create(item("y", 4))
    assert shell.handle(e.Called(peer.number, seq, 5.0, m.Create([item("y", 4)]))) == []
    effects = shell.handle(e.Called(other.number, 0, 0.0, m.Drop([held.hold])))
    assert [f.seq for f in of_type(effects, e.Respond) if isinstance(f, e.Respond)] == [seq]


def test_an_answer_that_is_no_longer_kept_is_not_made_up() -> None:
    shell = Shell(answers_kept=2)
    peer = shell.client()
    for seq in (1, 2, 3):
        peer.call(m.Lookup([key("x")]), seq=seq)
    peer.call(m.Create([item("x")]), seq=1)
    assert "no longer kept" in failed(peer, 1, "InvalidMessage").message
    assert shell.report()["leases"] == 0
    peer.call(m.Create([item("x")]), seq=3)
    assert isinstance(peer.answers[3], m.Found)


@pytest.mark.parametrize(
    ("cast", "counter"),
    [
        (m.Abort([7, 8]), "unknown_leases"),
        (m.Unpin([7, 8]), "unknown_leases"),
        (m.Drop([7, 8]), "unknown_holds"),
        (m.Ack([7], [8]), "unknown_holds"),
        (m.Ack([], loaded=[7], settled=[8]), "unknown_holds"),
        (m.Settle([7, 8]), "unknown_holds"),
        (m.Loaded([7, 8]), "unknown_holds"),
    ],
)
def test_casts_about_unknown_numbers_are_counted_and_ignored(cast: Any, counter: str) -> None:
    shell = Shell()
    peer = shell.client()
    assert shell.handle(e.Called(peer.number, 0, 0.0, cast)) == []
    assert shell.counters()[counter] == 2


NASTY = "\x1b[2J\x1b]0;owned\x07\n[/red]"


@pytest.mark.parametrize(
    "change", [{"engine": NASTY}, {"device": NASTY}, {"engine": ""}, {"device": "d" * 129}]
)
def test_names_that_would_move_a_cursor_are_refused(change: dict[str, str]) -> None:
    call = msgspec.structs.replace(m.Attach("engine", 0, 1), **change)
    failure = Shell().client().failure(call, "InvalidMessage")
    assert "printable" in failure.message


def test_what_others_say_is_shown_without_what_would_move_a_cursor() -> None:
    shell = Shell()
    producer, rank = shell.client(), shell.client()
    rank.ask(m.Attach("engine", 0, 1, path=NASTY, why=NASTY))
    rank.cast(m.Tally({NASTY: 1}))
    assert shell.counters()["tallies_refused"] == 1
    (shown,) = shell.report()["engines"][0]["ranks"]
    assert shown["why"].isprintable() and "[2J" in shown["why"] and shown["path"].isprintable()
    seq = producer.seal(producer.lease(item("x")), "engine")
    rank.ack([], failed=[1], reason=NASTY)
    assert failed(producer, seq, "FeatureError").message.isprintable()
    assert shell.counters()["grants_failed"] == 1


@pytest.mark.parametrize(
    "call", [m.Create([], tier="t" * 100_000), m.Attach("e", 0, 1, access="a" * 100_000)]
)
def test_a_refusal_is_short_however_long_the_call(call: m.Body) -> None:
    assert len(Shell().client().failure(call, "InvalidMessage").message) < 300


def test_casts_about_others_numbers_are_ignored() -> None:
    shell = Shell()
    peer, thief = shell.client(), shell.client()
    (rank,) = shell.engine()
    (ref,) = peer.put(item("x"), to="engine")
    (lease,) = peer.lease(item("y"))
    for cast in (m.Drop([ref.hold]), m.Settle([ref.hold]), m.Ack([], [ref.hold]), m.Abort([lease.lease])):
        assert shell.handle(e.Called(thief.number, 0, 0.0, cast)) == []
    assert list(rank.entries) == [ref.hold]
    refs(peer, peer.seal([lease]))


# --- the broker -----------------------------------------------------------------------------------------------------


def drain(shell: Shell, grace: float = 5.0) -> list[e.Effect]:
    return shell.handle(e.Drain(grace))


def test_with_nothing_being_written_it_ends_at_once() -> None:
    shell = Shell()
    shell.client().put(item("x"))
    assert drain(shell) == [e.Halt("drained")]
    shell.advance(60.0)
    assert shell.halted == ["drained"], "once"


def test_open_leases_may_be_sealed_and_no_new_ones_are_given() -> None:
    shell = Shell(pages=8, segment=8)
    peer, other = shell.client(), shell.client()
    (lease,) = peer.lease(item("x", 8))
    seq = other.create(item("y", 8))
    drain(shell)
    assert "draining" in failed(other, seq, "BrokerLost").message
    other.failure(m.Create([item("z")]), "BrokerLost")
    assert not shell.halted
    refs(peer, peer.seal([lease]))
    assert shell.halted == ["drained"]


def test_a_lease_that_stays_open_is_waited_for_until_the_grace_is_over() -> None:
    shell = Shell()
    shell.client().lease(item("x"))
    drain(shell, 5.0)
    shell.advance(4.75)
    assert not shell.halted
    shell.advance(0.25)
    assert shell.halted == ["1 lease(s) left open"]


def test_a_client_may_ask_for_the_end() -> None:
    shell = Shell()
    assert isinstance(shell.client().ask(m.Shutdown()), m.Done)
    assert shell.halted == ["drained"]
    assert shell.report()["draining"]


# --- what it says about itself --------------------------------------------------------------------------------------


def everything() -> Shell:
    """One of each: leases, holds, waits, ghosts, engines, retired segments."""
    shell = Shell(pages=8, segment=4)
    secret = 0x5EC2E75EC2E75EC
    shell.handle(e.SessionOpened(secret, 1000, 4242, "named", "a"))
    peer, ghost, lost = shell.client(), shell.client(), shell.client(traceable=False)
    shell.engine(world=2)
    peer.put(item("x"), to="engine")
    peer.cast(m.Tally({"puts": 3}))
    peer.lease(item("y", kind=Kind.DERIVED))
    peer.create(item("y", kind=Kind.DERIVED))
    lost.lease(item("lost"))
    lost.end(alive=True)
    ghost.lease(item("ghost"))
    ghost.end(alive=True)
    peer.create(item("big", 8))
    shell.advance(0.5)
    return shell


def test_the_report_is_plain_values() -> None:
    shell = everything()
    report = shell.broker.report(shell.now, features=10)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report)) == report
    assert msgspec.json.decode(msgspec.json.encode(report)) == report
    assert (report["leases"], report["holds"], report["quarantined"]) == (1, 1, PAGE)
    assert len(report["ghosts"]) == 1
    assert len(report["waiting"]) == report["waiting_count"] == 2
    assert [engine["complete"] for engine in report["engines"]] == [True]
    assert [(f["key"], f["engines"]) for f in report["largest"]] == [(key("x").value.hex(), ["engine"])]
    assert {"puts": 3} in [session["tally"] for session in report["sessions"]]


def test_the_report_has_no_secrets() -> None:
    shell = everything()
    packed = msgspec.json.encode(shell.broker.report(shell.now, features=10)).decode()
    assert str(0x5EC2E75EC2E75EC) not in packed, "who knows a session's number can speak for it"
    assert BOOT.hex() not in packed
    assert BOOT.decode() not in packed
    packed = str(shell.broker.report(shell.now, features=10))
    assert repr(BOOT) not in packed
    assert str(0x5EC2E75EC2E75EC) not in packed


def test_a_tally_has_bounds() -> None:
    shell = Shell()
    peer = shell.client()
    peer.cast(m.Tally({str(n): n for n in range(97)}))
    peer.cast(m.Tally({"x" * 65: 1}))
    peer.cast(m.Tally({"puts": -1}))
    peer.cast(m.Tally({"puts": (1 << 62) + 1}))
    assert shell.report()["sessions"][0]["tally"] == {}
    assert shell.counters()["tallies_refused"] == 4


@pytest.mark.parametrize("clients", [3, 300])
def test_sums_of_what_clients_count_fit_a_message(clients: int) -> None:
    """Of those that are there, that are gone, and that are forgotten one by one."""
    shell = Shell()
    shell.checks = clients < 10
    for alive in [False] * clients + [True]:
        peer = shell.client()
        peer.cast(m.Tally({"puts": 1 << 62}))
        if not alive:
            peer.end()
    report = shell.report()
    assert report["told_before"]["puts"] == report["sessions"][0]["tally"]["puts"] == 1 << 62
    m.encode(m.Answer(1, m.Report(report)))
