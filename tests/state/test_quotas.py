"""How much a client, an engine and a namespace may have: who waits, who is refused, with which figures."""

from __future__ import annotations

from typing import Any

import pytest

from mmbroker.proto import messages as m

from .shell import PAGE, Peer, Shell, item, key
from .world import cache, failed, hit, kinds, refs


def quota(peer: Peer, body: m.Body, requested: int, used: int, limit: int, setting: str) -> None:
    """Refused at once, with the figures, the setting and its counter."""
    before = peer.shell.counters().get(f"quota_refusals_{setting}", 0)
    failure = peer.failure(body, "QuotaExceeded")
    assert failure.figures == {"requested": requested, "used": used, "limit": limit}
    assert f"raise the setting `{setting}`" in failure.message
    assert peer.shell.counters()[f"quota_refusals_{setting}"] == before + 1


# --- a client's budget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", [{"client_budget_features": 4}, {"client_budget_bytes": 4 * PAGE}], ids=["count", "bytes"]
)
def test_a_client_over_its_budget_waits_for_itself_only(budget: dict[str, int]) -> None:
    shell = Shell(**budget)
    shell.engine()
    flood, other = shell.client("flood"), shell.client("other")
    held = [flood.put(item(n), to="engine")[0] for n in range(4)]
    more = flood.create(item("more", 2), item("much"), to="engine", timeout=60.0)
    behind = flood.create(item("behind"), to="engine", timeout=60.0)
    assert not {more, behind} & set(flood.answers)
    other.put(item("theirs", 4), to="engine")
    assert [r["for"] for r in shell.report()["waiting"]] == ["client", "client"]
    flood.drop(held[0])
    assert not {more, behind} & set(flood.answers), "in order"
    flood.drop(*held[1:3])
    assert kinds(flood, more) == ["Leased"] * 2
    assert (behind in flood.answers) == ("client_budget_features" in budget)
    flood.drop(held[3])
    assert kinds(flood, behind) == ["Leased"]
    assert shell.counters()["waits_client"] == 2


def test_a_client_does_not_overtake_itself() -> None:
    shell = Shell(client_budget_features=4)
    peer = shell.client()
    held = peer.put(item("a"), item("b"), item("c"))
    first = peer.create(item("x"), item("y"), timeout=60.0)
    second = peer.create(item("z"), timeout=60.0)
    assert not {first, second} & set(peer.answers), "there is room for the second"
    peer.drop(held[0])
    assert kinds(peer, first) == ["Leased"] * 2
    assert second not in peer.answers
    peer.drop(held[1])
    assert kinds(peer, second) == ["Leased"]


def test_leases_count_as_holds_do() -> None:
    shell = Shell(client_budget_features=2)
    peer = shell.client()
    lease, other = peer.lease(item("x"), item("y"))
    seq = peer.create(item("z"), timeout=60.0)
    refs(peer, peer.seal([lease]))
    assert seq not in peer.answers, "a sealed lease is a hold"
    peer.abort(other)
    assert kinds(peer, seq) == ["Leased"]


def test_hits_count_as_well() -> None:
    shell = Shell(client_budget_features=2)
    peer, other = shell.client(), shell.client()
    cache(other, item("x"))
    first, second = hit(peer, item("x")), hit(peer, item("x"))
    seq = peer.call(m.Lookup([key("x")]), timeout=60.0)
    assert seq not in peer.answers
    peer.drop(first)
    answer = peer.answers[seq]
    assert isinstance(answer, m.Found) and answer.refs[0] is not None
    assert isinstance(peer.ask(m.Lookup([key("unknown")])), m.Found), "a miss takes nothing"
    peer.drop(second)


