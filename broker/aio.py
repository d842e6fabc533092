"""The asyncio twin of the client: the same calls, awaited, on a thread pool of its own.

A call whose awaiter was cancelled is undone when it arrives: its holds are dropped, its lease is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import torch

from mmbroker.proto.errors import BrokerError
from mmbroker.proto.keys import Key

from . import client as blocking
from . import handles
from .handles import Held, Hit, Promise
from .table import FeatureTable

#: Most calls of one client that wait at a time.
_THREADS: Final = 64

T = TypeVar("T")


async def connect(
    path: str | Path | None = None,
    *,
    name: str = "client",
    namespace: str | None = None,
    timeout: float = 5.0,
) -> Client:
    """As `mmbroker.connect`, without blocking the event loop."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mmbroker-aio")
    try:
        make = partial(blocking.connect, path, name=name, namespace=namespace, timeout=timeout)
        return Client(await _run(pool, make, lambda made: made.close()), pool)
    except BaseException:
        pool.shutdown(wait=False)
        raise


async def _run(pool: ThreadPoolExecutor, call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Await a blocking call. If the awaiter is cancelled, a call that runs is undone once it is done."""
    future: Future[T] = pool.submit(call)
    loops = threading.current_thread()

    def over(future: Future[T]) -> None:
        """In the thread of the call, or in the loop's, which must not wait for the broker, if it was over before."""
        if threading.current_thread() is not loops:
            _undo(undo, future)
            return
        with contextlib.suppress(RuntimeError):  # the client is closed: nothing is left to be undone
            pool.submit(_undo, undo, future)

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancel():
            future.add_done_callback(over)
        raise


def _undo(undo: Callable[[Any], object], future: Future[Any]) -> None:
    if future.exception() is None:
        with contextlib.suppress(BrokerError):
            undo(future.result())


def _drop_all(held: Sequence[Held | Promise | None]) -> None:
    for one in held:
        if one is not None:
            one.drop()


class Lease:
    """A lease whose `seal` is awaited; an async context manager. `tensor`, `held` and `abort` are the lease's own."""

    def __init__(self, lease: handles.Lease, pool: ThreadPoolExecutor) -> None:
        self._lease = lease
        self._pool = pool

    @property
    def lease(self) -> Lease:
        return self

    @property
    def held(self) -> Held | None:
        return self._lease.held

    @property
    def tensor(self) -> torch.Tensor:
        return self._lease.tensor

    async def seal(
        self, timeout: float | None = None, *, extra: bytes = b"", cost: int | None = None
    ) -> Held:
        return await _run(
            self._pool,
            partial(self._lease.seal, timeout, extra=extra, cost=cost),
            lambda held: held.drop(),
        )

    def abort(self) -> None:
        self._lease.abort()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Client:
    """As `mmbroker.Client`, with its blocking calls awaited. Made by `connect`; an async context manager."""

    def __init__(self, client: blocking.Client, pool: ThreadPoolExecutor) -> None:
        self.blocking = client
        self._pool = pool

    async def put(self, tensor: torch.Tensor, **options: Any) -> Held:
        return await self._run(partial(self.blocking.put, tensor, **options), lambda held: held.drop())

    async def put_many(self, tensors: Sequence[torch.Tensor], **options: Any) -> list[Held]:
        return await self._run(partial(self.blocking.put_many, tensors, **options), _drop_all)

    async def put_list(self, tensors: Sequence[torch.Tensor], **options: Any) -> Held:
        return await self._run(partial(self.blocking.put_list, tensors, **options), lambda held: held.drop())

    async def lookup(self, key: Key | bytes | str, **options: Any) -> Held | None:
        return await self._run(partial(self.blocking.lookup, key, **options), lambda held: _drop_all([held]))

    async def lookup_many(self, keys: Sequence[Key | bytes | str], **options: Any) -> list[Held | None]:
        return await self._run(partial(self.blocking.lookup_many, keys, **options), _drop_all)

    async def get_or_promise(
        self, keys: Sequence[Key | bytes | str], **options: Any
    ) -> list[Held | Promise | None]:
        return await self._run(partial(self.blocking.get_or_promise, keys, **options), _drop_all)

    async def get_or_create(
        self, key: Key | Promise | bytes | str, shape: Sequence[int], dtype: torch.dtype | str, **options: Any
    ) -> Hit | Lease:
        call = partial(self.blocking.get_or_create, key, shape, dtype, **options)
        out = await self._run(call, lambda out: out.held.drop() if isinstance(out, Hit) else out.abort())
        return Lease(out, self._pool) if isinstance(out, handles.Lease) else out

    async def attach(self, **options: Any) -> FeatureTable:
        """The table itself is the blocking client's: `take` never waits."""
        return await self._run(partial(self.blocking.attach, **options), lambda table: table.close())

    def stats(self) -> dict[str, int]:
        return self.blocking.stats()

    @property
    def connected(self) -> bool:
        return self.blocking.connected

    async def close(self) -> None:
        """As `mmbroker.Client.close`. Calls that are under way fail."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self.blocking.close)  # not in the pool: its threads may all be waiting
            self._pool.shutdown(wait=False)

    _closed = False

    async def _run(self, call: Callable[[], T], undo: Callable[[T], object]) -> T:
        return await _run(self._pool, call, undo)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
