"""The tier: what nobody here has is sought beyond this machine for a moment, and what is made here is told there."""

from __future__ import annotations

from typing import Any

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.reference import Reference

from .shell import PAGE, Peer, Shell, form, key
from .test_promises import due, promised
from .world import failed

PICTURE, OTHER, THIRD = (key(name, Kind.DERIVED) for name in ("picture", "other", "third"))
WAIT = 0.02


def tier(shell: Shell, open: bool = True, namespace: str = "a", **figures: Any) -> Peer:
    """A mover that answers nothing by itself."""
    mover = shell.client("mover", namespace)
    assert mover.ask(m.Tier(open, **{"wait": WAIT, **figures})) == m.Done()
    return mover


def fetched(mover: Peer, of: Key = PICTURE, pages: float = 1) -> None:
    """The mover keeps what it is asked for."""
    (leased,) = mover.lease(m.Item(of, form(pages), mover.sought.pop(of)))
    assert isinstance(mover.answers[mover.seal([leased])], m.Sealed)


def absent(mover: Peer, *keys: Key) -> None:
    mover.cast(m.Abort([mover.sought.pop(of) for of in keys]))


def ask(peer: Peer, verb: str, *keys: Key, timeout: float = 5.0, to: str | None = None) -> int:
    return peer.call({"lookup": m.Lookup, "promise": m.Promise}[verb](list(keys), to), timeout)


def answers(peer: Peer, seq: int) -> list[str]:
    """What came of each key: the answers' names, and for a lookup ``Hit`` or ``Miss``."""
    answer = peer.answers[seq]
    if isinstance(answer, m.Found):
        return ["Miss" if ref is None else "Hit" for ref in answer.refs]
    return [type(result).__name__ for result in promised(peer, seq)]


def counts(shell: Shell) -> dict[str, int]:
    (told,) = shell.report()["movers"]
    return {what: count for what, count in told["counts"].items() if count}


verbs = pytest.mark.parametrize("verb", ["lookup", "promise"])
MISS = {"lookup": "Miss", "promise": "Due"}


@verbs
def test_what_nobody_has_is_fetched_once_for_all_who_ask(verb: str) -> None:
    shell = Shell()
    shell.engine("engine")
    mover, *askers = tier(shell), *(shell.client() for _ in range(3))
    seqs = [ask(asker, verb, PICTURE, to="engine") for asker in askers]
    assert len(mover.sought) == 1 and not any(q in p.answers for p, q in zip(askers, seqs, strict=True))
    fetched(mover)
    assert [answers(*asked) for asked in zip(askers, seqs, strict=True)] == [["Hit"]] * 3
    assert counts(shell) == {"sought": 1, "found": 1}
    counters = shell.counters()
    assert (counters["hits"], counters["misses"]) == (3, 0) and "promises" not in counters


@verbs
def test_what_is_not_there_either_is_a_miss_at_once(verb: str) -> None:
    shell = Shell()
    mover, asker, other = tier(shell), shell.client(), shell.client()
    seq, second = ask(asker, verb, PICTURE), ask(other, verb, PICTURE)
    absent(mover, PICTURE)
    assert answers(asker, seq) == [MISS[verb]] and not mover.sought, "it is sought once"
    assert (second in other.answers) == (verb == "lookup"), "whoever is second waits for the first's promise"
    assert counts(shell) == {"sought": 1, "absent": 1}
    assert shell.report()["promises"] == (verb == "promise")
    assert not shell.counters()["promises_dropped"], "nobody had said that it would make it"


@verbs
@pytest.mark.parametrize("step", ["sought", "leased"])
def test_nobody_waits_longer_than_that(verb: str, step: str) -> None:
    shell = Shell()
    mover, asker = tier(shell), shell.client()
    start = shell.now
    seq = ask(asker, verb, PICTURE)
    promise = mover.sought[PICTURE]
    leases = mover.lease(m.Item(PICTURE, form(1), promise)) if step == "leased" else []
    shell.advance(WAIT / 2)
    other = shell.client()
    second = ask(other, verb, PICTURE)
    shell.advance(WAIT / 4)
    assert seq not in asker.answers and second not in other.answers
    shell.advance(start + WAIT - shell.now)
    assert answers(asker, seq) == [MISS[verb]]
    assert counts(shell) == {"sought": 1, "late": 1}
    if verb == "lookup":
        assert answers(other, second) == ["Miss"], "it has not waited as long, and waits no longer either"
    elif step == "sought":
        mover.failure(m.Create([m.Item(PICTURE, form(1), promise)]), "LeaseClosed")
    if leases:
        mover.seal(leases)
        assert isinstance(asker.ask(m.Lookup([PICTURE])).refs[0], Reference), "late is better than never"
    assert counts(shell) == {"sought": 1, "late": 1}


