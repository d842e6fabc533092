"""Which host memory is pinned. Pure.

A segment is pinned in pieces, and CUDA wants a copy's host memory to be of one kind, within one registration. So copies
are cut where pieces begin and end.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise


class Pins:
    """Pinned pieces by address. Lookups are safe beside a change in another thread: it makes a new list."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # start and end, sorted; they do not overlap

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self._pieces)

    def add(self, address: int, nbytes: int) -> None:
        """Raises ValueError if part of the range is pinned already."""
        last = self._last(address + nbytes)
        if last is not None and last[1] > address:
            raise ValueError(f"part of the {nbytes} bytes at {address:#x} is pinned already")
        self._pieces = sorted([*self._pieces, (address, address + nbytes)])

    def remove(self, address: int) -> int:
        """Forget the piece that begins here; its size. Raises KeyError if none does."""
        for piece in self._pieces:
            if piece[0] == address:
                self._pieces = [other for other in self._pieces if other != piece]
                return piece[1] - address
        raise KeyError(address)

    def whole(self, address: int, nbytes: int) -> bool:
        """Whether one piece holds the whole range."""
        last = self._last(address + nbytes)
        return last is not None and last[0] <= address and address + nbytes <= last[1]

    def edges(self, address: int, nbytes: int) -> list[int]:
        """Where, in bytes from its beginning, a range reaches into or out of a piece. Mostly nowhere."""
        end = address + nbytes
        last = self._last(end)
        if last is None or last[1] <= address or (last[0] <= address and end <= last[1]):
            return []
        pieces = [piece for piece in self._pieces if piece[0] < end and address < piece[1]]
        return [edge - address for piece in pieces for edge in piece if address < edge < end]

    def _last(self, end: int) -> tuple[int, int] | None:
        """The last piece that begins before an address."""
        pieces = self._pieces
        at = bisect_left(pieces, (end,))
        return pieces[at - 1] if at else None


def cut(pins: Pins, dst: int, src: int, nbytes: int) -> list[tuple[int, int]]:
    """The offsets and sizes of the copies that one copy becomes; empty if it stays one."""
    edges = pins.edges(dst, nbytes) + pins.edges(src, nbytes)
    return (
        [(start, end - start) for start, end in pairwise([0, *sorted(set(edges)), nbytes])] if edges else []
    )
