"""What is stored, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmbroker.proto.keys import Key
from mmbroker.proto.messages import Worth
from mmbroker.tier.policy import MIB, Backlog, Bucket, Policy, Stored, cost_per_mib


def worth(number: int, nbytes: int = MIB, cost: int | None = None, hits: int = 0) -> Worth:
    return Worth(Key.derived(number.to_bytes(32, "big")), nbytes, cost, hits)


def test_everything_is_stored_unless_told_otherwise() -> None:
    assert Policy().wants(worth(0)) and Policy().wants(worth(0, cost=5))


def test_what_is_cheap_is_stored_once_it_is_reused() -> None:
    policy = Policy(min_cost=1000.0, reuse=2)
    assert policy.wants(worth(0, 2 * MIB, cost=2000))
    assert not policy.wants(worth(0, 2 * MIB, cost=1999))
    assert not policy.wants(worth(0, cost=None)) and not policy.wants(worth(0, cost=1, hits=1))
    assert policy.wants(worth(0, cost=None, hits=2))


def test_a_feature_without_bytes_has_a_cost() -> None:
    assert cost_per_mib(worth(0, 0, cost=1)) == MIB


@given(
    st.floats(1.0, 1e9),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), max_size=60),
)
def test_no_more_is_written_than_the_budget(rate: float, asked: list[tuple[int, float]]) -> None:
    bucket, now, spent, largest = Bucket(rate, 0.0), 0.0, 0, 0
    for nbytes, seconds in asked:
        now += seconds
        largest = max(largest, nbytes)
        left = bucket.left(nbytes, now)
        if bucket.spend(nbytes, now):
            assert left == 0.0
            spent += nbytes
        assert spent <= rate * (1 + now) * (1 + 1e-9) + largest


@given(st.floats(1.0, 1e9), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=20))
def test_everything_has_its_turn(rate: float, sizes: list[int]) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    for nbytes in sizes:
        now += bucket.left(nbytes, now) * (1 + 1e-6) + 1e-6
        assert bucket.spend(nbytes, now)


def test_the_dearest_per_byte_goes_first() -> None:
    backlog = Backlog(Bucket(1e12, 0.0))
    for number, cost in enumerate([5, None, 9, 7]):
        backlog.add(worth(number, cost=cost))
    taken = [backlog.take(0.0) for _ in range(4)]
    assert [one and one.cost for one in taken] == [9, 7, 5, None]
    assert backlog.take(0.0) is None and backlog.left(0.0) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 100))), st.integers(1, 10))
def test_a_full_backlog_drops_the_cheapest(added: list[tuple[int, int]], most: int) -> None:
    backlog, rest = Backlog(Bucket(1e12, 0.0), most), {}
    for number, cost in added:
        backlog.add(worth(number, cost=cost))
        rest[number] = cost
        if len(rest) > most:
            del rest[min(rest, key=lambda n: rest[n])]
        assert len(backlog) == len(rest) <= most
    assert sum(rest.values()) == sum(
        one.cost or 0 for one in iter(lambda: backlog.take(0.0), None) if one is not None
    )


def test_the_backlog_waits_for_its_budget() -> None:
    backlog = Backlog(Bucket(float(MIB), 0.0))
    backlog.add(worth(0, MIB, cost=2))
    backlog.add(worth(1, MIB, cost=1))
    assert backlog.take(0.0) is not None
    assert backlog.take(0.5) is None and backlog.left(0.5) == 0.5
    assert backlog.take(1.0) is not None


def test_what_is_stored_is_remembered_until_its_time_is_over() -> None:
    stored = Stored(most=3)
    stored.add("a", 10.0)
    stored.add("b", 11.0)
    stored.add("a", 12.0)  # again
    assert "a" in stored and "b" in stored and stored.left(1.0) == 10.0
    assert stored.over(10.5) is None and stored.over(11.0) == "b" and "b" not in stored
    for name in "cde":
        stored.add(name, None)
    assert "a" not in stored and len(stored) == 3
    assert stored.left(99.0) is None and stored.over(99.0) is None


def test_what_is_doubtful_is_stored_again_and_still_removed_in_time() -> None:
    stored = Stored()
    stored.add("a", 10.0)
    stored.add("b", 11.0)
    stored.doubt()
    assert "a" not in stored and "b" not in stored
    stored.add("b", 12.0)
    assert "b" in stored
    assert [stored.over(12.0), stored.over(12.0), stored.over(12.0)] == ["a", "b", None]
