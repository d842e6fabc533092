"""Workers: those that preprocess on the GPU put from there; those on the CPU never touch it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from mmbroker.proto.errors import FeatureError
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.conftest import UUIDS
from tests.gpu.test_table import block, in_thread
from tests.kit import Puppet, eventually
from tests.rig import VIEWS, same, values


def test_put_on_the_device(bench: Bench) -> None:
    table = bench.attach()
    features = [values(torch.float32, (n, 1000), seed=n) for n in (1, 7, 200)]
    with torch.no_grad():
        held = bench.client.put_many([bench.device_tensor(f) for f in features], to="a", tier="device")
    for one, feature in zip(held, features, strict=True):
        assert bench.reads(table, one, feature)
        one.drop()
    bench.settled(table)
    assert table.stats()["loads"] == 0  # they were there
    assert bench.broker.status()["pool"]["used"] == 0


@pytest.mark.parametrize("view", VIEWS)
def test_every_kind_of_tensor(bench: Bench, view: str) -> None:
    table = bench.attach()
    feature = bench.device_tensor(VIEWS[view](torch.arange(24.0).view(4, 6)))
    with bench.client.put(feature, to="a", tier="device") as held, table.take(held.ref) as use:
        assert same(use.tensor.cpu(), feature.detach().cpu())
    with bench.client.put(torch.randn(4, dtype=torch.complex64).conj(), to="a") as held:
        table.take(held.ref).release()


def test_lists(bench: Bench) -> None:
    table = bench.attach()
    parts = [values(torch.bfloat16, (3, 5)), values(torch.int64, (0, 7)), values(torch.bool, (9,))]
    given = [bench.device_tensor(part) for part in parts]
    with bench.client.put_list(given, to="a", tier="device") as held, table.take(held.ref) as use:
        assert all(same(got.cpu(), part) for got, part in zip(use.tensors, parts, strict=True))


def test_a_tensor_that_is_not_finished(bench: Bench) -> None:
    """What the caller's stream still writes is waited for; the tensor may be changed right after the put."""
    table = bench.attach()
    feature, driven = block(0.5), bench.driven
    with (
        driven.stream() as stream,
        driven.memory(2 << 20) as address,
        driven.pinned(1 << 20) as source,
    ):
        source.view[: feature.nbytes] = feature.numpy().tobytes()
        tensor = bench.driver.tensor(address, torch.uint8, (feature.nbytes,), driven.uuid, None)
        keep: list[object] = []

        def put() -> None:
            bench.driver.use(driven.uuid)
            with driven.current(stream):
                keep.append(bench.client.put(tensor, key="late", to="a", tier="device"))

        with driven.blocked(stream):
            bench.driver.copy(address, source.address, feature.nbytes, stream)
            end = in_thread(put)
            eventually(lambda: bench.broker.status()["leases"], "a lease")
            assert not keep
        end()
        driven.write(address, bytes(feature.nbytes))
        held = keep.pop()
        assert bench.reads(table, held, feature)  # type: ignore[arg-type]
        held.drop()  # type: ignore[attr-defined]


def test_write_in_place(bench: Bench) -> None:
    table = bench.attach()
    feature = values(torch.float32, (30, 40))
    out = bench.client.get_or_create("k", (30, 40), torch.float32, to="a", tier="device")
    with out.lease as lease:
        assert bench.on_device(lease.tensor)
        lease.tensor.copy_(bench.device_tensor(feature))
        held = lease.seal()
    assert bench.reads(table, held, feature)
    again = bench.client.get_or_create("k", (30, 40), torch.float32, to="a", tier="device")
    assert again.held is not None
    assert bench.reads(table, again.held, feature)


