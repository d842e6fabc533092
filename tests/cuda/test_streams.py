"""Copies, events, waits, pinning and threads. On both drivers."""

from __future__ import annotations

import ctypes
import mmap
import os
import random

import pytest

from mmbroker.cuda import DriverError
from tests.cuda.rig import MIB, Host, Rig

SIZE = 8 * MIB


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_copies_of_any_size_between_any_addresses(rig: Rig, seed: int, room: bool) -> None:
    """H2D, D2D and D2H in a row on one stream; nothing beside the range is touched."""
    rng = random.Random(seed)
    driver = rig.driver
    with (
        rig.memory(SIZE) as one,
        rig.memory(SIZE) as two,
        rig.pinned(2 * MIB) as source,
        rig.pinned(2 * MIB) as target,
        rig.stream() as stream,
    ):
        for _ in range(12):
            nbytes = rng.choice((1, 2, 3, 7, 8, 4097, rng.randrange(1, 2 * MIB)))
            at = [rng.randrange(room - nbytes + 1) for room in (2 * MIB, SIZE, SIZE, 2 * MIB)]
            data = rng.randbytes(nbytes)
            source.view[at[0] : at[0] + nbytes] = data
            target.view[:] = bytes(len(target.view))
            driver.copy(one + at[1], source.address + at[0], nbytes, stream, room)
            driver.copy(two + at[2], one + at[1], nbytes, stream, room)
            driver.copy(target.address + at[3], two + at[2], nbytes, stream, room)
            rig.finish(stream)
            assert target.view[at[3] : at[3] + nbytes] == data
            assert not any(target.view[: at[3]]) and not any(target.view[at[3] + nbytes :])


@pytest.mark.parametrize("room", [False, True])
def test_order_within_a_stream(rig: Rig, room: bool) -> None:
    """A slot is written, copied on, and written again, all before any of it is done."""
    driver = rig.driver
    with (
        rig.memory(SIZE) as slot,
        rig.memory(SIZE) as results,
        rig.pinned(64 * 4096) as source,
        rig.stream() as stream,
    ):
        with rig.blocked(stream):
            for number in range(64):
                source.view[number * 4096 : (number + 1) * 4096] = bytes([number + 1]) * 4096
                driver.copy(slot, source.address + number * 4096, 4096, stream, room)
                driver.copy(results + number * 4096, slot, 4096, stream, room)
        rig.finish(stream)
        assert rig.read(results, 64 * 4096) == bytes(source.view)


def test_an_event_completes_with_what_was_before_it(rig: Rig) -> None:
    driver = rig.driver
    with rig.stream() as stream, rig.event() as event, rig.memory(SIZE) as address, rig.pinned(SIZE) as host:
        assert driver.query(event)  # never recorded
        driver.synchronize(event)
        with rig.blocked(stream):
            driver.copy(address, host.address, SIZE, stream)
            driver.record(event, stream)
            assert not driver.query(event)
        driver.synchronize(event)
        assert driver.query(event)
        with rig.blocked(stream):
            driver.record(event, stream)  # again: it counts from the last record
            assert not driver.query(event)
        driver.synchronize(event)


def test_streams_do_not_wait_for_each_other(rig: Rig) -> None:
    driver = rig.driver
    with (
        rig.stream() as slow,
        rig.stream(high_priority=True) as quick,
        rig.event() as late,
        rig.event() as soon,
    ):
        with rig.blocked(slow):
            driver.record(late, slow)
            driver.record(soon, quick)
            driver.synchronize(soon)
            assert driver.query(soon) and not driver.query(late)
        driver.synchronize(late)


def test_reading_before_the_event_reads_wrong_bytes(rig: Rig) -> None:
    """The reason for all the waiting: what is there before a copy is done is not the feature."""
    driver = rig.driver
    with rig.stream() as loader, rig.event() as loaded, rig.memory(SIZE) as slot, rig.pinned(4096) as host:
        host.view[:] = b"\x11" * 4096
        with rig.blocked(loader):
            driver.copy(slot, host.address, 4096, loader)
            driver.record(loaded, loader)
            assert not driver.query(loaded)
            assert rig.read(slot, 4096) != b"\x11" * 4096
        driver.synchronize(loaded)
        assert rig.read(slot, 4096) == b"\x11" * 4096


