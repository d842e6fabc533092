"""The real vLLM in several processes: one alone, and two with a broker that comes, is emptied, dies, and comes back.

The engines start once for all tests here, which run in their order, each with pictures of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit import BrokerProcess, RawClient, eventually

from . import kit

pytestmark = pytest.mark.vllm


class Scene:
    """`alone` has no connector; `first` and `second` look for a broker at `path`, where there is none at first."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.probe = kit.Probe(directory)
        self.quiet = kit.Probe(directory / "quiet")
        self.path = directory / "broker" / "cpu"
        self.broker: BrokerProcess
        patient = kit.transfer(self.path, wait=20)  # 0.25 s may be too short for a busy machine
        arguments = {"ec_transfer_config": patient}
        engines = [
            kit.Program(directory, self.quiet),
            kit.Program(directory, self.probe, **arguments),
            kit.Program(directory, self.probe, **arguments),
        ]
        for engine in engines:
            stack.callback(engine.close)
        stack.callback(lambda: [engine.hang_up() for engine in engines])  # they end side by side
        self.alone, self.first, self.second = (engine.ready() for engine in engines)

    def start_broker(self) -> None:
        """And wait until all processes of both engines have joined."""
        self.broker = self.stack.enter_context(kit.running_broker(self.directory / "broker"))
        roles = ("/scheduler", "/worker-0", "/items-0", "/api-0")
        eventually(
            lambda: all(
                sum(s["name"].endswith(role) for s in self.broker.status()["sessions"]) == 2 for role in roles
            ),
            "both engines joined",
            60,
        )

    def fill(self, *prompts: list[int]) -> list[Any]:
        """The first engine answers, and what it encoded is kept."""
        before = self.probe.count("saved")
        with self.probe.change() as change:
            answers = self.first.ask(*prompts)
        eventually(lambda: self.probe.count("saved") == before + change["encoded"], "saves", 30)
        return answers

    def at_rest(self) -> None:
        def rests() -> bool:
            status = self.broker.status()
            return not status["holds"] and not any(session["grants"] for session in status["sessions"])

        eventually(rests, "no hold and no grant is left", 30)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        directory = stack.enter_context(kit.scratch())
        (directory / "quiet").mkdir()
        yield Scene(directory, stack)


def test_without_a_broker_vllm_serves_and_says_so_once(scene: Scene) -> None:
    prompts = [[1], [2, 3], []]
    assert scene.first.ask(*prompts) == scene.second.ask(*prompts) == scene.alone.ask(*prompts)
    for engine in (scene.first, scene.second):
        assert len(engine.lines("has no broker")) == 1


def test_a_second_process_neither_preprocesses_nor_encodes(scene: Scene) -> None:
    scene.start_broker()
    prompts = [[4], [5, 6], [6, 4, 4]]
    expected = scene.alone.ask(*prompts)
    assert scene.fill(*prompts) == expected
    with scene.probe.change() as change:
        assert scene.second.ask(*prompts) == expected
    assert change == {"processed": 0, "encoded": 0}
    scene.at_rest()
    engines = {session["engine"] for session in scene.broker.status()["sessions"]}
    assert len([name for name in engines if name and "/" not in name]) == 2, "status shows both"


def test_what_was_evicted_is_made_again(scene: Scene) -> None:
    scene.fill([7])
    scene.at_rest()
    with RawClient(scene.broker.directory, name="evict") as client:
        from mmbroker.proto import messages as m

        client.call(m.Evict(1024))
    with scene.probe.change() as change:
        assert scene.second.ask([7]) == scene.alone.ask([7])
    assert change["encoded"] == 1


@pytest.mark.parametrize("identity", ["a name of the client's", "ab" * 32])
def test_metadata_without_an_entry_fails_alone(scene: Scene, identity: str) -> None:
    bad = [[identity, [1, 8, 8]]]
    good = scene.alone.ask([8])
    assert scene.second.ask(bad, [8]) == [None, *good]
    assert scene.second.ask([8]) == good


def test_what_vanished_is_sent_again_with_its_pixels(scene: Scene) -> None:
    """By the front end: whoever asked sees nothing of it."""
    expected = scene.alone.ask([9], [10, 9])
    assert scene.fill([9], [10]) == [expected[0], *scene.alone.ask([10])]
    before = len(
        scene.second.lines("is sent again")
    )  # once there was one, not of this test's; why is not known
    with scene.probe.fault("lose"), scene.probe.change() as change:
        assert scene.second.ask([9], [10, 9]) == expected
    assert change["encoded"] == 2 and change["processed"] >= 2
    assert len(scene.second.lines("is sent again")) == before + 2
    scene.at_rest()


def test_an_item_that_did_not_arrive_is_sent_again(scene: Scene) -> None:
    before = len(scene.second.lines("is sent again"))
    with scene.probe.fault("miss"):
        assert scene.second.ask([11]) == scene.alone.ask([11])
    assert len(scene.second.lines("is sent again")) == before + 1
    scene.at_rest()


def test_a_broker_that_is_killed_and_comes_back(scene: Scene) -> None:
    scene.fill([12])
    scene.broker.kill()
    prompts = [[12], [13, 4]]
    expected = scene.alone.ask(*prompts)
    assert scene.second.ask(*prompts) == scene.first.ask(*prompts) == expected
    scene.start_broker()
    assert scene.fill([14]) == scene.alone.ask([14])
    with scene.probe.change() as change:
        assert scene.second.ask([14]) == scene.alone.ask([14])
    assert change == {"processed": 0, "encoded": 0}
    scene.at_rest()


@pytest.mark.both
def test_sglang_and_vllm_share_a_broker_and_no_entries(scene: Scene) -> None:
    """The same pictures: each engine finds its own, and never what the other made of them."""
    pictures = [20, 21]
    sglang = subprocess.Popen(
        [
            os.environ["MMBROKER_SGLANG"],
            *("-m", "tests.vllm.sglang_program", str(scene.broker.directory), str(pictures)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert sglang.stdin is not None and sglang.stdout is not None
    try:
        told = json.loads(sglang.stdout.readline())
        assert told["takes"] >= len(pictures), "SGLang went through the broker"
        prompts = [[seed] for seed in pictures]
        with scene.probe.change() as change:
            assert scene.fill(*prompts) == scene.alone.ask(*prompts)
        assert change == {"processed": 2, "encoded": 2}
        with scene.probe.change() as change:
            assert scene.second.ask(*prompts) == scene.alone.ask(*prompts)
        assert change == {"processed": 0, "encoded": 0}
        engines = {str(session["engine"]).partition("-")[0] for session in scene.broker.status()["sessions"]}
        assert {"sglang", "vllm"} <= engines
    finally:
        sglang.stdin.close()
        sglang.wait(60)
        sglang.stdout.close()


def test_nobody_died(scene: Scene) -> None:
    for engine in (scene.first, scene.second):
        assert not engine.lines("EngineDeadError") and not engine.lines("Traceback")
        assert engine.process.poll() is None