@verbs
def test_the_one_who_is_late_harms_nobody(verb: str) -> None:
    """A second maker beside it; whoever seals first has made the feature, and the other is told where it is."""
    shell = Shell()
    mover, maker, asker = tier(shell), shell.client(), shell.client()
    ask(asker, verb, PICTURE)
    leases = mover.lease(m.Item(PICTURE, form(1), mover.sought.pop(PICTURE)))
    shell.advance(WAIT)
    (promise,) = due(maker, PICTURE) if verb == "lookup" else [promised(asker, 1)[0].promise]  # type: ignore[union-attr]
    seq = ask(shell.client(), "promise", PICTURE)
    assert not mover.sought, "it is being fetched already, and nobody waits for that"
    mover.seal(leases)
    assert answers(shell.peers[max(shell.peers)], seq) == ["Hit"]
    made_by = maker if verb == "lookup" else asker
    (result,) = made_by.ask(m.Create([m.Item(PICTURE, form(1), promise)])).results
    assert isinstance(result, m.Hit)
    assert shell.report()["promises"] == shell.report()["leases"] == 0


@pytest.mark.parametrize("step", ["sought", "leased", "late"])
@pytest.mark.parametrize("alive", [False, True], ids=["process over", "session over"])
@verbs
def test_the_movers_death_ends_what_it_was_asked_for(verb: str, alive: bool, step: str) -> None:
    shell = Shell()
    mover, asker = tier(shell), shell.client()
    seq = ask(asker, verb, PICTURE, OTHER)
    if step != "sought":
        mover.lease(m.Item(PICTURE, form(1), mover.sought[PICTURE]))
    if step == "late":
        shell.advance(WAIT)
    mover.end(alive)
    assert answers(asker, seq) == [MISS[verb]] * 2
    report = shell.report()
    assert report["leases"] == 0 and not report["movers"]
    assert report["promises"] == 2 * (verb == "promise") and not report["counters"].get("promises_broken")
    assert (report["quarantined"] == PAGE) == (alive and step != "sought")
    if alive:
        mover.gone()
    shell.advance(30.0)
    report = shell.report()
    assert report["quarantined"] == report["timers"] == 0
    assert answers(asker, ask(asker, "lookup", THIRD)) == ["Miss"], "there is no tier any more"
    again = tier(shell)
    ask(asker, "lookup", THIRD)
    assert again.sought, "another one takes its place"


def test_only_derived_keys_are_sought_and_only_by_lookups_and_promises() -> None:
    shell = Shell()
    mover, asker, other = tier(shell), shell.client(), shell.client(namespace="b")
    for kind in (Kind.CONTENT, Kind.CALLER):
        assert answers(asker, ask(asker, "lookup", key("picture", kind))) == ["Miss"]
        assert answers(asker, ask(asker, "promise", key("picture", kind))) == ["Due"]
    (leased,) = asker.lease(m.Item(PICTURE, form(1)))
    due(asker, key("mine"))
    assert answers(other, ask(other, "lookup", OTHER)) == ["Miss"], "another namespace's"
    assert answers(mover, ask(mover, "lookup", OTHER)) == ["Miss"], "its own"
    assert answers(asker, ask(asker, "lookup", PICTURE)) == ["Miss"], "it is being made"
    assert not mover.sought and not counts(shell)
    assert shell.counters()["misses"] == 8, "of the others"
    asker.abort(leased)
    mover.failure(m.Promise([OTHER]), "InvalidMessage")


def test_creates_wait_for_what_is_sought_and_no_longer() -> None:
    shell = Shell()
    mover, asker, writer = tier(shell), shell.client(), shell.client()
    ask(asker, "lookup", PICTURE, OTHER)
    seqs = [writer.create(m.Item(of, form(1))) for of in (PICTURE, OTHER)]
    fetched(mover, PICTURE)
    assert isinstance(writer.answers[seqs[0]].results[0], m.Hit)  # type: ignore[union-attr]
    assert seqs[1] not in writer.answers
    shell.advance(WAIT)
    assert isinstance(writer.answers[seqs[1]].results[0], m.Leased)  # type: ignore[union-attr]


@verbs
def test_nobody_waits_for_what_it_writes_unasked(verb: str) -> None:
    shell = Shell()
    mover, asker = tier(shell), shell.client()
    leases = mover.lease(m.Item(PICTURE, form(1)))
    seq = ask(asker, verb, PICTURE)
    shell.advance(WAIT)
    assert answers(asker, seq) == [MISS[verb]]
    mover.seal(leases)
    assert answers(asker, ask(asker, "lookup", PICTURE)) == ["Hit"]


