"""Host memory: a segment is one memfd, sealed against shrinking and growing, and filled before anybody sees it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from . import memory

#: The limits are read again before each piece of a segment, because others take memory meanwhile.
PIECE: Final = 16 << 20


class HostSegment:
    """`rw_fd` is for writers, `ro_fd` for everybody else: a descriptor that cannot be mapped writable.

    `create` and `close` take milliseconds: call them from a thread.
    """

    def __init__(self, rw_fd: int, ro_fd: int, nbytes: int) -> None:
        self.rw_fd = rw_fd
        self.ro_fd = ro_fd
        self.nbytes = nbytes

    @classmethod
    def create(cls, nbytes: int, machine: Path | None = None) -> HostSegment:
        """A segment whose every page exists. Raises `MemoryLimit`, or `OSError` where the kernel refuses."""
        rw_fd = os.memfd_create("mmbroker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(rw_fd, 0o600)  # else any user could open its read-only descriptor again, for writing
            for offset in range(0, nbytes, PIECE):
                memory.check(nbytes - offset, machine)
                _fill(rw_fd, offset, min(PIECE, nbytes - offset))
            fcntl.fcntl(rw_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            ro_fd = os.open(f"/proc/self/fd/{rw_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(rw_fd)
            raise
        return cls(rw_fd, ro_fd, nbytes)

    def close(self) -> None:
        """Give the memory back as soon as no client maps it. Idempotent."""
        for fd in (self.rw_fd, self.ro_fd):
            if fd >= 0:
                os.close(fd)
        self.rw_fd = self.ro_fd = -1


def _fill(fd: int, offset: int, nbytes: int) -> None:
    while True:
        try:
            return os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            if error.errno != errno.EINTR:
                raise
