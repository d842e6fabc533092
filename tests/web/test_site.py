"""The page's answers when the broker cannot look at itself, and how much it remembers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mmbroker.web import site as module
from mmbroker.web.http import Page
from mmbroker.web.site import ROWS, Site
from tests.state.shell import Shell

from .test_metrics import DAEMON


class World:
    """What the site is told, and what it says. Time stands still: the test ticks."""

    def __init__(self) -> None:
        self.shell = Shell()
        self.uptime = 0.0
        self.unreadable = False
        self.broken = False
        self.complaints: list[tuple[str, str]] = []
        self.loop = asyncio.new_event_loop()
        self.site = Site(
            self.loop, self.report, lambda cells, most: [], lambda *what: self.complaints.append(what)
        )

    def report(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("no report")
        self.uptime += 2.0
        daemon = {"unreadable": "none left"} if self.unreadable else {**DAEMON, "uptime": self.uptime}
        return {**self.shell.report(), "daemon": daemon}

    def get(self, path: str, uid: int | None = os.geteuid()) -> Any:
        return self.site.get(path, lambda: uid)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.site.close()
    world.loop.close()


def rows(world: World) -> list[dict[str, Any]]:
    """What a new reader is told first."""
    heard: list[bytes] = []
    world.site.join(heard.append)()
    name, data = heard[0].decode().splitlines()[:2]
    assert name == "event: hello"
    found: list[dict[str, Any]] = json.loads(data.removeprefix("data: "))["rows"]
    return found


def test_a_quarter_of_an_hour_is_remembered(world: World) -> None:
    for _ in range(ROWS + 50):
        world.site._tick()
    assert ROWS * module.INTERVAL == 15 * 60
    assert len(rows(world)) == ROWS


def test_without_descriptors_it_waits(world: World) -> None:
    world.site._tick()
    world.unreadable = True
    world.site._tick()
    heard: list[bytes] = []
    leave = world.site.join(heard.append)
    assert heard == []
    metrics = world.get("/metrics")
    assert isinstance(metrics, Page) and metrics.status == 503 and b"none left" in metrics.body
    assert world.get("/healthz").status == 200
    world.unreadable = False
    world.site._tick()
    assert heard[0].startswith(b"event: now\n")
    leave()
    assert len(rows(world)) == 2 and not world.complaints


def test_a_report_that_fails_is_no_reason_to_end(world: World) -> None:
    world.broken = True
    world.site._tick()
    assert world.complaints[0][0] == "page_failures" and "no report" in world.complaints[0][1]
    with pytest.raises(RuntimeError):
        world.get("/healthz")  # which its connection answers with 500
    with pytest.raises(RuntimeError):
        world.site.join(lambda data: None)
    assert world.site._listeners == []


def test_rates_are_of_the_time_between_two_looks(world: World) -> None:
    from tests.state.shell import item

    world.site._tick()
    world.shell.client().put(item("x"), item("y"))
    world.site._tick()
    world.site._tick()
    assert [row["features"] for row in rows(world)] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("path", "uid", "status"),
    [
        ("/", 1234, 403),
        ("/events", 1234, 403),
        ("/", None, 403),
        ("/metrics", 1234, 200),
        ("/healthz", None, 200),
    ],
)
def test_who_may_see_what(world: World, path: str, uid: int | None, status: int) -> None:
    assert world.get(path, uid).status == status
