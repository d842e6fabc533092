"""Reports of kind B: what is read is what was written, whatever is late."""

from __future__ import annotations

import gc
import threading
from ast import literal_eval
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

import mmbroker
from mmbroker.proto.errors import DeadlineExceeded, FeatureMissing
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.test_table import block, in_thread
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import DTYPES, same, values


def delay(driven: Driven, stream: int) -> None:
    """Keep a stream of the real GPU busy for a while; the fake's streams are late by themselves."""
    if driven.driver.kind == "cuda":
        with driven.current(stream):
            torch.cuda._sleep(2_000_000)


def test_a_put_waits_for_what_the_callers_stream_waits_for(bench: Bench) -> None:
    """B3, B4. Written on one stream, late; put from a second one that waits for it; the caller synchronises nothing."""
    driven, driver, table = bench.driven, bench.driver, bench.attach()
    nbytes = 1 << 16
    with (
        driven.stream() as first,
        driven.stream() as second,
        driven.event() as written,
        driven.memory(2 << 20) as address,
        driven.pinned(nbytes) as source,
    ):
        tensor = driver.tensor(address, torch.uint8, (nbytes,), driven.uuid, None)
        for seed in range(100):
            feature = values(torch.uint8, (nbytes,), seed=seed)
            source.view[:] = feature.numpy().tobytes()
            delay(driven, first)
            driver.copy(address, source.address, nbytes, first)
            driver.record(written, first)
            driver.wait(second, written)
            with driven.current(second):
                held = bench.client.put(tensor, key=f"item {seed}", to="a", tier="device")
            assert bench.reads(table, held, feature)
            held.drop()
        with (
            driven.stream() as third,
            driven.current(third),
        ):  # waits for nothing: the caller's fault, but no crash
            bench.client.put(tensor, key="early", to="a", tier="device").drop()
    bench.settled(table)


def test_the_tensor_is_freed_right_after_the_put(bench: Bench) -> None:
    """B6. Its memory is somebody else's at once."""
    table = bench.attach()
    for seed in range(20):
        feature = block(0.25, seed=seed)
        tensor = bench.device_tensor(feature.clone())
        held = bench.client.put(tensor, to="a", tier="device")
        del tensor
        other = torch.full((feature.nbytes,), 0xFF, dtype=torch.uint8, device=bench.driven.device)
        assert bench.reads(table, held, feature)
        del other
        held.drop()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_on_the_device(bench: Bench, dtype: torch.dtype) -> None:
    table = bench.attach()
    feature = values(dtype, (5, 7))
    with bench.client.put(bench.device_tensor(feature), to="a", tier="device") as held:
        assert bench.reads(table, held, feature)
    with bench.client.put(bench.device_tensor(feature).t(), to="a", tier="device") as held:
        assert bench.reads(table, held, feature.t())
    with bench.client.put(bench.device_tensor(feature)[::2, 1::3], to="a", tier="device") as held:
        assert bench.reads(table, held, feature[::2, 1::3])


@pytest.mark.parametrize("nbytes", [1, 2, 3, 7, 8, 4097])
def test_a_few_bytes(bench: Bench, nbytes: int) -> None:
    """B11. Neither from the host nor on the device do they become zeros."""
    table = bench.attach()
    feature = torch.arange(1, nbytes + 1, dtype=torch.int32).to(torch.uint8) | 1
    for tier, given in (("host", feature), ("device", bench.device_tensor(feature))):
        with bench.client.put(given, key=f"{tier} {nbytes}", to="a", tier=tier) as held:
            assert bench.reads(table, held, feature)


