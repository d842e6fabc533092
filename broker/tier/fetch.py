"""The way of a feature from the store into a slot, step by step. Nothing is sealed that was not verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mmbroker import hashing
from mmbroker.connection import Connection
from mmbroker.proto.digest import tree_hash
from mmbroker.proto.errors import BrokerError, DeadlineExceeded, LeaseClosed, PoolFull, QuotaExceeded
from mmbroker.proto.messages import Wanted

from . import objects
from .desk import Slot
from .objects import HEADER, Altered, Header
from .store import StoreError
from .way import Way

#: What says that there is no room for it here.
_NO_ROOM: Final = (PoolFull, QuotaExceeded, DeadlineExceeded)


@dataclass
class Fetcher(Way):
    """Fetches what is sought; any thread may. That there is nothing says little of the store: its master says so by
    itself. `patience`: seconds that the store has to say what it has. `gone` hears of keys that the store has no more,
    or never had."""

    _patience: float
    _gone: Callable[[Sequence[Wanted]], None]

    def sift(self, connection: Connection, wanted: list[Wanted]) -> list[Wanted]:
        """Those that the store has; the promises of the others are given back. Never raises what the store may."""
        asked = time.monotonic()
        try:
            there = self._exist([objects.name_of(self._namespace, one.key) for one in wanted])
        except StoreError as error:
            self._judge(str(error))
            self._desk.count("failed", len(wanted))
            there = [False] * len(wanted)
        else:
            self._look_at_the_clock(asked)
            self._desk.count("gets", there.count(False))
            self._desk.count("misses", there.count(False))
            self._gone([one for one, has in zip(wanted, there, strict=True) if not has])
        self._desk.decline(connection, [one for one, has in zip(wanted, there, strict=True) if not has])
        return [one for one, has in zip(wanted, there, strict=True) if has]

    def fetch(self, connection: Connection, wanted: Wanted) -> None:
        """Keep a promise, or give it back. Never raises what the store or the broker may."""
        name = objects.name_of(self._namespace, wanted.key)
        self._desk.count("gets")
        try:
            header, in_time = self._find(name, wanted)
        except StoreError as error:
            self._judge(str(error))
            self._desk.count("failed")
            header = None
        except Altered:
            self._discard(name, wanted, "altered")
            header = None
        if header is None:
            self._desk.decline(connection, [wanted])
            return
        try:
            slot = self._desk.lease(connection, wanted, header.form)
        except LeaseClosed:
            self._desk.count("late")
            return
        except BrokerError as error:
            self._desk.decline(connection, [wanted])
            self._desk.count("no_room" if isinstance(error, _NO_ROOM) else "refused")
            return
        if slot is None:
            self._desk.count("late")
        else:
            self._fill(name, wanted, header, slot, in_time)

    def _find(self, name: str, wanted: Wanted) -> tuple[Header | None, bool]:
        """The header, if the store has one that may still be served; and whether it came in time. Raises `StoreError`,
        `Altered`."""
        asked = time.monotonic()
        with self._scratch.header() as room:
            there = self._read_header(name, room.address)
            in_time = self._look_at_the_clock(asked)
            header = objects.decode(room.view, wanted.key) if there else None
        if header is None:
            self._missed(wanted)
        elif header.expired(self._wall()):
            self._discard(name, wanted, "expired")
            return None, in_time
        return header, in_time

    def _fill(self, name: str, wanted: Wanted, header: Header, slot: Slot, in_time: bool) -> None:
        """Write a slot, and seal it if all is as it was stored; else it is given back. `in_time`: the header was."""
        try:
            there = not header.form.nbytes or self._read_bytes(name, slot, header.form.nbytes)
        except StoreError as error:
            self._desk.give_back_later(slot, error.settles)
            self._desk.count("failed")
            self._judge(str(error))
            return
        except Altered:
            there = False
            self._discard(name, wanted, "altered")
        else:
            if not there:
                self._missed(wanted)  # removed in between
            elif in_time:
                self._judge(None)
        if there and not self._verify(header, slot):
            there = False
            self._discard(name, wanted, "altered")
        if not there:
            self._desk.give_back(slot)
            return
        try:
            self._seal(header, slot)
        except BrokerError:
            self._desk.count("refused")
        else:
            self._desk.count("hits")
            self._desk.count("get_bytes", header.form.nbytes)

    def _missed(self, wanted: Wanted) -> None:
        self._desk.count("misses")
        self._gone([wanted])

    def _look_at_the_clock(self, asked: float) -> bool:
        """Has the store answered in time?"""
        took = time.monotonic() - asked
        if took > self._patience:
            self._judge(f"the store took {took * 1e3:.0f} ms to say what it has")
        return took <= self._patience

    # --- the steps --------------------------------------------------------------------------------------------------

    def _exist(self, names: list[str]) -> list[bool]:
        return self._store.exist(names)

    def _read_header(self, name: str, address: int) -> bool:
        return self._store.read(name, 0, address, HEADER)

    def _read_bytes(self, name: str, slot: Slot, nbytes: int) -> bool:
        return self._store.read(name, HEADER, slot.place.address, nbytes)

    def _verify(self, header: Header, slot: Slot) -> bool:
        return tree_hash(slot.place.view, hashing.pool.map) == header.digest

    def _seal(self, header: Header, slot: Slot) -> None:
        self._desk.seal(slot, header.extra, header.cost)

    def _discard(self, name: str, wanted: Wanted, why: str) -> None:
        """An object that must not be served: whoever makes the feature stores it anew."""
        self._desk.count(why)
        self._gone([wanted])
        try:
            self._store.remove(name)
        except StoreError as error:
            self._judge(str(error))
