"""What a client has of the broker's: holds, leases and tables, of which session; and how it gives them back."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from mmbroker.proto.errors import BrokerError, InvalidMessage
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import (
    Abort,
    Ack,
    Body,
    Detach,
    Drop,
    Grant,
    Item,
    Leased,
    Lookup,
    Offer,
    Released,
    Reply,
    Seal,
    Sealed,
    Sealing,
    Tally,
    Unpin,
)
from mmbroker.proto.reference import Reference

from . import cuda
from .connection import Connection
from .cuda import DriverError
from .gpu import Gpu
from .handles import Held, Lease, Slot
from .link import Link
from .path import PATIENCE
from .table import FeatureTable

#: How often the receiver thread looks at tensors that outlived their lease, in seconds.
_WATCH: Final = 0.02
#: How often counters are told to the broker, in seconds.
_TALLY: Final = 1.0
#: How long each step of an orderly end may take, in seconds.
_FAREWELL: Final = 1.0

R = TypeVar("R", bound=Reply)


class Belongings:
    """Of one client, through all its sessions. Thread-safe; the link's hooks run in the receiver thread."""

    def __init__(self, link: Link, extra_stats: Callable[[], dict[str, int]]) -> None:
        self.link = link
        self.tables: list[FeatureTable] = []
        self._extra_stats = extra_stats
        self._holds: dict[tuple[int, int], Held] = {}  # by session and number
        self._leases: dict[tuple[int, int], weakref.ref[Lease]] = {}  # likewise, while they may write
        self._retained: deque[tuple[Slot, list[Body]]] = deque()  # what to say once their tensors are gone
        self._boot = link.boot
        self._lost: list[int] = []  # earlier sessions with this life of the broker
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._told: dict[str, int] = {}
        self._next_tally = 0.0
        self._gpus: dict[str, Gpu] = {}  # by UUID
        link.on_granted = self._granted
        link.on_offered = self._offered
        link.on_retired = self._retired
        link.on_device_lease = self._device_lease
        link.on_ended = self._ended
        link.on_dismissed = self._dismissed
        link.on_broken = self._broken
        link.on_lost = self._session_lost
        link.on_connected = self._reconnected
        link.on_closing = self._take_leave
        link.chores = self._chores

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(
        self, call: Body, kind: type[R], timeout: float | None, connection: Connection | None = None
    ) -> tuple[R, Connection]:
        """The answer to a batch call, checked: of its kind, with one result an item."""
        started = time.perf_counter_ns()
        reply, used = self.link.exchange(call, timeout, connection)
        self.count(calls=1, wait_us=(time.perf_counter_ns() - started) // 1000)
        if not isinstance(reply, kind) or len(_items(reply)) != len(_items(call)):
            raise InvalidMessage(
                f"the broker answered a {type(call).__name__} with a {type(reply).__name__} that does not fit: "
                "install the same mmbroker on both sides"
            )
        return reply, used

    # --- holds and leases -------------------------------------------------------------------------------------------

    def hold(self, key: Key, ref: Reference, connection: Connection, extra: bytes = b"") -> Held:
        """A hold that the broker has just given."""
        held = Held(self, key, ref, connection.session, extra)
        self._holds[held.session, ref.hold] = held
        return held

    def drop(self, held: Held) -> None:
        """End a hold, once. Never waits."""
        if self.link.forked:
            self.link.check()
        if self._holds.pop((held.session, held.ref.hold), None) is not None:
            self.link.cast(Drop([held.ref.hold]), held.session)

    def lease(
        self,
        connection: Connection,
        leased: Leased,
        item: Item,
        to: str | None = None,
        private: bool = False,
    ) -> Lease:
        """A lease that the broker has just given for an item."""
        lease = Lease(self, connection, leased, item, to, private)
        self._leases[connection.session, lease.number] = weakref.ref(lease)
        return lease

    def seal(
        self,
        leases: list[Lease],
        to: str | None,
        private: bool,
        timeout: float | None,
    ) -> list[Held]:
        """Seal leases of one connection. If that fails they are aborted."""
        connection = leases[0].connection
        slots = [lease.end() for lease in leases]
        retained = [slot.retained for slot in slots]
        call = Seal(
            [
                Sealing(slot.lease, kept, lease.extra, lease.cost)
                for lease, slot, kept in zip(leases, slots, retained, strict=True)
            ],
            to,
            private,
        )
        sealed: Sealed | None = None
        try:
            sealed, _ = self.ask(call, Sealed, timeout, connection)
        finally:
            for slot, kept in zip(slots, retained, strict=True):
                # After a failure they may be sealed or not: the word that does not fit is ignored.
                unwritten = [] if sealed else [Abort([slot.lease])]
                self.lease_over(slot, [*unwritten, *([Unpin([slot.lease])] if kept else [])])
        return [
            self.hold(lease.key, ref, connection, lease.extra)
            for lease, ref in zip(leases, sealed.refs, strict=True)
        ]

    def lease_over(self, slot: Slot, words: list[Body]) -> None:
        """Tell the broker that a slot is ours no more, once the last tensor over it is gone. Never waits."""
        self._leases.pop((slot.session, slot.lease), None)
        if (words and not self._told_over(slot, words)) or slot.session in self._lost:
            self.link.wake()  # to look after it from now on, or to say that nothing is left of its session

    def _told_over(self, slot: Slot, words: list[Body]) -> bool:
        if retained := slot.retained:
            self._retained.append((slot, words))
        else:
            for word in words:
                self.link.cast(word, slot.session)
        return not retained

    def gpu(self, uuid: str) -> Gpu:
        """This client's use of a GPU."""
        found = self._gpus.get(uuid)
        if found is None:
            found = self._gpus[uuid] = Gpu(cuda.open_driver(), uuid, self.link)
        return found

    def attach(self, table: FeatureTable, timeout: float | None) -> None:
        """Become a rank. In the receiver thread, which then does not lose the session halfway and attach the table to
        the next one, for a caller that was told that it failed."""
        seconds = self.link.timeout if timeout is None else timeout
        try:
            self.link.run(lambda: self._attach(table, timeout), seconds + PATIENCE + 1.0)
        except BaseException:
            table.give_up()
            raise

    def _attach(self, table: FeatureTable, timeout: float | None) -> None:
        if any(other.attached for other in self.tables):
            raise BrokerError(
                "this client is attached already: close its table first, or connect another client"
            )
        self.tables.append(table)
        try:
            table.attach(timeout)
        except BaseException:
            self.tables.remove(table)
            self.detach()  # the broker may have attached it, or will
            raise

    def detach(self) -> None:
        """Be no rank any more, unless of a table that is open. In the receiver thread."""
        if not any(table.attached for table in self.tables):
            self.link.cast(Detach())

    # --- counters ---------------------------------------------------------------------------------------------------

    def count(self, **counts: int) -> None:
        """Not for finalisers: it takes a lock."""
        with self._counting:
            self._counts.update(counts)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is open now."""
        counts = {
            **self._counts,
            "holds": len(self._holds),
            "open_leases": len(self._leases),
            "retained": len(self._retained),
            "reconnects": self.link.reconnects,
            "late_answers": self.link.late_answers,
            **self._extra_stats(),
        }
        for table in list(self.tables):
            for name, value in table.stats().items():
                counts[f"table_{name}"] = counts.get(f"table_{name}", 0) + value
        return counts

    # --- in the receiver thread -------------------------------------------------------------------------------------

    def _granted(self, grants: list[Grant], dismissed: list[int]) -> None:
        if self.tables:
            self.tables[-1].granted(grants, dismissed)
        else:  # the last one was closed, which the broker had not read yet
            self.link.cast(Ack([], [grant.ref.hold for grant in grants], "its table is closed"))
        if dismissed:
            for table in self.tables[:-1]:
                table.dismissed(dismissed)
            self._watch_lost()

    def _offered(self, offers: list[Offer]) -> None:
        if self.tables:
            self.tables[-1].offered(offers)

    def _device_lease(self, segment: int) -> None:
        """A lease on the device has come: its writer shall find the segment mapped."""
        self.gpu(self.link.device).maps(segment)

    def _retired(self, segments: list[int]) -> None:
        for gpu in self._gpus.values():
            gpu.retire(segments)

    def _ended(self) -> None:
        """The receiver thread's last act."""
        for table in list(self.tables):
            table.end()
        for gpu in self._gpus.values():
            gpu.close()

    def _dismissed(self, holds: list[int]) -> None:
        for table in list(self.tables):
            table.dismissed(holds)
        self._watch_lost()

    def _watch_lost(self) -> None:
        """Something has come to its end: if it was the last of a lost session, the broker waits for that word."""
        if self._lost:
            self.link.remind()

    def _broken(self, leases: list[int]) -> None:
        session = self.link.session
        for number in leases:
            watch = self._leases.get((session, number))
            lease = None if watch is None else watch()
            if lease is not None:
                lease.broken = True

    def _session_lost(self, session: int) -> None:
        self._lost += [session, *(word.session for word in self.link.unheard if isinstance(word, Released))]
        for key in [key for key in list(self._holds) if key[0] == session]:
            self._holds.pop(key, None)
        for table in list(self.tables):
            table.lost(session)
        for gpu in self._gpus.values():
            gpu.forget()

    def _reconnected(self) -> None:
        if self.link.boot != self._boot:
            self._boot = self.link.boot
            self._lost.clear()
        for table in list(self.tables):
            table.attach()
        self._told = {}
        self._watch_lost()

    def _chores(self, now: float) -> float:
        pause = _TALLY
        for table in list(self.tables):
            pause = min(pause, table.chores(now))
            if table.empty:
                self.tables.remove(table)
        for gpu in self._gpus.values():
            gpu.sweep()
        if self._retained:
            pause = _WATCH
            for _ in range(len(self._retained)):
                self._told_over(*self._retained.popleft())
        for session in list(self._lost) if self.link.connected else ():
            if not self._touches(session):
                self._lost.remove(session)
                self.link.cast(Released(session))
        if now >= self._next_tally and self.link.connected:
            self._next_tally = now + _TALLY
            counts = self.stats()
            if counts != self._told:
                self._told = counts
                self.link.cast(Tally(counts))
        return pause

    def _touches(self, session: int) -> bool:
        """Can anything of a session that is over still be read or written by this process?"""
        return (
            any(key[0] == session for key in list(self._leases))
            or any(slot.session == session for slot, _ in list(self._retained))
            or any(table.touches(session) for table in list(self.tables))
        )

    def _take_leave(self) -> None:
        """Give everything back, and wait until the broker has read it: what is still in a socket at its end is lost.

        A broker that is late to one step may be in time for the next.
        """
        for table in list(self.tables):
            with suppress(BrokerError):
                table.close(_FAREWELL)
        for watch in list(self._leases.values()):
            lease = watch()
            if lease is not None:
                lease.abort()
        for table in list(self.tables):
            table.fence()  # to be passed once all readers are waited for
        for gpu in self._gpus.values():
            with suppress(DriverError):
                gpu.await_copies()
                gpu.await_readers()
        with suppress(BrokerError):
            self._chores(time.monotonic())
        holds = iter([hold for session, hold in list(self._holds) if session == self.link.session])
        while batch := list(islice(holds, 4096)):
            self.link.cast(Drop(batch))
        self._holds.clear()
        self.link.call(Lookup([]), _FAREWELL)


def _items(message: msgspec.Struct) -> Sequence[Any]:
    """What batch calls and their answers have item by item: their first field."""
    items: Sequence[Any] = getattr(message, message.__struct_fields__[0])
    return items
