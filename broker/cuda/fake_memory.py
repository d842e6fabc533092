"""The memory of fake GPUs: a directory that several processes share, and where each of them has mapped what.

Memory is a file, and an exported descriptor holds a lock on it. Such a lock lives as long as the last descriptor or map
of that one opening of the file, in whatever process, or on its way through a socket; a process that is killed lets go
of it, too. So the kernel keeps the books, and whoever wants to know looks which files are locked. (A memfd has no name
by which others could look at it.) A context is a locked file as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .devices import Device
from .driver import error

VARIABLE: Final = "MMBROKER_FAKE_CUDA"
_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0x01, 0x02, 0x20
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Make:
    """What a machine is made of. `late`: how late, in microseconds, things happen on average; `context`: its bytes;
    `node`: the NUMA node near its GPUs, -1: not told."""

    uuids: Sequence[str] = ("GPU-fa4e0000-0000-4000-8000-000000000000",)
    total: int = 1 << 30
    granularity: int = 2 << 20
    context: int = 0
    late: float = 100.0
    seed: int = 0
    node: int = -1


class Machine:
    """The GPUs of a directory; it is made if it is not there yet."""

    def __init__(self, directory: Path | str, make: Make | None = None) -> None:
        self.directory = Path(directory).resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        description = self.directory / "machine.json"
        with self._books():
            if make is not None or not description.exists():
                description.write_text(json.dumps(asdict(make or Make())))
            self.make = Make(**json.loads(description.read_text()))
            for uuid in self.make.uuids:
                (self.directory / uuid).mkdir(exist_ok=True)
        self.existing = [
            Device(uuid, index, "Fake GPU", self.make.total) for index, uuid in enumerate(self.make.uuids)
        ]

    def free(self, uuid: str) -> int:
        with self._books():
            return self._free(uuid)

    def processes(self, uuid: str) -> dict[int, int]:
        """Pids that have a context, and its bytes."""
        with self._books():
            held = [path for path, _ in self._held(uuid, "context-")]
        return {int(path.name.removeprefix("context-")): self.make.context for path in held}

    def create(self, uuid: str, nbytes: int) -> int:
        """New memory, full of zeros: a descriptor. Raises `OutOfDeviceMemory`."""
        with self._books():
            if nbytes > (free := self._free(uuid)):
                raise error(
                    "CUDA_ERROR_OUT_OF_MEMORY", "cuMemCreate", f"{nbytes} bytes wanted, {free} are free"
                )
            numbers = {int(path.name.removeprefix("memory-")) for path, _ in self._held(uuid, "memory-")}
            fd = self._hold(self.directory / uuid / f"memory-{max(numbers, default=0) + 1}")
            os.ftruncate(fd, nbytes)
            return fd

    def enter(self, uuid: str) -> int:
        """A context of this process, which ends with the returned descriptor. Raises `OutOfDeviceMemory`."""
        with self._books():
            if self.make.context > self._free(uuid):
                raise error("CUDA_ERROR_OUT_OF_MEMORY", "cuDevicePrimaryCtxRetain", "no room for a context")
            return self._hold(self.directory / uuid / f"context-{os.getpid()}")

    def owner(self, fd: int) -> str | None:
        """The GPU whose memory a descriptor is; None for anything else."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            return None
        ours = path.name.startswith("memory-") and path.parent.parent == self.directory
        return path.parent.name if ours else None

    def _free(self, uuid: str) -> int:
        used = sum(size for _, size in self._held(uuid, "memory-"))
        contexts = sum(self.make.context for _ in self._held(uuid, "context-"))
        return self.make.total - used - contexts

    def _held(self, uuid: str, prefix: str) -> list[tuple[Path, int]]:
        """Files that somebody holds, and their sizes. Those that nobody does are removed."""
        held = []
        for path in sorted((self.directory / uuid).glob(f"{prefix}*")):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                held.append((path, os.fstat(fd).st_size))
            finally:
                os.close(fd)
        return held

    def _hold(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    @contextmanager
    def _books(self) -> Iterator[None]:
        """One process at a time looks at locks, since to look is to take them for a moment."""
        fd = os.open(self.directory / "books", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Map:
    """Memory of a GPU at an address of this process."""

    address: int
    nbytes: int
    uuid: str
    writable: bool


class Space:
    """The maps of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: list[Map] = []  # sorted by address

    def __len__(self) -> int:
        return len(self._maps)

    def add(self, fd: int, nbytes: int, uuid: str, writable: bool) -> int:
        """Map a descriptor, or zeros (fd -1); the address. Writing to a map that is not writable kills."""
        flags = _MAP_SHARED if fd >= 0 else _MAP_PRIVATE | _MAP_ANONYMOUS
        address = _mmap(None, nbytes, _PROT_READ | _PROT_WRITE if writable else _PROT_READ, flags, fd, 0)
        if address is None or address == _FAILED:
            raise error("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAddressReserve", os.strerror(ctypes.get_errno()))
        with self._lock:
            self._maps = sorted([*self._maps, Map(address, nbytes, uuid, writable)], key=lambda m: m.address)
        return int(address)

    def find(self, address: int) -> Map | None:
        """The map that an address lies in."""
        maps = self._maps
        at = bisect_right(maps, address, key=lambda m: m.address) - 1
        return maps[at] if at >= 0 and address < maps[at].address + maps[at].nbytes else None

    def remove(self, address: int, nbytes: int) -> None:
        """Unmap. Raises KeyError if this is no whole map."""
        with self._lock:
            found = self.find(address)
            if found is None or (found.address, found.nbytes) != (address, nbytes):
                raise KeyError(address)
            self._maps = [other for other in self._maps if other is not found]
        _munmap(address, nbytes)
