"""Reports of kind A: which GPU, whether its memory can be shared, and what is done where it cannot."""

from __future__ import annotations

import itertools
from ast import literal_eval
from collections.abc import Callable

import pytest
import torch

from mmbroker.cuda.fake_faults import VARIABLE as FAULTS
from mmbroker.proto.errors import BrokerError
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.conftest import UUIDS
from tests.gpu.test_table import block
from tests.kit import Puppet, eventually
from tests.rig import same, values

FEATURE = values(torch.float32, (64, 100))
IMPORT = "cuMemImportFromShareableHandle"
StartPuppet = Callable[..., Puppet]


def attach(engine: Puppet, bench: Bench, device: str = "cuda:0", rank: int = 0, world: int = 1) -> str:
    """Make a process a rank of engine ``a``; the path it found."""
    path = engine(f"""
        import mmbroker, torch
        client = mmbroker.connect({str(bench.broker.directory)!r}, name="a-{rank}")
        table = client.attach(
            engine="a", rank={rank}, world={world}, device={device!r}, access="readonly")
        result = table.path
    """)
    assert isinstance(path, str)
    return path


def read(engine: Puppet, ref: object) -> bytes:
    """The bytes that a process finds."""
    found = engine(f"""
        with table.take({ref!r}) as use:
            result = use.tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()
    """)
    return bytes.fromhex(found)


