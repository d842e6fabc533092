"""Reports of kinds I and P: what the GPU's memory, pinned memory and forks cost, and whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import mmbroker
from mmbroker.cuda.fake_faults import VARIABLE as FAULTS
from mmbroker.cuda.fake_memory import VARIABLE as FAKE
from mmbroker.cuda.fake_memory import Machine, Make
from tests.conftest import StartBroker
from tests.cuda.rig import MIB
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.test_table import block
from tests.kit import Puppet, eventually


def test_many_items_cost_no_more_memory_than_one(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    """I5, I6, I7. Too large for a tiny arena, or small ones by the hundred: the GPU's memory stays as it is."""
    bench = make_bench(driven, device_mib=2, segment_mib=4, host_mib=64)
    table = bench.attach()
    with bench.client.put(block(0.5), to="a") as held:
        bench.reads(table, held, block(0.5))
    slack = 0 if driven.driver.kind == "fake" else 8 * MIB
    free = driven.driver.free(driven.uuid) - slack
    for i in range(300):
        size = 8.0 if i % 30 == 0 else 0.01
        with bench.client.put(block(size, seed=i % 7), to="a") as held:
            assert bench.reads(table, held, block(size, seed=i % 7)) <= (size < 2)
        assert driven.driver.free(driven.uuid) >= free
    bench.settled(table)
    assert table.stats()["imports"] == 1


@pytest.mark.parametrize("engines", [1, 4])
def test_queued_requests_do_not_fill_the_gpu(
    driven: Driven, make_bench: Callable[..., Bench], engines: int
) -> None:
    """I8, I9. What waits beyond the arena waits on the host, and moves up when room comes free, the oldest first."""
    bench = make_bench(driven, device_mib=4, segment_mib=4, host_mib=128, device_linger=0.0)
    tables = [bench.attach(f"e{i}") for i in range(engines)]
    before = driven.driver.free(driven.uuid)
    features = [block(0.5, seed=i) for i in range(40 // engines)]
    queue = [
        (table, feature, bench.client.put(feature, to=table.engine))
        for feature in features
        for table in tables
    ]
    there = 0
    for table, feature, held in queue:
        bench.read_on_device(table, held, feature)
        table.take(held.ref).park()  # its encoder has run; it goes on without it
        there += 1
        assert bench.broker.status()["device"]["capacity"] <= 4 * MIB
        assert driven.driver.free(driven.uuid) >= before - (0 if driven.driver.kind == "fake" else 16 * MIB)
    assert there == len(queue)
    for _, _, held in queue:
        held.drop()
    bench.settled(*tables)


def test_many_workers_without_a_context(bench: Bench, puppet: Callable[..., Puppet]) -> None:
    """I3. Sixteen clients put from the CPU; the engine alone is on the GPU, and it is the one that pins."""
    table = bench.attach()
    workers = [puppet() for _ in range(4)]
    for number, worker in enumerate(workers):
        worker.post(f"""
            import mmbroker, torch
            clients = [mmbroker.connect({str(bench.broker.directory)!r}) for _ in range(4)]
            helds = [
                client.put(torch.full((1000,), {number} * 4 + i), to="a") for i, client in enumerate(clients)
            ]
            # a torch that is made for CUDA brings the driver's library along
            made_for_cuda = torch.version.cuda is not None
            result = "libcuda.so" in open("/proc/self/maps").read() and not made_for_cuda
        """)
    for worker in workers:
        assert worker.answer() is False
        assert worker.pid not in bench.driver.processes(bench.driven.uuid)
    assert bench.broker.pid not in bench.driver.processes(bench.driven.uuid)
    assert table.stats()["entries"] == 16
    eventually(lambda: bench.count("loads") == 16, "every feature loaded by the engine")


def test_pinning_is_limited(faked: Bench) -> None:
    """P5. Beyond the limit of locked memory the engine reads plain host memory; a warning names the call."""
    faked.driven.fake.faults.memlock = faked.driven.fake.pins.nbytes + (2 << 20)
    table = faked.attach()
    features = [block(3, seed=i) for i in range(3)]
    for feature in features:
        with faked.client.put(feature, to="a") as held:
            faked.read_on_device(table, held, feature)
    assert table.gpu is not None and "cuMemHostRegister" in table.gpu.unpinned


@pytest.mark.parametrize("node", [0, -1])
def test_host_memory_lies_near_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_broker: StartBroker, node: int
) -> None:
    """P1, P2. By the policy of the thread that makes it, as the kernel tells it, wherever the broker was started."""
    monkeypatch.setenv(FAKE, str(tmp_path / "gpus"))
    Machine(tmp_path / "gpus", Make(node=node))
    broker = start_broker(name="gpu", gpu="0", device_headroom_mib=0)
    with mmbroker.connect(broker.directory) as client, client.put(block(1)):
        policies = Counter(
            task.read_text().split(maxsplit=2)[1]
            for task in Path(f"/proc/{broker.pid}/task").glob("*/numa_maps")
        )
    assert policies.pop("default")
    assert policies == ({"prefer:0": 1} if node == 0 else {})


def test_a_forked_child(bench: Bench, puppet: Callable[..., Puppet]) -> None:
    """P6. It makes no call of CUDA's: its parent's client refuses, one of its own carries CPU tensors, and the
    GPU is not there for it."""
    bench.attach()
    parent = puppet()
    told = parent(f"""
        import json, os
        import mmbroker, torch
        from mmbroker import cuda
        driver = cuda.open_driver()
        driver.use({bench.driven.uuid!r}, create=True)
        device = {bench.driven.device!r}
        client = mmbroker.connect({str(bench.broker.directory)!r})
        client.put(torch.ones(100, device=device), to="a", tier="device").drop()

        def attempt(job):
            try:
                return str(job())
            except Exception as error:
                return f"{{type(error).__name__}}: {{error}}"

        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            told = [attempt(lambda: client.put(torch.ones(3)))]
            own = mmbroker.connect({str(bench.broker.directory)!r})
            told.append(attempt(lambda: own.put(torch.ones(30), to="a").ref.nbytes))
            told.append(attempt(lambda: own.put(torch.ones(300), to="a", tier="device")))
            told.append(attempt(lambda: own.attach(engine="b", device="cuda:0", access="readonly").path))
            own.close()
            os.write(writable, json.dumps(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            result = json.load(pipe)
        result.append(attempt(lambda: client.put(torch.ones(7, device=device), to="a", tier="device").ref.nbytes))
    """)
    assert told[0].startswith("ClientForked")
    assert told[1] == "120"
    assert told[2].startswith("FeatureError") and "the CPU" in told[2]
    assert told[3] == "host"
    assert told[4] == "28"


def test_an_engine_that_gets_no_context(
    fake: Driven, make_bench: Callable[..., Bench], puppet: Callable[..., Puppet]
) -> None:
    """A16. No context to be had: the host, and why, at once."""
    bench = make_bench(fake)
    engine = puppet(env={FAULTS: "cuDevicePrimaryCtxRetain=CUDA_ERROR_OPERATING_SYSTEM"})
    path = engine(f"""
        import mmbroker
        client = mmbroker.connect({str(bench.broker.directory)!r}, name="a")
        result = client.attach(engine="a", device="cuda:0", access="readonly").path
    """)
    assert path == "host"
    assert "cuDevicePrimaryCtxRetain" in bench.rank()["why"]
