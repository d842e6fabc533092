"""Explicit-state model of who makes what several want, with a tier that may have it already.

The world: one derived key that nobody has, clients that ask for it (by `Promise` or by `Lookup`), each once, and one
mover. The broker handles one message at a time, whole; between messages anything can happen in any order, or nothing,
and time passes in ticks. The mover finds the key, or does not, or says nothing; whoever was promised it makes it, gives
it back, or dies.

- in time: nobody waits past the deadline of its call, nor for the mover past `WAIT`; nobody fails whom nothing but the
  mover was in the way of.
- single flight: no two are to make it at once, unless one of them is the mover and its time is over.
- no leak: when nothing is left to do, nobody waits, and nobody is waited for.

The grants that follow a hit are `grants.py`, and know nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import search

WAIT = 2  # ticks
LAST = 2  # who has not asked by then does not ask
NOBODY = -1
MOVER = -2


class Asker(NamedTuple):
    at: str = "new"  # new, waits, due (it is to make it), writes; hit, miss, failed, gone
    since: int = 0


class State(NamedTuple):
    askers: tuple[Asker, ...]
    now: int = 0
    queue: tuple[int, ...] = ()  # who waits, in order of arrival
    writer: int = NOBODY  # whom they wait for
    due: int = 0  # when they wait no longer, if it is the mover
    mover: str = "idle"  # idle; asked (it has the promise); writes; late (writes, and nobody waits); dead
    stale: bool = False  # it does not know yet that an earlier promise has ended
    sealed: bool = False


class Step(NamedTuple):
    """What happened and who did it: an asker's number, `MOVER`, or `NOBODY` for time."""

    who: int
    what: str
    fault: bool = False

    def __str__(self) -> str:
        return f"{ {NOBODY: 'time', MOVER: 'the mover'}.get(self.who, f'client {self.who}') } {self.what}"


@dataclass(frozen=True)
class World:
    """`verbs` of the clients, and how long their calls may take, in ticks."""

    name: str
    verbs: tuple[str, ...]
    timeouts: tuple[int, ...] = (5, 5, 5)
    faults: frozenset[str] = frozenset()
    mutants: frozenset[str] = frozenset()

    def start(self) -> State:
        return State((Asker(),) * len(self.verbs))


Next = tuple[Step, State]


def become(s: State, i: int, at: str, **changes: object) -> State:
    """`s` when client `i` has come so far; it waits no longer."""
    asker = s.askers[i]._replace(at=at)
    s = s._replace(
        askers=(*s.askers[:i], asker, *s.askers[i + 1 :]), queue=tuple(n for n in s.queue if n != i)
    )
    return s._replace(**changes)  # type: ignore[arg-type]


# --- the broker -----------------------------------------------------------------------------------------------------


def ask(s: State, i: int, w: World) -> State:
    """A call comes: it waits for the mover, or for whoever makes it, or is answered at once."""
    asker = Asker("waits", s.now)
    s = s._replace(askers=(*s.askers[:i], asker, *s.askers[i + 1 :]), queue=(*s.queue, i))
    free = s.writer == NOBODY or "it is sought though somebody makes it" in w.mutants
    in_time = w.timeouts[i] > WAIT or "who has no time for it seeks" in w.mutants
    if not s.sealed and free and s.mover == "idle" and in_time:
        s = s._replace(writer=MOVER, due=s.now + WAIT, mover="asked")
    elif s.writer == MOVER and w.verbs[i] == "lookup" and s.now + w.timeouts[i] <= s.due:
        return become(s, i, "miss")
    if s.mover == "late" and s.writer == NOBODY and "who is late is waited for by others" in w.mutants:
        s = s._replace(writer=MOVER, due=s.now + WAIT + 9, mover="writes")
    return serve(s, w)


def serve(s: State, w: World) -> State:
    """Whoever waits is looked at, in order of arrival."""
    for i in s.queue:
        if s.sealed:
            s = become(s, i, "hit")
        elif s.writer == MOVER:
            continue
        elif w.verbs[i] == "lookup":
            s = become(s, i, "miss")
        elif s.writer == NOBODY:
            s = become(s, i, "gone" if s.askers[i].at == "gone" else "due", writer=i)
    return s


def leave(s: State, who: int, w: World) -> State:
    """Somebody makes it no more, or has made it."""
    if s.writer == who:
        s = s._replace(writer=NOBODY)
    again = s.writer == NOBODY and s.queue and not s.sealed and s.mover == "idle"
    if again and "who has waited seeks once more" in w.mutants:
        return s._replace(writer=MOVER, due=s.now + WAIT, mover="asked")
    return serve(s, w)


def time(s: State, w: World) -> Iterator[Next]:
    """Deadlines, as soon as they are there; else a tick, if anybody would notice."""
    waits = [i for i in s.queue if s.now >= s.askers[i].since + w.timeouts[i]]
    over = s.writer == MOVER and s.now >= s.due and "the wait has no end" not in w.mutants
    if over and s.mover == "writes" and "a lease is waited for until it is sealed" in w.mutants:
        over = False
    for i in waits:
        yield Step(i, "has no more time"), become(s, i, "failed")
    if over:
        keeps = "the promise outlives the wait" in w.mutants
        late = s._replace(mover="late") if s.mover == "writes" else s._replace(mover="idle", stale=True)
        late = late._replace(mover="asked") if keeps and s.mover == "asked" else late
        yield Step(NOBODY, "is over for the mover"), leave(late, MOVER, w)
    asked = s.now < LAST and any(asker.at == "new" for asker in s.askers)
    if not waits and not over and (asked or s.queue):
        yield Step(NOBODY, "passes"), s._replace(now=s.now + 1)


