"""Memory that one process exports and others map: who may, who has it, and when it is free again. On both drivers."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import random
import signal
import sys
import weakref

import pytest

from mmbroker.cuda import DriverError, NotShareable, OutOfDeviceMemory
from mmbroker.proto.dtypes import ITEMSIZE
from tests.cuda.rig import MIB, Refused, Rig
from tests.kit import descriptors, eventually

SIZE = 8 * MIB


def test_what_there_is(rig: Rig) -> None:
    device = rig.driver.devices()[0]
    assert device.uuid.startswith("GPU-") and device.index == 0 and device.whole and device.name
    assert device.uuid in [other.uuid for other in rig.driver.existing()]
    assert 0 < rig.driver.free(rig.uuid) <= device.total
    assert rig.driver.granularity(rig.uuid) % 4096 == 0
    with pytest.raises(DriverError, match="GPU-nobody"):
        rig.driver.granularity("GPU-nobody")


def test_export_needs_no_context_and_makes_none(rig: Rig) -> None:
    before = rig.driver.free(rig.uuid)
    with rig.agent() as exporter:
        fd = exporter.export(64 * MIB)
        assert not exporter("context") and not exporter("torch")
        # A process that NVML lists has at most what it exported.
        assert rig.driver.processes(rig.uuid).get(exporter.pid, 0) <= 68 * MIB
        assert 64 * MIB <= before - rig.driver.free(rig.uuid) <= 64 * MIB + rig.slack
        os.close(fd)
        exporter("use", True)
        assert exporter("context")
        eventually(lambda: exporter.pid in rig.driver.processes(rig.uuid), "the context is listed")


def test_a_context_is_only_made_when_asked_for(rig: Rig) -> None:
    with rig.agent() as agent:
        with pytest.raises(Refused, match=r"DriverError.*CUDA_ERROR_INVALID_CONTEXT"):
            agent("use", False)
        assert not agent("context")
        agent("use", True)
        agent("use", False)


def test_a_second_process_maps_what_was_exported(rig: Rig) -> None:
    data = random.Random(1).randbytes(SIZE // 8)
    with rig.agent() as exporter, rig.agent() as importer:
        fd = exporter.export(SIZE)
        with rig.mapped(fd, SIZE) as ours:
            rig.write(ours + SIZE // 2, data)
            theirs = importer("map", SIZE, False, fd=fd)
            assert bytes.fromhex(importer("read", theirs + SIZE // 2, 1000)) == data[:1000]
            assert importer("read", theirs + SIZE // 2 - 16, 16) == "00" * 16  # new memory is zeros
            importer("unmap", theirs)
            importer("close")
        os.close(fd)


def test_two_maps_of_one_segment(rig: Rig) -> None:
    """Written through the one, read through the other, which cannot be written."""
    rng = random.Random(2)
    fd = rig.driver.export(rig.uuid, SIZE)
    with rig.mapped(fd, SIZE, writable=True) as loader, rig.mapped(fd, SIZE, writable=False) as reader:
        os.close(fd)
        for _ in range(50):
            data = rng.randbytes(rng.randrange(1, 100_000))
            offset = rng.randrange(SIZE - len(data))
            rig.write(loader + offset, data)
            assert rig.read(reader + offset, len(data)) == data
        with rig.stream() as stream, pytest.raises(DriverError) as refused:
            rig.driver.copy(reader, loader, 4096, stream)
        assert refused.value.code == "CUDA_ERROR_INVALID_VALUE"


def test_computing_into_a_read_only_map_kills_only_who_does_it(rig: Rig) -> None:
    fd = rig.driver.export(rig.uuid, SIZE)
    with rig.mapped(fd, SIZE) as ours, rig.agent() as agent:
        rig.write(ours, b"right" * 100)
        theirs = agent("map", SIZE, False, fd=fd)
        if rig.driver.kind == "fake":
            with pytest.raises(EOFError):
                agent("compute_into", theirs, SIZE)
            assert agent.end() == -signal.SIGSEGV
        else:
            with pytest.raises(Refused):
                agent("compute_into", theirs, SIZE)
            with pytest.raises(Refused, match="Fault"):
                agent("query_after_fault")
            agent.kill()
        assert rig.read(ours, 500) == b"right" * 100
    os.close(fd)


def test_memory_outlives_an_exporter_that_is_killed(rig: Rig) -> None:
    before = rig.driver.free(rig.uuid)
    data = random.Random(3).randbytes(100_000)
    with rig.agent() as exporter:
        fd = exporter.export(SIZE)
        with rig.mapped(fd, SIZE) as address:
            os.close(fd)
            rig.write(address, data)
            exporter.kill()
            assert rig.read(address, len(data)) == data
            rig.write(address + SIZE - len(data), data)
            assert rig.read(address + SIZE - len(data), len(data)) == data
            assert rig.driver.free(rig.uuid) <= before - SIZE
    rig.free_again(before)


def test_memory_is_free_when_the_last_one_has_let_go(rig: Rig) -> None:
    with rig.agent() as exporter, rig.agent() as importer:
        importer("ready")
        before = rig.driver.free(rig.uuid)
        size = 64 * MIB
        fd = exporter.export(size)
        theirs = importer("map", size, True, fd=fd)
        importer("close")
        with rig.mapped(fd, size):
            os.close(fd)
            exporter("close")
            assert rig.driver.free(rig.uuid) <= before - size
        assert rig.driver.free(rig.uuid) <= before - size  # their map is left
        importer("unmap", theirs)
        rig.free_again(before)
        fd = exporter.export(size)
        importer("map", size, True, fd=fd)
        os.close(fd)
        exporter.kill()
        importer.kill()
        rig.free_again(before)


def test_more_than_there_is(rig: Rig) -> None:
    granularity = rig.driver.granularity(rig.uuid)
    size = (rig.driver.devices()[0].total // granularity + 1) * granularity
    with pytest.raises(OutOfDeviceMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        rig.driver.export(rig.uuid, size)
    with rig.agent() as agent, pytest.raises(Refused, match="OutOfDeviceMemory"):
        agent("export", size)


def test_what_is_no_gpu_memory_is_refused(rig: Rig) -> None:
    memfd = os.memfd_create("nothing of a GPU")
    os.truncate(memfd, SIZE)
    readable, writable = os.pipe()
    for fd in (memfd, readable):
        with pytest.raises(NotShareable) as refused:
            rig.driver.import_(fd, SIZE)
        assert refused.value.call == "cuMemImportFromShareableHandle"
    for fd in (memfd, readable, writable):
        os.close(fd)


def test_descriptors_are_not_inherited(rig: Rig) -> None:
    fd = rig.driver.export(rig.uuid, SIZE)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_a_thousand_segments_leave_nothing(rig: Rig) -> None:
    with rig.memory(SIZE):
        pass
    before, opened = rig.driver.free(rig.uuid), descriptors()
    for _ in range(200 if rig.driver.kind == "fake" else 1000):
        with rig.memory(SIZE):
            pass
    assert descriptors() == opened
    rig.free_again(before)


def test_a_forked_child_is_told_so(rig: Rig) -> None:
    with rig.agent() as agent:
        assert agent("fork") == ["NoDriver CUDA_ERROR_NOT_INITIALIZED"] * 3


def test_tensor_over_an_address(rig: Rig) -> None:
    import torch

    values = torch.arange(1000, dtype=torch.float32)
    with rig.memory(SIZE, writable=True) as address:
        rig.write(address + 4096, values.numpy().tobytes())
        tensor = rig.driver.tensor(address + 4096, torch.float32, (10, 100), rig.uuid, None)
        assert tensor.dtype == torch.float32 and tensor.shape == (10, 100) and tensor.is_contiguous()
        assert tensor.device == torch.device(rig.device)
        assert tensor.data_ptr() == address + 4096
        assert torch.equal(tensor.cpu(), values.view(10, 100))
        assert torch.equal((tensor * 2).cpu(), values.view(10, 100) * 2)
        half = tensor[0, 1:2].view(torch.bfloat16)
        assert torch.equal(half.cpu(), values[1:2].view(torch.bfloat16))
        del tensor, half


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4)])
@pytest.mark.parametrize("name", ITEMSIZE)
def test_a_tensor_of_every_dtype(rig: Rig, name: str, shape: tuple[int, ...]) -> None:
    import torch

    dtype, nbytes = getattr(torch, name), ITEMSIZE[name] * math.prod(shape)
    data = bytes(n % 2 for n in range(nbytes)) if name == "bool" else random.Random(name).randbytes(nbytes)
    with rig.memory(SIZE, writable=True) as address:
        rig.write(address + 512, data)
        tensor = rig.driver.tensor(address + 512, dtype, shape, rig.uuid, None)
        assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (dtype, shape, address + 512)
        assert tensor.device == torch.device(rig.device)
        assert tensor.flatten().view(torch.uint8).cpu().numpy().tobytes() == data
        del tensor


def test_a_tensor_keeps_its_owner(rig: Rig) -> None:
    import torch

    class Owner:
        pass

    with rig.memory(SIZE) as address:
        owner = Owner()
        alive = weakref.ref(owner)
        tensor = rig.driver.tensor(address, torch.uint8, (4096,), rig.uuid, owner)
        count = sys.getrefcount(owner)
        view = tensor[8:16].view(2, 4)
        assert sys.getrefcount(owner) == count
        del owner, tensor
        gc.collect()
        assert alive() is not None
        del view
        gc.collect()
        assert alive() is None
