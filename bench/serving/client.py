"""The senders: some processes that keep so many requests in flight together, and write down when what came.

They take the next request from one shared count, so that none is idle while another still has requests to send. More
are sent than are measured: the first `measured` count, the rest keep the server as busy until all of these are
answered, and for as long as somebody wants to look at it then (`linger`).
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from . import bodies

#: At most so many processes send.
SENDERS: Final = 4
#: How long a server may take for one answer, in seconds.
PATIENCE: Final = 300.0


class Answer(NamedTuple):
    """What came of a request. Times are seconds since the load began; `gaps` are between pieces of text."""

    number: int
    sent: float
    first: float
    end: float
    gaps: list[float]
    tokens: int
    text: str
    #: Empty if all is well.
    error: str


class Sent(NamedTuple):
    """`answers` to the measured requests, in their order; `ends`: when each that was answered by then was."""

    answers: list[Answer]
    ends: list[float]
    #: Seconds until all that were measured were answered.
    seconds: float
    #: Whether the time was over before.
    cut: bool


async def ask(session: Any, url: str, number: int, data: bytes, began: float, keep: bool) -> Answer:
    """One request. Never raises but when it is cancelled: what went wrong is in the answer."""
    sent = time.monotonic()
    first = last = 0.0
    gaps: list[float] = []
    tokens, texts = 0, []
    error = ""
    try:
        headers = {"Content-Type": "application/json"}
        async with session.post(
            f"{url}/v1/chat/completions", data=io.BytesIO(data), headers=headers
        ) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                async for line in response.content:
                    if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                        continue
                    now = time.monotonic()
                    first = first or now
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        error = f"in the stream: {str(chunk['error'])[:200]}"
                        break
                    if usage := chunk.get("usage"):
                        tokens = usage.get("completion_tokens", 0)
                    text = "".join(c.get("delta", {}).get("content") or "" for c in chunk.get("choices", ()))
                    if text:
                        if last:
                            gaps.append(now - last)
                        last = now
                        if keep:
                            texts.append(text)
                if not first and not error:
                    error = "an answer without a word"
    except Exception as problem:  # whatever a connection may raise
        error = f"{type(problem).__name__}: {problem}"
    end = time.monotonic()
    first = first or end
    return Answer(number, sent - began, first - began, end - began, gaps, tokens, "".join(texts), error)


class _Count:
    """How many requests were begun, by all senders together: a number in a file, and a lock on it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def next(self) -> int:
        """The number of the next request."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        number = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        os.pwrite(self._fd, (number + 1).to_bytes(8, "little"), 0)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return number

    def close(self) -> None:
        os.close(self._fd)


def _serve(link: Connection, path: str, url: str, slots: int, shared: str, measured: int, keep: bool) -> None:
    """A sender's life: ready, go, answers as they come, and until it is told that it is enough."""
    import aiohttp

    count, read = bodies.read(Path(path))
    begun = _Count(shared)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        # A connection for each request: then a worker that is free takes it, of several that listen. Those that stay
        # open would stay with whoever was first to accept them, which is mostly one.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            link.send("ready")
            began = await loop.run_in_executor(None, link.recv)
            if began is None:
                return

            async def slot() -> None:
                while (number := begun.next()) < count:
                    answer = await ask(session, url, number, read(number), began, keep and number < measured)
                    link.send(answer)

            work = asyncio.gather(*(slot() for _ in range(slots)))
            enough = loop.run_in_executor(None, link.recv)
            await asyncio.wait((work, enough), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            link.send(None)
            await enough

    asyncio.run(main())
    begun.close()


def send(
    path: Path,
    url: str,
    concurrency: int,
    measured: int,
    limit: float,
    keep: bool = False,
    linger: Callable[[], None] | None = None,
    senders: int = SENDERS,
) -> Sent:
    """Send the requests of a file, `concurrency` at a time, until `measured` are answered or `limit` seconds are over.

    `linger` is called then, while requests go on; what is still in flight after it is given up.
    """
    context = multiprocessing.get_context("spawn")
    shared = path.with_suffix(".begun")
    shared.write_bytes(bytes(8))
    links: list[Connection] = []
    processes = []
    senders = min(senders, concurrency)
    try:
        for index in range(senders):
            link, theirs = context.Pipe()
            slots = concurrency // senders + (index < concurrency % senders)
            process = context.Process(
                target=_serve, args=(theirs, str(path), url, slots, str(shared), measured, keep), daemon=True
            )
            process.start()
            theirs.close()
            links.append(link)
            processes.append(process)
        for link in links:
            link.recv()
        began = time.monotonic()
        for link in links:
            link.send(began)
        inbox = _Inbox(links, measured)
        while len(inbox.answers) < measured and inbox.open and time.monotonic() < began + limit:
            inbox.read(began + limit - time.monotonic())
        sent = inbox.sent(time.monotonic() - began)
        if linger is not None and not sent.cut:
            looking = threading.Thread(target=linger, name="look", daemon=True)
            looking.start()
            while looking.is_alive():
                inbox.read(0.05)  # else the senders would stand still
            looking.join()
        return sent
    finally:
        for link in links:
            with suppress(OSError):
                link.send(None)
        for process, link in zip(processes, links, strict=True):
            _drain(link)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            link.close()


class _Inbox:
    """What the senders tell."""

    def __init__(self, links: list[Connection], measured: int) -> None:
        self.open = list(links)
        self.answers: dict[int, Answer] = {}
        self._measured = measured
        self._ends: list[float] = []

    def read(self, timeout: float) -> None:
        """What has come, or comes within `timeout` seconds or one."""
        timeout = min(max(0.0, timeout), 1.0)  # the limit may be infinite
        if not self.open:
            time.sleep(timeout)
        for link in connection.wait(self.open, timeout):
            assert isinstance(link, Connection)
            try:
                answer = link.recv()
            except EOFError:
                answer = None
            if answer is None:
                self.open.remove(link)
                continue
            if not answer.error:
                self._ends.append(answer.end)
            if answer.number < self._measured:
                self.answers[answer.number] = answer

    def sent(self, seconds: float) -> Sent:
        ordered = [self.answers[number] for number in sorted(self.answers)]
        return Sent(ordered, sorted(self._ends), seconds, len(ordered) < self._measured)


def _drain(link: Connection) -> None:
    """Until the sender says that it is over, or is."""
    with suppress(EOFError, OSError):
        while link.poll(10) and link.recv() is not None:
            pass
