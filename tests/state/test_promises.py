"""Promises: one client makes what several want, before anybody knows its form."""

from __future__ import annotations

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.keys import Key, Kind

from .shell import Peer, Shell, form, item, key
from .world import failed, kinds

PICTURE, OTHER = key("picture", Kind.DERIVED), key("other", Kind.DERIVED)


def promised(peer: Peer, seq: int) -> list[m.Hit | m.Due | m.Pending]:
    answer = peer.answers[seq]
    assert isinstance(answer, m.Promised), answer
    return answer.results


def due(peer: Peer, *keys: Key) -> list[int]:
    """Promises of all of them, at once."""
    results = promised(peer, peer.call(m.Promise(list(keys))))
    assert all(isinstance(result, m.Due) for result in results), results
    return [result.promise for result in results if isinstance(result, m.Due)]


def keep(peer: Peer, promise: int, of: Key, to: str | None = None, extra: bytes = b"") -> int:
    """Create and seal what was promised."""
    (leased,) = peer.lease(m.Item(of, form(1), promise), to=to)
    return peer.call(m.Seal([m.Sealing(leased.lease, extra=extra)], to))


@pytest.mark.parametrize("kind", list(Kind))
def test_others_wait_until_a_promise_is_kept(kind: Kind) -> None:
    shell = Shell()
    shell.engine("a")
    picture = key("picture", kind)
    maker, *others = (shell.client() for _ in range(3))
    (promise,) = due(maker, picture)
    seqs = [other.call(m.Promise([picture], "a"), 600.0) for other in others]
    shell.advance(500.0)
    assert not any(seq in other.answers for other, seq in zip(others, seqs, strict=True)), (
        "as long as it takes"
    )
    keep(maker, promise, picture, extra=b"grid")
    for other, seq in zip(others, seqs, strict=True):
        (hit,) = promised(other, seq)
        assert isinstance(hit, m.Hit) and hit.extra == b"grid"
    counters = shell.counters()
    assert (counters["promises"], counters["leases"], counters["seals"]) == (1, 1, 1)
    assert shell.report()["promises"] == 0


@pytest.mark.parametrize("end", ["given back", "session over", "process over"])
def test_a_promise_that_ends_is_the_next_ones(end: str) -> None:
    shell = Shell()
    maker, *others = (shell.client() for _ in range(3))
    (promise,) = due(maker, PICTURE)
    seqs = [other.call(m.Promise([PICTURE]), 60.0) for other in others]
    if end == "given back":
        maker.cast(m.Abort([promise]))
    else:
        maker.end(alive=end == "session over")
    (again,) = promised(others[0], seqs[0])
    assert isinstance(again, m.Due), "the one who has waited longest"
    assert seqs[1] not in others[1].answers
    keep(others[0], again.promise, PICTURE)
    assert isinstance(promised(others[1], seqs[1])[0], m.Hit)


def test_a_lease_takes_the_promises_place_and_ends_as_leases_do() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    (promise,) = due(maker, PICTURE)
    seq = other.call(m.Promise([PICTURE]), 60.0)
    (leased,) = maker.lease(m.Item(PICTURE, form(2), promise))
    assert seq not in other.answers, "it is being written"
    maker.failure(m.Create([m.Item(PICTURE, form(2), promise)]), "LeaseClosed")
    maker.abort(leased)
    assert isinstance(promised(other, seq)[0], m.Due)


def test_a_call_that_is_promised_something_never_waits() -> None:
    """Who waits holds nothing that others wait for, so there is no circle: here of two, each with one of two."""
    shell = Shell()
    one, two = shell.client(), shell.client()
    (first,) = due(one, PICTURE)
    results = promised(two, two.call(m.Promise([PICTURE, OTHER, OTHER])))
    assert [type(result).__name__ for result in results] == ["Pending", "Due", "Pending"]
    second = next(result.promise for result in results if isinstance(result, m.Due))
    keep(one, first, PICTURE)
    keep(two, second, OTHER)
    both = promised(two, two.call(m.Promise([PICTURE, OTHER])))
    assert all(isinstance(result, m.Hit) for result in both)


def test_who_waits_holds_nothing() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    other.drop(*other.put(m.Item(OTHER, form(1))))
    (promise,) = due(maker, PICTURE)
    seq = other.call(m.Promise([OTHER, PICTURE]), 60.0)
    assert shell.report()["holds"] == 0 and seq not in other.answers
    keep(maker, promise, PICTURE)
    assert all(isinstance(result, m.Hit) for result in promised(other, seq))


def test_creates_wait_for_promises_as_for_leases() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    content = key("picture")
    promises = due(maker, PICTURE, content)
    derived = other.create(m.Item(PICTURE, form(1)), timeout=60.0)
    impatient = other.create(m.Item(content, form(1)), timeout=60.0)
    shell.advance(0.3)
    assert derived not in other.answers and impatient in other.answers
    keep(maker, promises[0], PICTURE)
    assert derived in other.answers
    seq = keep(maker, promises[1], content)
    assert isinstance(maker.answers[seq], m.Sealed), "whoever is first wins, and the other is no failure"


