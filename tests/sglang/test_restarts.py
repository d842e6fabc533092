"""The real SGLang serves while its broker is killed and started again: nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.kit import BrokerProcess, eventually

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), *kit.ONCE]

RESTARTS = 3
USERS = 3


@pytest.fixture(scope="module")
def scene() -> Iterator[kit.Scene]:
    with kit.scratch() as directory:
        found = kit.Scene(directory, path=directory / "cpu")
        with found.engine:
            yield found


class Users:
    """Threads that ask for pictures all the time; `answered` are those that were right, `problems` all others."""

    def __init__(self, scene: kit.Scene, expected: dict[str, tuple[str, ...]]) -> None:
        self.scene, self.expected = scene, expected
        self.answered: list[str] = []
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(USERS)]

    def _ask(self, number: int) -> None:
        pictures = list(self.expected)
        while not self._stop.is_set():
            number += 1
            picture = pictures[number % len(pictures)]
            try:
                texts = self.scene.engine.ask([picture], tokens=4).texts
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                continue
            if texts == self.expected[picture]:
                self.answered.append(picture)
            else:
                self.problems.append(f"{texts} instead of {self.expected[picture]}")

    def more(self, count: int) -> None:
        """Wait for so many further answers."""
        wanted = len(self.answered) + count
        eventually(lambda: len(self.answered) >= wanted or self.problems, f"{count} answers", timeout=300)

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def joined(broker: BrokerProcess) -> bool:
    """Have the scheduler and the tokenizer come (back)?"""
    status = broker.status()
    names = [session["name"] for session in status["sessions"]]
    return any(e["complete"] for e in status["engines"]) and any(n.endswith("/tokenizer") for n in names)


@pytest.fixture
def brokers(scene: kit.Scene) -> Iterator[list[BrokerProcess]]:
    """All that were started, the living one last."""
    found: list[BrokerProcess] = []
    yield found
    for broker in found:
        broker.kill()
        broker.clean_up()


def test_three_restarts_under_load(scene: kit.Scene, brokers: list[BrokerProcess]) -> None:
    expected = {picture: scene.engine.ask([picture], tokens=4).texts for picture in kit.album()[2:10]}

    def start() -> None:
        brokers.append(BrokerProcess(scene.scratch, {"host_mib": 64, "segment_mib": 4}, [], {}).wait_ready())
        eventually(lambda: joined(brokers[-1]), "the engine has joined", timeout=60)

    start()
    with Users(scene, expected) as users:
        for _ in range(RESTARTS):
            users.more(2 * USERS)
            brokers[-1].kill()
            users.more(USERS)  # without a broker
            start()
            with scene.change("tokenizer") as tokenizer:
                users.more(2 * USERS)
            assert tokenizer["features"], "features go through the broker again"
    assert not users.problems
    scene.broker = brokers[-1]
    scene.at_rest()
