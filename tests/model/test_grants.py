"""The grant protocol is safe, agreeing and free of leaks in every world; each shortcut is caught by one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .explore import MUTANTS, WORLDS, explore, mutated


@pytest.mark.parametrize("name", WORLDS)
def test_the_protocol_holds_in_every_state(name: str) -> None:
    found = explore(WORLDS[name])
    assert not found.verdict, f"{found.verdict}: " + "; ".join(map(str, found.path))
    assert found.states > 100, "the world is too small to say anything"


@pytest.mark.parametrize(
    ("mutants", "name", "expected"), MUTANTS, ids=[f"{' + '.join(m)} ({v})" for m, _, v in MUTANTS]
)
def test_a_shortcut_is_caught(mutants: tuple[str, ...], name: str, expected: str) -> None:
    found = explore(mutated(mutants, name))
    assert found.verdict == expected, f"{found.states} states, {found.verdict or 'nothing found'}"


def test_every_shortcut_is_tried() -> None:
    """A mutant that no test names would be dead code in the model."""
    here = Path(__file__).parent
    text = (here / "grants.py").read_text() + (here / "explore.py").read_text()
    known = set(re.findall(r'"([^"\n]+)" (?:not )?in (?:w\.mutants|m)\b', text))
    assert known == {name for mutants, _, _ in MUTANTS for name in mutants}
