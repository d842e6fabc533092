"""The real SGLang on two hosts, and a worker on a third: a picture is decoded and preprocessed once in all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mmbroker.proto import messages as m
from tests.kit import RawClient, eventually
from tests.sglang import kit

from .fleet import Fleet, Host

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.long]

#: Names of the real SGLang's servers on hosts a and b.
SERVERS = {"a": "one", "b": "two"}


@dataclass
class Servers:
    fleet: Fleet
    scenes: dict[str, kit.Scene]

    def made(self) -> list[tuple[int, int]]:
        """Pictures decoded and preprocessed on each host."""
        return [scene.made() for scene in self.scenes.values()]


@pytest.fixture(scope="module")
def servers(made: Fleet) -> Iterator[Servers]:
    made.empty()
    with kit.scratch() as directory:
        scenes = {}
        for name in SERVERS:
            (directory / name).mkdir()
            scenes[name] = kit.Scene(
                directory / name,
                ("--mm-broker-wait", "30"),
                {"MMBROKER_ENGINE": SERVERS[name]},
                broker=made.hosts[name].broker,
            )
        with scenes["a"].engine, scenes["b"].engine:
            for name in SERVERS:
                eventually(lambda name=name: _joined(made.hosts[name]), f"the server of {name} has joined")
            yield Servers(made, scenes)
    for name in SERVERS:
        eventually(lambda name=name: not _joined(made.hosts[name]), f"the server of {name} has left")


def _joined(host: Host) -> bool:
    return any(
        one["engine"] == SERVERS[host.name] and one["complete"] for one in host.broker.status()["engines"]
    )


def test_a_picture_that_one_host_has_preprocessed_the_others_fetch(servers: Servers) -> None:
    """The answers are the same, and so is every byte, also for a worker that is no SGLang."""
    fleet, a, b = servers.fleet, servers.scenes["a"].engine, servers.scenes["b"].engine
    pictures = kit.album()[:4]
    stored, before = fleet.hosts["a"].tally().get("tier_puts", 0), servers.made()
    said = [a.ask([url], tokens=4).texts for url in pictures]
    fleet.hosts["a"].has_stored(stored + len(pictures))
    assert [b.ask([url], tokens=4).texts for url in pictures] == said
    assert b.ask(pictures, tokens=4).texts == a.ask(pictures, tokens=4).texts
    (a_before, b_before), (a_after, b_after) = before, servers.made()
    assert [now - then for now, then in zip(a_after, a_before, strict=True)] == [len(pictures)] * 2
    assert b_after == b_before, "nothing was decoded or preprocessed there"
    keys = _derived(fleet.hosts["a"])
    assert keys == _derived(fleet.hosts["b"]) and len(keys) >= len(pictures)
    digests = {name: fleet.hosts[name].read(*keys) for name in "abc"}
    assert digests["a"] == digests["b"] == digests["c"] and all(digests["a"])


def _derived(host: Host) -> list[str]:
    """Keys of the pictures that its broker has: other tests' features have small numbers for keys."""
    with RawClient(host.broker.directory, name="status") as client:
        report = client.call(m.Status(1000))
    assert isinstance(report, m.Report)
    found = [one["key"] for one in report.status["largest"] if one["kind"] == "derived"]
    return sorted(key for key in found if int(key, 16) >= 1 << 128)
