"""GPU memory: a segment is memory that the driver exported, known to this process by its descriptor alone."""

from __future__ import annotations

import os

from mmbroker.cuda import Driver

from .memory import MIB, MemoryLimit


class DeviceSegment:
    """`fd` goes to every client; what it may do with the memory is up to its own map. No CUDA context is made.

    `create` may take a millisecond: call it from a thread.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes

    @property
    def rw_fd(self) -> int:
        return self.fd

    @property
    def ro_fd(self) -> int:
        return self.fd

    @classmethod
    def create(cls, driver: Driver, uuid: str, nbytes: int, headroom: int = 0) -> DeviceSegment:
        """A segment of at least `nbytes`, unless it would leave less than `headroom` bytes free on the GPU.

        Raises `MemoryLimit`, or `DriverError` where the driver refuses.
        """
        granularity = driver.granularity(uuid)
        nbytes = -(-nbytes // granularity) * granularity
        free = driver.free(uuid)
        if free - headroom < nbytes:
            raise MemoryLimit(
                f"{uuid} has {free // MIB} MiB free, and a segment of {nbytes // MIB} MiB would leave less than the "
                f"headroom of {headroom // MIB} MiB: lower --device-headroom-mib, or free GPU memory",
                requested=nbytes,
                free=free,
                limit=headroom,
            )
        return cls(driver.export(uuid, nbytes), nbytes)

    def close(self) -> None:
        """Give the memory back as soon as no client has a map of it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