def test_a_stream_that_waits_reads_right_bytes(rig: Rig) -> None:
    driver = rig.driver
    with (
        rig.stream() as loader,
        rig.stream() as reader,
        rig.stream() as hasty,
        rig.event() as loaded,
        rig.memory(SIZE) as slot,
        rig.pinned(3 * 4096) as host,
    ):
        host.view[:4096] = b"\x22" * 4096
        waited, not_waited = host.address + 4096, host.address + 8192
        with rig.blocked(loader):
            driver.copy(slot, host.address, 4096, loader)
            driver.record(loaded, loader)
            driver.wait(reader, loaded)
            driver.copy(waited, slot, 4096, reader)
            driver.copy(not_waited, slot, 4096, hasty)
            rig.finish(hasty)
        rig.finish(reader)
        assert host.view[4096:8192] == b"\x22" * 4096
        assert host.view[8192:] != b"\x22" * 4096


def test_a_wait_means_the_record_before_it(rig: Rig) -> None:
    """An event that is recorded again does not hold up who waited for the first time."""
    driver = rig.driver
    with rig.stream() as first, rig.stream() as second, rig.stream() as waiting, rig.event() as event:
        with rig.blocked(second):
            driver.record(event, first)
            driver.wait(waiting, event)
            driver.record(event, second)
            rig.finish(waiting)
            assert not driver.query(event)
        driver.synchronize(event)


def test_many_loads_on_two_streams_behind_one_reader(rig: Rig) -> None:
    """As loaders and a reader work: each load has its event, the reader waits for each before it reads."""
    driver, rng, count, nbytes = rig.driver, random.Random(5), 100, 8192
    with (
        rig.memory(SIZE) as slots,
        rig.pinned(count * nbytes) as source,
        rig.pinned(count * nbytes) as target,
        rig.stream(high_priority=True) as one,
        rig.stream() as two,
        rig.stream() as reader,
    ):
        source.view[:] = rng.randbytes(count * nbytes)
        events = [driver.event() for _ in range(count)]
        for number, event in enumerate(events):
            loader, offset = rng.choice((one, two)), number * nbytes
            driver.copy(slots + offset, source.address + offset, nbytes, loader)
            driver.record(event, loader)
        for number in rng.sample(range(count), count):
            driver.wait(reader, events[number])
            driver.copy(target.address + number * nbytes, slots + number * nbytes, nbytes, reader)
        rig.finish(reader)
        assert target.view == source.view
        assert all(driver.query(event) for event in events)
        for event in events:
            driver.destroy_event(event)


@pytest.mark.parametrize("room", [False, True])
def test_pinned_memory_is_read_when_the_copy_is_done_and_other_memory_at_once(rig: Rig, room: bool) -> None:
    driver = rig.driver
    with rig.memory(SIZE) as slot, rig.stream() as stream, rig.pinned(4096) as host:
        host.view[:] = b"\x01" * 4096
        with rig.blocked(stream):
            driver.copy(slot, host.address, 4096, stream, room)
            host.view[:] = b"\x02" * 4096
        rig.finish(stream)
        assert rig.read(slot, 4096) == b"\x02" * 4096
        data = bytearray(b"\x03" * 4096)
        driver.copy(slot, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data), stream, room)
        data[:] = b"\x04" * 4096
        rig.finish(stream)
        assert rig.read(slot, 4096) == b"\x03" * 4096
        driver.copy(ctypes.addressof(ctypes.c_char.from_buffer(data)), slot, len(data), stream, room)
        assert data == b"\x03" * 4096  # written before the call returned


@pytest.mark.parametrize("room", [False, True])
def test_pinning_in_pieces(rig: Rig, room: bool) -> None:
    """Copies across pieces, and out of them into memory that is not pinned, are whole."""
    driver, piece = rig.driver, MIB
    with Host(5 * piece) as host, rig.memory(SIZE) as slot, rig.stream() as stream:
        pinned = [host.address + number * piece for number in (0, 1, 3)]
        for address in pinned:
            driver.pin(address, piece)
        with pytest.raises(DriverError) as refused:
            driver.pin(pinned[1], piece)
        assert refused.value.code == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
        data = random.Random(6).randbytes(host.nbytes)
        host.view[:] = data
        driver.copy(slot, host.address, host.nbytes, stream, room)
        rig.finish(stream)
        assert rig.read(slot, host.nbytes) == data
        host.view[:] = bytes(host.nbytes)
        driver.copy(host.address + 7, slot + 7, host.nbytes - 14, stream, room)
        rig.finish(stream)
        assert host.view[7:-7] == data[7:-7]
        for address in pinned:
            driver.unpin(address)
        with pytest.raises(DriverError) as refused:
            driver.unpin(pinned[0])
        assert refused.value.code == "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


