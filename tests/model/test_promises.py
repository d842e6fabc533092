"""Whoever asks is answered in time, and one makes it; each shortcut is caught by a world."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .promises import MUTANTS, WORLDS, explore, mutated


@pytest.mark.parametrize("name", WORLDS)
def test_the_rules_hold_in_every_state(name: str) -> None:
    found = explore(WORLDS[name])
    assert not found.verdict, f"{found.verdict}: " + "; ".join(map(str, found.path))


def test_the_worlds_are_not_too_small_to_say_anything() -> None:
    assert explore(WORLDS["two want it"]).states > 1000


@pytest.mark.parametrize(("mutant", "name", "expected"), MUTANTS, ids=[mutant for mutant, _, _ in MUTANTS])
def test_a_shortcut_is_caught(mutant: str, name: str, expected: str) -> None:
    found = explore(mutated(mutant, name))
    assert found.verdict == expected, f"{found.states} states, {found.verdict or 'nothing found'}"


def test_every_shortcut_is_tried() -> None:
    text = (Path(__file__).parent / "promises.py").read_text()
    known = set(re.findall(r'"([^"\n]+)" (?:not )?in w\.mutants\b', text))
    assert known == {mutant for mutant, _, _ in MUTANTS}
