"""Device replicas: which rank loads what where, who shares it, and who gets room that comes free.

A rank on the device that the broker serves is granted a feature together with a place on the device. The first one is
told to load it there; grants to others are held back until it is loaded. A rank without room gets the host replica, and
is offered a place, in order of arrival, when there is one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from mmbroker.proto.messages import DevicePlace, Offer, Offered

from .books import Books
from .events import Notify
from .records import Hold, Rank, Replica, Session
from .room import Room


class Replicas:
    def __init__(
        self, books: Books, room: Room, grant: Callable[[Hold, Session, DevicePlace | None, float], None]
    ) -> None:
        """`grant` sends a grant that was held back."""
        self.books = books
        self.room = room
        self._grant = grant
        self.wanting: OrderedDict[tuple[int, int], Hold] = (
            OrderedDict()
        )  # (hold, session) without room, in order

    # --- grants -----------------------------------------------------------------------------------------------------

    def place(self, hold: Hold, session: Session, now: float) -> DevicePlace | Rank | None:
        """Where a rank finds a feature on the device; None: only on the host; `Rank.DEFERRED`: not yet."""
        feature = hold.feature
        if not session.gpu or not feature.slot.segment or feature.slot.tier == "device":
            return None
        if hold.private or session.access == "copy":
            return None  # such a rank makes a copy of its own from the host's
        replica = feature.replica
        if replica is None:
            return None if session.lazy else self._load_or_want(hold, session, now)
        if not replica.ready:
            replica.waiting.append((hold, session.number))
            return Rank.DEFERRED
        return self._share(replica, hold, session)

    def loaded(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """The loader's word that its copies are complete: whoever waited gets them too."""
        for number in numbers:
            replica = session.replicas.get(number)
            if replica is None or replica.ready or replica.loader != session.number:
                self.books.counters["unknown_holds"] += 1
                continue
            replica.ready = True
            self.books.counters["loads"] += 1
            self.books.figures.load_seconds.observe(now - replica.since)
            waiting, replica.waiting = replica.waiting, []
            self._serve(waiting, now)

    def release(self, session: Session, number: int, now: float) -> None:
        """A rank can no longer touch the device replica of this hold: it has settled, or parked it."""
        self.wanting.pop((number, session.number), None)
        replica = session.replicas.pop(number, None)
        if replica is None:
            return
        replica.pins.discard((number, session.number))
        if replica.pins:
            return
        if replica.ready:
            self.books.rest_replica(replica, now)
        else:
            self._lost(replica, now)
            self.books.free(replica.slot, now)

    def loader_ended(self, session: Session, now: float) -> None:
        """A session ended, its process may live: what it was loading is its own until then, and another loads anew."""
        for key in [key for key in self.wanting if key[1] == session.number]:
            del self.wanting[key]
        for number, replica in list(session.replicas.items()):
            if not replica.ready:
                del session.replicas[number]
                session.quarantine.append(replica.slot)
                self._lost(replica, now)

    def _lost(self, replica: Replica, now: float) -> None:
        """A replica that will never be loaded: whoever waited for it starts over."""
        replica.pins.clear()
        replica.feature.replica = None
        self.books.counters["loads_lost"] += 1
        waiting, replica.waiting = replica.waiting, []
        self._serve(waiting, now)

    def _serve(self, waiting: list[tuple[Hold, int]], now: float) -> None:
        """Grants that were held back, and offers to ranks that have the host replica meanwhile."""
        for hold, number in waiting:
            session = self.books.sessions.get(number)
            rank = hold.ranks.get(number)
            if session is None or hold.over or rank is None or rank is Rank.DETACHED:
                continue
            if rank is Rank.DEFERRED:
                place = self.place(hold, session, now)
                if not isinstance(place, Rank):
                    self._grant(hold, session, place, now)
            else:
                self.wanting[hold.number, number] = hold
                self.books.stirred = True

    def _share(self, replica: Replica, hold: Hold, session: Session) -> DevicePlace:
        self.books.wake_replica(replica)
        replica.pins.add((hold.number, session.number))
        session.replicas[hold.number] = replica
        self.books.send(session, replica.slot, writable=True)
        return DevicePlace(replica.slot.segment, replica.slot.offset, load=False)

    def _load(self, hold: Hold, session: Session, now: float) -> DevicePlace | None:
        feature = hold.feature
        slots = self.room.allocate(feature.place[0], [feature.form.nbytes], [], now)
        if slots is None:
            return None
        replica = feature.replica = Replica(feature, slots[0], session.number, now)
        replica.pins.add((hold.number, session.number))
        session.replicas[hold.number] = replica
        self.books.send(session, replica.slot, writable=True)
        return DevicePlace(replica.slot.segment, replica.slot.offset, load=True)

    def _load_or_want(self, hold: Hold, session: Session, now: float) -> DevicePlace | None:
        """In line: what can be had now is for those who came before, but what cannot is nobody's obstacle."""
        if not self._fits(hold):
            self.books.counters["device_too_large"] += 1
            return None
        before = any(self._possible(other) for other in self.wanting.values())
        place = None if before else self._load(hold, session, now)
        if place is None:
            self.books.counters["device_full"] += 1
            self.wanting[hold.number, session.number] = hold
        return place

    def _fits(self, hold: Hold) -> bool:
        """Is it on the host only, and could the device ever have it?"""
        feature = hold.feature
        on_host = feature.slot.segment and feature.slot.tier == "host"
        return bool(on_host) and self.room.fits(feature.form.nbytes)

    def _possible(self, hold: Hold) -> bool:
        return self.room.possible(hold.feature.place[0], hold.feature.form.nbytes)

    # --- later ------------------------------------------------------------------------------------------------------

    def park(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """The device replica is not needed for now; the grant goes on with the host's."""
        for number in numbers:
            if number in session.replicas:
                self.books.counters["parked"] += 1
            self.release(session, number, now)

    def want(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """A rank takes again what it had parked, or takes for the first time what it loads late."""
        for number in numbers:
            hold = session.grants.get(number)
            if hold is None or hold.over or number in session.replicas:
                self.books.counters["unknown_holds"] += 1
            elif session.gpu and self._fits(hold):
                self.wanting[number, session.number] = hold
                self.books.stirred = True

    def moved(self, session: Session) -> None:
        """A rank that was granted features on the host can have them on the device from now on."""
        if session.lazy or session.access == "copy":
            return
        for number, hold in session.grants.items():
            if not (hold.over or hold.private or number in session.replicas) and self._fits(hold):
                self.wanting[number, session.number] = hold

    def offer(self, now: float) -> None:
        """Give room that has come free to the ranks that want it, in order of arrival."""
        offers: dict[int, list[Offer]] = {}
        served: list[tuple[int, int]] = []
        for (number, session_number), hold in self.wanting.items():
            session = self.books.sessions.get(session_number)
            place: DevicePlace | None = None
            wants = session_number in hold.ranks and not hold.over
            if session is not None and not session.ended and wants and number not in session.replicas:
                replica = hold.feature.replica
                if replica is None:
                    place = self._load(hold, session, now)
                    if place is None:
                        if self._possible(hold):
                            break
                        continue
                elif replica.ready:
                    place = self._share(replica, hold, session)
                else:
                    replica.waiting.append((hold, session_number))
            served.append((number, session_number))
            if place is not None:
                offers.setdefault(session_number, []).append(Offer(number, place))
        for key in served:
            del self.wanting[key]
        for session_number, places in offers.items():
            self.books.counters["offers"] += len(places)
            self.books.out.add(Notify(session_number, Offered(places)))