def test_one_memfd_is_pinned_twice(rig: Rig) -> None:
    """As it is by two engines on one GPU."""
    fd = os.memfd_create("segment")
    os.truncate(fd, MIB)
    with (
        mmap.mmap(fd, MIB) as first,
        mmap.mmap(fd, MIB) as second,
        rig.memory(SIZE) as slot,
        rig.stream() as stream,
    ):
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (first, second)]
        for address in addresses:
            rig.driver.pin(address, MIB)
        first[:] = random.Random(7).randbytes(MIB)
        for number, address in enumerate(addresses):
            rig.driver.copy(slot + number * MIB, address, MIB, stream)
        rig.finish(stream)
        assert rig.read(slot, MIB) == rig.read(slot + MIB, MIB) == first[:]
        for address in addresses:
            rig.driver.unpin(address)
    os.close(fd)


def test_a_thread_must_say_which_gpu_it_uses(rig: Rig) -> None:
    with pytest.raises(DriverError) as refused:
        rig.thread(rig.driver.event)
    assert refused.value.code == "CUDA_ERROR_INVALID_CONTEXT"

    def load() -> bytes:
        rig.driver.use(rig.uuid)
        rig.write(slot, b"from a thread")
        return rig.read(slot, 13)

    with rig.memory(SIZE) as slot:
        assert rig.thread(load) == b"from a thread"
        assert rig.read(slot, 13) == b"from a thread"


def test_one_thread_records_what_another_waits_for(rig: Rig) -> None:
    with rig.stream() as stream, rig.event() as event:

        def query() -> bool:
            rig.driver.use(rig.uuid)
            return rig.driver.query(event)

        with rig.blocked(stream):
            rig.driver.record(event, stream)
            assert not rig.thread(query)
        rig.driver.synchronize(event)
        assert rig.thread(query)


def test_the_current_stream_is_torchs(rig: Rig) -> None:
    driver = rig.driver
    before = driver.current_stream(rig.uuid)()
    with rig.stream() as stream, rig.current(stream):
        assert driver.current_stream(rig.uuid)() == stream

        def elsewhere() -> int:
            driver.use(rig.uuid)
            return driver.current_stream(rig.uuid)()

        assert rig.thread(elsewhere) == before
    assert driver.current_stream(rig.uuid)() == before


def test_which_streams_last(rig: Rig) -> None:
    def lasts(stream: object = None) -> bool:
        return rig.driver.lasting(stream, rig.uuid)

    assert lasts() and lasts(0)
    with rig.stream() as own, rig.torchs_stream() as torchs:
        assert not lasts(own) and lasts(torchs)
        with rig.current(own):
            assert not lasts() and lasts(torchs)
    if rig.driver.kind == "cuda":
        import torch

        with rig.stream() as own, torch.cuda.stream(torch.cuda.Stream(rig.device)) as entered:
            assert lasts() and entered is None
            assert not lasts(torch.cuda.ExternalStream(own, device=rig.device))
            assert lasts(torch.cuda.Stream(rig.device, priority=-1))
            assert lasts(torch.cuda.default_stream(rig.device))


def test_torch_reads_right_bytes_once_its_stream_waits(rig: Rig) -> None:
    """What a scheduler does with a feature that is still on its way."""
    import torch

    driver = rig.driver
    with rig.memory(SIZE) as slot, rig.pinned(SIZE) as host, rig.stream() as loader, rig.stream() as forward:
        expected = torch.arange(SIZE // 4, dtype=torch.int32)
        host.view[:] = expected.numpy().tobytes()
        tensor = driver.tensor(slot, torch.int32, (SIZE // 4,), rig.uuid, None)
        with rig.current(forward), rig.event() as loaded, rig.event() as read:
            driver.copy(slot, host.address, SIZE, loader)
            driver.record(loaded, loader)
            if not driver.query(loaded):
                driver.wait(driver.current_stream(rig.uuid)(), loaded)
            doubled = tensor * 2
            driver.record(read, driver.current_stream(rig.uuid)())
            driver.synchronize(read)
            assert torch.equal(doubled.cpu(), expected * 2)
        del tensor


def test_handles_that_are_gone(rig: Rig) -> None:
    with rig.memory(SIZE) as address:
        pass
    with rig.stream() as stream, pytest.raises(DriverError):
        rig.driver.unmap(address, SIZE)
        rig.finish(stream)


def test_loading_beside_a_capture(rig: Rig) -> None:
    """A relaxed thread may pin, copy, query and wait while another captures a graph."""
    with rig.agent() as agent:
        assert agent("capture", True) == {
            "broken": False,
            "problems": [],
            "capturing": [False, True, False],
            "loaded": True,
        }


def test_a_thread_that_is_not_relaxed_breaks_a_capture(rig: Rig) -> None:
    with rig.agent() as agent:
        result = agent("capture", False)
        assert result["broken"] and result["problems"]
