"""How an engine's processes and threads come and go: killed at any point, and threads that never met CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import mmbroker
from tests.cuda.rig import MIB
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.test_table import block, in_thread
from tests.kit import Puppet, eventually

#: How far an engine has come when it is killed, and what it does to come there.
POINTS = {
    "connected": "",
    "attached": "table = attach()",
    "loaded": "table = attach(); held = put(); table.take(held.ref).release()",
    "reading": "table = attach(); held = put(); use = table.take(held.ref); tensor = use.tensor",
    "waiting": """
table = attach()
waits = client.get_or_create(b"w" * 32, (4,), "float32")
threading.Thread(target=client.get_or_create, args=(b"w" * 32, (4,), "float32"), kwargs={"timeout": 60}).start()
""",
    "leaving": "table = attach(); held = put(); use = table.take(held.ref); tensor = use.tensor; table.close()",
}


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_engine_leaves_no_memory(
    driven: Driven, make_bench: Callable[..., Bench], puppet: Callable[..., Puppet], point: str
) -> None:
    """R4. Without a goodbye and at any point: the broker keeps none of its memory, and the next one of that name
    is served at once."""
    bench = make_bench(driven, device_linger=0.0, device_segment_linger=0.0)
    free = driven.driver.free(driven.uuid)
    engine = puppet()
    engine(f"""
import threading
import mmbroker, torch
client = mmbroker.connect({str(bench.broker.directory)!r}, name="a")
def attach():
    return client.attach(engine="a", device="cuda:0", access="readonly")
def put():
    return client.put(torch.arange(100_000), to="a")
{POINTS[point]}
""")
    engine.kill()
    eventually(lambda: bench.broker.status()["device"]["capacity"] == 0, "the device arena given back")
    eventually(lambda: driven.driver.free(driven.uuid) >= free - 8 * MIB, "the GPU's memory given back")
    table = bench.attach()
    feature = block(0.5)
    with bench.client.put(feature, to="a") as held:
        bench.read_on_device(table, held, feature)


def test_threads_that_never_met_cuda(bench: Bench) -> None:
    """R7. The broker is restarted; a bare thread and a callback of an event loop connect, attach, take and read.
    Nothing there has made the GPU current before."""
    feature = block(0.5)

    def engine(name: str) -> None:
        table = bench.attach(name)
        with bench.client.put(feature, to=name) as held:
            bench.read_on_device(table, held, feature)
            table.take(held.ref).park()
            bench.read_on_device(table, held, feature)

    async def called_back() -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        loop.call_soon(lambda: done.set_result(engine("loop")))
        await done

    in_thread(lambda: engine("thread"))()
    in_thread(lambda: asyncio.run(called_back()))()
    sessions = [table._link.session for table in bench.tables]
    bench.broker.kill()
    bench.start()
    for table, session in zip(bench.tables, sessions, strict=True):
        link = table._link
        eventually(lambda link=link, old=session: link.connected and link.session != old, "an engine is back")
    eventually(lambda: bench.client.connected, "the producer is back")
    assert [table.path for table in bench.tables] == ["device", "device"]

    def read(table: mmbroker.FeatureTable) -> None:
        with bench.client.put(feature, to=table.engine) as held:
            bench.read_on_device(table, held, feature)

    for table in bench.tables:
        in_thread(lambda table=table: read(table))()