@pytest.mark.parametrize(
    ("budget", "figures", "words"),
    [
        ({"client_budget_features": 3}, (2, 2, 3), "2 features of 8192 bytes of its budget of 3 features"),
        (
            {"client_budget_bytes": 3 * PAGE},
            (2 * PAGE, 2 * PAGE, 3 * PAGE),
            f"of its budget of {3 * PAGE} bytes",
        ),
        (
            {"client_budget_features": 9, "client_budget_bytes": 3 * PAGE},
            (2 * PAGE, 2 * PAGE, 3 * PAGE),
            f"of 9 features and {3 * PAGE} bytes",
        ),
    ],
    ids=["count", "bytes", "both"],
)
def test_a_wait_for_ones_own_budget_ends_at_its_deadline(
    budget: dict[str, int], figures: tuple[int, int, int], words: str
) -> None:
    shell = Shell(**budget)
    peer = shell.client("agent")
    peer.put(item("x"), item("y"))
    seq = peer.create(item("a"), item("b"), timeout=2.0)
    shell.advance(2.0)
    failure = failed(peer, seq, "QuotaExceeded")
    assert tuple(failure.figures[name] for name in ("requested", "used", "limit")) == figures
    for word in ("'agent-1'", words, "end some of its requests", "`client_budget_"):
        assert word in failure.message
    assert shell.counters()["expired_client"] == 1


def test_what_waits_before_it_counts_as_if_the_client_had_it() -> None:
    """Else the figures would say that there is room."""
    shell = Shell(client_budget_features=3)
    peer = shell.client()
    peer.put(item("x"), item("y"))
    peer.create(item("a"), item("b"), timeout=60.0)
    seq = peer.create(item("c"), timeout=2.0)
    shell.advance(2.0)
    assert failed(peer, seq, "QuotaExceeded").figures == {"requested": 1, "used": 4, "limit": 3}


def test_what_no_budget_fits_is_refused_at_once() -> None:
    shell = Shell(client_budget_features=2, client_budget_bytes=3 * PAGE)
    peer = shell.client()
    quota(peer, m.Create([item(n, 0) for n in range(3)]), 3, 0, 2, "client_budget_features")
    quota(peer, m.Create([item("x", 4)]), 4 * PAGE, 0, 3 * PAGE, "client_budget_mib")
    peer.put(item("x", 3))


def test_what_is_stuck_on_its_own_budget_is_said() -> None:
    shell = Shell(client_budget_features=1)
    peer = shell.client("agent")
    peer.put(item("x"))
    peer.create(item("y"), timeout=60.0)
    shell.advance(2.0)
    (sentence,) = shell.report()["health"]["stuck"]
    assert "client 'agent-1' has 1 features of 4096 bytes of its budget of 1 features" in sentence


def test_who_waits_for_its_budget_keeps_its_place_among_those_who_wait_for_room() -> None:
    shell = Shell(pages=8, segment=8, client_budget_features=1)
    one, two, three = (shell.client() for _ in range(3))
    (held,) = one.put(item("held", 7))
    mine = one.create(item("mine", 4), timeout=60.0)
    theirs = two.create(item("theirs", 4), timeout=60.0)
    last = three.create(item("last", 1), timeout=60.0)
    assert not (two.answers or three.answers), "the small one does not overtake who waits for room"
    one.drop(held)
    assert kinds(one, mine) == kinds(two, theirs) == ["Leased"], "the budget came first, in order of arrival"
    assert last not in three.answers


# --- a client's limit -----------------------------------------------------------------------------------------------


def test_bytes_of_one_session() -> None:
    shell = Shell(session_bytes=4 * PAGE)
    peer, other = shell.client(), shell.client()
    (held,) = peer.put(item("x", 3))
    quota(peer, m.Create([item("y", 2)]), 2 * PAGE, 3 * PAGE, 4 * PAGE, "session_mib")
    quota(peer, m.Create([item("x", 3)]), 3 * PAGE, 3 * PAGE, 4 * PAGE, "session_mib")
    peer.put(item("y", 1), item("nothing", 0))
    other.put(item("z", 4))
    peer.drop(held)
    peer.put(item("w", 3))
    assert [s["bytes"] for s in shell.report()["sessions"]] == [4 * PAGE, 4 * PAGE]


# --- an engine's ----------------------------------------------------------------------------------------------------


