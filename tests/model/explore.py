"""Explores the grant model: every state of every world, and every mutant.

python -m tests.model.explore
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from . import search
from .grants import (
    EVERY,
    Entry,
    Next,
    Rank,
    State,
    Step,
    World,
    broker,
    change,
    over,
    put,
    receiver,
    scheduler,
)


def faults(s: State, w: World) -> Iterator[Next]:
    """What may go wrong."""
    r = s.ranks[0]
    if "cut" in w.faults and r.connected and not r.lives:
        holds = tuple(x if x.stage == "new" else x._replace(lost=x.lost | 1) for x in s.holds)
        cut = change(s._replace(holds=holds), 0, connected=False, up=())
        yield Step("rank", "its session ends, the process lives", 0, fault=True), cut
    if "die" in w.faults and r.alive:
        dead = Rank((Entry(),) * w.holds, (0,) * w.holds, connected=False, alive=False, lives=1)
        yield Step("rank", "its process dies", 0, fault=True), s._replace(ranks=put(s.ranks, 0, dead))
    if "producer" in w.faults and s.producer == "up":
        yield Step("producer", "its session ends, the process lives", fault=True), lose_producer(s, "cut", w)
    if "producer" in w.faults and s.producer != "dead":
        yield Step("producer", "its process dies", fault=True), lose_producer(s, "dead", w)
    if "restart" in w.faults and s.boot == 0 and s.up:
        ranks = tuple(r._replace(connected=False, up=()) for r in s.ranks)
        yield Step("broker", "dies", fault=True), s._replace(up=False, ranks=ranks)
    if not s.up:
        kept = "the new broker keeps the arena" in w.mutants
        yield Step("broker", "starts anew"), s._replace(up=True, boot=1, reused=s.reused | kept)


def lose_producer(s: State, state: str, w: World) -> State:
    t = s._replace(producer=state, pen="down" if state == "dead" else s.pen)
    stage = t.holds[0].stage
    if s.producer == "up" and stage == "new":
        return t._replace(holds=put(t.holds, 0, t.holds[0]._replace(stage="aborted")))
    if s.producer == "up" and stage in ("active", "sent"):
        if "no grace for a dead producer's holds" in w.mutants:
            return over(t, 0, w)
        if "a dead producer's hold is struck off" in w.mutants:
            return t._replace(holds=put(t.holds, 0, t.holds[0]._replace(stage="over", settled=EVERY)))
    return t


def steps(s: State, w: World) -> Iterator[Next]:
    """Everything that can happen next."""
    yield from broker(s, w)
    for i, r in enumerate(s.ranks):
        if r.alive:
            yield from receiver(s, i, w)
            yield from scheduler(s, i, w)
    yield from faults(s, w)


def unsafe(s: State, w: World) -> bool:
    if s.reused & 1 and s.pen != "down" and s.producer != "dead":
        return True
    for r in s.ranks:
        for h, e in enumerate(r.entries):
            touched = e.at in ("idle", "busy") or e.users or e.kept
            if r.wrong or (touched and s.reused >> w.slot(h) & 1):
                return True
    return False


def leaks(s: State, w: World) -> bool:
    """`s` is a state in which nothing is left to do."""
    born = any(x.stage != "new" for h, x in enumerate(s.holds) if w.slot(h) == w.slot(s.boot))
    writer_lives = s.producer == "cut" and s.pen != "down"
    return born and not s.reused >> w.slot(s.boot) & 1 and not writer_lives


def verdict(s: State, w: World, quiet: bool) -> str:
    """What is wrong with a state; empty if nothing is. `quiet`: nothing but faults can happen next."""
    if unsafe(s, w):
        return "unsafe"
    if w.orderly and any(r.missed for r in s.ranks):
        return "disagree"
    return "leak" if quiet and leaks(s, w) else ""


class Found(NamedTuple):
    """What an exploration found: the verdict on the first bad state and a shortest way to it, or all states."""

    verdict: str
    states: int
    path: tuple[Step, ...]


def twin(s: State) -> State:
    """The same state with its ranks in order: which is which does not matter where both can do the same."""
    if s.ranks[0] <= s.ranks[1]:
        return s
    swap = (0, 2, 1, 3)
    holds = tuple(
        x._replace(acked=swap[x.acked], settled=swap[x.settled], lost=swap[x.lost]) for x in s.holds
    )
    return s._replace(holds=holds, ranks=s.ranks[::-1])


def explore(w: World) -> Found:
    """Breadth first through every state of a world, until a bad one."""
    start = w.start()
    same = (lambda s: s) if w.kept or w.faults & {"cut", "die", "fail"} else twin
    seen = {same(start)}
    parent: dict[State, Next] = {}
    queue = deque([start])
    while queue:
        s = queue.popleft()
        following = list(steps(s, w))
        if bad := verdict(s, w, all(step.fault for step, _ in following)):
            return Found(bad, len(seen), path(s, parent))
        for step, t in following:
            if (key := same(t)) not in seen:
                seen.add(key)
                parent[t] = (step, s)
                queue.append(t)
    return Found("", len(seen), ())


def path(s: State, parent: dict[State, Next]) -> tuple[Step, ...]:
    back = []
    while s in parent:
        step, s = parent[s]
        back.append(step)
    return tuple(reversed(back))


def walk(w: World, rng: random.Random) -> list[Next]:
    """One random run, until nothing but faults is left."""
    return search.walk(w.start(), lambda s: steps(s, w), rng)


# --- the worlds, and the mutants that they have to catch ------------------------------------------------------------


def world(
    name: str,
    *faults: str,
    holds: int = 1,
    takes: tuple[int, ...] = (1,),
    kept: bool = False,
    orderly: bool = False,
) -> World:
    return World(name, holds, takes, kept, orderly, frozenset(faults))


WORLDS = {
    w.name: w
    for w in (
        world("takes", "die", takes=(3,), kept=True),
        world("takes, orderly", "die", takes=(3,), kept=True, orderly=True),
        world("hits", holds=2, takes=(1, 1)),
        world("hits, orderly", holds=2, takes=(2, 2), kept=True, orderly=True),
        world("hits and a death, orderly", "die", holds=2, takes=(2, 1), orderly=True),
        world("lost session", "cut", "die", takes=(2,), kept=True),
        world("lost session, orderly", "cut", "die", takes=(2,), kept=True, orderly=True),
        world("lost session and hits, orderly", "cut", holds=2, takes=(1, 1), orderly=True),
        world("failed grants", "fail", "deadline", "die"),
        world("failed grants, orderly", "fail", "deadline", "die", orderly=True),
        world("failed grants and a lost session", "fail", "deadline", "cut"),
        world("lost producer", "producer", "die", takes=(2,)),
        world("lost producer, orderly", "producer", "die", takes=(2,), orderly=True),
        world("restart", "restart", holds=2, takes=(1, 0)),
        world("restart, orderly", "restart", "die", holds=2, takes=(2, 1), orderly=True),
        world("restart and kept tensors", "restart", holds=2, takes=(1, 0), kept=True),
    )
}

#: (mutants, the world that must catch them, what it must find)
MUTANTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("an answer before the acknowledgements", "a miss builds from the reference"), "takes", "unsafe"),
    (("a use count in place of the pop",), "takes", "unsafe"),
    (("a session's end settles",), "lost session", "unsafe"),
    (("a live tensor does not matter",), "takes", "unsafe"),
    (("an answer before the acknowledgements",), "takes, orderly", "disagree"),
    (("the hold ends before the last word",), "takes, orderly", "disagree"),
    (("one settled hold is enough",), "hits", "unsafe"),
    (("one settled rank is enough",), "takes", "unsafe"),
    (("attaching again settles",), "lost session", "unsafe"),
    (("released is said at once",), "lost session", "unsafe"),
    (("released is never said",), "lost session", "leak"),
    (("the new broker keeps the arena",), "restart", "unsafe"),
    (("keys without the boot",), "restart", "unsafe"),
    (("an earlier boot's entries are dropped",), "restart, orderly", "disagree"),
    (("a second take is not counted",), "takes", "unsafe"),
    (("a busy entry is not found",), "takes, orderly", "disagree"),
    (("one rank's failure settles for all",), "failed grants", "unsafe"),
    (("a failed grant counts as acknowledged",), "failed grants, orderly", "disagree"),
    (("only ranks that acknowledged are dismissed",), "failed grants", "unsafe"),
    (("a dismissal overtakes the grant",), "failed grants", "unsafe"),
    (("one entry for a feature",), "hits, orderly", "disagree"),
    (("acknowledged before the entry is there",), "takes, orderly", "disagree"),
    (("no grace for a dead producer's holds",), "lost producer, orderly", "disagree"),
    (("a dead producer's hold is struck off",), "lost producer", "unsafe"),
    (("an aborted lease's slot is free at once",), "lost producer", "unsafe"),
    (("a retained slot is free with its last hold",), "lost producer", "unsafe"),
    (("the last release does not look at the flag",), "takes", "leak"),
    (("the flag is read before the entry is back",), "takes", "leak"),
    (("the flag is set after the pop",), "takes", "leak"),
)


def mutated(mutants: tuple[str, ...], name: str) -> World:
    return replace(WORLDS[name], mutants=frozenset(mutants))


def main() -> int:
    bad = 0
    for w in WORLDS.values():
        found = explore(w)
        bad += bool(found.verdict)
        print(
            f"{found.verdict or 'fine':9} {w.name}: {found.states} states", *found.path, sep="\n            "
        )
    for mutants, name, expected in MUTANTS:
        found = explore(mutated(mutants, name))
        bad += found.verdict != expected
        word = "caught" if found.verdict == expected else "MISSED"
        print(
            f"{word:9} {' + '.join(mutants)}: {found.verdict or 'fine'} after {len(found.path)} steps in {name}"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
