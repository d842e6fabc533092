"""Requests are prepared in line: so many at once, first come, first served."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mmbroker.adapters.sglang.pacing import Pace

pytestmark = pytest.mark.sglang


def asks(*pictures: Any, **others: Any) -> Any:
    return SimpleNamespace(image_data=list(pictures) or None, **others)


LOCAL = [
    asks("data:image/png;base64,AAAA"),
    asks("/a/file.png", "file:///another.png"),
    asks(b"bytes"),
    asks(SimpleNamespace(url="data:image/png;base64,AAAA")),
    asks(["data:image/png;base64,AAAA"], ["data:image/png;base64,BBBB"]),
    asks({"format": "precomputed_embedding"}),
    asks(video_data="/a/film.mp4"),
    asks(audio_data=["/a/sound.wav"]),
]
FREE = [
    asks(),
    SimpleNamespace(),
    None,
    asks("https://somewhere/a.png"),
    asks("data:image/png;base64,AAAA", SimpleNamespace(url="http://somewhere/a.png")),
    asks(video_data=["https://somewhere/film.mp4"]),
]


class Line:
    """Requests that are inside until they are let go."""

    def __init__(self, shapers: int) -> None:
        self.pace = Pace(shapers)
        self.inside: list[int] = []
        self.leave: dict[int, asyncio.Event] = {}

    async def come(self, number: int, request: Any) -> None:
        self.leave[number] = asyncio.Event()
        async with self.pace.turn(request):
            self.inside.append(number)
            try:
                await self.leave[number].wait()
            finally:
                self.inside.remove(number)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.mark.parametrize("request_", LOCAL, ids=str)
@pytest.mark.parametrize("shapers", [1, 2])
def test_one_more_than_are_shaped_first_come_first_served(request_: Any, shapers: int) -> None:
    async def run() -> None:
        line = Line(shapers)
        tasks = [asyncio.create_task(line.come(number, request_)) for number in range(6)]
        for first in range(6):
            await line.settle()
            assert line.inside == list(range(first, min(6, first + shapers + 1)))
            line.leave[first].set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


@pytest.mark.parametrize("request_", FREE, ids=str)
def test_what_takes_no_processor_does_not_wait(request_: Any) -> None:
    async def run() -> None:
        line = Line(1)
        tasks = [asyncio.create_task(line.come(number, LOCAL[0])) for number in range(3)]
        tasks += [asyncio.create_task(line.come(number, request_)) for number in (3, 4, 5)]
        await line.settle()
        assert line.inside == [0, 1, 3, 4, 5]
        for event in line.leave.values():
            event.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


@pytest.mark.parametrize("where", ["in line", "inside"])
def test_one_that_is_cancelled_leaves_its_place(where: str) -> None:
    async def run() -> None:
        line = Line(1)
        tasks = [asyncio.create_task(line.come(number, LOCAL[0])) for number in range(4)]
        await line.settle()
        tasks[0 if where == "inside" else 2].cancel()
        await line.settle()
        assert line.inside == ([1, 2] if where == "inside" else [0, 1])
        line.leave[1].set()
        await line.settle()
        assert line.inside == ([2, 3] if where == "inside" else [0, 3])
        for event in line.leave.values():
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_one_that_fails_leaves_its_place() -> None:
    async def run() -> None:
        pace = Pace(1)
        for _ in range(5):
            with pytest.raises(ValueError, match="not a picture"):
                async with pace.turn(LOCAL[0]):
                    raise ValueError("not a picture")
        async with pace.turn(LOCAL[0]), pace.turn(LOCAL[0]):
            pass

    asyncio.run(run())
