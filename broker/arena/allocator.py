"""Offsets within one segment: page-aligned best fit, free runs merged at once. Pure arithmetic, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

PAGE = 4096


def round_up(nbytes: int) -> int:
    """Whole pages that hold `nbytes`."""
    return -(-nbytes // PAGE) * PAGE


def shares(nbytes: int, pieces: Iterable[tuple[int, int]], cells: int) -> list[float]:
    """What pieces (offset and size, none over another) cover of each of so many equal stretches of `nbytes`."""
    width = nbytes / cells
    covered = [0.0] * cells
    for offset, size in pieces:
        end = offset + size
        first, last = int(offset / width), min(cells - 1, int(end / width))
        if first == last:  # as nearly all are
            covered[first] += size
            continue
        for cell in range(first, last + 1):
            covered[cell] += min(end, (cell + 1) * width) - max(offset, cell * width)
    return [min(1.0, size / width) for size in covered]


class Allocator:
    """Books of a segment of `nbytes`, a multiple of the page size. Logarithmic but for two list insertions."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % PAGE:
            raise ValueError(f"a segment is a positive multiple of {PAGE} bytes, not {nbytes}")
        self.nbytes = nbytes
        self.used = 0
        self._slots: dict[int, int] = {}  # offset -> size, in use
        self._runs: dict[int, int] = {0: nbytes}  # offset -> size, free
        self._offsets = [0]  # of the free runs, sorted
        self._sizes = [(nbytes, 0)]  # of the free runs, sorted by size, then offset

    @property
    def free_bytes(self) -> int:
        return self.nbytes - self.used

    @property
    def largest_free(self) -> int:
        return self._sizes[-1][0] if self._sizes else 0

    @property
    def slots(self) -> int:
        """How many are in use."""
        return len(self._slots)

    @property
    def empty(self) -> bool:
        return not self._slots

    def alloc(self, nbytes: int) -> int | None:
        """Offset of a free run of at least `nbytes` (> 0), or None: the smallest that fits, the lowest of equals."""
        size = round_up(nbytes)
        at = bisect_left(self._sizes, (size, 0))
        if at == len(self._sizes):
            return None
        have, offset = self._sizes[at]
        self._remove_run(offset)
        if have > size:
            self._add_run(offset + size, have - size)
        self._slots[offset] = size
        self.used += size
        return offset

    def free(self, offset: int) -> None:
        """Give a slot back; raises KeyError for an offset that is not in use."""
        size = self._slots.pop(offset)
        self.used -= size
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and self._offsets[at] == offset + size:
            size += self._remove_run(offset + size)
        if at and (before := self._offsets[at - 1]) + self._runs[before] == offset:
            size += self._remove_run(before)
            offset = before
        self._add_run(offset, size)

    def occupancy(self, cells: int) -> list[float]:
        """The share in use of each of so many equal stretches, in order: a picture of the segment."""
        return [max(0.0, 1 - share) for share in shares(self.nbytes, self._runs.items(), cells)]

    def check(self) -> None:
        """Raise AssertionError unless slots and free runs tile the segment without overlap or neighbouring runs."""
        pieces = sorted(
            [(o, n, True) for o, n in self._slots.items()] + [(o, n, False) for o, n in self._runs.items()]
        )
        end, was_free = 0, False
        for offset, size, used in pieces:
            assert offset == end and size > 0 and size % PAGE == 0, (offset, end, size)
            assert used or not was_free, f"two free runs meet at {offset}"
            end, was_free = offset + size, not used
        assert end == self.nbytes, (end, self.nbytes)
        assert self.used == sum(self._slots.values())
        assert self._offsets == sorted(self._runs)
        assert self._sizes == sorted((n, o) for o, n in self._runs.items())

    def _add_run(self, offset: int, size: int) -> None:
        self._runs[offset] = size
        insort(self._offsets, offset)
        insort(self._sizes, (size, offset))

    def _remove_run(self, offset: int) -> int:
        size = self._runs.pop(offset)
        del self._offsets[bisect_left(self._offsets, offset)]
        del self._sizes[bisect_left(self._sizes, (size, offset))]
        return size
