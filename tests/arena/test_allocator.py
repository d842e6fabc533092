"""The allocator of one segment, against a model that knows only a set of intervals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbroker.arena.allocator import PAGE, Allocator, round_up, shares

PAGES = 32

#: Allocate so many bytes, or (negative) free one of the slots that are in use.
steps = st.lists(
    st.one_of(st.integers(1, 12 * PAGE), st.integers(1, 3).map(lambda n: n * PAGE), st.integers(-100, -1)),
    max_size=80,
)


def holes(slots: dict[int, int]) -> list[tuple[int, int]]:
    """Free runs (size, offset) between the slots in use, smallest first."""
    runs, end = [], 0
    for offset, size in sorted([*slots.items(), (PAGES * PAGE, 0)]):
        if offset > end:
            runs.append((offset - end, end))
        end = offset + size
    return sorted(runs)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_slots_never_overlap_and_the_smallest_hole_is_taken(plan: list[int]) -> None:
    allocator = Allocator(PAGES * PAGE)
    slots: dict[int, int] = {}
    for step in plan:
        if step > 0:
            fitting = [hole for hole in holes(slots) if hole[0] >= step]
            offset = allocator.alloc(step)
            if offset is None:
                assert not fitting, f"{step} bytes fit into {fitting[0]}"
                continue
            assert offset == fitting[0][1], "best fit, the lowest of equals"
            assert offset % PAGE == 0
            slots[offset] = round_up(step)
        elif slots:
            offset = sorted(slots)[step % len(slots)]
            del slots[offset]
            allocator.free(offset)
        allocator.check()
        assert allocator.used == sum(slots.values())
        assert allocator.free_bytes == PAGES * PAGE - allocator.used
        assert allocator.largest_free == max((size for size, _ in holes(slots)), default=0)
        assert allocator.empty == (not slots)
    for offset in slots:
        allocator.free(offset)
    assert allocator.alloc(PAGES * PAGE) == 0, "everything was freed: the whole segment is one run again"
    allocator.check()


@given(st.permutations(range(8)))
def test_neighbours_merge_in_whatever_order_they_are_freed(order: list[int]) -> None:
    allocator = Allocator(8 * PAGE)
    offsets = [allocator.alloc(1) for _ in range(8)]
    assert offsets == [n * PAGE for n in range(8)]
    assert allocator.alloc(1) is None
    for n in order:
        allocator.free(n * PAGE)
        allocator.check()
    assert allocator.largest_free == 8 * PAGE


def test_an_offset_that_is_not_in_use_cannot_be_freed() -> None:
    allocator = Allocator(4 * PAGE)
    offset = allocator.alloc(2 * PAGE)
    assert offset == 0
    for unknown in (PAGE, 2 * PAGE, 17, -PAGE):
        with pytest.raises(KeyError):
            allocator.free(unknown)
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)
    allocator.check()
    assert allocator.empty


@pytest.mark.parametrize("nbytes", [0, -PAGE, 1, PAGE + 1])
def test_a_segment_is_whole_pages(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple"):
        Allocator(nbytes)


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_whole_pages(nbytes: int, pages: int) -> None:
    assert round_up(nbytes) == pages * PAGE


@pytest.mark.parametrize("spoil", ["slots", "runs", "sizes", "offsets", "used"])
def test_the_check_sees_spoiled_books(spoil: str) -> None:
    allocator = Allocator(8 * PAGE)
    allocator.alloc(PAGE)
    allocator.alloc(PAGE)
    allocator.free(0)
    match spoil:
        case "slots":
            allocator._slots[PAGE] = 3 * PAGE
        case "runs":
            allocator._runs[0] = 2 * PAGE
        case "sizes":
            allocator._sizes.reverse()
        case "offsets":
            allocator._offsets.reverse()
        case "used":
            allocator.used += PAGE
    with pytest.raises(AssertionError):
        allocator.check()


@pytest.mark.parametrize("cells", [1, 3, 4, 7, 64])
def test_a_picture_of_the_segment(cells: int) -> None:
    """Each stretch's share in use; all of them together are what is in use."""
    allocator = Allocator(16 * PAGE)
    assert allocator.occupancy(cells) == pytest.approx([0.0] * cells)
    offsets = [allocator.alloc(PAGE * n) for n in (4, 1, 3, 8)]
    assert allocator.occupancy(cells) == [1.0] * cells
    for at in (1, 3):
        offset = offsets[at]
        assert offset is not None
        allocator.free(offset)
    assert sum(allocator.occupancy(cells)) / cells == pytest.approx(7 / 16)


def test_where_in_the_segment() -> None:
    allocator = Allocator(4 * PAGE)
    offsets = [allocator.alloc(PAGE) for _ in range(3)]
    assert offsets[1] is not None
    allocator.free(offsets[1])
    assert allocator.occupancy(4) == [1.0, 0.0, 1.0, 0.0]
    assert allocator.occupancy(2) == [0.5, 0.5]
    assert shares(4 * PAGE, [(PAGE, 2 * PAGE)], 4) == [0.0, 1.0, 1.0, 0.0]
