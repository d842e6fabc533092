"""Explicit-state model of the grant protocol (design, section 5): what can happen next in a small world.

The world: one feature in one slot, one or two holds on it, two ranks of one engine. A rank has two threads: the
receiver handles what the broker sends, acknowledges, settles and attaches again; the scheduler takes and releases. Each
step below is one atomic dict operation or one message, so that every preemption between them is explored.

What must be true of every state (`explore.verdict`):

- safe: nobody uses, still references, or could take a slot that was given to another feature; no take gives another
  feature's entry; a writer that may still write keeps its slot.
- agreeing (only in orderly worlds): a reference that was sent is taken by every rank, every time. Orderly means that
  times-out are long enough: the hold, a dead producer's grace and a lost session's entries outlast the requests.
- no leak: when nothing is left to do, the slot of a feature whose holds are over has been reused.

A `World` bounds what is explored: the number of holds, the takes of each, whether tensors outlive their release, and
which faults may happen, each once. `World.mutants` switches tempting shortcuts on; exploring must catch each of them.

Where a feature lies on a device, and how it gets there and away again, is `loads.py`: it happens under a grant, and
changes nothing about it. A load is one more use of its source that settling waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

RANKS = 2
EVERY = (1 << RANKS) - 1  # a set of ranks has one bit for each


class Entry(NamedTuple):
    """One hold in one rank's table."""

    at: str = (
        "none"  # none; idle (takeable); busy; out (popped for good, in the receiver's queue); gone (settled)
    )
    uses: int = 0  # as the table counts them
    users: int = 0  # as they are
    dismissed: bool = False
    kept: bool = False  # a tensor handed out is still referenced after its release
    old: bool = False  # granted to an earlier session


Pc = tuple[str, int] | tuple[()]  # where a thread stands within one message or release; () between them


class Rank(NamedTuple):
    """One process. Its fields' names differ from `Entry`'s, see `change`."""

    entries: tuple[Entry, ...]
    todo: tuple[int, ...]  # takes to come, for each hold
    down: tuple[tuple[str, int], ...] = ()  # messages from the broker, in order
    up: tuple[tuple[str, int], ...] = ()  # messages to the broker, in order
    receiver: Pc = ()
    scheduler: Pc = ()
    connected: bool = True
    alive: bool = True
    lives: int = 0  # sessions before this one
    owes: bool = False  # it has to confirm that it let go of its earlier session's entries
    missed: bool = False  # a take found nothing
    wrong: bool = False  # a take gave another feature's entry


class Hold(NamedTuple):
    """`acked`, `settled`, `lost` are sets of ranks; `lost`: granted to a session that has ended."""

    stage: str = "new"  # new; active (granted); sent (answered, the request is on its way); over; aborted
    acked: int = 0
    settled: int = 0
    lost: int = 0


class State(NamedTuple):
    holds: tuple[Hold, ...]
    ranks: tuple[Rank, ...]
    boot: int = 0
    up: bool = True  # the broker
    reused: int = 0  # set of slots; each boot has its own
    producer: str = "up"  # up; cut (its session ended, its process lives); dead
    pen: str = "writing"  # writing; kept (sealed, a tensor over the slot is alive in the writer); down


class Step(NamedTuple):
    """What happened and who did it: `broker`, `producer`, `time`, `receiver`, `scheduler`, `rank` (the process)."""

    actor: str
    what: str
    rank: int = -1
    hold: int = -1
    fault: bool = False

    def __str__(self) -> str:
        who = self.actor + (f" {self.rank}" if self.rank >= 0 else "")
        return f"{who}: {self.what}" + (f" (hold {self.hold})" if self.hold >= 0 else "")


@dataclass(frozen=True)
class World:
    """Bounds of what is explored. Faults: `cut`, `die`, `fail` (of rank 0), `deadline`, `producer`, `restart`."""

    name: str
    holds: int = 1
    takes: tuple[int, ...] = (1, 1)
    kept: bool = False
    orderly: bool = False
    faults: frozenset[str] = frozenset()
    mutants: frozenset[str] = frozenset()

    def start(self) -> State:
        rank = Rank((Entry(),) * self.holds, (0,) * self.holds)
        return State(
            (Hold(),) * self.holds, (rank,) * RANKS, pen="writing" if "producer" in self.faults else "down"
        )

    def slot(self, hold: int) -> int:
        """After a restart the second hold is on another feature, in the new broker's slot."""
        return hold if "restart" in self.faults else 0


Next = tuple[Step, State]


def put(items: tuple[Any, ...], i: int, item: object) -> tuple[Any, ...]:
    return (*items[:i], item, *items[i + 1 :])


