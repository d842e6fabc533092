"""Runs of the model of promises, replayed on the state machine: who waits, who makes it, and who is answered what."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind
from tests.model import search
from tests.model.promises import MOVER, WAIT, WORLDS, Asker, Next, State, World, steps

from .shell import Peer, Shell, form, key

RUNS = 60
TICK = 2.0**-6  # so that sums are exact
PICTURE = key("picture", Kind.DERIVED)


def walk(w: World, rng: random.Random) -> list[Next]:
    """One random run in which nothing happens between a deadline and what it does, as in a broker."""

    def prompt(s: State) -> Iterator[Next]:
        following = list(steps(s, w))
        due = [x for x in following if x[0].what == "is over for the mover"]
        due += [x for x in following if x[0].what == "has no more time"]
        return iter(due[:1] or following)

    return search.walk(w.start(), prompt, rng)


class Replay:
    def __init__(self, world: World) -> None:
        self.world = world
        self.shell = Shell(segment_linger=1000.0)
        self.mover = self.shell.client("mover")
        self.mover.ask(m.Tier(True, WAIT * TICK))
        self.askers = [self.shell.client(verb) for verb in world.verbs]
        self.calls: dict[int, int] = {}
        self.leases: dict[int, m.Leased] = {}
        self.stale: list[int] = []

    def play(self, who: int, what: str, before: State) -> None:
        peer = self.mover if who == MOVER else self.askers[who]
        match what:
            case "passes":
                self.shell.now += TICK
            case "has no more time":
                self.shell.handle(e.Tick())
            case "is over for the mover":
                self.shell.handle(e.Tick())
                if before.mover == "asked":
                    self.stale.append(self.mover.sought.pop(PICTURE))
            case "asks":
                verb = {"promise": m.Promise, "lookup": m.Lookup}[self.world.verbs[who]]
                self.calls[who] = peer.call(verb([PICTURE]), self.world.timeouts[who] * TICK)
            case "begins to write":
                self.write(who, peer)
            case "has not got it":
                peer.cast(m.Abort([peer.sought.pop(PICTURE)]))
            case "gives it back":
                peer.cast(m.Abort([self.promise(who)]))
            case "is refused":
                for promise in self.stale:
                    peer.failure(m.Create([m.Item(PICTURE, form(1), promise)]), "LeaseClosed")
                self.stale.clear()
            case "seals":
                assert isinstance(peer.answers[peer.seal([self.leases.pop(who)])], m.Sealed)
            case "aborts":
                peer.abort(self.leases.pop(who))
            case "dies":
                peer.end()
                peer.sought.clear()
                self.leases.pop(who, None)

    def write(self, who: int, peer: Peer) -> None:
        promise = peer.sought.pop(PICTURE) if who == MOVER else self.promise(who)
        (result,) = peer.ask(m.Create([m.Item(PICTURE, form(1), promise)])).results
        if isinstance(result, m.Leased):
            self.leases[who] = result

    def promise(self, who: int) -> int:
        (result,) = self.askers[who].answers[self.calls[who]].results  # type: ignore[union-attr]
        assert isinstance(result, m.Due)
        return result.promise

    def check(self, s: State) -> None:
        for who, asker in enumerate(s.askers):
            if asker.at != "gone":
                self.check_answer(who, asker)
        assert bool(PICTURE in self.mover.sought) == (s.mover == "asked")
        writers = {who for who, asker in enumerate(s.askers) if asker.at == "writes"}
        assert self.leases.keys() == writers | ({MOVER} if s.mover in ("writes", "late") else set())

    def check_answer(self, who: int, asker: Asker) -> None:
        answer = self.askers[who].answers.get(self.calls[who]) if who in self.calls else None
        if asker.at in ("new", "waits"):
            assert answer is None, answer
        elif asker.at == "failed":
            assert isinstance(answer, m.Failed) and answer.error == "DeadlineExceeded", answer
        elif self.world.verbs[who] == "lookup":
            assert isinstance(answer, m.Found) and (answer.refs != [None]) == (asker.at == "hit"), answer
        else:
            assert isinstance(answer, m.Promised)
            (result,) = answer.results
            if asker.at in ("due", "writes"):
                assert isinstance(result, m.Due)


@pytest.mark.parametrize("name", WORLDS)
def test_the_state_machine_answers_as_the_model_does(name: str) -> None:
    world = WORLDS[name]
    found: set[str] = set()
    for number in range(RUNS):
        run = walk(world, random.Random(f"{name} {number}"))
        replay, before = Replay(world), world.start()
        for at, (step, s) in enumerate(run):
            found.add(step.what)
            try:
                replay.play(step.who, step.what, before)
                overdue = any(
                    later.what in ("is over for the mover", "has no more time")
                    for later, _ in steps(s, world)
                )
                if not overdue:
                    replay.check(s)
            except AssertionError as error:
                story = "; ".join(str(step) for step, _ in run[: at + 1])
                raise AssertionError(f"run {number}: {error} after {story}") from error
            before = s
    assert "asks" in found and "seals" in found
