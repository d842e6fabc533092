"""The asyncio twin: the same calls, a loop that is never blocked, and calls undone whose awaiter has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import aio
from mmbroker.proto import messages as m
from mmbroker.proto.errors import BrokerUnavailable, ConnectTimeout, LeaseClosed
from tests.client.peer import Peer
from tests.client.test_peer import reference
from tests.kit import BrokerProcess, eventually
from tests.rig import same, values


class Late(ThreadPoolExecutor):
    """Its calls end at the moment at which they are to be cancelled."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(call, *args, **kwargs)

        def too_late() -> bool:
            future.result()
            return False

        future.cancel = too_late  # type: ignore[method-assign]
        return future


def test_the_loop_undoes_nothing_itself(no_leaks: None) -> None:
    """What is undone may wait for the broker, also if the call is over just when its awaiter is cancelled."""
    undone: list[tuple[str, threading.Thread]] = []
    begun, go = threading.Event(), threading.Event()

    def call() -> str:
        begun.set()
        assert go.wait(20)
        return "result"

    async def main() -> None:
        task = asyncio.create_task(
            aio._run(pool, call, lambda out: undone.append((out, threading.current_thread())))
        )
        await asyncio.to_thread(begun.wait, 20)
        go.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Late(2) as pool:
        asyncio.run(main())
    ((result, thread),) = undone
    assert result == "result"
    assert thread is not threading.current_thread()


def test_what_is_undone_waits_for_nothing_but_its_own_call(no_leaks: None) -> None:
    """Cancelled calls that still run take no other threads than theirs: whoever comes next finds one."""
    slow, quick = threading.Event(), threading.Event()
    begun = threading.Semaphore(0)
    undone: list[threading.Event] = []

    def call(end: threading.Event) -> threading.Event:
        begun.release()
        assert end.wait(20)
        return end

    async def main() -> None:
        tasks = [
            asyncio.create_task(aio._run(pool, partial(call, end), undone.append)) for end in (slow, quick)
        ]
        for _ in tasks:
            await asyncio.to_thread(begun.acquire, timeout=20)
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        quick.set()
        try:
            assert await asyncio.wait_for(aio._run(pool, lambda: "next", print), 20) == "next"
            assert undone == [quick]
        finally:
            slow.set()

    with ThreadPoolExecutor(2) as pool:
        asyncio.run(main())
    assert undone == [quick, slow]


async def until(condition: Callable[[], Any], what: str) -> None:
    await asyncio.to_thread(eventually, condition, what)


@asynccontextmanager
async def pair(broker: BrokerProcess) -> AsyncIterator[tuple[mmbroker.aio.Client, mmbroker.FeatureTable]]:
    async with (
        await mmbroker.aio.connect(broker.directory, name="producer") as client,
        await mmbroker.aio.connect(broker.directory, name="engine") as engine,
    ):
        yield client, await engine.attach(engine="a", access="readonly")


def test_every_call(broker: BrokerProcess) -> None:
    tensor = values(torch.float32, (10, 20))

    async def main() -> None:
        async with pair(broker) as (client, table):
            held = await client.put(tensor, to="a")
            many = await client.put_many([tensor, tensor + 1], to="a")
            parts = await client.put_list([tensor, tensor], to="a")
            assert await client.lookup(bytes(held.digest)) is None  # plain bytes are a caller's key
            found = await client.lookup(held.digest, to="a")
            assert found is not None
            several = await client.lookup_many([mmbroker.digest(tensor), "nothing"])
            assert several[1] is None
            for one in (held, many[0], found):
                with table.take(one.ref) as use:
                    assert same(use.tensor, tensor)
            assert len(table.take(parts.ref).tensor) == 2
            out = await client.get_or_create("k", (2,), torch.int32, to="a")
            assert isinstance(out, mmbroker.aio.Lease)
            async with out.lease as lease:
                lease.tensor.fill_(4)
                sealed = await lease.seal()
            assert table.take(sealed.ref).tensor.tolist() == [4, 4]
            assert out.held is sealed
            assert isinstance(await client.get_or_create("k", (2,), "int32"), mmbroker.Hit)
            assert client.connected
            assert client.stats()["puts"] == 4
            with pytest.raises(TypeError, match="list"):
                await client.put([1])  # type: ignore[arg-type]

    asyncio.run(main())