# --- the others -----------------------------------------------------------------------------------------------------


def clients(s: State, w: World) -> Iterator[Next]:
    for i, asker in enumerate(s.askers):
        if asker.at == "new" and s.now <= LAST:
            yield Step(i, "asks"), ask(s, i, w)
        elif asker.at == "due":
            found = leave(become(s, i, "hit"), i, w)
            yield Step(i, "begins to write"), found if s.sealed else become(s, i, "writes")
            yield Step(i, "gives it back"), leave(become(s, i, "miss"), i, w)
        elif asker.at == "writes":
            yield Step(i, "seals"), leave(become(s, i, "hit", sealed=True), i, w)
            yield Step(i, "aborts"), leave(become(s, i, "miss"), i, w)
        if "client" in w.faults and asker.at in ("waits", "due", "writes"):
            gone = become(s, i, "gone")
            if asker.at == "waits" and "a dead client's call waits on" in w.mutants:
                gone = gone._replace(queue=s.queue)
            kept = "a dead client's promise stays" in w.mutants
            yield Step(i, "dies", True), gone if asker.at == "waits" or kept else leave(gone, i, w)


def mover(s: State, w: World) -> Iterator[Next]:
    """It is promised the key at once, and hears of it whenever; that its time is over it hears when it is refused."""
    idle = s._replace(mover="idle")
    if s.mover == "asked":
        yield Step(MOVER, "has not got it"), leave(idle, MOVER, w)
        yield (
            Step(MOVER, "begins to write"),
            leave(idle, MOVER, w) if s.sealed else s._replace(mover="writes"),
        )
    if s.stale:
        yield Step(MOVER, "is refused"), s._replace(stale=False)
    if s.mover in ("writes", "late"):
        yield Step(MOVER, "seals"), leave(idle._replace(sealed=True), MOVER, w)
        forgets = "an abort of what is late ends the wait for others" in w.mutants and s.mover == "late"
        yield Step(MOVER, "aborts"), leave(idle._replace(writer=NOBODY) if forgets else idle, MOVER, w)
    if "mover" in w.faults and s.mover != "dead":
        dead = s._replace(mover="dead", stale=False)
        stays = "a dead mover is waited for" in w.mutants and s.writer == MOVER
        yield Step(MOVER, "dies", True), dead._replace(due=99) if stays else leave(dead, MOVER, w)


def steps(s: State, w: World) -> Iterator[Next]:
    """Everything that can happen next."""
    yield from time(s, w)
    yield from clients(s, w)
    yield from mover(s, w)


# --- exploring ------------------------------------------------------------------------------------------------------


def verdict(s: State, w: World, quiet: bool) -> str:
    """What is wrong with a state; empty if nothing is. `quiet`: nothing but faults can happen next."""
    for i, asker in enumerate(s.askers):
        if asker.at == "waits" and s.writer == MOVER and s.now > asker.since + WAIT:
            return "waits for the mover"
        if asker.at == "waits" and w.verbs[i] == "lookup" and s.now > asker.since + WAIT:
            return "waits for the mover"
        others = [a for n, a in enumerate(s.askers) if n != i and w.verbs[n] == "promise" and a.at != "new"]
        if asker.at == "failed" and (w.verbs[i] == "lookup" or not others):
            return "fails"
    makers = [i for i, asker in enumerate(s.askers) if asker.at in ("due", "writes")]
    if len(makers) + (s.mover in ("asked", "writes")) > 1:
        return "two makers"
    at_it = s.writer != NOBODY or s.queue or makers or s.mover in ("asked", "writes", "late")
    return "leak" if quiet and at_it else ""


def explore(w: World) -> search.Found[Step]:
    """Breadth first through every state of a world, until a bad one."""
    return search.explore(w.start(), lambda s: steps(s, w), lambda s, quiet: verdict(s, w, quiet))


DEATHS = frozenset({"client", "mover"})
WORLDS = {
    w.name: w
    for w in (
        World("one makes it", ("promise",), faults=DEATHS),
        World("one looks it up", ("lookup",), faults=DEATHS),
        World("two want it", ("promise", "promise"), faults=DEATHS),
        World("three want it", ("promise", "promise", "promise"), faults=DEATHS),
        World("one makes it, two look it up", ("promise", "lookup", "lookup"), faults=DEATHS),
        World("no time for a tier", ("promise",), (WAIT,)),
        World("no time for a tier, behind others", ("promise", "lookup", "lookup"), (5, 1, WAIT), DEATHS),
    )
}

#: (mutant, the world that must catch it, what it must find)
MUTANTS = (
    ("the wait has no end", "one makes it", "waits for the mover"),
    ("a lease is waited for until it is sealed", "one looks it up", "waits for the mover"),
    ("who is late is waited for by others", "two want it", "waits for the mover"),
    ("who has waited seeks once more", "one looks it up", "waits for the mover"),
    ("who has no time for it seeks", "no time for a tier", "fails"),
    ("it is sought though somebody makes it", "two want it", "two makers"),
    ("the promise outlives the wait", "one makes it", "two makers"),
    ("an abort of what is late ends the wait for others", "two want it", "two makers"),
    ("a dead client's promise stays", "two want it", "leak"),
    ("a dead client's call waits on", "one makes it", "leak"),
    ("a dead mover is waited for", "one makes it", "leak"),
)


def mutated(mutant: str, name: str) -> World:
    return replace(WORLDS[name], mutants=frozenset({mutant}))