def test_a_lookup_that_waits_for_its_budget_does_not_wait_for_the_tier_again() -> None:
    shell = Shell(client_budget_features=1)
    asker, other = shell.client(), shell.client()
    tier(shell)
    (held,) = asker.put(m.Item(OTHER, form(1)))
    seq = ask(asker, "lookup", OTHER, PICTURE, timeout=600.0)
    shell.advance(10 * WAIT)
    assert ask(other, "lookup", PICTURE) not in other.answers, "it is sought once more"
    asker.drop(held)
    assert answers(asker, seq) == ["Hit", "Miss"]


def test_a_lookup_waits_for_the_tier_and_not_for_who_writes_beside_it() -> None:
    """A client that the mover waits for in turn writes what is sought, too, rather than wait for ever."""
    shell = Shell()
    mover, asker, writer = tier(shell, wait=1.0), shell.client(), shell.client()
    writer.lease(m.Item(OTHER, form(1)))
    seq = ask(asker, "lookup", PICTURE)
    mover.create(m.Item(OTHER, form(1)), timeout=60.0)
    second = writer.create(m.Item(PICTURE, form(1)))
    shell.advance(0.5)
    assert isinstance(writer.answers[second].results[0], m.Leased)  # type: ignore[union-attr]
    assert seq not in asker.answers
    shell.advance(0.5)
    assert answers(asker, seq) == ["Miss"]


@verbs
@pytest.mark.parametrize("closed", ["from the start", "later"])
def test_a_closed_tier_is_none(verb: str, closed: str) -> None:
    shell = Shell()
    mover, asker = tier(shell, open=closed == "later"), shell.client()
    mover.ask(m.Tier(False))
    assert answers(asker, ask(asker, verb, PICTURE)) == [MISS[verb]]
    maker = shell.client()
    maker.put(m.Item(OTHER, form(1)))
    assert not mover.sought and not mover.fresh and not counts(shell)
    mover.ask(m.Tier(True))
    ask(asker, verb, THIRD)
    assert THIRD in mover.sought


@verbs
def test_who_has_no_time_for_the_tier_does_not_ask_it(verb: str) -> None:
    shell = Shell()
    mover, asker, other = tier(shell), shell.client(), shell.client()
    for timeout in (0.0, WAIT / 2, WAIT):
        assert answers(asker, ask(asker, "lookup", PICTURE, timeout=timeout)) == ["Miss"]
    assert answers(asker, ask(asker, "promise", OTHER, timeout=WAIT)) == ["Due"]
    assert not mover.sought
    seq = ask(other, verb, PICTURE, timeout=2 * WAIT)
    assert PICTURE in mover.sought
    assert answers(asker, ask(asker, "lookup", PICTURE, timeout=WAIT)) == ["Miss"], (
        "not behind others, either"
    )
    shell.advance(WAIT)
    assert answers(other, seq) == [MISS[verb]]


@verbs
def test_whoever_is_woken_late_is_answered_all_the_same(verb: str) -> None:
    """The wait and the deadline are both over when the broker looks: what it waited for ended first."""
    shell = Shell()
    asker = (tier(shell), shell.client())[1]
    seq = ask(asker, verb, PICTURE, timeout=1.5 * WAIT)
    shell.now += 2 * WAIT
    shell.handle(e.Tick())
    assert answers(asker, seq) == [MISS[verb]]


@verbs
def test_no_more_are_sought_at_once_than_it_can_do(verb: str) -> None:
    shell = Shell()
    mover, *askers = tier(shell, most=2), *(shell.client() for _ in range(3))
    seqs = [ask(*one) for one in zip(askers, [verb] * 3, (PICTURE, OTHER, THIRD), strict=True)]
    assert list(mover.sought) == [PICTURE, OTHER]
    assert answers(askers[2], seqs[2]) == [MISS[verb]]
    assert counts(shell) == {"sought": 2, "busy": 1}
    mover.lease(m.Item(PICTURE, form(1), mover.sought[PICTURE]))
    shell.advance(WAIT)
    mover.cast(m.Tally({"tier_gets": 1}))
    fourth, fifth = key(4, Kind.DERIVED), key(5, Kind.DERIVED)
    ask(askers[0], "lookup", fourth)
    seq = ask(askers[0], "lookup", fifth)
    assert fourth in mover.sought and fifth not in mover.sought, "what is late is still being done"
    assert answers(askers[0], seq) == ["Miss"]


