"""The table's half of the protocol: safe in every interleaving, and each shortcut is caught."""

from __future__ import annotations

import pytest

from tests.model import marks


def test_the_table_is_safe_and_settles_in_every_interleaving() -> None:
    wrong, states = marks.explore()
    assert not wrong
    assert states > 500


@pytest.mark.parametrize("mutant", marks.MUTANTS)
def test_each_shortcut_is_caught(mutant: str) -> None:
    wrong, _ = marks.explore(mutant)
    assert wrong.startswith("unsafe"), wrong