def test_an_error_inside_a_lease_aborts(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with pair(broker) as (client, _):
            out = await client.get_or_create("k", (2,), torch.int32)
            assert isinstance(out, mmbroker.aio.Lease)
            with pytest.raises(ZeroDivisionError):
                async with out:
                    raise ZeroDivisionError
            with pytest.raises(LeaseClosed):
                await out.seal()
            await until(lambda: broker.status()["leases"] == 0, "the abort")

    asyncio.run(main())


def test_the_loop_goes_on_while_calls_wait(broker: BrokerProcess) -> None:
    """64 puts wait for room; meanwhile the loop turns, and the one drop that they wait for is made from it."""

    async def main() -> None:
        async with pair(broker) as (client, _):
            full = [await client.put(values(torch.uint8, (15 << 20,), seed=n)) for n in range(4)]
            puts = [
                asyncio.ensure_future(client.put(values(torch.uint8, (5 << 20,), seed=100 + n), timeout=60))
                for n in range(64)
            ]
            await until(lambda: broker.status()["waiting_count"] >= 32, "waiting puts")
            turns = 0
            while turns < 1000:
                await asyncio.sleep(0)
                turns += 1
            assert not any(put.done() for put in puts)
            for held in full:
                held.drop()
            for put in asyncio.as_completed(puts):
                (await put).drop()

    asyncio.run(main())


@pytest.mark.parametrize(
    "call", ["put", "put_many", "put_list", "lookup", "lookup_many", "lease", "attach", "seal"]
)
def test_a_cancelled_call_is_undone(call: str) -> None:
    """It runs on in its thread; what it brings is given back."""
    import threading

    asked, go = threading.Event(), threading.Event()

    def handler(peer: Peer, message: m.Call) -> m.Reply | None:
        body = message.body
        waits = m.Seal if call == "seal" else (m.Create, m.Lookup, m.Attach)
        if isinstance(body, waits) and not (isinstance(body, m.Lookup) and not body.keys):
            asked.set()
            go.wait(20)
        match body:
            case m.Create() if call in ("lease", "seal"):
                return m.Created([m.Leased(9, 0, 0, 1)])
            case m.Create():
                return m.Created([m.Hit(reference(peer.boot, n + 1)) for n, _ in enumerate(body.items)])
            case m.Lookup():
                return m.Found([reference(peer.boot, n + 1) for n, _ in enumerate(body.keys)])
            case m.Seal():
                return m.Sealed([reference(peer.boot, 1)])
            case m.Attach():
                return m.Attached(True)
        return m.Done()

    peer = Peer(handler)

    async def main() -> None:
        client = await mmbroker.aio.connect(peer.directory)
        empty = torch.empty(0)
        if call == "seal":
            lease = await client.get_or_create("k", (0,), torch.uint8)
            assert isinstance(lease, mmbroker.aio.Lease)
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: client.put(empty),
            "put_many": lambda: client.put_many([empty, empty]),
            "put_list": lambda: client.put_list([empty]),
            "lookup": lambda: client.lookup("k"),
            "lookup_many": lambda: client.lookup_many(["k", "l"]),
            "lease": lambda: client.get_or_create("k", (0,), torch.uint8),
            "attach": lambda: client.attach(engine="e"),
            "seal": lambda: lease.seal(),
        }
        task = asyncio.ensure_future(calls[call]())
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        undone = {"lease": m.Abort, "attach": m.Detach}.get(call, m.Drop)
        await asyncio.to_thread(peer.wait_for, undone)
        await until(lambda: client.stats()["holds"] == 0, "no hold")
        await client.close()

    try:
        asyncio.run(main())
    finally:
        go.set()
        peer.close()


def test_a_cancelled_connect_is_closed(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from mmbroker import client as blocking

    started, go = threading.Event(), threading.Event()
    connect = blocking.connect

    def slow(*args: Any, **options: Any) -> mmbroker.Client:
        started.set()
        go.wait(20)
        return connect(*args, **options)

    monkeypatch.setattr(blocking, "connect", slow)

    async def main() -> None:
        task = asyncio.ensure_future(mmbroker.aio.connect(broker.directory, name="cancelled"))
        await asyncio.to_thread(started.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        sessions = lambda: broker.status()["counters"]["sessions"]  # noqa: E731
        before = sessions()
        await until(lambda: sessions() > before + 1, "its session")
        await until(lambda: all(s["name"] != "cancelled" for s in broker.status()["sessions"]), "its end")

    asyncio.run(main())


def test_closing_does_not_wait_for_calls(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with pair(broker) as (client, _):
            held = [await client.put(values(torch.uint8, (15 << 20,), seed=n)) for n in range(4)]
            waiting = [
                asyncio.ensure_future(client.put(torch.zeros((20 << 20) + n, dtype=torch.uint8), timeout=600))
                for n in range(70)  # more than there are threads
            ]
            await until(lambda: broker.status()["waiting_count"], "waiting puts")
            await client.close()
            await client.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(result) for result in results} <= {BrokerUnavailable, mmbroker.BrokerLost}
            assert held

    asyncio.run(main())


def test_no_broker(tmp_path: Any) -> None:
    with pytest.raises(ConnectTimeout):
        asyncio.run(mmbroker.aio.connect(tmp_path, timeout=0.05))