def test_a_writer_that_stands_still(bench: Bench, puppet: Callable[..., Puppet]) -> None:
    """B7. Nobody gets what it has not finished: they time out, and other items go on."""
    table = bench.attach()
    writer = puppet()
    writer(f"""
        import mmbroker, torch
        client = mmbroker.connect({str(bench.broker.directory)!r})
        lease = client.get_or_create("k", (1000,), torch.uint8, to="a", tier="device").lease
        lease.tensor[:500] = 7
    """)
    writer.stop()
    assert bench.client.lookup("k", to="a") is None
    key = mmbroker.Key.derived(b"d" * 32)
    writer_too = bench.connect("slow").get_or_create(key, (1000,), torch.uint8, tier="device")
    assert writer_too.lease is not None
    with pytest.raises(DeadlineExceeded):
        bench.client.get_or_create(key, (1000,), torch.uint8, to="a", tier="device", timeout=0.3)
    with bench.client.put(block(0.1), to="a") as held:
        assert bench.reads(table, held, block(0.1))
    assert table.stats()["takes"] == 1
    writer_too.lease.abort()


def test_an_item_is_dropped_while_it_is_read(bench: Bench) -> None:
    """B9. The read goes on to its end; the memory is free after the last one."""
    table = bench.attach()
    feature = block(0.5)
    held = bench.client.put(feature, to="a")
    reading, ends = threading.Event(), []
    dropped = threading.Event()

    def read() -> None:
        bench.driver.use(bench.driven.uuid)
        with table.take(held.ref) as use:
            reading.set()
            assert dropped.wait(20)
            for _ in range(20):
                assert same(use.tensor.cpu(), feature)
            ends.append(table.stats()["settled"])

    end = in_thread(read)
    assert reading.wait(20)
    held.drop()
    eventually(lambda: table.stats()["unsettled"] == 1, "a dismissal")
    dropped.set()
    end()
    assert ends == [0]
    gc.collect()
    bench.settled(table)
    with pytest.raises(FeatureMissing):
        table.take(held.ref)


def test_each_item_begins_at_its_own_place(bench: Bench, puppet: Callable[..., Puppet]) -> None:
    """A14. Another process writes neighbours of other values, each late; nothing but descriptors is shared for it."""
    table = bench.attach()
    producer = puppet()
    wires = producer(f"""
        import mmbroker, torch
        from mmbroker import cuda
        driver = cuda.open_driver()
        driver.use({bench.driven.uuid!r}, create=True)
        client = mmbroker.connect({str(bench.broker.directory)!r})
        device = {bench.driven.device!r}
        tensors = []
        for i in range(100):
            if device != "cpu":
                torch.cuda._sleep(1_000_000)
            tensors.append(torch.full((1 + i * 37 % 5000,), i, dtype=torch.uint8, device=device))
        helds = client.put_many(tensors, to="a", tier="device", keys=[f"item {{i}}" for i in range(100)])
        result = [repr(held.ref.to_wire()) for held in helds]
    """)
    for i, wire in enumerate(wires):
        with table.take(literal_eval(wire)) as use:
            assert bench.on_device(use.tensor)
            assert same(use.tensor.cpu(), torch.full((1 + i * 37 % 5000,), i, dtype=torch.uint8))


@pytest.mark.balanced
def test_engines_that_count_their_requests_alike(broker: BrokerProcess) -> None:
    """B12. Eight engines at one broker, their items put in turns: each finds its own, and nothing of the others."""
    with ExitStack() as stack:
        producer = stack.enter_context(mmbroker.connect(broker.directory))
        tables = {
            f"engine-{i}": stack.enter_context(mmbroker.connect(broker.directory)).attach(
                engine=f"engine-{i}"
            )
            for i in range(8)
        }
        for request in range(50):
            contents = {
                name: values(torch.uint8, (100,), seed=request * 8 + i) for i, name in enumerate(tables)
            }
            held = {name: producer.put(content, to=name) for name, content in contents.items()}
            for name, table in tables.items():
                with table.take(held[name].ref) as use:
                    assert same(use.tensor, contents[name])
                others = [one for other, one in held.items() if other != name]
                for one in others:
                    with pytest.raises(FeatureMissing):
                        table.take(one.ref)
            for one in held.values():
                one.drop()
