"""Messages: control round trips beside bare ZeroMQ, from seal to answer, round trips a request costs.

The bare pair is a DEALER and a ROUTER over ``ipc://`` in two processes, the ROUTER with asyncio on uvloop, which echoes
messages of a lookup's size; it takes turns with the broker, so that both meet the same machine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Any

import torch
import uvloop
import zmq
import zmq.asyncio

import mmbroker

from . import stats, ways
from .processes import Broker, Workshop
from .producer import ENGINE, IdleRank

#: A lookup of one key, and its answer, are about so long.
MESSAGE = 128
#: Turns between the broker and the bare pair.
BLOCKS = 10
#: A feature for which one more segment is needed each time.
GROWTH_MB = 60.0


class Echo:
    """The bare ROUTER, in a thread of its worker, which does nothing else."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self._thread.start()
        self._ready.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(f"ipc://{self._path}")
        echo = asyncio.ensure_future(self._echo(router))
        self._ready.set()
        await self._over.wait()
        echo.cancel()
        router.close(linger=0)
        context.term()

    @staticmethod
    async def _echo(router: zmq.asyncio.Socket) -> None:
        while True:
            await router.send_multipart(await router.recv_multipart())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


class Grower:
    """Makes an arena grow by one segment after the other: leases that are given back, and segments with them."""

    def __init__(self, broker: str) -> None:
        self._client = mmbroker.connect(broker, name="bench-grower", timeout=30.0)
        self._stop = threading.Event()
        self._grown = 0
        self._thread = threading.Thread(target=self._grow)
        self._thread.start()

    def _grow(self) -> None:
        leases: deque[mmbroker.Lease] = deque()
        while not self._stop.is_set():
            if len(leases) == 4:
                leases.popleft().abort()
            out = self._client.get_or_create(
                f"growth {self._grown}", (ways.patches(GROWTH_MB), ways.PATCH), torch.float32
            )
            assert out.lease is not None
            leases.append(out.lease)
            self._grown += 1
        for lease in leases:
            lease.abort()

    def grown(self) -> int:
        return self._grown

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


class Caller:
    """Makes calls and measures them."""

    def __init__(self, broker: str, echo: str) -> None:
        self._client = mmbroker.connect(broker, name="bench-caller", timeout=30.0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bare = self._context.socket(zmq.DEALER)
        self._bare.connect(f"ipc://{echo}")
        self._made = 0

    def lookups(self, count: int) -> list[int]:
        """Nanoseconds of lookups of a key that nobody has."""
        return self._times(count, lambda: self._client.lookup("nobody has this"))

    def echoes(self, count: int) -> list[int]:
        """Nanoseconds of round trips on the bare pair."""
        message = bytes(MESSAGE)

        def trip() -> None:
            self._bare.send(message)
            self._bare.recv()

        return self._times(count, trip)

    @staticmethod
    def _times(count: int, call: Any) -> list[int]:
        clock, times = time.perf_counter_ns, []
        for _ in range(count):
            started = clock()
            call()
            times.append(clock() - started)
        return times

    def seals(self, mb: float, count: int) -> list[int]:
        """Nanoseconds from seal to answer, to an engine with one idle rank; writing is not in it."""
        clock, times = time.perf_counter_ns, []
        for _ in range(count):
            self._made += 1
            shape = (ways.patches(mb), ways.PATCH)
            out = self._client.get_or_create(f"seal {self._made}", shape, torch.float32, to=ENGINE)
            assert out.lease is not None
            lease = out.lease
            lease.tensor[0, 0] = self._made
            started = clock()
            held = lease.seal()
            times.append(clock() - started)
            held.drop()
        return times

    def request(self, images: int, mb: float) -> None:
        """One request with new images."""
        features = ways.tensors(mb, images, seed=7)
        for held in self._client.put_many(features, to=ENGINE):
            held.drop()

    def close(self) -> None:
        self._bare.close(linger=0)
        self._context.term()
        self._client.close()


def measure(shop: Workshop, count: int, mb: float, say: Any) -> dict[str, Any]:
    """`count` round trips of each kind; seals of features of `mb`."""
    found: dict[str, Any] = {"seal_mb": mb}
    place = shop.place("echo")
    with shop.worker("echo").make(Echo, place):
        say("round trips: a quiet broker")
        with shop.broker(host_mib=round(20 * mb + 64)) as broker:
            found |= _turns(shop, broker, place, count, mb)
            found["put_many_of_8"] = _count_calls(shop, broker, place)
        say("round trips: while the arena grows")
        with (
            shop.broker(host_mib=round(10 * GROWTH_MB + 20 * mb), segment_linger=0.001) as broker,
            shop.worker("grower").make(Grower, broker.path) as grower,
        ):
            growing = _turns(shop, broker, place, max(count // 4, BLOCKS), mb)
            found["while_growing"] = growing | {
                "segments_grown": broker.counters().get("segments_grown", 0),
                "leases": grower.call("grown"),
            }
    return found


def _turns(shop: Workshop, broker: Broker, echo: str, count: int, mb: float) -> dict[str, Any]:
    times: dict[str, list[int]] = {"control": [], "bare_zeromq": [], "seal_to_answer": []}
    with (
        shop.worker("rank").make(IdleRank, broker.path, "readonly"),
        shop.worker("caller").make(Caller, broker.path, echo) as caller,
    ):
        per_turn = max(1, count // BLOCKS)
        for turn in range(BLOCKS + 1):
            for name, values in (
                ("control", caller.call("lookups", per_turn)),
                ("bare_zeromq", caller.call("echoes", per_turn)),
                ("seal_to_answer", caller.call("seals", mb, max(1, per_turn // 4))),
            ):
                times[name] += values if turn else []  # the first turn warms
    return {name: stats.us(values) for name, values in times.items()}


def _count_calls(shop: Workshop, broker: Broker, echo: str) -> dict[str, int]:
    """Calls that the broker got for one request with eight new images."""
    with (
        shop.worker("rank").make(IdleRank, broker.path, "readonly"),
        shop.worker("caller").make(Caller, broker.path, echo) as caller,
    ):
        before = broker.counters()
        caller.call("request", 8, 0.1)
        after = broker.counters()
    kinds = ("create", "seal", "lookup")
    calls = {kind: after.get(f"{kind}_calls", 0) - before.get(f"{kind}_calls", 0) for kind in kinds}
    return {"round_trips": sum(calls.values()), **calls}
