"""Runs of the grant model, replayed on the state machine: it answers, dismisses and reuses the slot as the model says.

The arena holds one feature, so that whoever asks for another one finds out whether the slot may be reused.
"""

from __future__ import annotations

import random

import pytest

from mmbroker.proto import messages as m
from tests.model.explore import WORLDS, walk
from tests.model.grants import EVERY, State, Step, World, reusable

from .shell import Peer, Shell, item, key

RUNS = 40
PAGES = 4
FOREVER = 3000.0
LONG = 100.0


class Replay:
    """The model's producers, ranks and broker, as peers of a real one."""

    def __init__(self, world: World, run: list[tuple[Step, State]]) -> None:
        self.world = world
        self.times = [step.hold for step, _ in run if step.what == "the seal's deadline passes"]
        self.start()

    def start(self) -> None:
        """A new broker: the model's holds on a feature in its slot are the first producer's and the second's."""
        self.shell = Shell(pages=PAGES, segment=PAGES, producer_grace=LONG, segment_linger=FOREVER)
        self.producers = [self.shell.client("producer") for _ in range(2)]
        self.ranks = [self.attach(rank) for rank in range(2)]
        self.prober = self.shell.client("prober")
        self.lost: dict[int, Peer] = {}
        self.calls: dict[int, tuple[Peer, int]] = {}
        self.holds: dict[int, int] = {}
        self.leases: dict[int, m.Leased] = {}
        self.leases[0] = self.producers[0].lease(item("feature", PAGES))[0]

    def attach(self, rank: int, pid: int | None = None) -> Peer:
        peer = self.shell.client("rank", pid=pid)
        peer.attach("engine", rank, 2)
        return peer

    def play(self, step: Step) -> None:
        """The events that the broker sees of a step; most are inside a rank, and it sees none."""
        h, i = step.hold, step.rank
        match step.actor, step.what:
            case "producer", "seals":
                self.ask(h, m.Seal([m.Sealing(self.leases[0].lease)], "engine"))
            case "producer", "seals, a tensor lives on":
                self.ask(h, m.Seal([m.Sealing(self.leases[0].lease, retained=True)], "engine"))
            case "producer", "hits":
                self.ask(h, m.Lookup([key("feature")], "engine"))
            case "producer", "drops":
                self.calls[h][0].drop(self.holds[h])
            case "producer", "unpins":
                self.producers[0].cast(m.Unpin([self.leases[0].lease]))
            case "producer", "its session ends, the process lives":
                self.producers[0].end(alive=True)
            case "producer", "its process dies":
                self.die(self.producers[0])
            case "time", _:
                self.times = [hold for hold in self.times if hold != h]
                self.shell.advance(LONG)
            case "broker", "hears ack":
                self.ranks[i].ack([self.holds[h]])
            case "broker", "hears failed":
                self.ranks[i].ack([], [self.holds[h]], "no memory")
            case "broker", "hears settled":
                self.ranks[i].settle([self.holds[h]])
            case "broker", "hears released":
                self.ranks[i].ask(m.Released(self.lost[i].number))
            case "broker", "starts anew":
                pids = [rank.pid for rank in self.ranks]
                self.start()
                for rank, pid in zip(self.ranks, pids, strict=True):
                    rank.end()
                    rank.pid = pid
            case "rank", "its session ends, the process lives":
                self.ranks[i].end(alive=True)
            case "rank", "its process dies":
                for peer in (self.ranks[i], self.lost.pop(i, None)):
                    self.die(peer)
            case "rank", "attaches again":
                self.lost[i] = self.ranks[i]
                self.ranks[i] = self.attach(i, self.ranks[i].pid)

    def ask(self, h: int, body: m.Body) -> None:
        """The call whose answer is the model's hold `h`, with the deadline that the model is going to let pass."""
        peer = self.producers[h if self.world.slot(1) == 0 else 0]
        late = LONG * (1 + self.times.index(h)) if h in self.times else FOREVER
        before = set(self.ranks[1].granted)
        self.calls[h] = (peer, peer.call(body, late))
        (self.holds[h],) = set(self.ranks[1].granted) - before

    def die(self, peer: Peer | None) -> None:
        if peer is not None and peer.ended:
            peer.gone()
        elif peer is not None:
            peer.end()

    def check(self, s: State) -> None:
        """After a step of the model, which leads to `s`."""
        if not s.up:
            return
        for h, hold in enumerate(s.holds):
            if h in self.calls and self.world.slot(h) == self.world.slot(s.boot):
                peer, seq = self.calls[h]
                answer = peer.answers.get(seq)
                answered = isinstance(answer, m.Sealed | m.Found)
                if hold.stage in ("active", "sent") and not peer.ended:
                    assert answered == (hold.acked == EVERY), f"answered {answer}, but the ranks {hold}"
                told = {i for i, rank in enumerate(self.ranks) if self.holds[h] in rank.told}
                assert not (hold.stage == "sent" and told), f"ranks {told} were dismissed, but the hold lasts"
                if hold.stage == "over" and (answer is not None or peer.ended):
                    settled = {i for i in range(2) if (hold.settled | hold.lost) >> i & 1}
                    assert told | settled >= {i for i, r in enumerate(s.ranks) if r.connected}
        if reusable(s, self.world):
            assert self.shell.report()["pool"]["held"] == 0, "the slot is held though nobody can touch it"
        else:
            answer = self.prober.ask(m.Create([item("other", PAGES)]), timeout=0.0)
            assert isinstance(answer, m.Failed) and answer.error == "PoolFull", answer

    def reuse(self) -> None:
        (lease,) = self.prober.lease(item("other", PAGES))
        assert lease.generation > self.leases[0].generation


@pytest.mark.parametrize("name", WORLDS)
def test_the_state_machine_reuses_the_slot_when_the_model_does(name: str) -> None:
    reused = 0
    for number in range(RUNS):
        run = walk(WORLDS[name], random.Random(f"{name} {number}"))
        replay = Replay(WORLDS[name], run)
        for at, (step, s) in enumerate(run):
            try:
                if step.what == "reuses the slot":
                    replay.reuse()
                    reused += 1
                    break
                replay.play(step)
                replay.check(s)
            except AssertionError as error:
                story = "; ".join(str(step) for step, _ in run[: at + 1])
                raise AssertionError(f"run {number}: {error} after {story}") from error
    assert reused > RUNS // 4
