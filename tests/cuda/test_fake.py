"""The fake is as strict, as late and as broken as it promises. Without a GPU."""

from __future__ import annotations

import ctypes
import os
import random
import socket
from pathlib import Path

import pytest

from mmbroker import cuda
from mmbroker.cuda import DriverError, Fault, NoDriver, NotShareable, OutOfDeviceMemory
from mmbroker.cuda.fake import Crash, FakeDriver
from mmbroker.cuda.fake_faults import Faults
from mmbroker.cuda.fake_memory import Machine, Make
from mmbroker.cuda.fake_streams import POISON
from tests.cuda.rig import MIB, Host, Refused, Rig, receive, send

SIZE = 8 * MIB

# --- lateness -------------------------------------------------------------------------------------------------------


def test_the_destination_is_poison_until_the_copy_is_done(fake: Rig) -> None:
    driver = fake.fake
    with fake.memory(SIZE) as slot, fake.pinned(4096) as host, fake.stream() as stream:
        fake.write(slot, b"old bytes" + bytes(4096))
        host.view[:] = b"\x11" * 4096
        with driver.engine.blocked(stream):
            driver.copy(slot, host.address, 4096, stream)
            assert ctypes.string_at(slot, 4097) == bytes([POISON]) * 4096 + b"\0"
        fake.finish(stream)
        assert ctypes.string_at(slot, 4096) == b"\x11" * 4096


def test_poison_spares_what_is_still_to_be_read(fake: Rig) -> None:
    """A copy that is queued behind another one's read of its destination does no harm to it: that is legal."""
    driver = fake.fake
    with (
        fake.memory(SIZE) as slot,
        fake.memory(SIZE) as result,
        fake.pinned(4096) as host,
        fake.stream() as stream,
    ):
        fake.write(slot, b"first")
        with driver.engine.blocked(stream):
            driver.copy(result, slot, 5, stream)
            driver.copy(slot, host.address, 4096, stream)
        fake.finish(stream)
        assert ctypes.string_at(result, 5) == b"first"


def order(machine: Machine, seed: int) -> list[int]:
    """The order in which work of four streams is done, all of it there at the beginning."""
    rig = Rig(FakeDriver(machine, seed=seed, late=0.0), machine.existing[0].uuid)
    driver = rig.fake
    streams = [driver.stream() for _ in range(4)]
    with driver.engine.held():
        events = [driver.event() for _ in range(40)]
        for number, event in enumerate(events):
            driver.record(event, streams[number % 4])
    for event in events:
        driver.synchronize(event)
        driver.destroy_event(event)
    for stream in streams:
        driver.destroy_stream(stream)
    rig.close()
    driver.close()
    return list(driver.engine.order)


