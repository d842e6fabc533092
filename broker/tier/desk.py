"""The mover's side of the broker: what it was promised and told, and the slots that it may read and write.

It is a client as any other, without torch. What is sought and what is fresh is passed on in the receiver thread, which
must not wait; everything else is asked for by the threads that do the work. To read a feature it is granted it, as the
only rank of an engine of its own, so that the slot stays as it is for as long.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from mmbroker.connection import Connection
from mmbroker.link import Link
from mmbroker.proto.errors import BrokerError, FeatureMissing, InvalidMessage
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import (
    Abort,
    Ack,
    Attach,
    Attached,
    Create,
    Created,
    Detach,
    Drop,
    Found,
    Grant,
    Hit,
    Item,
    Leased,
    Lookup,
    Released,
    Seal,
    Sealed,
    Sealing,
    Settle,
    Tally,
    Tier,
    Wanted,
    Worth,
)

from .registry import Place, Registry
from .store import StoreError

log = logging.getLogger("mmbroker")

#: The engine that the mover reads as.
ENGINE: Final = "tier"
#: How long the broker may take to answer, in seconds.
PATIENCE: Final = 2.0
_TALLY: Final = 1.0
#: How long each step of an orderly end may take, in seconds.
_FAREWELL: Final = 1.0

_NOTHING: Final = Place(memoryview(b""), 0)


@dataclass(frozen=True)
class Terms:
    """What the broker is told of the tier: see `proto.messages.Tier`."""

    wait: float = 0.02
    most: int = 64
    reuse: int = 1


@dataclass
class Granted:
    """A feature that may be read, until it is `over` and nobody reads it."""

    grant: Grant
    place: Place
    reading: bool = False
    over: bool = False

    @property
    def form(self) -> Form:
        ref = self.grant.ref
        return Form(ref.dtype, ref.shape, ref.nbytes, self.grant.modality, ref.parts)


@dataclass
class Slot:
    """A lease of one session: `place` is to be written, and then sealed or given back."""

    connection: Connection
    lease: int
    place: Place


class Desk:
    """Thread-safe. `on_sought` and `on_fresh` are called in the receiver thread; the former with the session's
    connection."""

    def __init__(self, link: Link, registry: Registry, terms: Terms) -> None:
        self.link = link
        self._counts: Counter[str] = Counter()
        self.on_sought: Callable[[Connection, list[Wanted]], None] = lambda *_: None
        self.on_fresh: Callable[[list[Worth]], None] = lambda *_: None
        self._registry = registry
        self._terms = terms
        self._open = True
        self._lock = threading.Lock()
        self._granted: dict[tuple[int, int], Granted] = {}  # by session and hold
        self._touched: Counter[int] = Counter()  # by session: slots that somebody here may touch
        self._lost: list[int] = []  # earlier sessions with this life of the broker
        self._boot = link.boot
        self._late: list[tuple[float, Slot]] = []  # to be given back at a time, the first first
        self._told: dict[str, int] = {}
        self._next_tally = 0.0
        link.on_granted = self._grant
        link.on_dismissed = self._dismiss
        link.on_sought = lambda wanted: self.on_sought(link.connection, wanted)
        link.on_fresh = lambda features: self.on_fresh(features)
        link.on_lost = self._session_lost
        link.on_connected = self._introduce
        link.on_closing = self._take_leave
        link.chores = self._chores
        link.run(self._introduce, PATIENCE + 1)

    # --- what it is -------------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        """To a new session, in the receiver thread."""
        if self.link.boot != self._boot:
            self._boot = self.link.boot
            self._lost.clear()
        self._told = {}
        self.link.call(self._tier(), PATIENCE)
        answer = self.link.call(Attach(ENGINE, 0, 1, access="readonly"), PATIENCE)
        if not isinstance(answer, Attached):
            raise InvalidMessage(f"the broker answered an Attach with a {type(answer).__name__}")

    def tell(self, is_open: bool) -> None:
        """Have things sought or not. Never waits."""
        self._open = is_open
        self.link.cast(self._tier())

    def _tier(self) -> Tier:
        return Tier(self._open, self._terms.wait, self._terms.most, self._terms.reuse)

    def count(self, name: str, number: int = 1) -> None:
        """Counters of this client: the broker shows them beside its own."""
        with self._lock:
            self._counts[f"tier_{name}"] += number

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    # --- reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, key: Key) -> Iterator[tuple[Granted, bytes] | None]:
        """A feature and what was sealed beside it, to be read within; None: it is gone. Raises `BrokerError`."""
        found, connection = self.link.exchange(Lookup([key], ENGINE), PATIENCE)
        if not isinstance(found, Found) or len(found.refs) != 1:
            raise InvalidMessage(
                f"the broker answered a Lookup with a {type(found).__name__} that does not fit"
            )
        ref = found.refs[0]
        if ref is None:
            yield None
            return
        session = connection.session
        number = (session, ref.hold)
        try:
            with self._lock:
                granted = self._granted.get(number)
                if granted is None:
                    raise FeatureMissing("the session ended before the feature was read")
                granted.reading = True
                self._touched[session] += 1
            try:
                yield granted, (found.extras or [b""])[0]
            finally:
                with self._lock:
                    granted.reading = False
                    self._touched[session] -= 1
                    over = granted.over
                if over:
                    self.link.cast(Settle([ref.hold]), session)
        finally:
            self.link.cast(Drop([ref.hold]), session)

    def _grant(self, grants: list[Grant], dismissed: list[int]) -> None:
        entered: list[int] = []
        failed: list[int] = []
        reason = ""
        session = self.link.session
        for grant in grants:
            hold = grant.ref.hold
            try:
                place = self._place(grant)
            except (BrokerError, OSError) as error:
                failed.append(hold)
                reason = f"{type(error).__name__}: {error}"
            else:
                with self._lock:
                    self._granted[session, hold] = Granted(grant, place)
                entered.append(hold)
        self.link.cast(Ack(entered, failed, reason, self._settled(dismissed)))

    def _place(self, grant: Grant) -> Place:
        if not grant.ref.nbytes:
            return _NOTHING
        if grant.tier != "host":
            raise StoreError("a feature that is on the device only cannot be stored from here")
        return self._registry.place(self.link.segment(grant.segment, False), grant.offset, grant.ref.nbytes)

    def _dismiss(self, holds: list[int]) -> None:
        if settled := self._settled(holds):
            self.link.cast(Settle(settled))

    def _settled(self, holds: list[int]) -> list[int]:
        """Those of the dismissed holds that nobody reads; the others are settled by their reader."""
        settled = []
        with self._lock:
            for hold in holds:
                granted = self._granted.pop((self.link.session, hold), None)
                if granted is not None and granted.reading:
                    granted.over = True
                else:
                    settled.append(hold)
        return settled

    # --- writing ----------------------------------------------------------------------------------------------------

    def lease(self, connection: Connection, wanted: Wanted, form: Form) -> Slot | None:
        """A slot for a feature that was promised, or None: somebody has made it meanwhile. Raises `LeaseClosed` if the
        wait for it is over, `PoolFull`, other `BrokerError`s. `seal`, `give_back` or `give_back_later` ends it."""
        item = Item(wanted.key, form, wanted.promise)
        answer, _ = self.link.exchange(Create([item]), max(self._terms.wait, 0.05), connection)
        if not isinstance(answer, Created) or len(answer.results) != 1:
            raise InvalidMessage(
                f"the broker answered a Create with a {type(answer).__name__} that does not fit"
            )
        result = answer.results[0]
        if isinstance(result, Hit):
            self.link.cast(Drop([result.ref.hold]), connection.session)
        if not isinstance(result, Leased):
            return None
        with self._lock:
            self._touched[connection.session] += 1
        slot = Slot(connection, result.lease, _NOTHING)
        try:
            if form.nbytes:
                slot.place = self._registry.place(
                    connection.mapped(result.segment), result.offset, form.nbytes
                )
        except BaseException:
            self.give_back(slot)
            raise
        return slot

    def seal(self, slot: Slot, extra: bytes, cost: int | None) -> None:
        """Make it visible: it was verified. Raises `BrokerError`; the slot is over in any case."""
        session = slot.connection.session
        try:
            call = Seal([Sealing(slot.lease, False, extra, cost)])
            answer, _ = self.link.exchange(call, PATIENCE, slot.connection)
            if isinstance(answer, Sealed):
                self.link.cast(Drop([ref.hold for ref in answer.refs]), session)
        except BaseException:
            self.link.cast(Abort([slot.lease]), session)  # ignored, if it was sealed
            raise
        finally:
            self._untouch(slot)

    def give_back(self, slot: Slot) -> None:
        """Unwritten: nothing writes there any more."""
        self.link.cast(Abort([slot.lease]), slot.connection.session)
        self._untouch(slot)

    def give_back_later(self, slot: Slot, seconds: float) -> None:
        """The store has failed while it wrote there, and may still do so for a while; for ever, if that is so long."""
        if seconds == math.inf:
            nbytes = slot.place.view.nbytes
            log.warning(
                "mmbroker tier: %d bytes are kept until this process ends: the store may write there", nbytes
            )
        with self._lock:
            insort(self._late, (time.monotonic() + seconds, slot), key=itemgetter(0))
        self.link.remind()

    def decline(self, connection: Connection, wanted: Sequence[Wanted]) -> None:
        """Give promises back: the store has not got these. Never waits.

        All that are known to be absent in one go: who has asked for several is told to make the first ones then."""
        if wanted:
            self.link.cast(Abort([one.promise for one in wanted]), connection.session)

    def _untouch(self, slot: Slot) -> None:
        slot.place = _NOTHING
        with self._lock:
            self._touched[slot.connection.session] -= 1
        if slot.connection.session in self._lost:
            self.link.wake()

    # --- in the receiver thread -------------------------------------------------------------------------------------

    def _session_lost(self, session: int) -> None:
        self._lost += [session, *(word.session for word in self.link.unheard if isinstance(word, Released))]
        with self._lock:
            for number in [number for number in self._granted if number[0] == session]:
                del self._granted[number]

    def _take_leave(self) -> None:
        """Give everything back, and wait until the broker has read it: what is still in a socket at its end is lost."""
        self._next_tally = 0.0
        self._chores(time.monotonic())
        self.link.call(Detach(), _FAREWELL)  # before its answer comes what ends the holds that were dropped
        session = self.link.session
        with self._lock:
            mine = [hold for number, hold in self._granted if number == session]
        if settled := self._settled(mine):
            self.link.cast(Settle(settled))
        self.link.call(Lookup([]), _FAREWELL)

    def _chores(self, now: float) -> float:
        pause = _TALLY
        while self._late and self._late[0][0] <= now:
            with self._lock:
                _, slot = self._late.pop(0)
            self.give_back(slot)
        if self._late:
            pause = min(pause, self._late[0][0] - now)
        if not self.link.connected:
            return pause
        for session in list(self._lost):
            with self._lock:
                touched = self._touched[session]
                if not touched:
                    del self._touched[session]
            if not touched:
                self._lost.remove(session)
                self.link.cast(Released(session))
        if now >= self._next_tally:
            self._next_tally = now + _TALLY
            if (counts := self.stats()) != self._told:
                self._told = counts
                self.link.cast(Tally(counts))
        return pause
