"""Seeking: what nobody here has is asked for beyond this machine, for a moment; and what is made here is told there.

One session of a namespace moves features to and from a store (`Tier`). A key that is asked for and that nobody has
becomes its promise: whoever asks waits for it as for any other client, but only until `Mover.wait` is over. Then the
promise ends; if a lease has taken its place, the lease goes on and nobody waits for it. So whatever the mover does, or
fails to do, costs no more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.messages import Tier, Wanted, Worth

from .books import Books
from .quotas import Quotas
from .records import Feature, Lease, Mover, Place, Promise, Request, Seek, Session

#: Longest time that anybody waits for a mover, in seconds.
MOST_WAIT: Final = 10.0
#: What is counted: keys sought, and of these found, not there, or not in time; keys not sought because the mover was
#: busy; features it was told of, and those that were too many.
COUNTS: Final = ("sought", "found", "absent", "late", "busy", "fresh", "fresh_dropped")
#: So many features a mover is told of until it says a word, whatever it is: one that has stopped is not told for ever.
TOLD: Final = 4096


class Seeking:
    def __init__(
        self,
        books: Books,
        quotas: Quotas,
        promise: Callable[[Session, Key], Promise],
        overtake: Callable[[Lease | Promise, float], None],
    ) -> None:
        """`promise` makes a promise of that session; `overtake` has nobody wait for a writer any more."""
        self.books = books
        self.quotas = quotas
        self.movers: dict[str, Mover] = {}  # by namespace
        self._promise = promise
        self._overtake = overtake

    # --- the mover --------------------------------------------------------------------------------------------------

    def say(self, session: Session, call: Tier) -> str:
        """A session is the mover of its namespace from now on, or says it again. Returns why not, if so."""
        if not 0 < call.wait <= MOST_WAIT:  # not a number, too
            return f"wait is a number of seconds above 0 and at most {MOST_WAIT:g}, not {call.wait}"
        if call.most < 1 or call.reuse < 1:
            return f"most and reuse are at least 1, not {call.most} and {call.reuse}"
        mover = session.mover
        if mover is None:
            first = self.movers.get(session.namespace)
            if first is not None:
                return (
                    f"{first.session.name!r} (pid {first.session.pid}) is the tier of namespace "
                    f"{session.namespace!r}: end it first, or serve another namespace"
                )
            if session.features or session.requests or session.engine is not None:
                return "this session is at work already: say that it is a tier before anything else"
            mover = session.mover = self.movers[session.namespace] = Mover(session)
        mover.open, mover.wait, mover.most, mover.reuse = call.open, call.wait, call.most, call.reuse
        return ""

    def heard(self, session: Session) -> None:
        """A session has said a word: if it is a mover, it is alive."""
        if session.mover is not None:
            session.mover.vain = session.mover.told = 0

    def end(self, session: Session) -> None:
        """A session ends. Its promises and leases do as all do."""
        if session.mover is not None:
            del self.movers[session.namespace]

    # --- keys that nobody has ---------------------------------------------------------------------------------------

    def awaited(self, request: Request, place: Place, now: float) -> bool:
        """Does a call for this key, which is missing, wait for the mover? It is sought if nobody has done so.

        A call waits for all that is sought when it comes, even if it is going to be promised the rest; and so for
        `Mover.wait` in all, however often it is looked at. It does not if its own deadline comes first, as it would
        miss what it gets without a tier.
        """
        mover = self.movers.get(request.namespace)
        if mover is None or place[1].kind is not Kind.DERIVED or request.session == mover.session.number:
            return False
        assert request.timer is not None
        seek = mover.sought.get(place)
        due = now + mover.wait if seek is None else seek.due
        if due > request.since + mover.wait or due >= request.timer.when:
            return False
        if seek is None:
            fresh = not request.waited and place not in self.books.flights
            return fresh and self._seek(mover, place, due)
        return seek.writer.awaited

    def _seek(self, mover: Mover, place: Place, due: float) -> bool:
        """Ask for a key, unless the mover is closed, or has as much to do as it can."""
        if not mover.open:
            return False
        full = len(mover.sought) >= mover.most or mover.vain >= mover.most
        if full or not self.quotas.may_promise(mover.session):
            self._count(mover, "busy")
            return False
        promise = self._promise(mover.session, place[1])
        timer = self.books.timers.at(due, lambda at: self._late(seek, at))
        seek = mover.sought[place] = Seek(mover, promise, due, timer)
        self.books.out.sought(mover.session.number, Wanted(place[1], promise.number))
        self._count(mover, "sought")
        return True

    def _late(self, seek: Seek, now: float) -> None:
        """Whoever waits goes on as if there were no tier."""
        seek.mover.vain += 1
        self._count(seek.mover, "late")
        self._overtake(seek.writer, now)

    def leased(self, lease: Lease, promise: int, session: Session) -> None:
        """A mover writes: others wait for it if it keeps the promise of what was sought, so in time."""
        if session.mover is not None:
            seek = session.mover.sought.get(lease.place)
            lease.awaited = seek is not None and seek.writer is session.promises.get(promise)
            if seek is not None and lease.awaited:
                seek.writer = lease

    def left(self, writer: Lease | Promise, session: Session) -> None:
        """A writer is one no more: if it is what a mover was asked for, that has come to its end."""
        seek = session.mover.sought.get(writer.place) if session.mover is not None else None
        if seek is None or seek.writer is not writer:
            return
        del seek.mover.sought[writer.place]
        if seek.timer.action is not None:
            seek.timer.cancel()
            self._count(seek.mover, "found" if writer.place in self.books.features else "absent")

    # --- features that were made here -------------------------------------------------------------------------------

    def sealed(self, feature: Feature, session: Session) -> None:
        """A key has its feature: from beyond this machine, or else it may be worth storing there."""
        if session.mover is not None:
            feature.fetched = True
        else:
            self._tell(feature)

    def hit(self, feature: Feature) -> None:
        """A feature has been found once more."""
        mover = self.movers.get(feature.place[0])
        if mover is not None and feature.hits == mover.reuse:
            self._tell(feature)

    def _tell(self, feature: Feature) -> None:
        namespace, key = feature.place
        mover = self.movers.get(namespace)
        if mover is None or not mover.open or feature.fetched or key.kind is not Kind.DERIVED:
            return
        if feature.slot.tier != "host":
            return  # it reads no device
        if mover.told >= TOLD:
            self._count(mover, "fresh_dropped")
            return
        mover.told += 1
        self._count(mover, "fresh")
        worth = Worth(key, feature.form.nbytes, feature.cost, feature.hits)
        self.books.out.fresh(mover.session.number, worth)

    def _count(self, mover: Mover, what: str) -> None:
        """For `status` and for `metrics`, whose counters outlive the mover."""
        mover.counts[what] += 1
        self.books.counters[f"tier_{what}"] += 1
