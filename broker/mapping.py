"""Memory maps without the GIL: segments in this process's address space, and private buffers.

`mmap.mmap` holds the interpreter's lock while the kernel fills page tables, which would stall a scheduler thread for
milliseconds; calls through ctypes do not. A map lives as long as any view of it. It is taken apart by a receiver
thread, never where its last view happens to die: `munmap` of a large map takes long, too.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from mmbroker.proto.errors import InvalidMessage

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0x01, 0x02, 0x20
_MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 10, 22, 23
#: How much of a map is populated at a time, in bytes.
_PIECE: Final = 2 << 20
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: Maps whose last view has died: address, size and the process that made them.
_dead: deque[tuple[int, int, int]] = deque()
_sweepers: list[object] = []
#: What to do before a map is taken apart, by its address.
_undo: dict[int, Callable[[], None]] = {}


def copy(target: memoryview, source: int) -> None:
    """Fill `target` from the address `source`, without the GIL and on this thread alone."""
    if target.nbytes:
        ctypes.memmove(address_of(target), source, target.nbytes)


def address_of(view: memoryview) -> int:
    """Where a view of a map begins."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


class Mapping:
    """A map of `nbytes` bytes: of a segment (`of`), or private memory (`private`). Raises `OSError`.

    `view` is the only way to its bytes.
    """

    def __init__(self, fd: int, nbytes: int, prot: int, flags: int) -> None:
        address = _mmap(None, nbytes, prot, flags, fd, 0)
        if address == _FAILED or address is None:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
        region = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(region, _bury, address, nbytes, os.getpid()).atexit = False
        self.nbytes = nbytes
        self.address = address
        self._populate = 0
        self._warm: set[int] = set()
        self._ahead = 0  # all pieces before this one are
        self.writable = bool(prot & _PROT_WRITE)
        self._whole = memoryview(region).cast("B")

    @classmethod
    def of(cls, fd: int, nbytes: int, writable: bool) -> Mapping:
        """The segment behind a descriptor, which may be closed afterwards. Not inherited by forked children."""
        mapping = cls(fd, nbytes, _PROT_READ | _PROT_WRITE if writable else _PROT_READ, _MAP_SHARED)
        _madvise(mapping.address, nbytes, _MADV_DONTFORK)
        mapping._populate = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        return mapping

    @classmethod
    def private(cls, nbytes: int) -> Mapping:
        """Memory of this process alone."""
        return cls(-1, nbytes, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS)

    def pinned(self) -> None:
        """Its pages are in place for good: there is nothing to populate any more, which would walk through them all."""
        self._populate = 0

    def before_unmap(self, undo: Callable[[], None]) -> None:
        """Have the sweeper call `undo` just before it takes the map apart."""
        _undo[self.address] = undo

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes `offset` to `offset + nbytes`; the map stays at least as long as the view, and views of it.

        Its pages are in place then: a fault for each of them would cost whoever reads several times as much.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidMessage(
                f"{nbytes} bytes at {offset} lie outside a segment of {self.nbytes} bytes",
                offset=offset,
                nbytes=nbytes,
                limit=self.nbytes,
            )
        if self._populate:
            self._warm_up(offset, nbytes)
        return self._whole[offset : offset + nbytes]

    def _warm_up(self, offset: int, nbytes: int) -> None:
        """Have the kernel fill in page tables, once a piece. Where it does not know how, the first touch does."""
        for piece in range(offset // _PIECE, -(-(offset + nbytes) // _PIECE)):
            if piece not in self._warm:
                self._warm_one(piece)

    def _warm_one(self, piece: int) -> None:
        start = piece * _PIECE
        _madvise(self.address + start, min(_PIECE, self.nbytes - start), self._populate)
        self._warm.add(piece)

    def warm_ahead(self) -> bool:
        """Populate one more piece, before it is needed; False: all are. For a thread that has nothing else to do."""
        if not self._populate or self._ahead * _PIECE >= self.nbytes:
            return False
        if self._ahead not in self._warm:
            self._warm_one(self._ahead)
        self._ahead += 1
        return True


def _bury(address: int, nbytes: int, pid: int) -> None:
    """The last view died, in whatever thread: leave the work to a sweeper, if there is one."""
    _dead.append((address, nbytes, pid))
    if not _sweepers:
        sweep()


def sweep() -> None:
    """Unmap what has died. Not for a thread that must not wait."""
    while _dead:
        try:
            address, nbytes, pid = _dead.popleft()
        except IndexError:  # another sweeper was faster
            return
        if pid == os.getpid():  # a forked child has no such map, and perhaps another one at this address
            if (undo := _undo.pop(address, None)) is not None:
                undo()
            _munmap(address, nbytes)


def add_sweeper(who: object) -> None:
    """Announce a thread that calls `sweep` from time to time, until `remove_sweeper`."""
    _sweepers.append(who)


def remove_sweeper(who: object) -> None:
    _sweepers.remove(who)
    if not _sweepers:
        sweep()