def test_the_feature_may_be_there_when_a_promise_is_kept() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    (promise,) = due(maker, key("picture"))
    seq = other.create(m.Item(key("picture"), form(1)), timeout=60.0)
    shell.advance(0.3)
    (leased,) = (r for r in other.answers[seq].results if isinstance(r, m.Leased))  # type: ignore[union-attr]
    other.seal([leased])
    answer = maker.ask(m.Create([m.Item(key("picture"), form(1), promise)]))
    assert isinstance(answer.results[0], m.Hit)
    assert shell.report()["promises"] == 0


@pytest.mark.parametrize("deadline", [0.0, 0.5])
def test_the_deadline_names_who_makes_it(deadline: float) -> None:
    shell = Shell()
    maker, other = shell.client("maker"), shell.client()
    due(maker, PICTURE)
    seq = other.call(m.Promise([PICTURE]), deadline)
    shell.advance(deadline)
    assert "maker" in failed(other, seq, "DeadlineExceeded").message


def test_promises_of_others_and_of_other_keys_are_refused() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    promise, second = due(maker, PICTURE, OTHER)
    other.failure(m.Create([m.Item(PICTURE, form(1), promise)]), "LeaseClosed")
    maker.failure(m.Create([m.Item(PICTURE, form(1), second)]), "LeaseClosed")
    maker.failure(m.Seal([m.Sealing(promise)]), "LeaseClosed")
    other.cast(m.Abort([promise]))
    assert shell.report()["promises"] == 2, "nobody's word but its owner's counts"


def test_what_is_put_beside_a_feature_is_bounded_and_goes_with_it() -> None:
    shell = Shell()
    peer = shell.client()
    (leased,) = peer.lease(m.Item(PICTURE, form(1)))
    assert (
        "4096" in peer.failure(m.Seal([m.Sealing(leased.lease, extra=bytes(4097))]), "InvalidMessage").message
    )
    (ref,) = peer.ask(m.Seal([m.Sealing(leased.lease, extra=bytes(4096))])).refs
    found = peer.ask(m.Lookup([PICTURE, OTHER]))
    assert found.extras == [bytes(4096), b""]
    (hit,) = peer.ask(m.Create([m.Item(PICTURE, form(1))])).results
    assert hit.extra == bytes(4096)
    peer.drop(ref, found.refs[0], hit.ref)
    shell.client().ask(m.Evict(10))
    assert peer.ask(m.Lookup([PICTURE])).refs == [None]
    (promise,) = due(peer, PICTURE)
    keep(peer, promise, PICTURE)
    assert peer.ask(m.Lookup([PICTURE])).extras == [], "nothing of the evicted one is left"


def test_a_promise_counts_as_one_feature_and_so_does_what_keeps_it() -> None:
    shell = Shell(client_budget_features=1, features_per_namespace=1)
    peer = shell.client()
    (promise,) = due(peer, PICTURE)
    seq = peer.call(m.Promise([OTHER]), 1.0)
    failed(peer, seq, "QuotaExceeded")
    assert isinstance(peer.answers[keep(peer, promise, PICTURE)], m.Sealed)


def test_a_promise_that_a_refused_call_named_still_counts() -> None:
    shell = Shell(client_budget_features=2)
    maker, other = shell.client(), shell.client()
    promise, _ = due(maker, PICTURE, OTHER)
    maker.failure(m.Create([m.Item(PICTURE, form(1), promise)], to="nowhere"), "NoSuchEngine")
    behind = maker.create(item("mine"))
    assert kinds(other, other.create(item("theirs"))) == ["Leased"], "nobody else waits for it"
    assert behind not in maker.answers
    maker.cast(m.Abort([promise]))
    assert kinds(maker, behind) == ["Leased"]


def test_making_something_is_no_standstill_for_a_while() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    due(maker, PICTURE)
    other.call(m.Promise([PICTURE]), 600.0)
    shell.advance(20.0)
    assert shell.report()["health"]["ok"]
    shell.advance(20.0)
    health = shell.report()["health"]
    assert not health["ok"] and maker.shell.broker.books.sessions[maker.number].name in health["stuck"][0]


def test_open_promises_do_not_delay_the_end() -> None:
    shell = Shell()
    maker, other = shell.client(), shell.client()
    due(maker, PICTURE)
    seq = other.call(m.Promise([PICTURE]), 600.0)
    other.ask(m.Shutdown())
    failed(other, seq, "BrokerLost")
    maker.failure(m.Promise([OTHER]), "BrokerLost")
    assert shell.halted == ["drained"]
