"""Reports of kind G: features that were given up too early, too late or never."""

from __future__ import annotations

import threading

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import FeatureMissing, NoSuchEngine
from tests.kit import BrokerProcess, RawClient, eventually
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
