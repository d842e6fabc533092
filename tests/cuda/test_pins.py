"""Where copies are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.cuda.pins import Pins, cut


def test_books() -> None:
    pins = Pins()
    pins.add(100, 50)
    pins.add(150, 50)
    for address, nbytes in ((100, 50), (99, 2), (199, 1), (120, 10), (0, 1000)):
        with pytest.raises(ValueError, match="pinned already"):
            pins.add(address, nbytes)
    assert len(pins) == 2 and pins.nbytes == 100
    for address in (99, 101, 200):
        with pytest.raises(KeyError):
            pins.remove(address)
    assert pins.remove(100) == 50 and len(pins) == 1 and not pins.whole(100, 50)


ranges = st.tuples(st.integers(0, 60), st.integers(1, 60))


@given(st.sets(st.integers(0, 11), max_size=12), ranges, st.integers(0, 60))
def test_every_part_of_a_copy_is_of_one_kind(pieces: set[int], source: tuple[int, int], dst: int) -> None:
    pins = Pins()
    for piece in pieces:
        pins.add(piece * 10, 10)
    src, nbytes = source
    parts = cut(pins, dst, src, nbytes) or [(0, nbytes)]
    assert sum(size for _, size in parts) == nbytes
    end = 0
    for offset, size in parts:
        assert offset == end and size > 0
        end = offset + size
        for start in (dst + offset, src + offset):
            kinds = {place // 10 if place // 10 in pieces else None for place in range(start, start + size)}
            assert len(kinds) == 1, "each part lies in one piece, or in none"
    assert len(parts) <= 1 + 4 * len(pieces)
    if len(parts) == 1:
        assert cut(pins, dst, src, nbytes) == []
