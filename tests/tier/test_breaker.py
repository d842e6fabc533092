"""When the store is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmbroker.tier.breaker import Breaker, State


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, pause=(1.0, 4.0))
    assert [breaker.failed(at, "gone") for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = opened()
    assert breaker.state is State.OPEN and breaker.why == "gone" and breaker.opened == 1


def test_a_success_in_between_does_not() -> None:
    breaker = Breaker(failures=3)
    for _ in range(10):
        breaker.failed(0.0, "slow")
        breaker.failed(0.0, "slow")
        breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_what_was_asked_before_it_opened_does_not_count_again() -> None:
    breaker = opened()
    assert not any(breaker.failed(0.1, "late") for _ in range(10))
    assert breaker.opened == 1 and breaker.why == "gone"


def test_one_trial_after_the_pause() -> None:
    breaker = opened()
    assert not breaker.due(0.99)
    assert breaker.due(1.0) and breaker.state is State.HALF_OPEN
    assert not breaker.due(9.0), "there is one at a time"
    assert breaker.tried(9.0, None) and breaker.state is State.CLOSED


def test_pauses_grow_up_to_a_limit() -> None:
    breaker, now = opened(), 0.0
    pauses = []
    for _ in range(5):
        left = breaker.left(now)
        assert left is not None
        pauses.append(left)
        now += left
        assert breaker.due(now)
        assert not breaker.tried(now, "still gone")
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_store_that_answers_trials_and_then_fails_is_left_alone_for_longer() -> None:
    breaker = opened()
    assert breaker.due(1.0) and breaker.tried(1.0, None)
    assert [breaker.failed(1.1, "gone") for _ in range(3)][-1]
    assert breaker.left(1.1) == 2.0


def test_a_store_that_was_well_for_long_is_tried_soon() -> None:
    breaker = opened()
    assert breaker.due(1.0) and breaker.tried(1.0, None)
    assert [breaker.failed(100.0, "gone") for _ in range(3)][-1]
    assert breaker.left(100.0) == 1.0


@given(
    st.lists(st.tuples(st.sampled_from(["well", "failed", "trial well", "trial failed"]), st.integers(0, 10)))
)
def test_it_always_gets_another_chance(steps: list[tuple[str, int]]) -> None:
    breaker, now = Breaker(failures=2, pause=(1.0, 8.0)), 0.0
    for what, seconds in steps:
        now += seconds
        match what:
            case "well":
                breaker.succeeded()
            case "failed":
                breaker.failed(now, "failed")
            case _:
                if breaker.due(now):
                    breaker.tried(now, None if what == "trial well" else "failed")
        left = breaker.left(now)
        assert breaker.state is not State.HALF_OPEN
        assert (left is None) == (breaker.state is State.CLOSED)
        assert left is None or left <= 8.0
