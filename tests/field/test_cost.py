"""Reports of kind O: bytes that were copied too often, and producers in each other's way."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmbroker
from tests.kit import BrokerProcess, Puppet
from tests.rig import DTYPES, same, values


def page(address: int) -> tuple[str, int]:
    """Which byte of which file is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, offset, _, inode, *_ = line.split()
        start, end = (int(part, 16) for part in where.split("-"))
        if start <= address < end:
            return inode, int(offset, 16) + address - start
    raise AssertionError("not mapped")


@pytest.mark.balanced
def test_what_is_written_in_place_is_never_copied(broker: BrokerProcess) -> None:
    """O6, O9. The producer writes into the very memory that two engines read."""
    tensor = values(torch.float32, (100, 1000))
    with (
        mmbroker.connect(broker.directory) as producer,
        mmbroker.connect(broker.directory) as one,
        mmbroker.connect(broker.directory) as two,
    ):
        tables = [one.attach(engine="one", access="readonly"), two.attach(engine="two", access="readonly")]
        lease = producer.get_or_create("in place", tensor.shape, tensor.dtype, to="one").lease
        assert lease is not None
        with lease:
            written = page(lease.tensor.data_ptr())
            lease.tensor.copy_(tensor)
            held = lease.seal()
        other = producer.lookup("in place", to="two")
        assert other is not None
        for table, ref in zip(tables, (held.ref, other.ref), strict=True):
            with table.take(ref) as use:
                assert page(use.tensor.data_ptr()) == written
                assert same(use.tensor, tensor)
        held.drop()
        other.drop()


@pytest.mark.balanced
def test_many_producers(broker: BrokerProcess, puppet: Callable[..., Puppet]) -> None:
    """O7. Several processes put to one engine at one time, from several threads each."""
    producers = [puppet() for _ in range(2)]
    with mmbroker.connect(broker.directory, name="engine") as engine:
        table = engine.attach(engine="a", access="readonly")
        for producer in producers:
            producer.post(
                "import mmbroker\nfrom concurrent.futures import ThreadPoolExecutor\n"
                "from tests.rig import DTYPES, values"
            )
        for n, producer in enumerate(producers):
            producer.answer()
            producer(f"client = mmbroker.connect({str(broker.directory)!r}, name='producer-{n}')")
        for n, producer in enumerate(producers):
            producer.post(
                "def put(seed):\n"
                "    held = client.put(values(DTYPES[0], (seed * 997 % 50_000,), seed=seed), to='a', timeout=20)\n"
                "    return seed, held.ref.to_wire()\n"
                "with ThreadPoolExecutor(4) as pool:\n"
                f"    result = repr(list(pool.map(put, range({n * 100}, {n * 100 + 100}))))"
            )
        for producer in producers:
            for seed, wire in ast.literal_eval(producer.answer()):
                with table.take(wire) as use:
                    assert same(use.tensor, values(DTYPES[0], (seed * 997 % 50_000,), seed=seed))
        assert table.stats()["takes"] == 200
        for producer in producers:
            producer("client.close()")