def test_features_of_one_engine() -> None:
    shell = Shell(features_per_engine=3)
    shell.engine("left")
    shell.engine("right")
    one, two = shell.client(), shell.client()
    held = one.put(item(0), item(1), to="left")
    (lease,) = one.lease(item(2), to="left")
    over = two.create(item(3), to="left", timeout=2.0)
    again = hit(two, item(1), to="left")
    assert over not in two.answers
    two.put(item(3), item(4), to="right")
    quota(two, m.Create([item(n) for n in range(10, 14)], "left"), 4, 0, 3, "features_per_engine")
    shell.advance(2.0)
    failure = failed(two, over, "QuotaExceeded")
    assert failure.figures == {"requested": 1, "used": 3, "limit": 3}
    for word in (
        "engine 'left' has 3 features in flight",
        "end some of its requests",
        "`features_per_engine`",
    ):
        assert word in failure.message
    over = two.create(item(5), to="left", timeout=2.0)
    one.drop(held[0])
    assert kinds(two, over) == ["Leased"]
    one.abort(lease)
    two.drop(again)


def test_an_engine_that_attaches_anew_has_nothing_in_flight() -> None:
    """Whoever had its name before may read what it was granted, and nobody waits for that."""
    shell = Shell(features_per_engine=2)
    (old,) = shell.engine()
    peer = shell.client()
    held = peer.put(item("a"), item("b"), to="engine")
    assert peer.create(item("c"), to="engine") not in peer.answers
    old.ask(m.Detach())
    shell.engine()
    peer.put(item("d"), item("e"), to="engine")
    assert peer.create(item("f"), to="engine") not in peer.answers
    peer.drop(*held)


def test_bytes_of_one_engine() -> None:
    shell = Shell(engine_bytes=4 * PAGE)
    shell.engine()
    peer = shell.client()
    peer.put(item("x", 3), to="engine")
    seq = peer.create(item("y", 2), to="engine", timeout=1.0)
    shell.advance(1.0)
    failure = failed(peer, seq, "PoolFull")
    assert failure.figures == {"requested": 2 * PAGE, "free": PAGE, "limit": 4 * PAGE}
    assert "and the setting `engine_mib`" in failure.message
    (engine,) = shell.report()["engines"]
    assert (engine["budget"], engine["in_flight"], engine["features"]) == (4 * PAGE, 3 * PAGE, 1)


def test_a_share_that_is_less_than_the_limit_counts() -> None:
    shell = Shell(pages=16, engine_bytes=10 * PAGE)
    for name in ("left", "right"):
        shell.engine(name)
    assert [engine["budget"] for engine in shell.report()["engines"]] == [8 * PAGE, 8 * PAGE]


@pytest.mark.parametrize(
    "limit", [{"features_per_engine": 2}, {"engine_bytes": 2 * PAGE}], ids=["count", "bytes"]
)
def test_no_side_door_to_an_engine(limit: dict[str, int]) -> None:
    """Leases that were made for nobody, or for another engine, have not waited for this one's budget."""
    shell = Shell(**limit)
    shell.engine("left")
    shell.engine("right")
    peer = shell.client()
    peer.put(item("x"), to="left")
    for to in (None, "right"):
        leases = peer.lease(item(f"y {to}"), item(f"z {to}"), to=to)
        failure = failed(peer, peer.seal(leases, "left"), "QuotaExceeded")
        assert failure.figures["requested"] == 2
        assert "create them with to='left'" in failure.message
        assert shell.report()["leases"] == 2, "nothing was sealed, nothing is lost"
        refs(peer, peer.seal(leases[:1], "left"))
        peer.abort(leases[1])
        peer.drop(max(peer.shell.broker.holds.open))
    assert shell.counters()["quota_refusals_seal"] == 2
    (again,) = peer.lease(item("w"))
    peer.put(item("v"), to="left")
    failed(peer, peer.seal([again], "left"), "QuotaExceeded")
    refs(peer, peer.seal([again], "right"))


# --- a namespace's --------------------------------------------------------------------------------------------------


