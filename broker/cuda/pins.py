"""Which host memory is pinned. Pure.

A segment is pinned in pieces, and CUDA wants a copy's host memory to be of one kind, within one registration. So copies
are cut where pieces begin and end.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from itertools import pairwise
from math import inf


class Pins:
    """Pinned pieces by address. Lookups are safe beside a change in another thread."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # start and end, sorted

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self._pieces)

    def add(self, address: int, nbytes: int) -> None:
        """Raises ValueError if part of the range is pinned already."""
        if self._overlapping(address, address + nbytes):
            raise ValueError(f"part of the {nbytes} bytes at {address:#x} is pinned already")
        insort(self._pieces, (address, address + nbytes))

    def remove(self, address: int) -> int:
        """Forget the piece that begins here; its size. Raises KeyError if none does."""
        at = bisect_right(self._pieces, (address, inf)) - 1
        if at < 0 or self._pieces[at][0] != address:
            raise KeyError(address)
        start, end = self._pieces.pop(at)
        return end - start

    def whole(self, address: int, nbytes: int) -> bool:
        """Whether one piece holds the whole range."""
        at = bisect_right(self._pieces, (address, inf)) - 1
        return at >= 0 and address + nbytes <= self._pieces[at][1]

    def edges(self, address: int, nbytes: int) -> list[int]:
        """Where, in bytes from its beginning, a range reaches into or out of a piece; sorted. Mostly nowhere."""
        if not self._pieces or self.whole(address, nbytes):
            return []
        pieces = self._overlapping(address, address + nbytes)
        return sorted({edge - address for piece in pieces for edge in piece if 0 < edge - address < nbytes})

    def _overlapping(self, start: int, end: int) -> list[tuple[int, int]]:
        return [piece for piece in self._pieces if piece[0] < end and start < piece[1]]


def cut(pins: Pins, dst: int, src: int, nbytes: int) -> list[tuple[int, int]]:
    """The offsets and sizes of the copies that one copy becomes."""
    edges = pins.edges(dst, nbytes) + pins.edges(src, nbytes)
    if not edges:
        return [(0, nbytes)]
    return [(start, end - start) for start, end in pairwise([0, *sorted(set(edges)), nbytes])]
