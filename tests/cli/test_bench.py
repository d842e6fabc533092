"""`mmbroker bench` in its quickest form: every figure is there, and the words fit them."""

from __future__ import annotations

import json

import pytest

from mmbroker import selftest

from .test_cli import mmbroker

LINES = ["round trip", "put 4 KB", "put 9.6 MB", "put 9.6 MB again", "look-up", "eight at a time"]


@pytest.mark.usefixtures("no_leaks")
def test_every_figure_is_there() -> None:
    result = mmbroker("bench", "--quick", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert [line["name"] for line in found["lines"]] == LINES
    assert all(line["value"] > 0 and line["limit"] > 0 and line["verdict"] for line in found["lines"])
    trip = found["lines"][0]
    assert trip["value"] > trip["limit"], "a round trip to a broker is more than one by bare socket"
    assert found["verdict"]


@pytest.mark.usefixtures("no_leaks")
def test_a_person_reads_it() -> None:
    result = mmbroker("bench", "--quick")
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "GB/s" in result.stdout and "look-up" in result.stdout
    assert result.stderr.splitlines()[0] == "measuring this machine's own limits"


@pytest.mark.parametrize(
    ("unit", "value", "limit", "allowed", "fine", "words"),
    [
        ("s", 3.0, 2.0, 2, True, "1.5 times hashing it"),
        ("s", 5.0, 2.0, 2, False, "slow: 2.5 times hashing it"),
        ("s", 1.0, 2.0, 1, True, "within hashing it"),
        ("B/s", 4.0, 2.0, 1.5, True, "2 times hashing it"),
        ("B/s", 1.0, 2.0, 1.5, False, "slow: 0.5 times hashing it"),
    ],
)
def test_a_figure_beside_its_limit(
    unit: str, value: float, limit: float, allowed: float, fine: bool, words: str
) -> None:
    line = selftest._line("x", unit, value, limit, "hashing it", allowed)
    assert (line.fine, line.verdict) == (fine, words)


def test_the_verdict_names_what_is_slow_and_whether_it_counts() -> None:
    good = selftest._line("good", "s", 1.0, 1.0, "x", 2)
    slow = selftest._line("slow one", "s", 9.0, 1.0, "x", 2)
    assert selftest._verdict([good], 3.0).startswith("Good")
    assert "slow one" in selftest._verdict([good, slow], 0.1) and "allows" in selftest._verdict(
        [good, slow], 0.1
    )
    assert selftest._verdict([good, slow], 3.0).startswith("Inconclusive")
