"""Where reading and writing on the GPU end: in streams that last, that are destroyed, and that nobody has named."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import mmbroker
from mmbroker import fences
from mmbroker.cuda import DriverError
from mmbroker.cuda.driver import error
from mmbroker.cuda.real import RealDriver
from tests.gpu.bench import Bench
from tests.gpu.test_table import after_it, block, look_at
from tests.kit import PATIENCE, eventually

CURRENT = pytest.mark.parametrize("current", [False, True], ids=["named", "current"])


@CURRENT
def test_a_stream_that_is_destroyed_after_the_release(bench: Bench, current: bool) -> None:
    """CUDA does not refuse what it is asked about it later: it may crash."""
    table = bench.attach()
    feature = block(1)
    held = bench.client.put(feature, to="a")
    stream = bench.driver.stream()
    with bench.driven.pinned(feature.nbytes) as target:
        with bench.driven.blocked(stream):
            use = table.take(held.ref)
            bench.driver.copy(target.address, use.tensor.data_ptr(), feature.nbytes, stream)
            if current:
                with bench.driven.current(stream):
                    use.release()
            else:
                use.release(stream)
            held.drop()
            after_it(bench, table)
            assert table.stats()["unsettled"] == 1
        bench.driver.destroy_stream(stream)
        bench.settled(table)
        assert bytes(target.view) == bytes(feature.numpy())
        bench.read_on_device(table, bench.client.put(block(1, seed=3), to="a"), block(1, seed=3))


@pytest.mark.parametrize("kind", ["torch's", "destroyed"])
@pytest.mark.parametrize("how", ["kept", "forgotten", "often"])
def test_a_stream_that_no_release_has_named(bench: Bench, how: str, kind: str) -> None:
    """The slot waits for all that the GPU was told, and nobody else does: others come and go, more than have room."""
    table = bench.attach()
    feature = block(1)
    held = bench.client.put(feature, to="a")
    own = bench.driver.stream()
    with (
        bench.driven.torchs_stream() as torchs,
        bench.driven.stream() as known,
        bench.driven.pinned(feature.nbytes) as target,
    ):
        stream = own if kind == "destroyed" else torchs.cuda_stream
        with bench.driven.blocked(stream):
            if how == "often":  # as often as there are fences kept
                for _ in range(64):
                    use = table.take(held.ref)
                    look_at(use)
                    use.release(known)
            use = table.take(held.ref)
            tensor = use.tensor
            bench.driver.copy(target.address, tensor.data_ptr(), feature.nbytes, stream)
            if how == "kept":
                use.release(known)
            elif how == "often":
                del tensor
                use.release(stream)
            use = tensor = None
            gc.collect()
            held.drop()
            for seed in range(100, 140):
                with bench.client.put(block(1, seed), to="a") as other:
                    assert bench.reads(table, other, block(1, seed))
        bench.driver.destroy_stream(own)
        bench.settled(table)
        assert bytes(target.view) == bytes(feature.numpy())


def forget(bench: Bench, table: mmbroker.FeatureTable, seed: int = 0) -> None:
    """Have a feature that was read, nobody knows in which stream."""
    held = bench.client.put(block(0.1, seed), to="a")
    use = table.take(held.ref)
    look_at(use)
    del use
    gc.collect()
    held.drop()


def test_a_wait_for_everything_that_fails_is_repeated(faked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "_AGAIN", 0.01)
    table = faked.attach()
    faked.driven.fake.faults.fail("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 2)
    forget(faked, table)
    faked.settled(table)


def test_a_thread_that_cannot_be_started_is_started_for_the_next(
    faked: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = faked.attach()
    failed: list[str] = []

    def start(thread: threading.Thread, original: Callable[..., None] = threading.Thread.start) -> None:
        if thread.name == "mmbroker-drain" and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    forget(faked, table, 1)
    eventually(lambda: failed, "a thread that cannot be started")
    forget(faked, table, 2)
    faked.settled(table)
    assert table.stats()["settled"] == 2 and not faked.client.stats()["reconnects"]


def test_no_wait_goes_on_when_graphs_are_captured(faked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    table = faked.attach()
    assert table.gpu is not None
    idle = table.gpu._drain.idle
    began, go, wait, over = threading.Event(), threading.Event(), idle.wait, []

    def finish() -> None:
        began.set()
        assert go.wait(PATIENCE)
        over.append("over")

    monkeypatch.setattr(faked.driver, "finish", finish)
    monkeypatch.setattr(idle, "wait", lambda timeout: (go.set(), wait(PATIENCE)))
    forget(faked, table)
    assert began.wait(PATIENCE)
    with table.quiet():
        assert over
    faked.settled(table)


def test_no_wait_begins_while_graphs_are_captured(faked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    table = faked.attach()
    gpu = table.gpu
    assert gpu is not None
    looked, looks, waits, finish = threading.Event(), gpu._drain._forbidden, [], faked.driver.finish
    monkeypatch.setattr(gpu._drain, "_forbidden", lambda: (looks(), looked.set())[0])
    monkeypatch.setattr(faked.driver, "finish", lambda: (waits.append(gpu.quiet), finish()))
    with table.quiet():
        fence = gpu.drain()
        assert looked.wait(PATIENCE)
        looked.clear()
        assert looked.wait(PATIENCE) and fence.event  # it looks again and again
    eventually(lambda: not fence.event, "it is passed after that")
    assert waits == [0]


def test_a_stream_that_cannot_be_asked_keeps_nobody(faked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has read waits for everything; what others read is settled as ever."""
    table, driver = faked.attach(), faked.driven.fake
    bad, record = 987_654, driver.record

    def refuse(event: int, stream: int) -> None:
        if stream == bad:
            raise error("CUDA_ERROR_INVALID_HANDLE", "cuEventRecord", "another device's")
        record(event, stream)

    monkeypatch.setattr(driver, "record", refuse)
    driver.torchs.add(bad)
    held = faked.client.put(block(0.1), to="a")
    use = table.take(held.ref)
    look_at(use)
    use.release(SimpleNamespace(cuda_stream=bad))
    held.drop()
    for seed in range(1, 4):
        forget(faked, table, seed)
    faked.settled(table)
    assert table.gpu is not None and bad not in table.gpu.streams


