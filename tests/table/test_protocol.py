"""The table's two-sided protocol, explored: every interleaving of takers, tensors kept, and a dismissal.

`model/` explores the grant protocol between broker and ranks; this is what happens inside one rank, step by step, where
each step is one atomic operation of a dict. Safety: nothing is settled while somebody uses the entry or a tensor of it
lives. Liveness: once all have let go of a dismissed entry, it is settled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Taker(NamedTuple):
    """A scheduler thread that takes, builds a tensor, releases, and perhaps keeps the tensor for a while."""

    at: str = "start"  # start, found, marked, using, releasing, out
    mark: bool = False
    tensor: bool = False


class State(NamedTuple):
    listed: bool = True  # the entry is in the table
    receiver: str = "idle"  # idle, withdrawn (the entry), unmarked (has seen no mark), settled
    takers: tuple[Taker, ...] = (Taker(), Taker())


def steps(s: State, mutant: str) -> Iterator[State]:
    match s.receiver:
        case "idle" if mutant == "looks before it withdraws":
            if not any(t.mark for t in s.takers):
                yield s._replace(receiver="looked")
        case "looked":
            yield s._replace(listed=False, receiver="unmarked")
        case "idle":
            yield s._replace(listed=False, receiver="withdrawn")
        case "withdrawn":
            if mutant == "does not look for marks" or not any(t.mark for t in s.takers):
                yield s._replace(receiver="unmarked")
        case "unmarked":
            if mutant == "does not look for tensors" or not any(t.tensor for t in s.takers):
                yield s._replace(receiver="settled")
            else:
                yield s._replace(receiver="withdrawn")
    for i, taker in enumerate(s.takers):

        def now(i: int = i, taker: Taker = taker, **changes: object) -> State:
            takers = list(s.takers)
            takers[i] = taker._replace(**changes)
            return s._replace(takers=tuple(takers))

        match taker.at:
            case "start":
                yield now(at="found" if s.listed else "out")
            case "found":
                yield now(at="marked", mark=True)
            case "marked" if mutant == "does not look again" or s.listed:
                yield now(at="using")
            case "marked":
                yield now(at="out", mark=False)  # a miss
            case "using":
                yield now(tensor=True)
                yield now(at="releasing", tensor=False)
                if taker.tensor:
                    yield now(at="releasing")  # somebody keeps it
            case "releasing":
                yield now(at="out", mark=False)
            case "out" if taker.tensor:
                yield now(tensor=False)


def unsafe(s: State) -> bool:
    return s.receiver == "settled" and any(t.at == "using" or t.tensor for t in s.takers)


def explore(mutant: str = "") -> set[State]:
    seen: set[State] = set()
    todo = [State()]
    while todo:
        s = todo.pop()
        if s not in seen:
            seen.add(s)
            todo += steps(s, mutant)
    return seen


def test_safe_in_every_interleaving() -> None:
    states = explore()
    assert len(states) > 200
    assert not any(map(unsafe, states))


def test_every_end_is_settled() -> None:
    ends = [s for s in explore() if not list(steps(s, ""))]
    assert ends
    assert all(s.receiver == "settled" and all(t.at == "out" and not t.mark for t in s.takers) for s in ends)


@pytest.mark.parametrize(
    "mutant",
    [
        "looks before it withdraws",
        "does not look for marks",
        "does not look for tensors",
        "does not look again",
    ],
)
def test_each_shortcut_is_caught(mutant: str) -> None:
    assert any(map(unsafe, explore(mutant)))