def change(s: State, i: int, h: int = 0, say: str = "", **changes: object) -> State:
    """`s` with changes to rank `i` and to its entry of hold `h`; `say`: a message, unheard without a session."""
    rank = s.ranks[i]
    mine = {name: changes.pop(name) for name in Entry._fields if name in changes}
    if mine:
        changes["entries"] = put(rank.entries, h, rank.entries[h]._replace(**mine))  # type: ignore[arg-type]
    if say and rank.connected:
        changes["up"] = (*rank.up, (say, h))
    return s._replace(ranks=put(s.ranks, i, rank._replace(**changes)))  # type: ignore[arg-type]


def finished(s: State, h: int) -> bool:
    """Has every rank said its last word on the requests of this hold?"""
    return all(not r.todo[h] and not r.entries[h].users and not r.scheduler for r in s.ranks)


# --- the broker and the producers -----------------------------------------------------------------------------------


def grant(s: State, h: int, pen: str) -> State:
    ranks = tuple(r._replace(down=(*r.down, ("grant", h))) for r in s.ranks)
    return s._replace(holds=put(s.holds, h, Hold("active")), ranks=ranks, pen=pen)


def over(s: State, h: int, w: World) -> State:
    """The hold is over: every rank that was granted it and may still hold an entry is told."""
    hold, ranks = s.holds[h]._replace(stage="over"), s.ranks
    if "only ranks that acknowledged are dismissed" in w.mutants:
        hold = hold._replace(settled=hold.settled | EVERY & ~hold.acked)
    for i, r in enumerate(ranks):
        if r.connected and not (hold.settled | hold.lost) >> i & 1:
            overtakes = "a dismissal overtakes the grant" in w.mutants
            down = (("dismiss", h), *r.down) if overtakes else (*r.down, ("dismiss", h))
            ranks = put(ranks, i, r._replace(down=down))
    return s._replace(holds=put(s.holds, h, hold), ranks=ranks)


def reusable(s: State, w: World) -> bool:
    """May the living broker give the slot of its feature to another one?"""
    holds = [x for h, x in enumerate(s.holds) if w.slot(h) == w.slot(s.boot) and x.stage != "new"]
    ended = [x for x in holds if x.stage in ("over", "aborted")]
    gone = sum(1 << i for i, r in enumerate(s.ranks) if not r.alive)
    if "a session's end settles" in w.mutants:
        gone |= sum(1 << i for i, r in enumerate(s.ranks) if not r.connected)
    free = [x for x in ended if x.stage == "aborted" or (x.settled | gone) == EVERY]
    if "one settled rank is enough" in w.mutants:
        free = [x for x in ended if x.settled | gone]
    if "one settled hold is enough" in w.mutants and free:
        return True
    harmless = {"down"}
    if "an aborted lease's slot is free at once" in w.mutants:
        harmless.add("writing")
    if "a retained slot is free with its last hold" in w.mutants:
        harmless.add("kept")
    return bool(ended) and len(free) == len(holds) and (s.pen in harmless or s.producer == "dead")


def hear(s: State, i: int, w: World) -> State:
    """The broker handles the oldest message of a rank."""
    (what, h), bit = s.ranks[i].up[0], 1 << i
    s = change(s, i, up=s.ranks[i].up[1:])
    if what == "released":
        return s._replace(holds=tuple(x._replace(settled=x.settled | x.lost & bit) for x in s.holds))
    hold, was = s.holds[h], s.holds[h].stage
    if what == "ack" or "a failed grant counts as acknowledged" in w.mutants:
        hold = hold._replace(acked=hold.acked | bit)
    if what != "ack":
        everyone = what == "failed" and "one rank's failure settles for all" in w.mutants
        hold = hold._replace(settled=hold.settled | (EVERY if everyone else bit))
    s = s._replace(holds=put(s.holds, h, hold))
    failed = what == "failed" and "a failed grant counts as acknowledged" not in w.mutants
    return over(s, h, w) if failed and was == "active" else s


def broker(s: State, w: World) -> Iterator[Next]:
    """Seals, hits, answers, ends of holds, the ranks' messages, and the reuse of the slot."""
    if not s.up:
        return
    slot, first = w.slot(s.boot), s.holds[0].stage
    if all(r.connected for r in s.ranks) and not s.reused >> slot & 1:
        if s.boot == 0 and first == "new" and s.producer == "up":
            yield Step("producer", "seals", hold=0), grant(s, 0, "down")
            if s.pen == "writing":
                yield Step("producer", "seals, a tensor lives on", hold=0), grant(s, 0, "kept")
        if len(s.holds) > 1 and s.holds[1].stage == "new":
            if w.slot(1) == w.slot(0) and first not in ("new", "aborted"):
                yield Step("producer", "hits", hold=1), grant(s, 1, s.pen)
            elif w.slot(1) != w.slot(0) and s.boot == 1:
                yield Step("producer", "seals", hold=1), grant(s, 1, s.pen)
    if s.pen == "kept" and s.producer == "up":
        yield Step("producer", "unpins"), s._replace(pen="down")
    for h in range(len(s.holds)):
        if w.slot(h) == slot:
            yield from hold_steps(s, h, w)
    for i, r in enumerate(s.ranks):
        if r.up:
            yield Step("broker", f"hears {r.up[0][0]}", i, r.up[0][1]), hear(s, i, w)
    if not s.reused >> slot & 1 and reusable(s, w):
        yield Step("broker", "reuses the slot"), s._replace(reused=s.reused | 1 << slot)


