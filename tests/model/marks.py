"""Explicit-state model of how schedulers and the receiver meet at one entry of a local table (`broker/table.py`).

A take looks the entry up, leaves its mark on it, and looks again; a release lets go of the tensor and takes the mark
away; a dismissal takes the entry out of the table, and settles as soon as it has seen no mark, and then no live tensor.
Each step below is one atomic operation; every preemption of two schedulers and the receiver is explored.

Safe: nobody uses or references what was settled. Live: a dismissed entry is settled when nobody is at it any more. This
refines the entry of `grants.py`: *idle* is an entry in the table without marks, *busy* one with marks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

TAKES = 2  # of each scheduler


class Scheduler(NamedTuple):
    at: str = "away"  # away, found, marked, using, letting go, missed
    kept: bool = False  # a tensor outlives its release
    left: int = TAKES


class State(NamedTuple):
    schedulers: tuple[Scheduler, ...] = (Scheduler(), Scheduler())
    marks: frozenset[int] = frozenset()
    listed: bool = True  # in the table
    receiver: str = "granted"  # granted, withdrawing, watching, halfway, settled
    seen: bool = False  # what the receiver saw when it looked too early


def steps(s: State, mutant: str = "") -> Iterator[tuple[str, State]]:
    """What can happen next, with one shortcut switched on."""
    for i, one in enumerate(s.schedulers):

        def move(to: str, i: int = i, one: Scheduler = one, **changes: object) -> State:
            fields = {"at": to, **{k: v for k, v in changes.items() if k in Scheduler._fields}}
            schedulers = (*s.schedulers[:i], one._replace(**fields), *s.schedulers[i + 1 :])  # type: ignore[arg-type]
            rest = {k: v for k, v in changes.items() if k not in Scheduler._fields}
            return s._replace(schedulers=schedulers, **rest)  # type: ignore[arg-type]

        if one.at == "away" and one.left:
            left = one.left - 1
            yield f"{i} looks up", move("found", left=left) if s.listed else move("away", left=left)
        if one.at == "found":
            if mutant == "marks after the second look":
                yield f"{i} looks again", move("marking") if s.listed else move("away")
            else:
                after = "using" if mutant == "no second look" else "marked"
                yield f"{i} marks", move(after, marks=s.marks | {i})
        if one.at == "marking":
            yield f"{i} marks", move("using", marks=s.marks | {i})
        if one.at == "marked":
            yield f"{i} looks again", move("using") if s.listed else move("away", marks=s.marks - {i})
        if one.at == "using":
            if mutant == "the mark goes before the tensor":
                yield f"{i} unmarks", move("still using", marks=s.marks - {i})
            else:
                for kept in (False, True):
                    yield f"{i} lets go, kept={kept}", move("letting go", kept=kept)
        if one.at == "still using":
            yield f"{i} lets go", move("away")
        if one.at == "letting go":
            yield f"{i} unmarks", move("away", marks=s.marks - {i})
        if one.kept:
            yield f"{i}: the tensor dies", move(one.at, kept=False)

    kept = any(one.kept for one in s.schedulers) and mutant != "live tensors do not matter"
    clear = {"marks": not s.marks, "tensors": not kept}
    first, then = ("tensors", "marks") if mutant == "looks at tensors first" else ("marks", "tensors")
    if s.receiver == "granted":
        if mutant == "looks before it withdraws":
            yield "receiver looks", s._replace(receiver="withdrawing", seen=all(clear.values()))
        else:
            yield "receiver withdraws", s._replace(receiver="watching", listed=False)
    if s.receiver == "withdrawing":
        yield "receiver withdraws", s._replace(receiver="settled" if s.seen else "watching", listed=False)
    if s.receiver == "watching" and clear[first]:
        yield f"receiver sees no {first}", s._replace(receiver="halfway")
    if s.receiver == "halfway":
        yield f"receiver looks at {then}", s._replace(receiver="settled" if clear[then] else "watching")


def unsafe(s: State) -> bool:
    return s.receiver == "settled" and any(
        one.kept or one.at in ("using", "still using", "letting go") for one in s.schedulers
    )


def explore(mutant: str = "") -> tuple[str, int]:
    """``""`` if all is well, else what is wrong and how it came about; and the number of states."""
    start = State()
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        following = list(steps(state, mutant))
        wrong = (
            "unsafe" if unsafe(state) else "stuck" if not following and state.receiver != "settled" else ""
        )
        if wrong:
            path = []
            at: State = state
            while (before := came[at]) is not None:
                at, label = before
                path.append(label)
            return f"{wrong}: {'; '.join(reversed(path))}", len(came)
        for label, after in following:
            if after not in came:
                came[after] = (state, label)
                queue.append(after)
    return "", len(came)


MUTANTS = (
    "no second look",
    "marks after the second look",
    "the mark goes before the tensor",
    "live tensors do not matter",
    "looks before it withdraws",
    "looks at tensors first",
)
