"""Engines as processes of their own: one dies, or is cut off, while it loads; and what each of them imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mmbroker
from tests.cuda.rig import MIB
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.test_table import block, in_thread
from tests.kit import Puppet, eventually

StartPuppet = Callable[..., Puppet]
SIZE = 1.0


def engine(puppet: StartPuppet, bench: Bench, name: str) -> Puppet:
    """A process that is the only rank of an engine, on the device."""
    process = puppet()
    process(f"""
        import mmbroker, torch
        from mmbroker import cuda
        client = mmbroker.connect({str(bench.broker.directory)!r}, name={name!r})
        driver = cuda.open_driver()
        table = client.attach(engine={name!r}, device="cuda:0", access="readonly")
        assert table.path == "device"
    """)
    return process


def digest(process: Puppet, held: mmbroker.Held) -> tuple[Any, bool]:
    """What an engine reads, hashed, and whether it was on the device."""
    key, there = process(f"""
        with table.take({held.ref.to_wire()!r}) as use:
            found = driver.space.find(use.tensor.data_ptr()) if driver.kind == "fake" else use.tensor.is_cuda
            result = [mmbroker.digest(use.tensor).hex(), bool(found)]
    """)
    return key, there


def device(bench: Bench) -> dict[str, Any]:
    found = bench.broker.status()["device"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def caught(
    fake: Driven, make_bench: Callable[..., Bench], puppet: StartPuppet
) -> tuple[Bench, Puppet, Puppet, Any]:
    """The first engine has enqueued a copy that does not end; the second waits to be granted the same feature."""
    bench = make_bench(fake, device_mib=8)
    first, second = engine(puppet, bench, "a"), engine(puppet, bench, "b")
    first("stopped = driver.engine.held(); stopped.__enter__()")
    feature, got = block(SIZE), []
    bench.client.put(feature, to="a")
    first("assert table.stats()['loads'] == 1 and table.stats()['entries'] == 1")
    end = in_thread(lambda: got.append(bench.client.put(feature, to="b")))
    eventually(lambda: bench.broker.status()["holds"] == 2, "the second hold")
    assert second("result = table.stats()['entries']") == 0
    assert (device(bench)["loading"], device(bench)["used"]) == (1, SIZE * MIB)
    return bench, first, second, lambda: (end(), got[0])[1]


def test_the_loader_is_killed(caught: tuple[Bench, Puppet, Puppet, Any]) -> None:
    """The other engine loads into a new slot, and reads the right bytes there."""
    bench, first, second, granted = caught
    first.kill()
    held = granted()
    assert digest(second, held) == (mmbroker.digest(block(SIZE)).hex(), True)
    assert second("result = table.stats()['loads']") == 1
    assert bench.count("loads_lost") == 1
    eventually(lambda: device(bench)["used"] == SIZE * MIB, "the dead process's slot free again")


def test_the_loader_is_cut_off(caught: tuple[Bench, Puppet, Puppet, Any]) -> None:
    """Its copy still runs, so its slot is nobody's until the process is gone."""
    bench, first, second, granted = caught
    first("import socket; client._link._connection.lifeline.shutdown(socket.SHUT_RDWR)")
    held = granted()
    assert digest(second, held) == (mmbroker.digest(block(SIZE)).hex(), True)
    assert bench.count("loads_lost") == 1
    with bench.client.put(block(SIZE, seed=1), to="b") as other:
        assert digest(second, other) == (mmbroker.digest(block(SIZE, seed=1)).hex(), True)
        assert device(bench)["used"] >= 3 * SIZE * MIB  # both features of the second, and the quarantine
    first.kill()
    eventually(lambda: device(bench)["used"] <= 2 * SIZE * MIB, "the slot free again")
    assert digest(second, held) == (mmbroker.digest(block(SIZE)).hex(), True)


def test_a_segment_is_imported_once_by_each_process(bench: Bench, puppet: StartPuppet) -> None:
    engines = {name: engine(puppet, bench, name) for name in "ab"}
    for process in engines.values():
        process("""
            imported, named, own, by_name = [], [], type(driver).import_, client._link.descriptor
            def counted(self, fd, nbytes):
                imported.append(nbytes)
                return own(self, fd, nbytes)
            def counted_by_name(number):
                named.append(number)
                return by_name(number)
            type(driver).import_, client._link.descriptor = counted, counted_by_name
            before = table.stats()["imports"]
        """)
    held = {name: [bench.client.put(block(1, seed=i), to=name) for i in range(10)] for name in engines}
    for name, process in engines.items():
        for _ in range(2):
            for i, one in enumerate(held[name]):
                process(f"table.take({one.ref.to_wire()!r}).park()")
                key, _ = digest(process, one)
                assert key == mmbroker.digest(block(1, seed=i)).hex()
    for process in engines.values():
        before, imports, imported, named = process(
            "result = [before, table.stats()['imports'], len(imported), named]"
        )
        assert len(named) == len(set(named)) == imported >= 2
        assert imports == before + imported
