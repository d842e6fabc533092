"""Who is the tier, what it reads and is told: one mover of a namespace, which takes nothing from the engines."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind
from mmbroker.proto.reference import Reference
from mmbroker.seeking import TOLD

from .shell import PAGE, Shell, form, key
from .test_promises import due, keep, promised
from .test_seeking import OTHER, PICTURE, WAIT, answers, ask, counts, fetched, tier

# --- who is the tier ------------------------------------------------------------------------------------------------


def test_there_is_one_in_a_namespace() -> None:
    shell = Shell()
    first = tier(shell, open=False)
    text = shell.client("second").failure(m.Tier(True), "InvalidMessage").message
    assert "mover-1" in text and "'a'" in text
    tier(shell, namespace="b")
    first.ask(m.Tier(True, 0.5, 7, 3))
    told = {t["namespace"]: t for t in shell.report()["movers"]}
    assert {what: told["a"][what] for what in ("open", "wait", "most", "reuse", "sought")} == {
        "open": True, "wait": 0.5, "most": 7, "reuse": 3, "sought": 0,
    }  # fmt: skip
    first.end()
    tier(shell)


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({"wait": 0.0}, "wait"),
        ({"wait": -1.0}, "wait"),
        ({"wait": math.nan}, "wait"),
        ({"wait": math.inf}, "wait"),
        ({"wait": 11.0}, "10"),
        ({"most": 0}, "most"),
        ({"reuse": 0}, "reuse"),
    ],
)
def test_figures_that_make_no_sense_are_refused(figures: dict[str, Any], named: str) -> None:
    shell = Shell()
    assert named in shell.client().failure(m.Tier(True, **figures), "InvalidMessage").message
    mover = tier(shell)
    mover.failure(m.Tier(True, **figures), "InvalidMessage")
    assert shell.report()["movers"][0]["wait"] == WAIT, "what it said before stands"


@pytest.mark.parametrize("work", ["promise", "lease", "rank", "waits"])
def test_who_is_at_work_is_no_tier(work: str) -> None:
    shell = Shell()
    peer, other = shell.client(), shell.client()
    match work:
        case "promise":
            due(peer, PICTURE)
        case "lease":
            peer.lease(m.Item(PICTURE, form(1)))
        case "rank":
            peer.attach("engine")
        case "waits":
            due(other, PICTURE)
            ask(peer, "promise", PICTURE)
    peer.failure(m.Tier(True), "InvalidMessage")
    assert not shell.report()["movers"]


# --- reading and storing --------------------------------------------------------------------------------------------


def test_it_reads_as_a_rank_and_takes_nothing_from_the_engines() -> None:
    shell = Shell(pages=32)
    shell.engine("engine")
    mover, maker = tier(shell), shell.client()
    before = shell.broker.books.budget()
    mover.attach("tier")
    assert shell.broker.books.budget() == before == 32 * PAGE
    engines = {one["engine"]: one["budget"] for one in shell.report()["engines"]}
    assert engines == {"engine": 32 * PAGE, "tier": 2 * PAGE}
    text = maker.failure(m.Lookup([PICTURE], "tier"), "NoSuchEngine").message
    assert "attached engines: engine;" in text, "nobody sends to it"
    maker.failure(m.Create([m.Item(PICTURE, form(1))], "tier"), "NoSuchEngine")
    maker.drop(*maker.put(m.Item(PICTURE, form(2)), m.Item(OTHER, form(1))))
    seq = ask(mover, "lookup", PICTURE, to="tier")
    mover.ack()
    (ref,) = mover.answers[seq].refs  # type: ignore[union-attr]
    assert isinstance(ref, Reference) and shell.report()["holds"] == 1
    second = ask(mover, "lookup", OTHER, to="tier")
    assert second not in mover.answers, "its budget is a sixteenth of the arena"
    mover.drop(ref)
    mover.settle()
    mover.ack()
    assert second in mover.answers
    counters = shell.counters()
    assert "hits" not in counters and counters["misses"] == 2, "its own lookups are no use of a feature"
    assert {f["hits"] for f in maker.status()["largest"]} == {0}


def test_its_rank_is_its_own() -> None:
    shell = Shell()
    shell.engine("engine")
    mover, other = tier(shell), shell.client()
    mover.failure(m.Attach("engine", 0, 2), "InvalidMessage")
    mover.attach("tier", 0, 2)
    other.failure(m.Attach("tier", 1, 2), "InvalidMessage")


def test_one_that_owes_an_acknowledgement_is_no_standstill() -> None:
    shell = Shell()
    mover, maker = tier(shell), shell.client()
    mover.attach("tier")
    maker.put(m.Item(PICTURE, form(1)))
    ask(mover, "lookup", PICTURE, to="tier", timeout=600.0)
    shell.advance(60.0)
    assert shell.report()["health"]["ok"]


def test_engines_see_what_they_have_from_it() -> None:
    """What it brings is its own first; what it only looks at is not."""
    shell = Shell()
    shell.engine("engine")
    mover, maker = tier(shell), shell.client()
    mover.prompt = True
    mover.attach("tier")
    maker.put(m.Item(OTHER, form(1)))
    ask(mover, "lookup", OTHER, to="tier")
    for of in (OTHER, PICTURE):
        seq = ask(maker, "lookup", of, to="engine")
        if of is PICTURE:
            fetched(mover)
        assert answers(maker, seq) == ["Hit"]
    (engine,) = (one for one in shell.report()["engines"] if one["engine"] == "engine")
    assert engine["reused"] == [{"engine": "tier", "features": 1, "bytes": PAGE}]


def test_it_is_told_of_what_is_made_here_and_of_its_use() -> None:
    shell = Shell()
    mover, maker = tier(shell, reuse=2), shell.client()
    (leased, plain) = maker.lease(m.Item(PICTURE, form(2)), m.Item(key("content"), form(1)))
    refs = maker.ask(m.Seal([m.Sealing(leased.lease, cost=68_000), m.Sealing(plain.lease)])).refs
    assert mover.fresh == [m.Worth(PICTURE, 2 * PAGE, 68_000, 0)]
    maker.drop(*refs)
    for _ in range(4):
        maker.ask(m.Lookup([PICTURE, key("content")]))
        mover.ask(m.Lookup([PICTURE]))
    assert mover.fresh[1:] == [m.Worth(PICTURE, 2 * PAGE, 68_000, 2)]
    assert counts(shell) == {"fresh": 2}
    other = shell.client(namespace="b")
    other.put(m.Item(OTHER, form(1)))
    assert len(mover.fresh) == 2, "another namespace's"


def test_it_is_not_told_of_what_it_brought() -> None:
    shell = Shell()
    mover, asker = tier(shell), shell.client()
    seq = ask(asker, "promise", PICTURE)
    fetched(mover)
    assert answers(asker, seq) == ["Hit"]
    for _ in range(3):
        asker.ask(m.Lookup([PICTURE]))
    assert not mover.fresh


def test_whoever_is_second_to_seal_has_made_nothing() -> None:
    shell = Shell()
    mover, maker = tier(shell), shell.client()
    ask(maker, "promise", PICTURE)
    leases = mover.lease(m.Item(PICTURE, form(1), mover.sought[PICTURE]))
    shell.advance(WAIT)
    (result,) = promised(maker, 1)
    assert isinstance(result, m.Due)
    keep(maker, result.promise, PICTURE)
    mover.seal(leases)
    maker.ask(m.Lookup([PICTURE]))
    assert [worth.hits for worth in mover.fresh] == [0, 1], "it was made here"


def test_what_it_is_told_is_bounded() -> None:
    shell = Shell(items_per_call=TOLD + 10, features_per_session=3 * TOLD, cached_features=3 * TOLD)
    shell.checks = False
    mover, maker = tier(shell), shell.client()
    keys = [key(name, Kind.DERIVED) for name in range(TOLD + 5)]
    maker.put(*(m.Item(of, form(0)) for of in keys))
    assert len(mover.fresh) == TOLD and counts(shell) == {"fresh": TOLD, "fresh_dropped": 5}
    maker.ask(m.Lookup(keys[:1]))
    assert len(mover.fresh) == TOLD
    mover.cast(m.Tally({}))
    maker.ask(m.Lookup(keys[1:2]))
    assert len(mover.fresh) == TOLD + 1, "it has said something"


def test_what_one_event_tells_fits_messages() -> None:
    shell = Shell(items_per_call=TOLD + 10, features_per_session=3 * TOLD, cached_features=3 * TOLD)
    shell.checks = False
    tier(shell, most=TOLD)
    asker, notices = shell.client(), []
    keys = [key(name, Kind.DERIVED) for name in range(TOLD)]
    effects = shell.handle(e.Called(asker.number, 1, 5.0, m.Lookup(keys)))
    notices = [x.notice for x in effects if isinstance(x, e.Notify)]
    assert all(isinstance(n, m.Sought) for n in notices)
    assert [one.key for n in notices for one in n.wanted] == keys  # type: ignore[union-attr]
    assert max(len(m.encode(n)) for n in notices) < m.MAX_MESSAGE // 2
