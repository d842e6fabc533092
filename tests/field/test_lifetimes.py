"""Reports of kind G: features that were given up too early, too late or never."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import BrokerLost, FeatureMissing, NoSuchEngine
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, RawClient, eventually
from tests.rig import Rig, a_rig, same, values

MIB = 1 << 20


def held_bytes(rig: Rig) -> int:
    return int(rig.broker.status()["pool"]["held"])


def test_holds_end_with_the_use_or_with_the_request() -> None:
    """G6, G7. Dropped once it is consumed, a feature costs nothing while its request lives on, and a retracted request
    is told that it is gone; what is still stored is granted again without being written. Held, it is simply there.
    """
    with a_rig("readonly") as rig:
        tensors = [values(torch.uint8, (MIB,), seed=n) for n in range(40)]
        held = [rig.client.put(tensor, to="a") for tensor in tensors]
        assert held_bytes(rig) == 40 * MIB
        for one, tensor in zip(held, tensors, strict=True):
            with rig.table.take(one.ref) as use:
                assert same(use.tensor, tensor)
        until_the_end, on_use = held[:4], held[4:]
        for one in on_use:
            one.drop()
        eventually(lambda: held_bytes(rig) == 4 * MIB, "what is still held")

        for one, tensor in zip(until_the_end, tensors, strict=False):
            with rig.table.take(one.ref) as use:
                assert same(use.tensor, tensor)
        with pytest.raises(FeatureMissing):
            rig.table.take(on_use[0].ref)
        written = rig.client.stats()["bytes_written"]
        again = rig.client.lookup(mmbroker.digest(tensors[4]), to="a")
        assert again is not None
        with rig.table.take(again.ref) as use:
            assert same(use.tensor, tensors[4])
        assert rig.client.stats()["bytes_written"] == written
        for one in (again, *until_the_end):
            one.drop()
        eventually(lambda: held_bytes(rig) == 0, "nothing held")


@pytest.mark.balanced
def test_a_burst_before_the_engine_is_there(broker: BrokerProcess) -> None:
    """G8. 500 puts at one instant, to an engine that comes later: each is answered, and so is everybody else."""
    threads, each = 20, 25
    refused: list[str] = []
    start = threading.Barrier(threads + 1)
    with (
        mmbroker.connect(broker.directory, name="burst") as client,
        mmbroker.connect(broker.directory, name="engine") as engine,
        RawClient(broker.directory, name="operator") as operator,
    ):

        def puts(first: int) -> None:
            start.wait()
            for n in range(first, first + each):
                try:
                    client.put(torch.tensor([n]), to="later", timeout=20)
                except NoSuchEngine as error:
                    refused.append(str(error))

        bursts = [threading.Thread(target=puts, args=(n * each,)) for n in range(threads)]
        for thread in bursts:
            thread.start()
        start.wait()
        report = operator.call(m.Status())
        assert isinstance(report, m.Report)
        for thread in bursts:
            thread.join()
        assert len(refused) == threads * each and all("'later'" in text for text in refused)
        table = engine.attach(engine="later", access="readonly")
        for n in range(0, threads * each, 50):
            with client.put(torch.tensor([n]), to="later") as held, table.take(held.ref) as use:
                assert use.tensor.tolist() == [n]


def test_the_brokers_memory_thread_breaks(start_broker: StartBroker) -> None:
    """G13. Twenty calls wait for what it was to make: all of them fail at once, for the broker ends with it."""
    code = (
        "import sys, mmbroker.arena.host as h\n"
        "def broken(*a): raise AssertionError('made of nothing')\n"
        "h.HostSegment.create = broken\n"
        "from mmbroker.cli import main\n"
        "main(sys.argv[3:])\n"
    )
    broker = start_broker(prefix=["sh", "-c", f'exec "$0" -c "{code}" "$@"'])
    errors: list[BaseException] = []
    with mmbroker.connect(broker.directory) as client:

        def put(n: int) -> None:
            try:
                client.put(torch.tensor([n]), timeout=20)
            except mmbroker.BrokerError as error:
                errors.append(error)

        callers = [threading.Thread(target=put, args=(n,)) for n in range(20)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert [type(error) for error in errors] == [BrokerLost] * 20
    assert broker.wait() == 1
    assert "AssertionError: made of nothing" in broker.log()


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_producer_that_is_gone_before_its_message_is_read(
    broker: BrokerProcess, puppet: Callable[..., Puppet], end: str
) -> None:
    """S7. Its requests may still run: the engine keeps what it was granted, within a grace time."""
    producer = puppet()
    producer("import mmbroker, os, torch")
    with mmbroker.connect(broker.directory, name="engine") as engine:
        table = engine.attach(engine="a", access="readonly")
        producer(f"client = mmbroker.connect({str(broker.directory)!r}, name='producer')")
        wire = ast.literal_eval(
            producer("held = client.put(torch.arange(1000), to='a')\nresult = repr(held.ref.to_wire())")
        )
        producer.post(end)
        producer.process.wait(20)
        eventually(
            lambda: [s["name"] for s in broker.status()["sessions"]] == ["engine", "status"],
            "the producer's end",
        )
        with table.take(wire) as use:
            assert same(use.tensor, torch.arange(1000))


@pytest.mark.balanced
@pytest.mark.parametrize(("end", "grace"), [("client.close()", 30.0), ("os.kill(os.getpid(), 9)", 0.0)])
def test_a_producers_holds_end_after_it(
    start_broker: StartBroker, puppet: Callable[..., Puppet], end: str, grace: float
) -> None:
    """S7. At once, if it took its leave; after the grace time otherwise. Then nothing of them stays."""
    broker = start_broker(producer_grace=grace)
    producer = puppet()
    producer("import mmbroker, os, torch")
    with mmbroker.connect(broker.directory, name="engine") as engine:
        table = engine.attach(engine="a", access="readonly")
        producer(f"client = mmbroker.connect({str(broker.directory)!r}, name='producer')")
        producer("held = client.put(torch.arange(1000), to='a')")
        assert table.stats()["entries"] == 1
        producer.post(end)
        eventually(lambda: table.stats()["entries"] == 0, "the end of the hold")
        eventually(lambda: broker.status()["pool"]["held"] == 0, "nothing held")
