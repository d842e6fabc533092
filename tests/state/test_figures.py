"""What the state machine measures, and what it remembers of clients that are gone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mmbroker.figures import ITEMS, SECONDS, Histogram, quantile, since
from mmbroker.proto import messages as m

from .shell import PAGE, Shell, item


def figure(shell: Shell, name: str) -> tuple[int, float]:
    """How many values a histogram has, and their sum."""
    found = shell.report()["figures"][name]
    return sum(found["counts"]), found["sum"]


def test_a_value_goes_to_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram(ITEMS)
    for value in (1, 2, 3, 1024, 1025):
        histogram.observe(value)
    assert histogram.report() == {
        "bounds": list(ITEMS),
        "counts": [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1],
        "sum": 2055.0,
    }


def test_quantiles_are_right_within_a_bucket() -> None:
    histogram, dice = Histogram(SECONDS), random.Random(3)
    values = sorted(dice.uniform(0, 2) for _ in range(10_000))
    for value in values:
        histogram.observe(value)
    for share in (0.01, 0.5, 0.9, 0.99):
        found, wanted = quantile(histogram.report(), share), values[int(share * len(values))]
        assert found is not None
        bucket = next(bound for bound in SECONDS if bound >= wanted)
        before = max((bound for bound in SECONDS if bound < bucket), default=0.0)
        assert before <= found <= bucket


def test_quantiles_of_nothing_and_beyond_everything() -> None:
    histogram = Histogram(SECONDS)
    assert quantile(histogram.report(), 0.5) is None
    histogram.observe(1e9)
    assert quantile(histogram.report(), 0.5) == SECONDS[-1]


def test_the_difference_of_two_reports() -> None:
    histogram = Histogram(SECONDS)
    histogram.observe(1.0)
    before = histogram.report()
    histogram.observe(5.0)
    between = since(histogram.report(), before)
    assert (sum(between["counts"]), between["sum"]) == (1, 5.0)
    assert since(before, None) == before


def test_times_are_from_event_to_event() -> None:
    shell = Shell()
    peer = shell.client()
    (rank,) = shell.engine(prompt=False)
    leases = peer.lease(item("x"), item("y"), to="engine")
    shell.advance(1.0)
    seal = peer.seal(leases, to="engine")
    shell.advance(0.5)
    rank.ack()
    sealed = peer.answers[seal]
    assert isinstance(sealed, m.Sealed)
    shell.advance(2.0)
    peer.drop(*sealed.refs)
    shell.advance(0.25)
    rank.settle()
    assert {name: figure(shell, name) for name in ("lease_seconds", "grant_seconds", "hold_seconds")} == {
        "lease_seconds": (2, 2.0),
        "grant_seconds": (2, 1.0),
        "hold_seconds": (2, 5.0),
    }
    assert figure(shell, "settle_seconds") == (2, 0.5)
    assert figure(shell, "create_items") == (1, 2.0)
    assert figure(shell, "feature_bytes") == (2, 2.0 * PAGE)
    assert figure(shell, "wait_seconds") == (1, 0.0), "for the first segment, which came at once"


def test_waits_are_measured_until_they_are_served() -> None:
    shell = Shell()
    peer, other = shell.client(), shell.client()
    refs = peer.put(item("x", 8), item("y", 8))
    other.create(item("z", 8), timeout=60.0)
    shell.advance(3.0)
    peer.drop(*refs)
    assert figure(shell, "wait_seconds") == (2, 3.0), "the first wait was for a segment, which came at once"


def test_held_and_leased_bytes_are_told() -> None:
    shell = Shell()
    peer = shell.client()
    peer.put(item("x", 2))
    peer.lease(item("y", 3))
    report = shell.report()
    assert report["leased_bytes"] == 3 * PAGE
    assert [session["bytes"] for session in report["sessions"]] == [5 * PAGE], "both"


# --- tallies of clients that are gone ---


def total(report: dict[str, Any], name: str) -> int:
    here = sum(session["tally"].get(name, 0) for session in report["sessions"])
    return here + report["told_before"].get(name, 0)


def test_what_a_client_counted_stays_when_it_is_gone() -> None:
    shell = Shell()
    for count in (3, 4):
        peer = shell.client()
        peer.cast(m.Tally({"puts": count, "holds": 9}))
        peer.end()
    report = shell.report()
    assert total(report, "puts") == 7
    assert "holds" not in report["told_before"], "what it held is over"


@pytest.mark.parametrize("again", [3, 5])
def test_a_client_that_comes_back_is_not_counted_twice(again: int) -> None:
    """It tells everything since its own start, in a new session."""
    shell = Shell()
    first = shell.client(pid=77)
    name = shell.report()["sessions"][0]["name"]
    first.cast(m.Tally({"puts": 3}))
    first.end(alive=True)
    second = shell.client(pid=77)
    shell.broker.books.sessions[second.number].name = name
    second.cast(m.Tally({"puts": again}))
    assert total(shell.report(), "puts") == again
    second.cast(m.Tally({"puts": again + 1}))
    assert total(shell.report(), "puts") == again + 1
    second.end()
    assert total(shell.report(), "puts") == again + 1


def test_a_client_that_starts_anew_under_the_same_name_is_counted_as_well() -> None:
    shell = Shell()
    first = shell.client(pid=77)
    name = shell.report()["sessions"][0]["name"]
    first.cast(m.Tally({"puts": 3}))
    first.end(alive=True)
    second = shell.client(pid=77)
    shell.broker.books.sessions[second.number].name = name
    second.cast(m.Tally({"puts": 1}))
    assert total(shell.report(), "puts") == 4


def test_what_is_remembered_of_clients_is_bounded() -> None:
    shell = Shell()
    shell.checks = False
    for number in range(600):
        peer = shell.client()
        peer.cast(m.Tally({"puts": 1, f"own-{number}": 1}))
        peer.end()
    before = shell.report()["told_before"]
    assert before["puts"] == 600
    assert len(before) <= 256
    assert len(shell.broker.tallies._gone) <= 256