def test_one_that_says_nothing_is_not_asked_for_ever() -> None:
    """A mover that is stopped costs `most` waits, and not one for each miss."""
    shell = Shell()
    mover, asker = tier(shell, most=3), shell.client()
    for name in range(3):
        seq = ask(asker, "lookup", key(name, Kind.DERIVED))
        assert seq not in asker.answers
        shell.advance(WAIT)
    mover.sought.clear()
    assert answers(asker, ask(asker, "lookup", PICTURE)) == ["Miss"] and not mover.sought
    assert counts(shell) == {"sought": 3, "late": 3, "busy": 1}
    mover.cast(m.Tally({"tier_gets": 3}))
    assert ask(asker, "lookup", PICTURE) not in asker.answers and PICTURE in mover.sought


@pytest.mark.parametrize(
    "limits",
    [{"features_per_session": 2}, {"client_budget_features": 2}, {"features_per_namespace": 2}],
    ids=lambda limits: next(iter(limits)),
)
def test_what_is_sought_is_within_the_movers_limits(limits: dict[str, int]) -> None:
    shell = Shell(**limits)
    mover, asker, other = tier(shell), shell.client(), shell.client()
    seqs = [ask(asker, "lookup", PICTURE), ask(other, "lookup", OTHER), ask(asker, "lookup", THIRD)]
    assert list(mover.sought) == [PICTURE, OTHER] and answers(asker, seqs[2]) == ["Miss"]
    assert counts(shell) == {"sought": 2, "busy": 1}


def test_a_batch_waits_for_all_that_is_sought() -> None:
    """So it is told at once of all that it has to make, and asks no second time for what was sought already."""
    shell = Shell()
    mover, asker = tier(shell), shell.client()
    here, content = key("here", Kind.DERIVED), key("content")
    asker.drop(*asker.put(m.Item(here, form(1))))
    seq = ask(asker, "promise", here, PICTURE, OTHER, PICTURE)
    assert list(mover.sought) == [PICTURE, OTHER] and shell.report()["holds"] == 0, "who waits holds nothing"
    absent(mover, PICTURE)
    assert seq not in asker.answers
    fetched(mover, OTHER)
    assert answers(asker, seq) == ["Hit", "Due", "Hit", "Pending"]
    seq = ask(asker, "promise", content, THIRD)
    assert seq not in asker.answers, "nor does it begin with what is not sought"
    shell.advance(WAIT)
    assert answers(asker, seq) == ["Due", "Due"] and counts(shell)["sought"] == 3


def test_what_others_gave_up_is_not_sought_by_those_who_waited() -> None:
    """They have waited long enough; whoever made it had sought it."""
    shell = Shell()
    mover, maker, asker = tier(shell), shell.client(), shell.client()
    ask(maker, "promise", PICTURE)
    absent(mover, PICTURE)
    (result,) = promised(maker, 1)
    assert isinstance(result, m.Due)
    seq = ask(asker, "promise", PICTURE)
    shell.advance(1.0)
    maker.cast(m.Abort([result.promise]))
    assert answers(asker, seq) == ["Due"] and not mover.sought


def test_a_mover_that_writes_beside_its_own_promise_keeps_nobody_waiting() -> None:
    """It waits in a circle with a maker, and so gets a lease of what it is asked for without keeping its promise."""
    shell = Shell(single_flight=0.5)
    mover, maker, asker = tier(shell, wait=1.0), shell.client(), shell.client()
    ask(maker, "promise", THIRD)
    absent(mover, THIRD)
    ask(maker, "promise", PICTURE)
    seq = ask(asker, "promise", OTHER)
    beside = mover.create(m.Item(OTHER, form(1)), m.Item(THIRD, form(1)))
    shell.advance(0.5)
    assert [type(one) for one in mover.answers[beside].results] == [m.Leased] * 2  # type: ignore[union-attr]
    assert seq not in asker.answers
    shell.advance(0.5)
    assert answers(asker, seq) == ["Due"]


def test_the_askers_end_leaves_the_mover_at_it() -> None:
    shell = Shell()
    mover, asker = tier(shell), shell.client()
    ask(asker, "promise", PICTURE)
    asker.end()
    fetched(mover)
    assert answers(*(lambda peer: (peer, ask(peer, "lookup", PICTURE)))(shell.client())) == ["Hit"]


def test_what_it_finds_too_large_or_has_no_room_for_is_given_back() -> None:
    shell = Shell(pages=4, segment=4)
    mover, asker, other = tier(shell), shell.client(), shell.client()
    other.put(m.Item(OTHER, form(4)))
    seq = ask(asker, "promise", PICTURE)
    waiting = mover.create(m.Item(PICTURE, form(1), mover.sought[PICTURE]))
    shell.advance(WAIT)
    assert answers(asker, seq) == ["Due"]
    failed(mover, waiting, "LeaseClosed")
    assert counts(shell) == {"sought": 1, "late": 1, "fresh": 1}