@pytest.mark.parametrize("call", ["cuMemExportToShareableHandle", "cuMemCreate"])
def test_memory_that_cannot_be_shared(
    fake: Driven, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A2, A23. The broker starts, says so once, and serves the host; who insists on the device gets an error."""
    monkeypatch.setenv(FAULTS, f"{call}=CUDA_ERROR_NOT_SUPPORTED")
    bench = make_bench(fake, grow_retry=0.01)
    table = bench.attach()
    assert table.path == "pinned"
    for seed in range(3):
        with pytest.raises(BrokerError, match=call):
            bench.client.put(block(0.1, seed), tier="device", timeout=0.2)
        with bench.client.put(block(0.1, seed), to="a") as held:
            assert not bench.reads(table, held, block(0.1, seed))
    assert bench.broker.log().count(call) == 1


def test_items_in_any_order_and_the_way_that_each_takes(
    driven: Driven, make_bench: Callable[..., Bench]
) -> None:
    """A3. Too large for the arena, or for what is left of it: the host's memory does, and the broker counts why."""
    bench = make_bench(driven, device_mib=2, segment_mib=4, host_mib=64, device_linger=0.0)
    table = bench.attach()
    sizes = (0.125, 1.0, 1.875, 2.125, 5.0)
    items = [block(size, seed=i) for i, size in enumerate(sizes)]
    on_device = 0
    for order in itertools.permutations(range(len(items))):
        held = [bench.client.put(items[i], key=f"item {i}", to="a") for i in order]
        for i, one in zip(order, held, strict=True):
            there = bench.reads(table, one, items[i])
            assert not (there and sizes[i] > 2)
            on_device += there
        for one in held:
            one.drop()
    bench.settled(table)
    assert on_device > 120
    assert bench.count("device_too_large") == 2 * 120
    assert bench.count("device_full")
    assert table.stats()["load_failures"] == table.stats()["failed"] == 0


def test_one_rank_cannot_import(faked: Bench, puppet: StartPuppet) -> None:
    """A4. Of four ranks one has to go another way: each tries for itself, all of them read right bytes."""
    ranks = [
        puppet(env={FAULTS: f"{IMPORT}=CUDA_ERROR_INVALID_DEVICE"} if rank == 2 else {}) for rank in range(4)
    ]
    paths = [attach(engine, faked, rank=rank, world=4) for rank, engine in enumerate(ranks)]
    assert paths == ["device", "device", "pinned", "device"]
    with faked.client.put(FEATURE, to="a") as held:
        for engine in ranks:
            assert read(engine, held.ref.to_wire()) == FEATURE.numpy().tobytes()
    (engine,) = faked.broker.status()["engines"]
    assert [bool(rank["why"]) for rank in engine["ranks"]] == [False, False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_whatever_allocator_a_producer_has(
    real: Driven, make_bench: Callable[..., Bench], puppet: StartPuppet, setting: str
) -> None:
    """A6, A7, A10. A producer copies into the broker's memory, so nothing of its own is shared; and it may be gone."""
    bench = make_bench(real)
    table = bench.attach()
    producer = puppet(
        env={"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting} if setting else {}
    )
    wire = producer(f"""
        import mmbroker, os, torch
        client = mmbroker.connect({str(bench.broker.directory)!r})
        tensor = torch.arange(300_000, device="cuda", dtype=torch.int32)
        result = repr(client.put(tensor, to="a", tier="device").ref.to_wire())
    """)
    producer.kill()
    with table.take(literal_eval(wire)) as use:
        assert same(use.tensor.cpu(), torch.arange(300_000, dtype=torch.int32))


def test_a_client_outlives_many_segments(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    """A8, A9. Each is mapped once at two addresses, and its maps are gone when it is."""
    bench = make_bench(driven, device_linger=0.0, device_segment_linger=0.0)
    table = bench.attach()
    maps: list[int] = []
    for cycle in range(20):
        with bench.client.put(block(1, seed=cycle), to="a") as held:
            bench.read_on_device(table, held, block(1, seed=cycle))
        eventually(lambda: not bench.broker.status()["device"]["capacity"], "no segment")
        eventually(lambda: table.gpu is not None and not (table.gpu._maps or table.gpu._dead), "no map")
        maps.append(mapped(driven))
    assert maps[-1] <= maps[2] * 1.1, maps
    assert table.stats()["imports"] >= 20


def mapped(driven: Driven) -> int:
    """How much of this process's address space the GPU's memory takes, in maps."""
    if driven.driver.kind == "fake":
        return len(driven.fake.space)
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def test_another_process_sees_the_same_gpu_under_another_index(
    fake: Driven, make_bench: Callable[..., Bench], puppet: StartPuppet
) -> None:
    """A17, A18. GPUs are told apart by UUID; an index is the process's own."""
    bench = make_bench(fake)
    engine = puppet(env={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert attach(engine, bench, "cuda:1") == "device"
    with bench.client.put(FEATURE, to="a") as held:
        assert read(engine, held.ref.to_wire()) == FEATURE.numpy().tobytes()
    producer = puppet(env={"CUDA_VISIBLE_DEVICES": "1"})
    refusal, wire = producer(f"""
        import mmbroker, torch
        client = mmbroker.connect({str(bench.broker.directory)!r})
        from mmbroker import cuda
        cuda.open_driver().use({UUIDS[1]!r}, create=True)
        refusal = ""
        try:
            client.put(torch.ones(1000), to="a", tier="device")
        except mmbroker.BrokerError as error:
            refusal = str(error)
        held = client.put(torch.ones(1000), to="a")
        result = [refusal, repr(held.ref.to_wire())]
    """)
    assert all(uuid in refusal for uuid in UUIDS)
    assert read(engine, literal_eval(wire)) == torch.ones(1000).numpy().tobytes()


def test_a_rank_on_another_gpu_has_no_context_on_the_brokers(
    fake: Driven, make_bench: Callable[..., Bench], puppet: StartPuppet
) -> None:
    """I2."""
    bench = make_bench(fake)
    engine = puppet()
    assert attach(engine, bench, "cuda:1") == "pinned"
    with bench.client.put(FEATURE, to="a") as held:
        assert read(engine, held.ref.to_wire()) == FEATURE.numpy().tobytes()
    assert engine.pid not in fake.driver.processes(UUIDS[0])
    assert engine.pid in fake.driver.processes(UUIDS[1])


def test_producer_and_engine_in_one_process(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    """A5. Producer and engine are one process: nothing is exported to oneself, and it is given back once."""
    bench = make_bench(driven, device_linger=0.0)
    table = bench.attach()
    for seed in range(100):
        feature = values(torch.uint8, (1 + seed * 997,), seed=seed)
        with bench.client.put(bench.device_tensor(feature), to="a", tier="device") as held:
            assert bench.reads(table, held, feature)
    bench.settled(table)
    status = bench.broker.status()
    assert status["holds"] == 0 and status["counters"].get("unknown_holds", 0) == 0
    assert bench.client.stats()["holds"] == 0