def test_an_aborted_lease_stays_while_work_writes_it(bench: Bench) -> None:
    driven = bench.driven
    lease = bench.client.get_or_create("k", (1 << 20,), torch.uint8, tier="device").lease
    assert lease is not None
    with driven.stream() as stream, driven.pinned(1 << 20) as source:
        address = lease.tensor.data_ptr()

        def abort() -> None:
            bench.driver.use(driven.uuid)
            with driven.current(stream):
                lease.abort()

        with driven.blocked(stream):
            bench.driver.copy(address, source.address, 1 << 20, stream)
            in_thread(abort)()
            bench.client.put(block(0.01)).drop()
            assert bench.client.stats()["retained"] == 1
            assert bench.broker.status()["leases"] == 1
        driven.finish(stream)
    eventually(lambda: bench.broker.status()["leases"] == 0, "the lease given back")


def test_a_lease_that_outlives_its_client(bench: Bench) -> None:
    """Closed without a broker to give it back to. Nothing is made on the GPU afterwards that nobody takes apart."""
    lease = bench.client.get_or_create("k", (1 << 20,), torch.uint8, tier="device").lease
    assert lease is not None
    lease.tensor.fill_(1)
    bench.broker.kill()
    eventually(lambda: not bench.client.connected, "the loss")
    bench.client.close()
    lease.abort()


def test_a_tensor_kept_over_the_seal(bench: Bench) -> None:
    lease = bench.client.get_or_create("k", (1 << 20,), torch.uint8, tier="device").lease
    assert lease is not None
    kept = lease.tensor
    kept.zero_()
    lease.seal().drop()
    assert bench.broker.status()["writer_pins"] == 1
    del kept, lease
    gc.collect()
    eventually(lambda: bench.broker.status()["writer_pins"] == 0, "no pins")


def test_a_rank_that_copies_what_is_on_the_device(bench: Bench) -> None:
    table = bench.attach(access="copy")
    feature = block(0.5)
    with (
        bench.client.put(bench.device_tensor(feature), to="a", tier="device") as held,
        table.take(held.ref) as use,
    ):
        use.tensor.add_(1)
        assert same(use.tensor.cpu(), feature + 1)
    with (
        bench.client.put(bench.device_tensor(feature), to="a", tier="device") as held,
        table.take(held.ref) as use,
    ):
        assert same(use.tensor.cpu(), feature)


def test_a_rank_that_is_not_there(bench: Bench) -> None:
    bench.attach(device="cpu")
    with pytest.raises(FeatureError, match="tier='host'"):
        bench.client.put(bench.device_tensor(block(0.1)), to="a", tier="device")
    assert bench.broker.status()["device"]["used"] == 0


def test_a_broker_without_gpu(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(driven, gpu=None)
    with pytest.raises(FeatureError, match="--gpu"):
        bench.client.put(bench.device_tensor(block(0.1)), tier="device")
    with pytest.raises(FeatureError, match="--gpu"):
        bench.client.get_or_create("k", (3,), torch.uint8, tier="device")


def test_another_gpu(fake: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(fake, gpu="1")
    with pytest.raises(FeatureError, match=rf"{UUIDS[0]}.*{UUIDS[1]}"):
        bench.client.put(block(0.1), tier="device")


def test_a_cpu_worker_has_no_context(bench: Bench, puppet: Callable[..., Puppet]) -> None:
    table = bench.attach()
    worker = puppet()
    wire = worker(f"""
        import mmbroker, torch
        from mmbroker import cuda
        from mmbroker.proto.errors import FeatureError
        client = mmbroker.connect({str(bench.broker.directory)!r})
        refused = ""
        try:
            client.put(torch.ones(1000), to="a", tier="device")
        except FeatureError as error:
            refused = str(error)
        held = client.put(torch.ones(1000), to="a")
        driver = cuda.load()
        result = [refused, driver.context({bench.driven.uuid!r}), held.ref.hold]
    """)
    refused, context, _ = wire
    assert "the CPU" in refused and not context
    assert worker.pid not in bench.driver.processes(bench.driven.uuid)
    assert bench.broker.pid not in bench.driver.processes(bench.driven.uuid)
    assert table.stats()["entries"] == 1
