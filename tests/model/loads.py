"""Explicit-state model of device replicas: loads, shares, parks, takes again, and loaders that die.

Two engines of one rank each, and one feature, granted to both; its bytes are on the host for as long as it is held. The
first rank is told to load it into a slot on the device, the second waits until it is loaded, and shares it. A slot that
the broker counts as free may be another feature's at once.

A rank has three actors: the receiver enqueues copies, publishes places, parks, settles; the scheduler takes, reads,
lets go and parks; the GPU does copies and reads, later, in any order. Every preemption between them is explored.

- safe: nothing is copied into a free slot, or read from one; what is read is what was loaded.
- no leak: when nothing is left to do, both ranks have had the feature, and every slot is free.

`grants.py` is the protocol of the holds themselves. Neither needs the other: a place on the device is given up before,
or together with, the grant that it belongs to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from . import search

RANKS = 2
NOWHERE = -1
HOST = -2


class Rank(NamedTuple):
    """One process. Slots are numbers; `NOWHERE`: none."""

    stage: str = "waiting"  # for its grant; listed (has an entry); over (dismissed); settled
    place: int = NOWHERE  # where the entry says that the feature is on the device
    copying: int = NOWHERE  # the GPU copies into this slot
    copied: bool = False  # and is done, but the broker does not know yet
    hidden: int = NOWHERE  # the place that the receiver has put out of sight, to look at the uses
    parking: bool = False  # the scheduler asked for it
    using: int = NOWHERE  # what the scheduler's tensor lies over; HOST
    marked: bool = False  # it has a use
    reading: int = NOWHERE  # the slot that the GPU reads, after the tensor was let go
    asked: bool = False
    todo: int = 0  # takes to come
    down: tuple[
        tuple[str, int], ...
    ] = ()  # from the broker, in order: load, share, offer to load, offer; dismiss
    up: tuple[str, ...] = ()  # to the broker, in order
    connected: bool = True
    alive: bool = True


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    slots: tuple[str, ...] = ()  # of each slot there was: held, quarantined (by the first rank), free
    loaded: frozenset[int] = frozenset()  # slots with the feature's bytes
    replica: int = NOWHERE
    loader: int = NOWHERE
    ready: bool = False
    pins: frozenset[int] = frozenset()  # ranks that were given the replica
    waiting: tuple[int, ...] = ()  # ranks that get it when it is loaded
    over: frozenset[int] = frozenset()  # ranks whose hold is over
    wrong: bool = False  # something was read that was not the feature


class Step(NamedTuple):
    actor: str  # broker, producer, time, receiver, scheduler, gpu, rank
    what: str
    rank: int = NOWHERE
    fault: bool = False

    def __str__(self) -> str:
        return f"{self.actor}{f' {self.rank}' if self.rank >= 0 else ''}: {self.what}"


@dataclass(frozen=True)
class World:
    """`takes` of each rank. Faults of the first rank: `cut` (its session ends, its process lives), `die`."""

    name: str
    takes: tuple[int, int] = (1, 1)
    loads: int = 3  # at most, so that there are not endlessly many states
    parks: bool = False
    faults: frozenset[str] = frozenset()
    mutants: frozenset[str] = frozenset()

    def start(self) -> State:
        """Both were granted the feature: the first is told to load it."""
        ranks = tuple(Rank(todo=n) for n in self.takes)
        return load(State(ranks, waiting=(1,)), 0, "load")


Next = tuple[Step, State]


def change(s: State, i: int, say: str = "", **changes: Any) -> State:
    """`s` with changes to a rank; `say`: a word to the broker, unheard without a session."""
    rank = s.ranks[i]
    if say and rank.connected:
        changes["up"] = (*rank.up, say)
    return s._replace(ranks=(*s.ranks[:i], rank._replace(**changes), *s.ranks[i + 1 :]))


def mark(s: State, slot: int, how: str) -> State:
    return s._replace(slots=(*s.slots[:slot], how, *s.slots[slot + 1 :]))


# --- the broker -----------------------------------------------------------------------------------------------------


def tell(s: State, i: int, what: str, slot: int) -> State:
    return change(s, i, down=(*s.ranks[i].down, (what, slot)))


def load(s: State, i: int, how: str) -> State:
    """Give a rank a new slot to load the feature into; `how`: with its grant, or as an offer."""
    slot = len(s.slots)
    s = s._replace(slots=(*s.slots, "held"), replica=slot, loader=i, ready=False, pins=frozenset({i}))
    return tell(s, i, how, slot)


def give(s: State, i: int, w: World) -> State:
    """What a rank gets that waits, or asks anew."""
    granted = s.ranks[i].stage == "waiting" and not any(
        what in ("load", "share") for what, _ in s.ranks[i].down
    )
    if s.replica == NOWHERE:
        if len(s.slots) >= w.loads:
            return tell(s, i, "share", NOWHERE) if granted else s
        return load(s, i, "load" if granted else "offer to load")
    if not s.ready:
        return s._replace(waiting=(*s.waiting, i))
    s = s._replace(pins=s.pins | {i})
    return tell(s, i, "share" if granted else "offer", s.replica)


def serve(s: State, waiting: tuple[int, ...], w: World) -> State:
    for i in waiting:
        if i not in s.over and s.ranks[i].connected:
            s = give(s, i, w)
    return s


def let_go(s: State, i: int, w: World) -> State:
    """A rank can touch the replica no more."""
    if i not in s.pins:
        return s
    s = s._replace(pins=s.pins - {i})
    if s.pins and "one rank's park is all ranks'" not in w.mutants:
        return s
    if s.ready:
        return mark(s._replace(replica=NOWHERE, pins=frozenset()), s.replica, "free")
    return lost(mark(s, s.replica, "free"), w)


def lost(s: State, w: World) -> State:
    """The replica will never be loaded: whoever waits for it starts over."""
    waiting = () if "who waits for a lost load is forgotten" in w.mutants else s.waiting
    return serve(s._replace(replica=NOWHERE, pins=frozenset(), waiting=()), waiting, w)


def hear(s: State, i: int, w: World) -> State:
    word = s.ranks[i].up[0]
    s = change(s, i, up=s.ranks[i].up[1:])
    if word == "loaded" and s.loader == i and not s.ready and s.replica != NOWHERE:
        return serve(s._replace(ready=True, waiting=()), s.waiting, w)
    if word == "want" and i not in s.pins and i not in s.over and i not in s.waiting:
        return give(s, i, w)
    if word == "parked":
        return let_go(s, i, w)
    if word == "settled":
        return let_go(s._replace(waiting=tuple(j for j in s.waiting if j != i)), i, w)
    return s


def broker(s: State, w: World) -> Iterator[Next]:
    for i, r in enumerate(s.ranks):
        if r.up:
            yield Step("broker", f"hears {r.up[0]}", i), hear(s, i, w)
        done = not r.todo and not r.marked and r.stage == "listed"
        if i not in s.over and (done or not r.alive):
            yield Step("producer", "drops", i), dismiss(s, i)


def dismiss(s: State, i: int) -> State:
    s = s._replace(over=s.over | {i}, waiting=tuple(j for j in s.waiting if j != i))
    return tell(s, i, "dismiss", NOWHERE) if s.ranks[i].connected else s


# --- a rank ---------------------------------------------------------------------------------------------------------


def unread(r: Rank, slot: int, w: World) -> bool:
    """Has the GPU done what it was told with a slot?"""
    copying = r.copying == slot and not r.copied and "a park does not wait for the copy" not in w.mutants
    reading = r.reading == slot and "a park does not wait for the reader" not in w.mutants
    return not (copying or reading)


def receiver(s: State, i: int, w: World) -> Iterator[Next]:
    r = s.ranks[i]
    if r.hidden != NOWHERE:
        yield look(s, i, w)
        return
    if r.down:
        yield message(s, i, w)
    early = "a load is told when it begins" in w.mutants and s.loader == i and not s.ready and r.connected
    if r.copying != NOWHERE and (r.copied or early) and "loaded" not in r.up:
        after = NOWHERE if r.copied else r.copying
        told = change(s, i, "loaded", copying=after, copied=False)
        yield Step("receiver", "tells that it is loaded", i), told
    if r.parking and r.stage == "listed":
        if r.place == NOWHERE:
            yield Step("receiver", "has nothing to park", i), change(s, i, parking=False)
        elif "the uses are looked at first" in w.mutants:
            if not r.marked and unread(r, r.place, w):
                yield Step("receiver", "sees no use", i), change(s, i, parking=False, hidden=r.place)
        else:
            yield Step("receiver", "hides the place", i), change(s, i, place=NOWHERE, hidden=r.place)
    if r.stage == "over" and not r.marked and r.reading == NOWHERE:
        busy = (
            r.copying != NOWHERE and not r.copied and "settling does not wait for the copy" not in w.mutants
        )
        if not busy:
            yield Step("receiver", "settles", i), change(s, i, "settled", stage="settled", place=NOWHERE)


def look(s: State, i: int, w: World) -> Next:
    """The second step of a park."""
    r = s.ranks[i]
    if "the uses are looked at first" in w.mutants:
        return Step("receiver", "hides the place after all", i), change(
            s, i, "parked", hidden=NOWHERE, place=NOWHERE, asked=False
        )
    if r.marked and "a park does not look at the uses" not in w.mutants:
        back = change(s, i, hidden=NOWHERE, place=r.hidden, parking=False)
        return Step("receiver", "sees a use, and leaves it there", i), back
    if not unread(r, r.hidden, w):
        return Step("receiver", "sees the GPU at work", i), change(s, i, hidden=NOWHERE, place=r.hidden)
    parked = change(s, i, "parked", hidden=NOWHERE, parking=False, asked=False)
    return Step("receiver", "sees nothing, and parks", i), parked


def message(s: State, i: int, w: World) -> Next:
    r = s.ranks[i]
    (what, slot), down = r.down[0], r.down[1:]
    s = change(s, i, down=down)
    step = Step("receiver", f"hears {what}", i)
    if what == "dismiss":
        if r.stage == "waiting":
            return step, change(s, i, "settled", stage="settled")
        return step, change(s, i, stage="over")
    if what in ("load", "share"):
        s = change(s, i, stage="listed", place=slot)
    elif r.stage != "listed" or r.place != NOWHERE:
        return step, change(s, i, "parked")  # nobody needs it any more
    else:
        s = change(s, i, place=slot)
    return step, change(s, i, copying=slot, copied=False) if "load" in what else s


def scheduler(s: State, i: int, w: World) -> Iterator[Next]:
    r = s.ranks[i]
    if r.todo and r.stage == "listed" and not r.marked:
        ask = "want" if r.place == NOWHERE and not r.asked and w.parks else ""
        taken = change(s, i, ask, marked=True, todo=r.todo - 1, asked=r.asked or bool(ask))
        yield Step("scheduler", "takes", i), taken
    if r.marked and r.using == NOWHERE:
        where = r.place if r.place != NOWHERE else HOST
        yield Step("scheduler", "makes the tensor", i), change(s, i, using=where)
    if r.marked and r.using != NOWHERE and r.reading == NOWHERE:
        reading = r.using if r.using != HOST else NOWHERE
        gone = {"using": NOWHERE, "marked": False, "reading": reading}
        yield Step("scheduler", "reads it, lets go", i), change(s, i, **gone)
        if w.parks:
            yield Step("scheduler", "reads it, parks", i), change(s, i, **gone, parking=True)


def gpu(s: State, i: int, w: World) -> Iterator[Next]:
    r = s.ranks[i]
    if r.copying != NOWHERE and not r.copied and r.copying not in s.loaded:
        done = s._replace(loaded=s.loaded | {r.copying})
        yield Step("gpu", "has copied", i), change(done, i, copied=True)
    if r.reading != NOWHERE and (
        r.reading != r.copying or r.copied
    ):  # in the loader's process it waits for the copy
        wrong = s.wrong or r.reading not in s.loaded
        yield Step("gpu", "has read", i), change(s._replace(wrong=wrong), i, reading=NOWHERE)


def faults(s: State, w: World) -> Iterator[Next]:
    """Of the first rank."""
    r = s.ranks[0]
    if "cut" in w.faults and r.connected and r.alive:
        cut = change(s, 0, connected=False, up=(), down=())
        if s.loader == 0 and not s.ready and 0 in s.pins:
            how = "free" if "a cut loader's slot is free at once" in w.mutants else "quarantined"
            cut = lost(mark(cut, s.replica, how), w)
        yield Step("rank", "its session ends, its process lives", 0, fault=True), cut
    if "die" in w.faults and r.alive:
        dead = Rank("settled", connected=False, alive=False)
        gone = s._replace(
            ranks=(dead, *s.ranks[1:]), over=s.over | {0}, waiting=tuple(j for j in s.waiting if j)
        )
        for slot, how in enumerate(gone.slots):
            if how == "quarantined":
                gone = mark(gone, slot, "free")
        yield Step("rank", "its process dies", 0, fault=True), let_go(gone, 0, w)


def steps(s: State, w: World) -> Iterator[Next]:
    yield from broker(s, w)
    for i, r in enumerate(s.ranks):
        if r.alive:
            yield from receiver(s, i, w)
            yield from scheduler(s, i, w)
            yield from gpu(s, i, w)
    yield from faults(s, w)


# --- what must be true ----------------------------------------------------------------------------------------------


def unsafe(s: State) -> bool:
    """Is a free slot touched, or was something read that was not the feature?"""
    free = {slot for slot, how in enumerate(s.slots) if how == "free"}
    touched = {
        slot
        for r in s.ranks
        for slot in (r.using, r.reading, r.place if r.stage == "listed" and not r.down else NOWHERE)
    } | {r.copying for r in s.ranks if not r.copied}
    return s.wrong or bool(free & touched)


def leaks(s: State) -> bool:
    """`s` is a state in which nothing is left to do but faults."""
    cut = {0} if not s.ranks[0].connected and s.ranks[0].alive else set()
    if any(r.stage != "settled" for i, r in enumerate(s.ranks) if i not in cut):
        return True
    return not cut and any(how != "free" for how in s.slots)


def explore(w: World) -> search.Found[Step]:
    """Breadth first through every state of a world, until a bad one."""

    def verdict(s: State, quiet: bool) -> str:
        return "unsafe" if unsafe(s) else "leak" if quiet and leaks(s) else ""

    return search.explore(w.start(), lambda s: steps(s, w), verdict)


def walk(w: World, rng: random.Random) -> list[Next]:
    """One random run, until nothing but faults is left."""
    return search.walk(w.start(), lambda s: steps(s, w), rng)


WORLDS = {
    w.name: w
    for w in (
        World("loads and shares", (2, 2)),
        World("never read", (0, 1)),
        World("parks", (2, 1), 2, parks=True),
        World("a loader dies", faults=frozenset({"die"})),
        World("a loader is cut off, and dies", faults=frozenset({"cut", "die"})),
        World("parks and deaths", (1, 1), 2, parks=True, faults=frozenset({"cut", "die"})),
    )
}

#: (mutant, the world that must catch it, what it must find)
MUTANTS = (
    ("a load is told when it begins", "loads and shares", "unsafe"),
    ("settling does not wait for the copy", "never read", "unsafe"),
    ("a park does not look at the uses", "parks", "unsafe"),
    ("the uses are looked at first", "parks", "unsafe"),
    ("a park does not wait for the reader", "parks", "unsafe"),
    ("a park does not wait for the copy", "parks", "unsafe"),
    ("one rank's park is all ranks'", "parks", "unsafe"),
    ("a cut loader's slot is free at once", "a loader is cut off, and dies", "unsafe"),
    ("who waits for a lost load is forgotten", "a loader dies", "leak"),
)


def mutated(mutant: str, name: str) -> World:
    return replace(WORLDS[name], mutants=frozenset({mutant}))