def test_features_of_one_namespace() -> None:
    shell = Shell(features_per_namespace=3)
    (rank,) = shell.engine(prompt=False)
    one, two, other = shell.client(), shell.client(), shell.client(namespace="b")
    one.put(item(0))
    seq = one.seal(one.lease(item(1)), "engine")
    rank.ack()
    (ref,) = refs(one, seq)
    one.drop(ref)
    two.lease(item(2))
    quota(two, m.Create([item(3)]), 1, 3, 3, "features_per_namespace")
    quota(two, m.Lookup([key(0)]), 1, 3, 3, "features_per_namespace")
    assert isinstance(two.ask(m.Lookup([key("unknown")])), m.Found)
    other.put(item(4), item(5), item(6))
    rank.settle()
    two.put(item(3))


def test_bytes_of_one_namespace() -> None:
    """What is in use counts, whoever uses it; what is cached does not, until it is used again."""
    shell = Shell(namespace_bytes=4 * PAGE)
    one, two, other = shell.client(), shell.client(), shell.client(namespace="b")
    cache(one, item("idle", 4))
    (held,) = one.put(item("x", 2))
    quota(two, m.Create([item("idle", 4)]), 4 * PAGE, 2 * PAGE, 4 * PAGE, "namespace_mib")
    quota(two, m.Create([item("y", 3)]), 3 * PAGE, 2 * PAGE, 4 * PAGE, "namespace_mib")
    two.put(item("y", 2))
    assert hit(two, item("x", 2)), "it is in use already"
    other.put(item("z", 4))
    by_name = {n["namespace"]: n for n in shell.report()["namespaces"]}
    assert (by_name["a"]["bytes"], by_name["a"]["bytes_limit"], by_name["a"]["features"]) == (
        4 * PAGE,
        4 * PAGE,
        3,
    )
    two.end()
    one.drop(held)
    assert hit(one, item("idle", 4))


def test_what_a_lost_client_may_still_write_counts_for_its_namespace() -> None:
    shell = Shell(namespace_bytes=4 * PAGE)
    lost, other = shell.client(), shell.client()
    lost.lease(item("x", 3))
    lost.end(alive=True)
    quota(other, m.Create([item("y", 2)]), 2 * PAGE, 3 * PAGE, 4 * PAGE, "namespace_mib")
    lost.gone()
    other.put(item("y", 2))


def test_what_a_lost_reader_may_read_is_cached_until_it_is_evicted() -> None:
    """It counts for nobody while it can be evicted, and then for its namespace until its segment goes."""
    shell = Shell(namespace_bytes=4 * PAGE)
    lost, peer = shell.client(traceable=False), shell.client()
    lost.attach("engine")
    lost.prompt = True
    held = peer.put(item("read", 2), to="engine") + peer.put(item("beside"))
    lost.end(alive=True)
    peer.drop(held[0])
    more = peer.put(item("more", 3))
    assert shell.client("operator", "op").ask(m.Evict(1)) == m.Evicted(1, 0)
    quota(peer, m.Create([item("y")]), PAGE, 6 * PAGE, 4 * PAGE, "namespace_mib")
    peer.drop(held[1], *more)
    peer.put(item("y", 4))


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_says_how_much_everybody_has_of_what() -> None:
    shell = Shell(client_budget_features=5, client_budget_bytes=9 * PAGE)
    shell.engine()
    peer = shell.client()
    peer.put(item("x", 2), to="engine")
    report: dict[str, Any] = shell.report()
    assert report["budget"] == {"features": 5, "bytes": 9 * PAGE}
    (session,) = [s for s in report["sessions"] if s["pid"] == peer.pid]
    assert (session["holds"], session["leases"], session["bytes"]) == (1, 0, 2 * PAGE)
    assert report["namespaces"] == [
        {"namespace": "a", "features": 1, "features_limit": 1 << 18, "bytes": 2 * PAGE, "bytes_limit": 0}
    ]
    (engine,) = report["engines"]
    assert (engine["features"], engine["features_limit"]) == (1, 65536)