def test_order_across_streams_is_the_seeds(machine: Machine) -> None:
    runs = [order(machine, seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != sorted(runs[0]) and len(runs[0]) == 40


def test_nothing_is_done_at_once(fake: Rig) -> None:
    driver = fake.fake
    with fake.stream() as stream, fake.event() as event:
        with driver.engine.held():
            driver.record(event, stream)
            assert not driver.query(event)
        driver.synchronize(event)
        assert driver.query(event)


def test_the_current_stream_is_done_when_the_call_returns(fake: Rig) -> None:
    """torch computes on the CPU at once, so what its stream waits for must have happened by then."""
    driver = fake.fake
    with (
        fake.memory(SIZE) as slot,
        fake.pinned(SIZE) as host,
        fake.stream() as loader,
        fake.event() as loaded,
    ):
        for number in range(20):
            host.view[:] = bytes([number]) * SIZE
            driver.copy(slot, host.address, SIZE, loader)
            driver.record(loaded, loader)
            driver.wait(driver.current_stream(fake.uuid)(), loaded)
            assert ctypes.string_at(slot, SIZE) == bytes(host.view)
        with driver.current(loader):
            driver.copy(slot, host.address, 8, loader)
            assert driver.engine.touched(slot, 8) is False


def test_a_stream_that_is_destroyed_finishes_its_work(fake: Rig) -> None:
    driver = fake.fake
    with fake.memory(SIZE) as slot, fake.pinned(4096) as host, fake.event() as event:
        stream = driver.stream()
        host.view[:5] = b"still"
        with driver.engine.blocked(stream):
            driver.copy(slot, host.address, 5, stream)
            driver.record(event, stream)
            driver.destroy_stream(stream)
            with pytest.raises(Crash, match=f"stream {stream} was destroyed"):
                driver.record(event, stream)
            with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
                driver.destroy_stream(stream)
        driver.synchronize(event)
        assert ctypes.string_at(slot, 5) == b"still"


# --- strictness -----------------------------------------------------------------------------------------------------


def test_memory_in_use_by_a_copy_is_not_given_back(fake: Rig) -> None:
    driver = fake.fake
    with fake.memory(SIZE) as slot, fake.stream() as stream, Host(MIB) as host:
        driver.pin(host.address, MIB)
        with driver.engine.blocked(stream):
            driver.copy(slot, host.address + 4096, 4096, stream)
            with pytest.raises(Fault, match="still using"):
                driver.unmap(slot, SIZE)
            with pytest.raises(Fault, match="still using"):
                driver.unpin(host.address)
        fake.finish(stream)


def test_ranges_that_leave_a_map_are_refused(fake: Rig) -> None:
    driver = fake.fake
    with fake.memory(SIZE) as slot, fake.pinned(8192) as host, fake.stream() as stream:
        for dst, src in ((slot + SIZE - 4096, host.address), (host.address, slot + SIZE - 4096)):
            with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
                driver.copy(dst, src, 4097, stream)
        driver.copy(slot + SIZE - 4096, host.address, 4096, stream)
        driver.copy(slot, host.address, 0, stream)
        fake.finish(stream)


def test_wrong_sizes_and_handles(fake: Rig) -> None:
    driver = fake.fake
    for nbytes in (0, -1, MIB, SIZE + 1):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            driver.export(fake.uuid, nbytes)
    fd = driver.export(fake.uuid, SIZE)
    with pytest.raises(NotShareable, match="CUDA_ERROR_INVALID_VALUE"):
        driver.import_(fd, 2 * SIZE)
    handle = driver.import_(fd, SIZE)
    with pytest.raises(NotShareable):
        driver.map(handle, 2 * SIZE, True)
    driver.release(handle)
    os.close(fd)
    with fake.stream() as stream:
        for call in (
            lambda: driver.map(handle, SIZE, True),
            lambda: driver.release(handle),
            lambda: driver.destroy_event(handle),
            lambda: driver.query(handle),
            lambda: driver.synchronize(handle),
            lambda: driver.record(handle, stream),
            lambda: driver.wait(stream, handle),
            lambda: driver.unmap(4096, SIZE),
            lambda: driver.destroy_stream(0),
            lambda: driver.destroy_stream(99),
        ):
            with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
                call()
    with Host(8192) as host:
        for address, nbytes in ((host.address + 1, 4096), (host.address, 100), (host.address, 0)):
            with pytest.raises(DriverError, match="whole pages"):
                driver.pin(address, nbytes)


def test_another_gpus_memory_cannot_be_mapped(fake: Rig) -> None:
    driver = fake.fake
    other = driver.devices()[1].uuid
    fd = driver.export(other, SIZE)
    handle = driver.import_(fd, SIZE)
    with pytest.raises(NotShareable, match=other):
        driver.map(handle, SIZE, True)
    driver.release(handle)
    os.close(fd)


def test_waiting_for_outside_work_breaks_a_capture(fake: Rig) -> None:
    driver = fake.fake
    with fake.stream() as captured, fake.stream() as loader, fake.event() as event, driver.engine.held():
        driver.record(event, loader)
        capture = driver.capture(captured)
        with (
            pytest.raises(DriverError, match="INVALIDATED"),
            capture,
            pytest.raises(DriverError, match="ISOLATION"),
        ):
            driver.wait(captured, event)


def test_what_comes_into_a_captured_stream_is_not_done(fake: Rig) -> None:
    driver = fake.fake
    with fake.memory(SIZE) as slot, fake.pinned(4096) as host, fake.stream() as stream:
        host.view[:] = b"\x11" * 4096
        with driver.capture(stream):
            driver.copy(slot, host.address, 4096, stream)
        fake.finish(stream)
        assert fake.read(slot, 4096) == bytes(4096)


# --- books ----------------------------------------------------------------------------------------------------------


def test_processes_agree_on_what_is_free(fake: Rig) -> None:
    with fake.agent() as other:
        fds = [other.export(64 * MIB) for _ in range(3)]
        assert fake.driver.free(fake.uuid) == 64 * MIB
        with pytest.raises(OutOfDeviceMemory, match="67108864 are free"):
            fake.driver.export(fake.uuid, 66 * MIB)
        with pytest.raises(Refused, match="OutOfDeviceMemory"):
            other("export", 66 * MIB)
        assert fake.driver.free(fake.driver.devices()[1].uuid) == 256 * MIB
        for fd in fds:
            os.close(fd)


def test_a_descriptor_on_its_way_counts(fake: Rig) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fd = fake.driver.export(fake.uuid, SIZE)
        send(ours, "memory", fd)
        os.close(fd)
        assert fake.driver.free(fake.uuid) == 256 * MIB - SIZE
        _, fd2 = receive(theirs)
        assert fd2 is not None
        os.close(fd2)
    assert fake.driver.free(fake.uuid) == 256 * MIB


def test_contexts_take_memory_and_end_with_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMBROKER_FAKE_CUDA", str(tmp_path))
    machine = Machine(tmp_path, Make(total=100 * MIB, context=40 * MIB))
    uuid = machine.existing[0].uuid
    rigs = [Rig(FakeDriver(machine), uuid)]
    assert machine.free(uuid) == 60 * MIB and machine.processes(uuid) == {os.getpid(): 40 * MIB}
    with rigs[0].agent() as one, rigs[0].agent() as two:
        one("use", True)
        assert machine.free(uuid) == 20 * MIB and set(machine.processes(uuid)) == {os.getpid(), one.pid}
        with pytest.raises(Refused, match="OutOfDeviceMemory"):
            two("use", True)
        one.kill()
        assert machine.free(uuid) == 60 * MIB
        two("use", True)
    rigs[0].close()
    rigs[0].driver.close()
    assert machine.free(uuid) == 100 * MIB and machine.processes(uuid) == {}


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", OutOfDeviceMemory),
        ("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED", NotShareable),
        ("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_PERMITTED", NotShareable),
        ("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_DEVICE", NotShareable),
        ("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE", NotShareable),
        ("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", DriverError),
        ("cuMemHostRegister", "CUDA_ERROR_NOT_PERMITTED", DriverError),
        ("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS", Fault),
        ("cuEventQuery", "CUDA_ERROR_LAUNCH_FAILED", Fault),
        ("*", "CUDA_ERROR_ILLEGAL_ADDRESS", Fault),
        ("nvmlDeviceGetMemoryInfo", "NVML_ERROR_999", DriverError),
    ],
)
def test_ordered_faults(machine: Machine, call: str, code: str, kind: type[DriverError]) -> None:
    """By the variable, as a child process gets them, and once only."""
    driver = FakeDriver(machine, Faults(f"{call}={code}*1"))
    uuid = machine.existing[0].uuid
    driver.use(uuid, create=True)
    with Host(4096) as host:

        def everything() -> None:
            driver.free(uuid)
            fd = driver.export(uuid, SIZE)
            try:
                handle = driver.import_(fd, SIZE)
                try:
                    address = driver.map(handle, SIZE, True)
                finally:
                    driver.release(handle)
            finally:
                os.close(fd)
            try:
                driver.pin(host.address, 4096)
                driver.unpin(host.address)
                driver.copy(address, host.address, 4096, 0)
                event = driver.event()
                try:
                    driver.record(event, 0)
                    driver.query(event)
                    driver.synchronize(event)
                finally:
                    driver.destroy_event(event)
            finally:
                driver.unmap(address, SIZE)

        with pytest.raises(DriverError, match=code) as refused:
            everything()
        assert type(refused.value) is kind and refused.value.code == code
        assert refused.value.call == call or call == "*"
        everything()
    driver.close()