def hold_steps(s: State, h: int, w: World) -> Iterator[Next]:
    hold = s.holds[h]
    owned = h > 0 or s.producer == "up"
    if owned and hold.stage == "active":
        if hold.acked == EVERY or "an answer before the acknowledgements" in w.mutants:
            ranks = tuple(r._replace(todo=put(r.todo, h, w.takes[h])) if r.alive else r for r in s.ranks)
            sent = s._replace(holds=put(s.holds, h, hold._replace(stage="sent")), ranks=ranks)
            yield Step("producer", "is answered, sends the request", hold=h), sent
        stalled = hold.lost or not all(r.connected for r in s.ranks) or "deadline" in w.faults
        if hold.acked != EVERY and stalled:
            yield Step("time", "the seal's deadline passes", hold=h), over(s, h, w)
    early = not w.orderly or "the hold ends before the last word" in w.mutants
    if owned and hold.stage == "sent" and (early or finished(s, h)):
        yield Step("producer", "drops", hold=h), over(s, h, w)
    if not owned and (hold.stage == "active" or (hold.stage == "sent" and (not w.orderly or finished(s, h)))):
        yield Step("time", "the grace is over", hold=h), over(s, h, w)


# --- a rank's receiver thread ---------------------------------------------------------------------------------------


def receiver(s: State, i: int, w: World) -> Iterator[Next]:
    r = s.ranks[i]
    if r.receiver:
        yield continue_message(s, i)
        return
    for h, e in enumerate(r.entries):
        if e.at == "out" and (not e.kept or "a live tensor does not matter" in w.mutants):
            yield Step("receiver", "settles", i, h), change(s, i, h, "" if e.old else "settled", at="gone")
        if e.old and e.at == "idle" and (not w.orderly or (s.holds[h].stage != "active" and finished(s, h))):
            yield Step("receiver", "lets an old entry go", i, h), change(s, i, h, at="out")
    if r.down:
        (what, h), rest = r.down[0], r.down[1:]
        yield from (granted if what == "grant" else dismissed)(change(s, i, down=rest), i, h, w)
    if not r.connected and s.up:
        yield Step("rank", "attaches again", i), attach(s, i, w)
    held = any(e.old and (e.at in ("idle", "busy", "out") or e.kept) for e in r.entries)
    free = not held or "released is said at once" in w.mutants
    if r.owes and r.connected and free and "released is never said" not in w.mutants:
        step = Step("receiver", "has released its old session", i)
        yield step, change(s, i, say="released", owes=False)


def granted(s: State, i: int, h: int, w: World) -> Iterator[Next]:
    step = Step("receiver", "maps, entry idle, acknowledges", i, h)
    if "acknowledged before the entry is there" in w.mutants:
        yield step, change(s, i, h, "ack", receiver=("publish", h))
    elif "one entry for a feature" in w.mutants and h and s.ranks[i].entries[0].at != "none":
        yield step, change(s, i, h, "ack")
    else:
        yield step, change(s, i, h, "ack", at="idle")
    if "fail" in w.faults and i == 0:
        yield Step("receiver", "cannot make the entry", i, h, fault=True), change(s, i, h, "failed")


def dismissed(s: State, i: int, h: int, w: World) -> Iterator[Next]:
    r, e = s.ranks[i], s.ranks[i].entries[h]
    if e.at == "none":
        early = "settled" if "a dismissal overtakes the grant" in w.mutants else ""
        yield Step("receiver", "knows no such hold", i, h), change(s, i, h, early)
    elif "a use count in place of the pop" in w.mutants:
        unused: Pc = () if e.uses or r.scheduler else ("unused", h)
        yield Step("receiver", "looks at the uses", i, h), change(s, i, h, dismissed=True, receiver=unused)
    elif "the flag is set after the pop" in w.mutants:
        at = "out" if e.at == "idle" else e.at
        yield Step("receiver", "tries to pop first", i, h), change(s, i, h, at=at, receiver=("flag", h))
    else:
        yield Step("receiver", "sets the flag", i, h), change(s, i, h, dismissed=True, receiver=("pop", h))


