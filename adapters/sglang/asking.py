"""Questions to the broker from the event loop: in threads, and given up as soon as the broker does not answer."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import mmbroker
from mmbroker.proto.errors import BrokerError

from .joining import Joining

T = TypeVar("T")

#: Calls at once that may wait: for room, for acknowledgements, for what somebody else makes.
_WORKERS: Final = 64
#: A call that takes longer than this makes the producer ask whether the broker still answers, in seconds.
_PATIENCE: Final = 0.4
#: How long the broker may take to answer that, in seconds.
_ANSWER: Final = 0.5


class Asking:
    """One process's way to the broker: its client, once it has joined one, and the threads that wait for answers."""

    def __init__(self, joining: Joining, engine: str) -> None:
        self._joining = joining
        self.engine = engine
        self._puts = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mmbroker-put")
        # Who waits here may wait for one of those puts, and must not take its thread.
        self._finds = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mmbroker-find")
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="mmbroker-ask")
        self._asking: asyncio.Future[bool] | None = None
        self._silent = False

    @property
    def client(self) -> Any:
        """None until a broker was joined."""
        return self._joining.client

    @property
    def connected(self) -> bool:
        return self.client is not None and self.client.connected

    async def answers(self) -> bool:
        """Does the broker answer, as far as is known? It is asked only if it did not the last time."""
        return not self._silent or await self._ask()

    async def put(self, call: Callable[[], T], undo: Callable[[T], object]) -> T | None:
        """A call that writes. None if the broker stopped answering; what comes too late for that, or for a request that
        was cancelled meanwhile, is undone."""
        return await self._result(_submit(self._puts, call), undo)

    async def find(self, call: Callable[[], T], undo: Callable[[T], object]) -> T | None:
        """A call that may wait for what others make. As `put`."""
        return await self._result(_submit(self._finds, call), undo)

    async def _result(self, done: Future[T], undo: Callable[[T], object]) -> T | None:
        waiting = asyncio.wrap_future(done)
        try:
            while True:
                await asyncio.wait({waiting}, timeout=_PATIENCE)
                if waiting.done():
                    return waiting.result()
                if not await self._ask():
                    waiting.add_done_callback(_forget)
                    done.add_done_callback(partial(_undo, undo))
                    return None
        except asyncio.CancelledError:
            waiting.add_done_callback(_forget)
            if not done.cancel():
                done.add_done_callback(partial(_undo, undo))
            raise

    async def _ask(self) -> bool:
        """Does the broker answer at all? One question at a time, whoever asks."""
        if self._asking is None or self._asking.done():
            loop = asyncio.get_running_loop()
            self._asking = loop.run_in_executor(self._asker, _try, self.client)
        self._silent = not await asyncio.shield(self._asking)
        return not self._silent


def _submit(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    return pool.submit(contextvars.copy_context().run, call)  # whose trace it belongs to


def _try(client: mmbroker.Client) -> bool:
    try:
        client.lookup("does the broker answer?", timeout=_ANSWER)
    except BrokerError:
        return False
    return True


def _forget(waiting: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: if it fails, asyncio need not complain that nobody heard of it."""
    if not waiting.cancelled():
        waiting.exception()


def _undo(undo: Callable[[Any], object], done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is None:
        undo(done.result())