def test_a_lease_that_is_aborted_while_a_stream_writes_it(bench: Bench) -> None:
    """Whatever stream: its slot goes to nobody before that is over."""
    client, junk, feature = bench.connect("writer"), block(1, 77), block(1, 5)
    table = bench.attach()
    with bench.driven.stream() as stream, bench.driven.pinned(junk.nbytes) as source:
        source.view[:] = junk.numpy().tobytes()
        lease = client.get_or_create("never", (junk.nbytes,), torch.uint8, tier="device")
        assert isinstance(lease, mmbroker.Lease)
        with bench.driven.blocked(stream):
            bench.driver.copy(lease.tensor.data_ptr(), source.address, junk.nbytes, stream)
            lease.abort()
            client._link.run(lambda: client._own._chores(0.0), PATIENCE)
            assert client.stats()["retained"] == 1
            bench.read_on_device(table, held := bench.client.put(feature, to="a"), feature)
        bench.driven.finish(stream)
        assert bench.reads(table, held, feature)
    eventually(lambda: not client.stats()["retained"], "it is given back")


def test_a_release_after_the_client_is_closed(bench: Bench) -> None:
    """What was read is waited for when the memory is unmapped; nothing of ours is left on the GPU."""
    client = bench.connect("late")
    table = client.attach(engine="late", device="cuda:0", access="readonly")
    held = bench.client.put(block(1), to="late")
    with bench.driven.stream() as stream:
        use = table.take(held.ref)
        look_at(use)
        client.close()
        use.release(stream)
    held.drop()


def test_fences_of_a_stream_that_lasts_are_made_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = bench.attach()
    made: list[int] = []
    with bench.driven.torchs_stream() as stream:
        held = [bench.client.put(block(0.1, seed=seed), to="a") for seed in range(8)]
        uses = [table.take(one.ref) for one in held]
        for use in uses:
            look_at(use)
        gpu = table.gpu
        assert gpu is not None
        fence = gpu.fence
        monkeypatch.setattr(gpu, "fence", lambda stream: (made.append(stream), fence(stream))[1])
        for use in uses:
            use.release(stream)
        assert made == []
        with table.quiet():
            for one in held:
                one.drop()
            eventually(lambda: table.stats()["unsettled"] == len(held), "all dismissed")
        bench.settled(table)
        assert made.count(stream.cuda_stream) == 1


def test_a_gpu_that_cuda_does_not_show_is_refused_by_name() -> None:
    """As all refusals are: whoever has one goes another way."""
    driver = RealDriver.__new__(RealDriver)
    driver._devices = {}
    with pytest.raises(DriverError, match="GPU-unseen"):
        driver.current_stream("GPU-unseen")
    with pytest.raises(DriverError, match="GPU-unseen"):
        driver.lasting(None, "GPU-unseen")
