"""How a world is explored: breadth first through every state, or along one random run. A world's `steps` give what can
happen next, as pairs of a step and the state after it; a step has `what` it is, and whether it is a `fault`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar


class Step(Protocol):
    @property
    def what(self) -> str: ...

    @property
    def fault(self) -> bool: ...


S = TypeVar("S", bound=Hashable)
T = TypeVar("T", bound=Step)


class Found(NamedTuple, Generic[T]):
    """`verdict`: what is wrong, empty if nothing is; `path`: the steps that lead there."""

    verdict: str
    states: int
    path: tuple[T, ...]


def explore(
    start: S, steps: Callable[[S], Iterator[tuple[T, S]]], verdict: Callable[[S, bool], str]
) -> Found[T]:
    """Until a state is bad. `verdict` is told whether nothing but faults can happen in a state."""
    came: dict[S, tuple[T, S] | None] = {start: None}
    queue = deque([start])
    while queue:
        s = queue.popleft()
        following = list(steps(s))
        if bad := verdict(s, all(step.fault for step, _ in following)):
            back: list[T] = []
            at = s
            while (before := came[at]) is not None:
                back.append(before[0])
                at = before[1]
            return Found(bad, len(came), tuple(reversed(back)))
        for step, t in following:
            if t not in came:
                came[t] = (step, s)
                queue.append(t)
    return Found("", len(came), ())


def walk(start: S, steps: Callable[[S], Iterator[tuple[T, S]]], rng: random.Random) -> list[tuple[T, S]]:
    """One random run, until nothing but faults is left. Each kind of step is likely in one run, rare in another."""
    s, run = start, []
    weights: dict[str, float] = {}
    while True:
        following = list(steps(s))
        if all(step.fault for step, _ in following):
            return run
        for step, _ in following:
            if step.what not in weights:
                weights[step.what] = rng.choice([0.0, 0.05, 0.2] if step.fault else [0.02, 1.0, 1.0])
        step, s = rng.choices(following, [weights[step.what] for step, _ in following])[0]
        run.append((step, s))
