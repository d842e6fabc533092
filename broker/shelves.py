"""What is kept as a cache, in the order in which it goes: cheap before dear, and old before new. Pure.

This is GreedyDual-Size with rounded costs. A clock stands for how much the cache is worth at present. Whatever comes
to rest is *due* at the clock's time plus what it costs to make again, per byte; what is due first goes first, and sets
the clock. So of two that came together the cheaper one goes first, and what is dear but not asked for goes, too, once
enough cheaper things have gone before it.

Costs are rounded to powers of two, and each power has a shelf in order of arrival. Since the clock never goes back, the
first of each shelf is the first due of it: whoever is next is found by a look at one entry of each shelf, however many
rest on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

#: The shelf of copies: the original is there, and making them again is a copy.
COPIES: Final = 0
#: The last shelf: 2^20 us a KiB and more. A bound to what somebody may claim.
LAST: Final = 21
#: Of what nobody stated a cost for, in us a KiB: an image processor took 1.4 for 1920x1080 pixels, 3.9 for 640x480.
USUAL: Final = 2

Entry = TypeVar("Entry")


def shelf_of(cost: int | None, nbytes: int) -> int:
    """The shelf for what takes `cost` us to make again (None: nobody said) and `nbytes` of memory."""
    per_kib = USUAL if cost is None else max(cost, 0) * 1024 // max(nbytes, 1024)
    return min(COPIES + 1 + per_kib.bit_length(), LAST)


def worth(shelf: int) -> int:
    """How much longer than a copy an entry of that shelf stays, in the clock's units (us a KiB)."""
    return 0 if shelf == COPIES else 1 << (shelf - COPIES - 1)


class Shelves(Generic[Entry]):
    """Entries of one arena, by number."""

    def __init__(self) -> None:
        self._shelves: dict[int, OrderedDict[int, tuple[int, Entry]]] = {}
        self._places: dict[int, int] = {}  # number -> shelf

    def lay(self, number: int, entry: Entry, shelf: int, clock: int) -> None:
        """An entry comes to rest. `clock` never goes back."""
        self._places[number] = shelf
        self._shelves.setdefault(shelf, OrderedDict())[number] = clock + worth(shelf), entry

    def lift(self, number: int) -> bool:
        """Take an entry away; False if it is not here."""
        shelf = self._places.pop(number, None)
        if shelf is None:
            return False
        entries = self._shelves[shelf]
        del entries[number]
        if not entries:
            del self._shelves[shelf]
        return True

    def next(self, copies: bool = True) -> tuple[int, Entry] | None:
        """Which entry goes next, and when it is due; without `copies`, the next that is none."""
        heads = [
            (next(iter(entries.values())), shelf)
            for shelf, entries in self._shelves.items()
            if copies or shelf != COPIES
        ]
        if not heads:
            return None
        return min(heads, key=lambda head: (head[0][0], head[1]))[0]

    def get(self, number: int) -> Entry | None:
        shelf = self._places.get(number)
        return None if shelf is None else self._shelves[shelf][number][1]

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Entry]:
        """All of them, shelf by shelf."""
        return (entry for entries in self._shelves.values() for _, entry in entries.values())
