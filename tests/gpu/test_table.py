"""A rank on the GPU: loads, releases, parks, offers, copies of its own, captures."""

from __future__ import annotations

import gc
import signal
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import mmbroker
from mmbroker.link import Link
from mmbroker.proto.errors import EngineLagging, FeatureError
from tests.cuda.rig import MIB
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.kit import PATIENCE, Puppet, eventually
from tests.rig import same, values


def block(mib: float, seed: int = 0) -> torch.Tensor:
    return values(torch.uint8, (int(mib * MIB),), seed=seed)


def look_at(use: mmbroker.Use) -> None:
    assert use.tensor is not None


def in_thread(job: Callable[[], object]) -> Callable[[], None]:
    """Begin a job; what is returned waits for its end, and raises what it raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        thread.join(PATIENCE)
        assert not thread.is_alive()
        if failed:
            raise failed[0]

    return end


def test_reads_right_after_the_grant(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(driven, device_reserve_mib=32)  # else some are read before a segment is there
    table = bench.attach()
    for i in range(30):
        feature = values(torch.float32, (3, 1 + 7919 * i % 100_000), seed=i)
        with bench.client.put(feature, to="a") as held:
            assert bench.reads(table, held, feature)
    bench.settled(table)
    assert table.stats()["loads"] == 30
    eventually(lambda: bench.count("loads") == 30, "every load told")


def test_a_read_waits_for_the_copy(faked: Bench) -> None:
    table = faked.attach()
    feature = block(1)
    with faked.driven.fake.engine.held():
        held = faked.client.put(feature, to="a")  # granted before the copy is done
        end = in_thread(lambda: faked.reads(table, held, feature))
    end()
    held.drop()


def test_lists_empty_ones_and_dtypes(bench: Bench) -> None:
    table = bench.attach()
    parts = [values(torch.bfloat16, (3, 5)), values(torch.int64, (0, 7)), values(torch.bool, (9,))]
    with bench.client.put_list(parts, to="a") as held, table.take(held.ref) as use:
        assert all(same(got.cpu(), part) for got, part in zip(use.tensors, parts, strict=True))
    with bench.client.put(torch.empty(0, 4), to="a") as held, table.take(held.ref) as use:
        assert use.tensor.shape == (0, 4)


@pytest.mark.parametrize("torchs", [False, True])
def test_a_slot_stays_while_a_stream_reads_it(bench: Bench, torchs: bool) -> None:
    table = bench.attach()
    feature = block(0.5, seed=1)
    kind = bench.driven.torchs_stream if torchs else bench.driven.stream
    with kind() as which, bench.driven.pinned(feature.nbytes) as target:
        stream = which.cuda_stream if torchs else which
        held = bench.client.put(feature, to="a")
        use = table.take(held.ref)
        address = use.tensor.data_ptr()
        with bench.driven.blocked(stream):
            bench.driver.copy(target.address, address, feature.nbytes, stream)
            use.release(which)
            assert table.gpu is not None and (stream in table.gpu.streams) == torchs
            held.drop()
            after_it(bench, table)
            assert table.stats()["unsettled"] == 1
            assert bench.broker.status()["holds"] == 1
        bench.driven.finish(stream)
        assert bytes(target.view) == feature.numpy().tobytes()
    bench.settled(table)


def after_it(bench: Bench, table: mmbroker.FeatureTable) -> None:
    """A later feature comes and goes: what could be settled before it, is."""
    settled = table.stats()["settled"]
    with bench.client.put(block(0.01, seed=settled + 100), to="a"):
        pass
    eventually(lambda: table.stats()["settled"] > settled, "a later feature settled")


def test_a_tensor_that_outlives_its_use(bench: Bench) -> None:
    table = bench.attach()
    feature = block(0.5, seed=2)
    held = bench.client.put(feature, to="a")
    with table.take(held.ref) as use:
        kept = use.tensor
    held.drop()
    after_it(bench, table)
    assert table.stats()["kept"] == 1
    assert same(kept.cpu(), feature)
    with bench.driven.stream() as stream:
        table.take(bench.client.put(feature, to="a").ref).release(stream)
        with bench.driven.pinned(feature.nbytes) as target:
            del use
            with bench.client.put(block(0.1, seed=3), to="a") as other:
                use = table.take(other.ref)
                look_at(use)
                use.release(stream)  # from now on the table knows the stream
                del use
            with bench.driven.blocked(stream):
                bench.driver.copy(target.address, kept.data_ptr(), feature.nbytes, stream)
                del kept
                gc.collect()
                after_it(bench, table)
                assert table.stats()["unsettled"] >= 1
            bench.driven.finish(stream)
            assert bytes(target.view) == feature.numpy().tobytes()


def test_a_use_that_is_forgotten(bench: Bench) -> None:
    table = bench.attach()
    feature = block(0.1)
    with bench.client.put(feature, to="a") as held:
        use = table.take(held.ref)
        assert same(use.tensor.cpu(), feature)
        del use
        gc.collect()
    bench.settled(table)


def test_park_and_take_again(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    with bench.client.put(feature, to="a") as held:
        for parks in range(1, 6):
            use = table.take(held.ref)
            assert same(use.tensor.cpu(), feature)
            use.park()
            eventually(lambda parks=parks: bench.count("parked") == parks, "parked")  # type: ignore[misc]
            bench.broker.process.send_signal(signal.SIGSTOP)  # nobody offers a place meanwhile
            try:
                assert not bench.reads(table, held, feature)  # the host's copy, at once
            finally:
                bench.broker.process.send_signal(signal.SIGCONT)
            bench.read_on_device(table, held, feature)
    bench.settled(table)


def test_parked_while_it_is_read(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    with bench.driven.stream() as stream, bench.client.put(feature, to="a") as held:
        use = table.take(held.ref)
        address = use.tensor.data_ptr()
        with bench.driven.pinned(feature.nbytes) as target:
            with bench.driven.blocked(stream):
                bench.driver.copy(target.address, address, feature.nbytes, stream)
                use.park(stream)
                after_it(bench, table)
                assert bench.count("parked") == 0
            bench.driven.finish(stream)
            assert bytes(target.view) == feature.numpy().tobytes()
        eventually(lambda: bench.count("parked") == 1, "parked")


def test_one_use_parks_while_another_goes_on(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    with bench.client.put(feature, to="a") as held:
        first, second = table.take(held.ref), table.take(held.ref)
        look_at(first)
        first.park()
        after_it(bench, table)
        assert bench.count("parked") == 0
        assert same(second.tensor.cpu(), feature) and bench.on_device(second.tensor)
        second.park()
        eventually(lambda: bench.count("parked") == 1, "parked")


def test_a_paused_use_keeps_the_feature_and_not_its_place(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    held = bench.client.put(feature, to="a")
    use = table.take(held.ref)
    for pauses in (1, 2):
        assert same(use.tensor.cpu(), feature)
        assert bench.on_device(use.tensor) == (pauses == 1)
        use.pause()
        eventually(lambda: bench.count("parked") == 1, "parked")
    held.drop()
    after_it(bench, table)
    assert table.stats()["unsettled"] == 1
    assert same(use.tensor.cpu(), feature)  # after the hold is over
    use.pause()
    use.release()
    bench.settled(table)


def test_paused_while_it_is_read(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    with bench.driven.stream() as stream, bench.client.put(feature, to="a") as held:
        use, other = table.take(held.ref), table.take(held.ref)
        address = use.tensor.data_ptr()
        with bench.driven.pinned(feature.nbytes) as target:
            with bench.driven.blocked(stream):
                bench.driver.copy(target.address, address, feature.nbytes, stream)
                use.pause(stream)
                look_at(other)
                other.pause()
                after_it(bench, table)
                assert bench.count("parked") == 0
            bench.driven.finish(stream)
            assert bytes(target.view) == feature.numpy().tobytes()
        eventually(lambda: bench.count("parked") == 1, "parked")
        use.release()
        other.release()


def test_one_use_pauses_while_another_goes_on(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    with bench.client.put(feature, to="a") as held, table.take(held.ref) as second:
        first = table.take(held.ref)
        look_at(first)
        first.pause()
        after_it(bench, table)
        assert bench.count("parked") == 0
        assert bench.on_device(second.tensor)
        second.pause()
        eventually(lambda: bench.count("parked") == 1, "parked")
        first.release()


def test_without_room_on_the_device(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(driven, device_mib=4, segment_mib=4)
    table = bench.attach()
    features = [block(1.5, seed=i) for i in range(5)]
    held = [bench.client.put(feature, to="a") for feature in features]
    there = [bench.reads(table, one, feature) for one, feature in zip(held, features, strict=True)]
    assert there == [True, True, False, False, False]
    held[0].drop()
    bench.read_on_device(table, held[2], features[2])  # first come, first served
    assert not bench.reads(table, held[3], features[3])
    held[1].drop()
    bench.read_on_device(table, held[3], features[3])
    assert not bench.reads(table, held[4], features[4])
    for one in held:
        one.drop()
    bench.settled(table)


def test_lazy_ranks_load_what_is_taken(bench: Bench) -> None:
    table = bench.attach(lazy=True)
    feature = block(1)
    with bench.client.put(feature, to="a") as held:
        after_it(bench, table)
        assert table.stats()["loads"] == 0
        bench.reads(table, held, feature)
        bench.read_on_device(table, held, feature)


def test_two_engines_share_a_replica(bench: Bench) -> None:
    first, second = bench.attach("a"), bench.attach("b")
    feature = block(1)
    with bench.client.put(feature, to="a") as one, bench.client.put(feature, to="b") as two:
        assert bench.reads(first, one, feature) and bench.reads(second, two, feature)
        assert (first.stats()["loads"], second.stats()["loads"]) == (1, 0)
        assert bench.broker.status()["device"]["replicas"] == 1
    bench.settled(first, second)


def test_the_loader_dies_midway(faked: Bench, puppet: Callable[..., Puppet]) -> None:
    loader = puppet()
    loader(f"""
        import mmbroker
        from mmbroker import cuda
        client = mmbroker.connect({str(faked.broker.directory)!r}, name="a")
        table = client.attach(engine="a", device="cuda:0", access="readonly")
        assert table.path == "device"
        stopped = cuda.open_driver().engine.held()
        stopped.__enter__()
        result = None
    """)
    table = faked.attach("b")
    feature = block(1)
    faked.client.put(feature, to="a")
    end = in_thread(lambda: faked.reads(table, faked.client.put(feature, to="b"), feature))
    eventually(lambda: faked.broker.status()["device"]["loading"] == 1, "a load")
    eventually(lambda: faked.count("lookups") or faked.broker.status()["holds"] == 2, "the second hold")
    assert table.stats()["entries"] == 0  # held back until it is loaded
    loader.kill()
    end()
    assert table.stats()["loads"] == 1
    assert faked.count("loads_lost") == 1


@pytest.mark.parametrize("access", ["copy", "readonly"])
def test_copies_of_its_own(bench: Bench, access: str) -> None:
    table = bench.attach(access=access)
    feature = block(1)
    with bench.client.put(feature, to="a", private=access == "readonly") as held:
        use = table.take(held.ref)
        use.tensor.add_(1)  # a model that writes into its input
        assert same(use.tensor.cpu(), feature + 1)
    eventually(lambda: table.stats()["settled"] == 1, "settled, though in use")
    assert same(use.tensor.cpu(), feature + 1)
    use.release()
    assert bench.broker.status()["device"]["replicas"] == 0
    with bench.client.put(feature, to="a") as held:
        bench.reads(table, held, feature)
    with bench.client.put(feature, to="a") as held:
        table.take(held.ref).park()
        bench.reads(table, held, feature)


def test_loads_that_fail_leave_the_host(faked: Bench) -> None:
    table = faked.attach()
    feature = block(1)
    faked.driven.fake.faults.fail("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")
    with faked.client.put(feature, to="a") as held:
        assert not faked.reads(table, held, feature)
        eventually(lambda: faked.broker.status()["device"]["replicas"] == 0, "the place given back")
        assert table.stats()["load_failures"] == 1
    faked.driven.fake.faults.heal()
    with faked.client.put(block(1, seed=5), to="a") as held:
        assert faked.reads(table, held, block(1, seed=5))
    faked.settled(table)
    assert faked.client.stats().get("table_failed", 0) == 0


def test_a_failed_fence_is_no_error_to_the_scheduler(faked: Bench) -> None:
    table = faked.attach()
    feature = block(1)
    held = faked.client.put(feature, to="a")
    use = table.take(held.ref)
    look_at(use)
    faked.driven.fake.faults.fail("cuEventRecord", "CUDA_ERROR_INVALID_VALUE", 1)
    use.release()
    held.drop()
    faked.settled(table)


@pytest.mark.parametrize("mib", [20, 40])
def test_a_host_tensor_is_pinned_as_one(driven: Driven, make_bench: Callable[..., Bench], mib: int) -> None:
    """torch copies a pinned tensor at once, and CUDA refuses that across registrations."""
    bench = make_bench(driven, gpu=None, segment_mib=64, host_mib=128)
    table = bench.attach()
    assert table.path == "pinned"
    for seed in range(2):
        feature = block(mib, seed=seed)
        with bench.client.put(feature, to="a") as held, table.take(held.ref) as use:
            if driven.driver.kind == "fake":
                assert driven.fake.pins.whole(use.tensor.data_ptr(), feature.nbytes)
            copied = use.tensor.to(driven.device, non_blocking=True)
            assert same(copied.cpu(), feature)


def test_a_segment_is_imported_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: Counter[int] = Counter()
    descriptor = Link.descriptor

    def counted(link: Link, number: int) -> tuple[int, int]:
        imported[number] += 1
        return descriptor(link, number)

    monkeypatch.setattr(Link, "descriptor", counted)
    table = bench.attach()
    for i in range(8):
        feature = block(1, seed=i)
        with bench.client.put(feature, to="a") as held:
            use = table.take(held.ref)
            assert same(use.tensor.cpu(), feature)
            use.park()
            bench.reads(table, held, feature)
    bench.settled(table)
    assert set(imported.values()) == {1}
    assert table.stats()["imports"] == len(imported)


def test_the_arena_is_given_back(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(driven, device_linger=0.05, device_segment_linger=0.05)
    table = bench.attach()
    bench.reads(table, bench.client.put(block(1), to="a"), block(1))
    eventually(lambda: bench.broker.status()["device"]["capacity"], "a segment")
    bench.client.close()
    eventually(lambda: not bench.broker.status()["device"]["capacity"], "an empty arena", timeout=40)


def test_the_memory_is_given_back(fake: Driven, make_bench: Callable[..., Bench]) -> None:
    free = fake.driver.free(fake.uuid)
    bench = make_bench(fake, device_linger=0.05, device_segment_linger=0.05)
    table = bench.attach()
    with bench.client.put(block(1), to="a") as held:
        bench.reads(table, held, block(1))
        assert fake.driver.free(fake.uuid) < free
    eventually(lambda: fake.driver.free(fake.uuid) == free, "all memory free again")


def test_nothing_happens_while_graphs_are_captured(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    with table.quiet():
        end = in_thread(lambda: bench.reads(table, bench.client.put(feature, to="a"), feature))
        eventually(lambda: bench.broker.status()["holds"] == 1, "a grant")
        with pytest.raises(EngineLagging):
            bench.client.put(block(1, seed=9), to="a", timeout=1)  # it is sealed by then
        assert table.stats()["entries"] == 0
        assert table.stats()["loads"] == 0
    end()
    eventually(lambda: table.stats()["entries"] == 1, "the refused one dismissed")
    eventually(lambda: bench.broker.status()["holds"] == 1, "the refused one's end")


def test_a_table_that_closes_while_graphs_are_captured(bench: Bench) -> None:
    """What was granted meanwhile is answered after that, though the table is over."""
    table = bench.attach()
    failed: list[BaseException] = []

    def put() -> None:
        try:
            bench.client.put(block(1), to="a", timeout=20)
        except FeatureError as error:
            failed.append(error)

    with table.quiet():
        end = in_thread(put)
        eventually(lambda: bench.broker.status()["holds"] == 1, "a grant")
        table._link.run(lambda: None, 20)  # it has been received
        table.close()
        table._link.run(lambda: None, 20)
        table._link.run(lambda: None, 20)  # and the chores were done
    end()
    assert len(failed) == 1
    assert "closed" in str(failed[0])
    eventually(lambda: not bench.broker.status()["holds"], "nothing left")


def test_close_with_tensors_alive(bench: Bench) -> None:
    table = bench.attach()
    feature = block(1)
    held = bench.client.put(feature, to="a")
    use = table.take(held.ref)
    tensor = use.tensor
    table._link.close()
    assert same(tensor.cpu(), feature)
    use.release()
    del tensor, use
    gc.collect()
