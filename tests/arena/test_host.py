"""Host segments: memfds that are complete before anybody sees them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from mmbroker.arena import host
from mmbroker.arena.host import HostSegment
from mmbroker.arena.memory import MemoryLimit
from tests.arena.machine import Machine

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("nbytes", [4096, MIB, host.PIECE, host.PIECE + 4096])
def test_every_page_exists(nbytes: int) -> None:
    segment = HostSegment.create(nbytes)
    info = os.fstat(segment.rw_fd)
    assert (info.st_size, info.st_blocks * 512) == (nbytes, nbytes)
    assert segment.nbytes == nbytes
    segment.close()


@pytest.mark.parametrize("nbytes", [0, 4096, 1 << 30])
def test_size_is_sealed(nbytes: int) -> None:
    segment = HostSegment.create(MIB)
    for fd in (segment.rw_fd, segment.ro_fd):
        with pytest.raises(OSError) as caught:
            os.ftruncate(fd, nbytes)
        assert caught.value.errno in (errno.EPERM, errno.EINVAL)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.rw_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    segment.close()


def test_two_descriptors_one_memory_and_only_one_writes() -> None:
    segment = HostSegment.create(MIB)
    with (
        mmap.mmap(segment.rw_fd, MIB) as writer,
        mmap.mmap(segment.ro_fd, MIB, prot=mmap.PROT_READ) as reader,
    ):
        writer[:5] = b"bytes"
        assert reader[:5] == b"bytes"
    with pytest.raises(PermissionError):
        mmap.mmap(segment.ro_fd, MIB)
    for fd in (segment.rw_fd, segment.ro_fd):
        assert not os.get_inheritable(fd)
    segment.close()


def test_close_is_idempotent_and_mappings_outlive_it() -> None:
    segment = HostSegment.create(MIB)
    with mmap.mmap(segment.rw_fd, MIB) as mapping:
        segment.close()
        segment.close()
        mapping[:5] = b"bytes"
        assert mapping[:5] == b"bytes"


def test_refused_before_anything_is_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=100 * MIB)
    with pytest.raises(MemoryLimit, match="available memory"):
        HostSegment.create(100 * MIB, tmp_path)
    machine.set_available(1000 * MIB)
    HostSegment.create(MIB, tmp_path).close()


def test_memory_that_others_take_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are read again before each piece: what had room at first is given up, and given back."""
    machine = Machine(tmp_path, available=1000 * MIB)
    filled = []

    def fill(fd: int, offset: int, nbytes: int) -> None:
        filled.append(offset)
        machine.set_available(280 * MIB - len(filled) * host.PIECE)

    monkeypatch.setattr(host, "_fill", fill)
    with pytest.raises(MemoryLimit):
        HostSegment.create(4 * host.PIECE, tmp_path)
    assert filled == [0]


@pytest.mark.parametrize("spare", [0, 1])
def test_the_kernel_refuses(spare: int) -> None:
    """Without descriptors there is an error, and nothing stays open: neither is there for the second of the two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)  # the lowest free number
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + spare, hard))
    try:
        with pytest.raises(OSError) as caught:
            HostSegment.create(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE
