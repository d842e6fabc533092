"""Device segments: rounded up, kept out of the headroom, given back. On both drivers."""

from __future__ import annotations

import pytest

from mmbroker.arena.device import DeviceSegment
from mmbroker.arena.memory import MemoryLimit
from mmbroker.cuda import NotShareable, OutOfDeviceMemory
from tests.cuda.rig import MIB, Rig


def test_a_segment_is_whole_pieces_and_can_be_mapped(rig: Rig) -> None:
    granularity = rig.driver.granularity(rig.uuid)
    before = rig.driver.free(rig.uuid)
    segment = DeviceSegment.create(rig.driver, rig.uuid, 3 * granularity + 1)
    assert segment.nbytes == 4 * granularity and segment.rw_fd == segment.ro_fd == segment.fd
    with (
        rig.mapped(segment.rw_fd, segment.nbytes) as writer,
        rig.mapped(segment.ro_fd, segment.nbytes, False) as reader,
    ):
        rig.write(writer + 3 * granularity, b"at the end")
        assert rig.read(reader + 3 * granularity, 10) == b"at the end"
    segment.close()
    segment.close()
    assert segment.fd == -1
    rig.free_again(before)


def test_the_headroom_is_left_alone(rig: Rig) -> None:
    free = rig.driver.free(rig.uuid)
    with pytest.raises(MemoryLimit, match="--device-headroom-mib") as refused:
        DeviceSegment.create(rig.driver, rig.uuid, 64 * MIB, headroom=free - 32 * MIB)
    message = str(refused.value)
    assert rig.uuid in message and "64 MiB" in message and str((free - 32 * MIB) // MIB) in message
    assert refused.value.figures["requested"] == 64 * MIB
    segment = DeviceSegment.create(rig.driver, rig.uuid, 64 * MIB, headroom=free - 64 * MIB - rig.slack)
    segment.close()


def test_refusals_of_the_driver_come_through(fake: Rig) -> None:
    faults = fake.fake.faults
    faults.fail("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", times=1)
    with pytest.raises(OutOfDeviceMemory):
        DeviceSegment.create(fake.driver, fake.uuid, MIB)
    faults.fail("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(NotShareable, match="cuMemExportToShareableHandle"):
        DeviceSegment.create(fake.driver, fake.uuid, MIB)
    faults.heal()
    DeviceSegment.create(fake.driver, fake.uuid, MIB).close()