def test_faults_of_a_child_process(fake: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMBROKER_FAKE_CUDA_FAULTS", "cuMemImportFromShareableHandle=CUDA_ERROR_NOT_SUPPORTED")
    fd = fake.driver.export(fake.uuid, SIZE)
    with fake.agent() as agent, pytest.raises(Refused, match=r"NotShareable.*CUDA_ERROR_NOT_SUPPORTED"):
        agent("map", SIZE, True, fd=fd)
    os.close(fd)


def test_a_limit_on_locked_memory(fake: Rig) -> None:
    fake.fake.faults.memlock = fake.fake.pins.nbytes + 8192
    with Host(4 * 4096) as host:
        fake.driver.pin(host.address, 8192)
        with pytest.raises(DriverError, match=r"cuMemHostRegister.*locked") as refused:
            fake.driver.pin(host.address + 8192, 4096)
        assert not isinstance(refused.value, OutOfDeviceMemory)
        fake.driver.unpin(host.address)


def test_maps_that_show_nothing(fake: Rig) -> None:
    """As a broken container does: everything succeeds, and nobody sees what the others wrote."""
    fd = fake.driver.export(fake.uuid, SIZE)
    with fake.mapped(fd, SIZE) as good:
        fake.write(good, b"nonce")
        fake.fake.faults.zeros = True
        with fake.mapped(fd, SIZE, writable=False) as broken:
            assert fake.read(broken, 5) == bytes(5)
    os.close(fd)


def test_a_driver_that_does_not_start(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMBROKER_FAKE_CUDA_FAULTS", "cuInit=CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    assert cuda.load() is None
    with pytest.raises(NoDriver, match="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        cuda.open_driver()


@pytest.mark.parametrize("text", ["cuMemCreate", "memlock=much", "nonsense", "cuMemCreate=OUT_OF_MEMORY"])
def test_a_fault_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="MMBROKER_FAKE_CUDA_FAULTS"):
        Faults(text)


# --- opening --------------------------------------------------------------------------------------------------------


def test_the_variable_opens_the_fake(machine: Machine) -> None:
    driver = cuda.open_driver()
    assert driver.kind == "fake" and cuda.load() is driver
    assert [device.total for device in driver.devices()] == [256 * MIB] * 2
    assert cuda.find_device("1", driver).uuid == machine.existing[1].uuid
    driver.close()


def test_visible_devices_hide_and_reorder(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (device.uuid for device in machine.existing)
    driver = FakeDriver(machine, shown="1,0")
    assert [device.uuid for device in driver.devices()] == [second, first]
    assert [device.uuid for device in driver.existing()] == [first, second]
    driver.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    driver = FakeDriver(machine, shown="1")
    with pytest.raises(cuda.NoSuchDevice, match=f"{first} exists, but is hidden"):
        cuda.find_device("GPU-fa4e0", driver)
    with pytest.raises(DriverError, match=f"does not show {first}"):
        driver.export(first, SIZE)
    driver.close()


def test_a_new_machine_is_made_on_demand(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "new")
    assert machine.free(machine.existing[0].uuid) == 1 << 30
    assert Machine(tmp_path / "new").existing == machine.existing


def test_without_a_driver_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMBROKER_FAKE_CUDA", raising=False)
    monkeypatch.setattr("mmbroker.cuda.real._LIBRARY", "libcuda-that-is-nowhere.so.1")
    monkeypatch.setattr("mmbroker.cuda._drivers", {})
    assert cuda.load() is None
    with pytest.raises(NoDriver, match="libcuda-that-is-nowhere"):
        cuda.open_driver()


def test_random_traffic_ends_balanced(fake: Rig) -> None:
    """Segments come and go while copies run between them; every byte is right, and nothing is left."""
    driver, rng = fake.fake, random.Random(8)
    with fake.pinned(SIZE) as host, fake.stream() as one, fake.stream() as two:
        for _ in range(20):
            with fake.memory(SIZE) as slot, fake.memory(SIZE) as other, fake.event() as event:
                nbytes = rng.randrange(1, SIZE)
                data = rng.randbytes(nbytes)
                host.view[:nbytes] = data
                driver.copy(slot, host.address, nbytes, one)
                driver.record(event, one)
                driver.wait(two, event)
                driver.copy(other, slot, nbytes, two)
                driver.record(event, two)
                driver.synchronize(event)
                assert ctypes.string_at(other, nbytes) == data