def continue_message(s: State, i: int) -> Next:
    """The second step of the message that the receiver is handling; all but `pop` only in mutants."""
    stage, h = s.ranks[i].receiver  # type: ignore[misc]
    at = s.ranks[i].entries[h].at
    if stage == "publish":
        return Step("receiver", "entry idle", i, h), change(s, i, h, at="idle", receiver=())
    if stage == "flag":
        return Step("receiver", "sets the flag after all", i, h), change(s, i, h, dismissed=True, receiver=())
    if stage == "unused":
        at = "gone" if at == "idle" else at
        return Step("receiver", "saw no use, settles", i, h), change(s, i, h, "settled", at=at, receiver=())
    if at == "idle":
        return Step("receiver", "pops it", i, h), change(s, i, h, at="out", receiver=())
    return Step("receiver", "not idle, leaves it to the last release", i, h), change(s, i, receiver=())


def attach(s: State, i: int, w: World) -> State:
    """A new session. What was on its way in the old one is lost; what is in the table stays takeable."""
    restarted = "restart" in w.faults
    entries = tuple(e._replace(old=e.at not in ("none", "gone")) for e in s.ranks[i].entries)
    if "an earlier boot's entries are dropped" in w.mutants and restarted:
        entries = tuple(e._replace(at="out") if e.at == "idle" else e for e in entries)
    if "attaching again settles" in w.mutants:
        s = s._replace(holds=tuple(x._replace(settled=x.settled | x.lost & 1 << i) for x in s.holds))
    return change(s, i, entries=entries, down=(), connected=True, lives=1, owes=not restarted)


# --- a rank's scheduler thread --------------------------------------------------------------------------------------


def scheduler(s: State, i: int, w: World) -> Iterator[Next]:
    if s.ranks[i].scheduler:
        yield continue_release(s, i, w)
        return
    for h, e in enumerate(s.ranks[i].entries):
        if s.ranks[i].todo[h]:
            yield take(s, i, h, w)
        if e.kept:
            yield Step("rank", "the last tensor dies", i, h), change(s, i, h, kept=False)
        if e.users:
            yield release(s, i, h, False, w)
            if w.kept and i == 0 and not e.kept:
                yield release(s, i, h, True, w)


def take(s: State, i: int, h: int, w: World) -> Next:
    asked, m = h, w.mutants
    s = change(s, i, todo=put(s.ranks[i].todo, h, s.ranks[i].todo[h] - 1))
    if "one entry for a feature" in m:
        h = 0
    entries = s.ranks[i].entries
    e = entries[h]
    if e.at == "idle":
        return Step("scheduler", "takes", i, asked), change(s, i, h, at="busy", uses=1, users=1)
    if e.at == "busy" and "a busy entry is not found" not in m:
        uses = e.uses + ("a second take is not counted" not in m)
        return Step("scheduler", "takes again", i, asked), change(s, i, h, uses=uses, users=e.users + 1)
    if e.at in ("none", "gone") and "a miss builds from the reference" in m:
        return Step("scheduler", "builds a view", i, asked), change(s, i, h, at="busy", uses=1, users=1)
    if "keys without the boot" in m and h == 0 and entries[1].at == "idle":
        return Step("scheduler", "takes another boot's entry", i, asked), change(s, i, wrong=True)
    return Step("scheduler", "misses", i, asked), change(s, i, missed=True)


def release(s: State, i: int, h: int, kept: bool, w: World) -> Next:
    e = s.ranks[i].entries[h]
    s = change(s, i, h, users=e.users - 1, uses=max(e.uses - 1, 0), kept=e.kept or kept)
    last = e.uses == 1 and e.at == "busy"
    if last and "the last release does not look at the flag" in w.mutants:
        s = change(s, i, h, at="idle")
    elif last:
        s = change(
            s,
            i,
            scheduler=("look" if "the flag is read before the entry is back" in w.mutants else "back", h),
        )
    return Step("scheduler", "last release" * last or "release" + ", a tensor lives on" * kept, i, h), s


def continue_release(s: State, i: int, w: World) -> Next:
    """After the last release: put the entry back, look at the flag, pop what is dismissed."""
    stage, h = s.ranks[i].scheduler  # type: ignore[misc]
    e, swapped = s.ranks[i].entries[h], "the flag is read before the entry is back" in w.mutants
    if stage == "back":
        look: Pc = () if swapped else ("look", h)
        return Step("scheduler", "puts the entry back", i, h), change(s, i, h, at="idle", scheduler=look)
    if stage == "look":
        rest: Pc = ("back", h) if swapped else ()
        pc: Pc = ("pop", h) if e.dismissed else rest
        return Step("scheduler", "looks at the flag", i, h), change(s, i, scheduler=pc)
    if e.at == "idle" or swapped:
        return Step("scheduler", "pops it for the receiver", i, h), change(s, i, h, at="out", scheduler=())
    return Step("scheduler", "the receiver was first", i, h), change(s, i, scheduler=())
