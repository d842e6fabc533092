"""Which way features go to a rank, and what `status` says about why."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable

import pytest
import torch

from mmbroker import table as table_module
from mmbroker.cuda.fake_faults import VARIABLE
from mmbroker.gpu import Gpu
from mmbroker.link import Link
from mmbroker.path import Path
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.conftest import UUIDS
from tests.gpu.test_table import block
from tests.kit import Puppet, eventually
from tests.rig import values

FEATURE = values(torch.float32, (64, 100))


def works(bench: Bench, path: str, *words: str, device: str = "cuda:0") -> None:
    """A rank on that path, with these words in the reason, gets right bytes."""
    table = bench.attach(device=device)
    assert table.path == path
    rank = bench.rank()
    assert rank["path"] == path
    assert bool(rank["why"]) == bool(words)
    for word in words:
        assert word in rank["why"]
    with bench.client.put(FEATURE, to="a") as held:
        assert bench.reads(table, held, FEATURE) == (path == "device")


def test_the_device(bench: Bench) -> None:
    works(bench, "device")


def test_the_current_gpu(bench: Bench) -> None:
    works(bench, "device", device="cuda")


def test_a_cpu_rank_tries_nothing(bench: Bench) -> None:
    works(bench, "host", device="cpu")


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuMemImportFromShareableHandle", "CUDA_ERROR_NOT_SUPPORTED"),
        ("cuMemSetAccess", "CUDA_ERROR_NOT_PERMITTED"),
    ],
)
def test_memory_that_cannot_be_imported(faked: Bench, call: str, code: str) -> None:
    faked.driven.fake.faults.fail(call, code)
    works(faked, "pinned", call, code)


def test_memory_that_reads_as_zeros(faked: Bench) -> None:
    faked.driven.fake.faults.zeros = True
    works(faked, "pinned", "was not read back")


def test_memory_that_cannot_be_exported(
    fake: Driven, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "cuMemExportToShareableHandle=CUDA_ERROR_NOT_SUPPORTED")
    works(make_bench(fake), "pinned", "cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED")


def test_host_memory_that_cannot_be_pinned(faked: Bench) -> None:
    faked.driven.fake.faults.memlock = faked.driven.fake.pins.nbytes
    works(faked, "host", "cuMemHostRegister", "pinned")


def test_another_gpu(fake: Driven, make_bench: Callable[..., Bench]) -> None:
    works(make_bench(fake, gpu="1"), "pinned", UUIDS[0], UUIDS[1])


def test_a_broker_without_gpu(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    works(make_bench(driven, gpu=None), "pinned", "no GPU", "--gpu")


def test_a_full_arena_is_left_for_later(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    """What is granted meanwhile is on the host, and goes to the device by itself, the oldest first."""
    bench = make_bench(driven, device_mib=4, segment_mib=4)
    there = [bench.client.put(bench.device_tensor(block(2, seed=i)), tier="device") for i in range(2)]
    works(bench, "pinned", "--device-mib")
    table = bench.tables[-1]
    held = [bench.client.put(block(1.5, seed=10 + i), to="a") for i in range(2)]
    assert not any(bench.reads(table, one, block(1.5, seed=10 + i)) for i, one in enumerate(held))
    there[0].drop()
    bench.read_on_device(table, held[0], block(1.5, seed=10))
    assert not bench.reads(table, held[1], block(1.5, seed=11))
    there[1].drop()
    bench.read_on_device(table, held[1], block(1.5, seed=11))
    assert table.path == bench.rank()["path"] == "device" and not bench.rank()["why"]
    for one in held:
        one.drop()
    bench.settled(table)


def test_a_full_gpu_is_left_for_later(fake: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(fake, grow_retry=0.05)
    with fake.memory(fake.driver.free(fake.uuid) - (2 << 20)):
        works(bench, "pinned", "MiB free", "--device-headroom-mib")
    eventually(lambda: bench.tables[-1].path == "device", "room on the GPU")
    with bench.client.put(FEATURE, to="a") as held:
        bench.read_on_device(bench.tables[-1], held, FEATURE)


def test_a_move_that_is_answered_too_late(
    fake: Driven, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker stands still while a rank says that it moves to the device: it stays a rank."""
    bench = make_bench(fake, device_mib=4, segment_mib=4)
    there = [bench.client.put(bench.device_tensor(block(2, seed=i)), tier="device") for i in range(2)]
    stopped = threading.Event()
    again = table_module.again

    def stopping(link: Link, gpu: Gpu) -> Path:
        path = again(link, gpu)
        bench.broker.process.send_signal(signal.SIGSTOP)
        stopped.set()
        return path

    works(bench, "pinned", "--device-mib")
    link = bench.tables[-1]._link
    with monkeypatch.context() as patched:
        patched.setattr(table_module, "again", stopping)
        patched.setattr(table_module, "PATIENCE", 0.05)
        for one in there:
            one.drop()
        try:
            assert stopped.wait(20)
            link.run(lambda: None, 20)  # the move was given up
            before = link.late_answers
        finally:
            bench.broker.process.send_signal(signal.SIGCONT)
    eventually(lambda: link.late_answers > before, "the answer")
    assert bench.rank()["path"] == "device"
    with bench.client.put(FEATURE, to="a") as held:
        bench.read_on_device(bench.tables[-1], held, FEATURE)
    eventually(lambda: bench.tables[-1].path == "device", "the move")


def test_a_path_that_fails_is_not_tried_again(faked: Bench) -> None:
    faked.driven.fake.faults.fail("cuMemImportFromShareableHandle", "CUDA_ERROR_NOT_SUPPORTED", 1)
    works(faked, "pinned", "CUDA_ERROR_NOT_SUPPORTED")
    assert faked.tables[-1]._next_try == math.inf


def test_a_gpu_that_does_not_exist(bench: Bench) -> None:
    works(bench, "host", "no GPU", device="cuda:77")


def test_no_driver(faked: Bench, puppet: Callable[..., Puppet]) -> None:
    engine = puppet(env={"MMBROKER_FAKE_CUDA": "", "CUDA_VISIBLE_DEVICES": ""})
    path = engine(f"""
        import mmbroker
        client = mmbroker.connect({str(faked.broker.directory)!r}, name="a")
        table = client.attach(engine="a", device="cuda:0", access="readonly")
        result = table.path
    """)
    assert path == "host"
    assert faked.rank()["why"]
    faked.client.put(FEATURE, to="a").drop()
