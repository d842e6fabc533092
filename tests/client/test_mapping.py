"""Maps: as long as their views, inside their bounds, populated before they are read, unmapped by sweepers."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmbroker import mapping
from mmbroker.mapping import Mapping
from mmbroker.proto.errors import InvalidMessage
from tests.kit import resident

MIB = 1 << 20


@pytest.fixture
def segment() -> Iterator[Callable[[int], int]]:
    made: list[int] = []

    def make(nbytes: int) -> int:
        fd = os.memfd_create("test")
        os.posix_fallocate(fd, 0, nbytes)
        made.append(fd)
        return fd

    yield make
    for fd in made:
        os.close(fd)


def mapped(address: int) -> bool:
    ranges = (line.split(" ")[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_bytes_are_shared_by_all_maps_of_a_segment(segment: Callable[[int], int]) -> None:
    fd = segment(3 * MIB)
    writer, reader = Mapping.of(fd, 3 * MIB, True), Mapping.of(fd, 3 * MIB, False)
    writer.view(MIB, 4)[:] = b"abcd"
    assert bytes(reader.view(MIB - 1, 6)) == b"\0abcd\0"
    assert os.pread(fd, 4, MIB) == b"abcd"


@pytest.mark.parametrize("keep", ["mapping", "view", "view of a view", "nothing"])
def test_a_map_lives_as_long_as_its_views(segment: Callable[[int], int], keep: str) -> None:
    fd = segment(MIB)
    whole = Mapping.of(fd, MIB, False)
    view = whole.view(4096, 100)
    address = mapping.address_of(view)
    kept: object = {"mapping": whole, "view": view, "view of a view": view[3:], "nothing": None}[keep]
    del whole, view
    gc.collect()
    assert mapped(address) == (keep != "nothing")
    del kept
    gc.collect()
    assert not mapped(address)


def test_sweepers_unmap_and_nobody_else(segment: Callable[[int], int]) -> None:
    """While there is one, the thread in which the last view dies only leaves a note."""
    me = object()
    mapping.add_sweeper(me)
    try:
        view = Mapping.of(segment(MIB), MIB, False).view(0, 10)
        address = mapping.address_of(view)
        del view
        assert mapped(address)
        other = threading.Thread(target=mapping.sweep)
        other.start()
        other.join()
        assert not mapped(address)
        view = Mapping.of(segment(MIB), MIB, False).view(0, 10)
        address = mapping.address_of(view)
        del view
        assert mapped(address)
    finally:
        mapping.remove_sweeper(me)
    assert not mapped(address)  # the last sweeper leaves nothing


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 4), (0, -1), (MIB, 1), (MIB - 1, 2), (0, MIB + 1), (1 << 62, 1), (1, 1 << 62)]
)
def test_outside_is_refused(segment: Callable[[int], int], offset: int, nbytes: int) -> None:
    with pytest.raises(InvalidMessage, match="outside"):
        Mapping.of(segment(MIB), MIB, False).view(offset, nbytes)


@pytest.mark.parametrize("writable", [True, False])
def test_pages_are_in_place_before_they_are_touched(segment: Callable[[int], int], writable: bool) -> None:
    """Of what is asked for, in whole pieces, up to a segment's odd end."""
    size = 9 * MIB + 4096
    whole = Mapping.of(segment(size), size, writable)
    address = whole.address
    assert resident(address) == 0
    whole.view(5 * MIB, 10)
    assert resident(address) == 2 * MIB
    whole.view(3 * MIB, 3 * MIB)
    assert resident(address) == 4 * MIB
    whole.view(0, size)
    assert resident(address) == size


def test_the_error_says_what_could_not_be_mapped() -> None:
    with pytest.raises(OSError, match="cannot map 4096 bytes") as caught:
        Mapping.of(-1, 4096, False)
    assert caught.value.errno == errno.EBADF


def test_private_memory_is_zero_and_its_own() -> None:
    first, second = Mapping.private(MIB), Mapping.private(MIB)
    first.view(0, MIB)[:] = b"x" * MIB
    mapping.copy(second.view(100, 1000), mapping.address_of(first.view(0, 1)))
    assert bytes(second.view(99, 1002)) == b"\0" + b"x" * 1000 + b"\0"
    mapping.copy(second.view(0, 0), 0)  # nothing


def test_pinned_pages_are_not_populated_again(segment: Callable[[int], int]) -> None:
    """Whoever pinned them has faulted them in; here nobody has, so that it shows."""
    plain, pinned = Mapping.of(segment(4 * MIB), 4 * MIB, False), Mapping.of(segment(4 * MIB), 4 * MIB, False)
    pinned.pinned()
    for whole in (plain, pinned):
        whole.view(0, 4 * MIB)
    assert (resident(plain.address), resident(pinned.address)) == (4 * MIB, 0)


def test_populating_ahead_ends_when_all_is_there(segment: Callable[[int], int]) -> None:
    whole = Mapping.of(segment(5 * MIB), 5 * MIB, False)
    whole.view(2 * MIB, MIB)
    there = [resident(whole.address)]
    while whole.warm_ahead():
        there.append(resident(whole.address))
    assert there == [2 * MIB, 4 * MIB, 4 * MIB, 5 * MIB]
    assert not Mapping.private(MIB).warm_ahead()
