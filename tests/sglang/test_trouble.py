"""The engine works on when the broker is absent, full, stopped, killed or back, and when the plugin itself fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch

import mmbroker
from tests.kit import BrokerProcess, eventually

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), *kit.ONCE]

#: An arena in which two photographs' features fit (6.2 MiB each), and not four.
SMALL = {"host_mib": 16, "segment_mib": 4}


def four_large() -> list[str]:
    """The photographs, upright and upside down: two of them fit into `SMALL`."""
    photographs = list(kit.pictures.photographs().values())
    return [kit.url(photograph.rotate(turn)) for turn in (0, 180) for photograph in photographs]


class Trouble:
    """An engine that was started without a broker, and brokers that come and go."""

    def __init__(self, scene: kit.Scene, root: Path) -> None:
        self.scene = scene
        self.root = root
        self.broker: BrokerProcess | None = None

    def start(self, **settings: Any) -> BrokerProcess:
        """A broker, and the engine attached to it."""
        broker = BrokerProcess(self.root, {"host_mib": 256, **settings}, [], {}).wait_ready()
        self.broker = self.scene.broker = broker
        eventually(lambda: self._complete(broker), "the engine's ranks and tokenizers have joined")
        return broker

    @staticmethod
    def _complete(broker: BrokerProcess) -> bool:
        status = broker.status()
        names = [session["name"] for session in status["sessions"]]
        return any(e["complete"] for e in status["engines"]) and any(n.endswith("/tokenizer") for n in names)

    def end(self) -> None:
        if self.broker is not None:
            self.broker.process.send_signal(signal.SIGCONT)
            self.broker.stop()
            self.broker.clean_up()
            self.broker = self.scene.broker = None


@pytest.fixture(scope="module")
def engine() -> Iterator[Trouble]:
    with kit.scratch() as directory:
        scene = kit.Scene(directory, ("--mm-broker-wait", "2"), path=directory / "cpu")
        with scene.engine:
            yield Trouble(scene, directory)


@pytest.fixture(scope="module")
def expected(engine: Trouble) -> list[tuple[str, ...]]:
    """The texts for the first pictures, before there is any broker."""
    return [engine.scene.engine.ask([picture], tokens=4).texts for picture in kit.album()[:4]]


@pytest.fixture
def trouble(engine: Trouble, expected: list[tuple[str, ...]]) -> Iterator[Trouble]:
    yield engine
    engine.end()


def test_absent_at_start_and_joined_later(trouble: Trouble, expected: list[tuple[str, ...]]) -> None:
    scene = trouble.scene
    with scene.change("tokenizer") as tokenizer, scene.change("scheduler") as scheduler:
        texts = scene.engine.ask([kit.album()[0]], tokens=4).texts
    assert texts == expected[0]
    assert kit.fallbacks(tokenizer) == {"fallback_absent": 1}
    assert scheduler["shm_open_calls"] == 1, "SGLang's own transport served"
    trouble.start()
    with scene.change("tokenizer") as tokenizer, scene.change("scheduler") as scheduler:
        texts = scene.engine.ask([kit.album()[0]], tokens=4).texts
    assert texts == expected[0]
    assert tokenizer["features"] == scheduler["takes"] == 1
    assert not kit.fallbacks(tokenizer)


def test_killed_and_restarted(trouble: Trouble, expected: list[tuple[str, ...]]) -> None:
    scene = trouble.scene
    broker = trouble.start()
    with scene.stream([kit.album()[1]], max_tokens=100) as lines:
        next(lines)
        broker.kill()
        # What was sent is served to its end: the memory outlives the broker.
        assert "[DONE]" in list(lines)[-1]
    with scene.change("tokenizer") as tokenizer:
        assert scene.engine.ask([kit.album()[1]], tokens=4).texts == expected[1]
    assert kit.fallbacks(tokenizer) == {"fallback_absent": 1}
    trouble.end()
    trouble.start()
    with scene.change("tokenizer") as tokenizer:
        assert scene.engine.ask([kit.album()[1]], tokens=4).texts == expected[1]
    assert tokenizer["features"] == 1
    scene.at_rest()


def test_stopped_and_continued(trouble: Trouble, expected: list[tuple[str, ...]]) -> None:
    """A broker that does not answer is not waited for as a full one is."""
    scene = trouble.scene
    broker = trouble.start()
    broker.process.send_signal(signal.SIGSTOP)
    with scene.change("tokenizer") as tokenizer:
        for index in (2, 3):
            assert scene.engine.ask([kit.album()[index]], tokens=4).texts == expected[index]
    assert kit.fallbacks(tokenizer) == {"fallback_unresponsive": 2}
    broker.process.send_signal(signal.SIGCONT)

    def through_the_broker() -> bool:
        with scene.change("tokenizer") as tokenizer:
            assert scene.engine.ask([kit.album()[2]], tokens=4).texts == expected[2]
        return tokenizer.get("features") == 1

    eventually(through_the_broker, "the broker is used again")
    scene.at_rest()


def test_a_full_arena_is_waited_for(trouble: Trouble, expected: list[tuple[str, ...]]) -> None:
    scene = trouble.scene
    broker = trouble.start(**SMALL)
    with mmbroker.connect(broker.directory) as client, ThreadPoolExecutor(1) as pool:
        held = client.put(torch.arange(15 << 20, dtype=torch.uint8))
        with scene.change("tokenizer") as tokenizer:
            answer = pool.submit(scene.engine.ask, [kit.album()[0]], tokens=4)
            eventually(lambda: broker.status()["waiting_count"] == 1, "the request waits for room")
            held.drop()
            assert answer.result().texts == expected[0]
        assert tokenizer["features"] == 1
        assert not kit.fallbacks(tokenizer)
    scene.at_rest()


def test_an_arena_that_stays_full_is_not_waited_for_for_ever(
    trouble: Trouble, expected: list[tuple[str, ...]]
) -> None:
    scene = trouble.scene
    broker = trouble.start(**SMALL)
    with mmbroker.connect(broker.directory) as client:
        with client.put(torch.arange(15 << 20, dtype=torch.uint8)), scene.change("tokenizer") as tokenizer:
            assert scene.engine.ask([kit.album()[1]], tokens=4).texts == expected[1]
        assert kit.fallbacks(tokenizer) == {"fallback_full": 1}
        # The next one tries the broker again.
        with scene.change("tokenizer") as tokenizer:
            assert scene.engine.ask([kit.album()[1]], tokens=4).texts == expected[1]
        assert tokenizer["features"] == 1
    scene.at_rest()


def test_a_batch_that_can_never_fit_goes_item_by_item(trouble: Trouble) -> None:
    scene = trouble.scene
    four = four_large()
    alone = scene.engine.ask(four, tokens=4).texts
    trouble.start(**SMALL)
    with scene.change("tokenizer") as tokenizer, scene.change("scheduler") as scheduler:
        assert scene.engine.ask(four, tokens=4).texts == alone
    assert tokenizer["features"] == scheduler["takes"] == 2
    assert kit.fallbacks(tokenizer) == {"fallback_full": 2}
    scene.at_rest()


def test_a_batch_keeps_the_answers_that_come_before_its_last_request_is_sent(trouble: Trouble) -> None:
    """Two pictures fit, and their requests are answered while the third waits for room."""
    scene = trouble.scene
    body = {
        "text": ["<|vision_start|><|image_pad|><|vision_end|>What is in this picture?"] * 4,
        "image_data": [[picture] for picture in four_large()],
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }

    def texts() -> list[str]:
        return [answer["text"] for answer in json.loads(kit.post(scene.engine, "/generate", body))]

    alone = texts()
    trouble.start(**SMALL)
    with scene.change("tokenizer") as tokenizer:
        assert texts() == alone
    assert tokenizer["features"] == 2
    assert kit.fallbacks(tokenizer) == {"fallback_full": 2}
    scene.at_rest()


def test_a_feature_that_can_never_fit_does_not_wait(
    trouble: Trouble, expected: list[tuple[str, ...]]
) -> None:
    scene = trouble.scene
    trouble.start(host_mib=4, segment_mib=4)
    with scene.change("tokenizer") as tokenizer:
        assert scene.engine.ask([kit.album()[0]], tokens=4).texts == expected[0]
    assert kit.fallbacks(tokenizer) == {"fallback_too_large": 1}


def test_an_exception_in_the_plugin_fails_one_request(
    trouble: Trouble, expected: list[tuple[str, ...]]
) -> None:
    scene = trouble.scene
    trouble.start()
    with scene.broken(0), pytest.raises(HTTPError) as failed:
        scene.engine.ask([kit.album()[0]], tokens=4)
    with failed.value as answer:
        assert answer.code == 500
        assert "a fault made on purpose" in answer.read().decode()
    assert scene.engine.ask([kit.album()[0]], tokens=4).texts == expected[0]
    scene.at_rest()


def test_a_killed_engine_leaves_nothing_in_the_broker(trouble: Trouble) -> None:
    """The last test: it ends the engine."""
    scene = trouble.scene
    broker = trouble.start(producer_grace=0.2)
    with scene.stream([kit.album()[0]], max_tokens=2000) as lines:
        next(lines)
        os.killpg(scene.engine.process.pid, signal.SIGKILL)
    eventually(lambda: kit.balanced(broker.status()), "holds and grants come to nothing")
    assert not broker.status()["quarantined"]
