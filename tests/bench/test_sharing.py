"""The bench of sharing, without its servers: what is sent, what is still to be measured, what was promised."""

from __future__ import annotations

from typing import Any

import pytest

from bench import sharing
from bench.screenshots import Album, order


@pytest.mark.parametrize("repeats", sharing.REPEATS)
def test_as_many_have_come_before_as_were_asked_for(repeats: int) -> None:
    sent = order(200, repeats)
    assert len(sent) == 200 and sent == order(200, repeats)
    again = [one for place, one in enumerate(sent) if one in sent[:place]]
    assert len(again) == 200 * repeats // 100
    fresh = list(dict.fromkeys(sent))
    assert fresh == list(range(len(fresh)))


def test_screenshots_differ_and_are_drawn_once() -> None:
    album = Album()
    album.draw([0, 1, 4])
    assert len({album[0], album[1], album[4]}) == 3
    assert album[4] is album[4]


def test_no_line_has_a_picture_of_another_one() -> None:
    parts = [(sharing.OWN, engines, repeats) for engines in (1, 2) for repeats in sharing.REPEATS]
    numbers = [set(sharing.numbers_of(part, 100)) for part in parts]
    assert len(set().union(*numbers)) == sum(map(len, numbers))
    assert not set(sharing.WARM) & set().union(*numbers)


def _line(transport: str, engines: int, repeats: int, per_second: float, live: int) -> dict[str, Any]:
    return {
        "transport": transport,
        "engines": engines,
        "repeats_percent": repeats,
        "requests_per_s": per_second,
        "live_bytes": {"host": live},
    }


def test_what_was_measured_is_not_measured_again() -> None:
    found: dict[str, Any] = {
        "lines": [_line(sharing.SHARED, 1, 0, 1.0, 1)],
        "hits": [{"transport": sharing.OWN}],
    }
    ours, theirs = (sharing.parts(found, transport) for transport in (sharing.SHARED, sharing.OWN))
    assert (sharing.SHARED, 1, 0) not in ours and (sharing.SHARED, 0, 0) in ours
    assert (sharing.OWN, 1, 0) in theirs and (sharing.OWN, 0, 0) not in theirs


def test_goals_are_of_what_was_measured() -> None:
    lines = [_line(sharing.SHARED, engines, 90, 30.0, 100) for engines in (1, 2)]
    found: dict[str, Any] = {"lines": [*lines, _line(sharing.OWN, 1, 90, 10.0, 0)], "hits": []}
    assert [(goal["measured"], goal["met"]) for goal in sharing.goals(found)] == [(50.0, True), (3.0, True)]
    found["hits"].append({"transport": sharing.SHARED, "text_ms": 2.0, "new_ms": 92.0, "known_ms": 8.0})
    assert next((goal["measured"], goal["met"]) for goal in sharing.goals(found)) == (15.0, False)
    assert sharing.goals({"lines": [], "hits": []}) == []
