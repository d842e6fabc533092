"""Something bad happens at every step of the protocol. Nothing is lost, nothing is wrong, nobody else fails."""

from __future__ import annotations

import pytest

from .campaign import STEPS, Theatre, short
from .conftest import SEED
from .scene import Life, Stage


@pytest.mark.parametrize(
    ("role", "step", "action"), [pytest.param(*fault, id=":".join(fault)) for fault in short(SEED)]
)
def test_fault(theatre: Theatre, role: str, step: str, action: str) -> None:
    theatre.play(role, step, action, SEED)


def test_every_step_has_a_name() -> None:
    """What is gone through in a life is what the campaign knows: no step is new, none has gone."""
    stage = Stage()
    try:
        stage.start()
        stage.bystanders()
        with Life(stage, "broker", "", "", SEED) as life:
            life.live(copy=True)
            seen = {name: set(found) for name, found in life.seen.items()}
            life.end()
        seen["broker"] = set(stage.seen())
    finally:
        stage.close()
    for role, steps in STEPS.items():
        assert len(steps) == len(set(steps))
        assert seen[role] - set(steps) == set()
        # The last steps come after the last question.
        assert set(steps) - seen[role] <= {
            "detach.ask",
            "detach.sent",
            "leave",
            "left",
            "lookup.ask",
            "lookup.sent",
            "found.came",
            "found.handled",
        }
