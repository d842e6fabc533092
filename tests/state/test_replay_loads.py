"""Runs of the model of device replicas, replayed on the state machine: it grants, holds and frees as the model says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mmbroker.proto import messages as m
from tests.model.loads import WORLDS, State, Step, World, walk

from .shell import PAGE, Shell, item, key
from .test_device import attached, shell

RUNS = 60
PAGES = 10


class Replay:
    """The model's producers and ranks, as peers of a real broker."""

    def __init__(self) -> None:
        self.shell: Shell = shell(device_mib=8, device_linger=0.0, device_segment_linger=3000.0)
        one = self.shell
        warm = one.client()
        seq = warm.call(m.Create([item("first of a segment", 10)], tier="device"))
        one.advance(0.0)
        (lease,) = warm.answers[seq].results  # type: ignore[union-attr]
        warm.abort(lease)
        self.producers = [one.client("producer") for _ in range(2)]
        self.ranks = [attached(one, name, prompt=False) for name in "ab"]
        self.producers[0].seal(self.producers[0].lease(item("feature", PAGES), to="a"), "a")
        self.producers[1].call(m.Lookup([key("feature")], "b"))
        (self.first,) = self.ranks[0].granted
        self.holds = [self.first, self.first + 1]

    def play(self, step: Step) -> None:
        """The events that the broker sees of a step; most are inside a rank, and it sees none."""
        i = step.rank
        rank, hold = self.ranks[i], [self.holds[i]]
        match step.actor, step.what:
            case "receiver", "hears load" | "hears share":
                rank.ack(hold)
            case "broker", "hears loaded":
                rank.cast(m.Loaded(hold))
            case "broker", "hears parked":
                rank.cast(m.Park(hold))
            case "broker", "hears want":
                rank.cast(m.Want(hold))
            case "broker", "hears settled":
                rank.settle(hold)
            case "producer", "drops":
                self.producers[i].drop(*hold)
            case "rank", "its session ends, its process lives":
                rank.end(alive=True)
            case "rank", "its process dies":
                rank.gone() if rank.ended else rank.end()
        self.shell.advance(0.0)

    def check(self, s: State) -> None:
        """After a step of the model, which leads to `s`."""
        held = sum(how != "free" for how in s.slots)
        assert self.shell.report()["device"]["held"] == held * PAGES * PAGE
        for i, (rank, told) in enumerate(zip(s.ranks, self.ranks, strict=True)):
            if rank.connected and not told.ended:
                heard = rank.stage != "waiting" or any(what in ("load", "share") for what, _ in rank.down)
                assert bool(told.granted or told.entries or told.dismissed or told.told) >= heard
                assert heard or not (told.granted or told.entries), f"rank {i} was granted what is not loaded"
        self.places(s)

    def places(self, s: State) -> None:
        """Ranks are to load what the model has them load, and nothing else."""
        for i, rank in enumerate(s.ranks):
            place = self.ranks[i].offered.get(self.holds[i])
            for what, _ in rank.down:
                if what.startswith("offer"):
                    assert place is not None and place.load == ("load" in what)


@pytest.mark.parametrize("name", WORLDS)
def test_the_state_machine_gives_and_takes_places_as_the_model_does(name: str) -> None:
    freed = 0
    world: World = replace(WORLDS[name], loads=100)
    for number in range(RUNS):
        replay = Replay()
        run = walk(world, random.Random(f"{name} {number}"))
        for at, (step, s) in enumerate(run):
            try:
                replay.play(step)
                replay.check(s)
            except AssertionError as error:
                story = "; ".join(str(step) for step, _ in run[: at + 1])
                raise AssertionError(f"run {number}: {error} after {story}") from error
        freed += "held" not in run[-1][1].slots
    assert freed > RUNS // 4
