"""How many requests a tokenizer prepares at once: first come, first served.

SGLang loads the pictures of all requests that have come, in many threads, beside the few that shape them. In a burst
all of them take turns on the same cores and are ready late, and the GPU waits for the first. In line, the first is
ready sooner, and the last no later. Only for what is in the request or in a file: while something is fetched from
elsewhere, the next ones go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

#: What is fetched through the network begins so.
_REMOTE: Final = ("http://", "https://")


class Pace:
    """Of one tokenizer. `shapers`: how many requests SGLang shapes at once."""

    def __init__(self, shapers: int) -> None:
        # One more is on its way into the broker.
        self._places = asyncio.Semaphore(max(1, shapers) + 1)

    @asynccontextmanager
    async def turn(self, request: Any) -> AsyncIterator[None]:
        """While a request is prepared; its turn comes after those that came before."""
        if not any(True for _ in _media(request)) or any(map(_is_remote, _media(request))):
            yield
            return
        async with self._places:
            yield


def _media(request: Any) -> Iterator[Any]:
    """What a request has of pictures, videos and sounds, one by one."""
    for name in ("image_data", "video_data", "audio_data"):
        yield from _flat(getattr(request, name, None))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    elif value is not None:
        yield value


def _is_remote(medium: Any) -> bool:
    place = getattr(
        medium, "url", medium
    )  # SGLang's own record of a picture and how finely it is to be looked at
    return isinstance(place, str) and place.startswith(_REMOTE)
