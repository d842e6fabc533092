"""Leases: from the right to write a slot to sealed content, or back; and promises, from which they may come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import MAX_EXTRA, Due, Failed, Item, Leased, Seal, Sealed, Sealing

from .books import Books
from .holds import Holds
from .pool import Slot
from .quotas import Quotas
from .records import Engine, Feature, Hold, Lease, Place, Promise, Session
from .seeking import Seeking


class Leases:
    def __init__(
        self, books: Books, quotas: Quotas, holds: Holds, landed: Callable[[Place, float], None]
    ) -> None:
        """`landed(place, now)` is called when nobody writes that key any more, or it is sealed."""
        self.books = books
        self.quotas = quotas
        self.holds = holds
        self.seeking = Seeking(books, quotas, self._promise, self._overtake)
        self._landed = landed
        self._numbers = count(1)
        self._feature_numbers = count(1)
        self.open: dict[int, Lease] = {}

    def grant(self, session: Session, item: Item, slot: Slot, engine: Engine | None, now: float) -> Leased:
        """A lease on a slot that was just allocated; the writer's descriptor goes first."""
        books = self.books
        place = (session.namespace, item.key)
        lease = Lease(next(self._numbers), session.number, place, item.form, slot, now, engine)
        self.open[lease.number] = lease
        session.leases[lease.number] = lease
        self.seeking.leased(lease, item.promise, session)
        if lease.awaited:
            books.flights.setdefault(place, []).append(lease)
        books.claim(session, place[0], slot)
        if engine is not None:
            engine.leases += 1
            engine.in_flight[slot.tier] += slot.nbytes
        books.send(session, slot, writable=True)
        books.counters["leases"] += 1
        books.figures.feature_bytes.observe(item.form.nbytes)
        return Leased(lease.number, slot.segment, slot.offset, slot.generation, slot.tier)

    def promise(self, session: Session, key: Key) -> Due:
        """A client's word that it will make what this key names."""
        self.books.counters["promises"] += 1
        return Due(self._promise(session, key).number)

    def _promise(self, session: Session, key: Key) -> Promise:
        place = (session.namespace, key)
        promise = Promise(next(self._numbers), session.number, place)
        session.promises[promise.number] = promise
        self.books.flights.setdefault(place, []).append(promise)
        self.books.claims[place[0]] += 1
        return promise

    def end_promise(self, session: Session, number: int, now: float) -> None:
        """It was kept, or is given back: nobody waits for it any more."""
        promise = session.promises.pop(number)
        self.books.close(promise.place[0])
        self.books.stirred = True
        self._leave(promise, now)

    def seal(
        self, session: Session, seq: int, call: Seal, engine: Engine | None, now: float, deadline: float
    ) -> None:
        """Make leases' contents visible. The first seal of a key wins; a later equal one gives its slot back.

        All or nothing: the call fails before anything is sealed. Leases that can never be sealed are taken back.
        """
        books = self.books
        numbers = [sealing.lease for sealing in call.leases]
        if len(set(numbers)) != len(numbers):
            books.respond(session, seq, Failed("InvalidMessage", "a lease is named twice in one seal"))
            return
        forms: dict[Place, Form] = {}
        for sealing in call.leases:
            number = sealing.lease
            lease = session.leases.get(number)
            if lease is None:
                text = f"lease {number} is not open: it was sealed, aborted, or never yours; create again"
                books.respond(session, seq, Failed("LeaseClosed", text))
                return
            if len(sealing.extra) > MAX_EXTRA:
                text = f"{len(sealing.extra)} bytes beside a feature exceed the limit of {MAX_EXTRA}: put less there"
                books.respond(session, seq, Failed("InvalidMessage", text, {"limit": MAX_EXTRA}))
                return
            taken = books.features.get(lease.place)
            first = forms.setdefault(lease.place, taken.form if taken is not None else lease.form)
            if first != lease.form:
                self.abort(session, [number], now)
                books.counters["conflicts"] += 1
                books.respond(session, seq, conflict(first, lease.form.nbytes))
                return
            sealing_into = taken or lease
            if engine is not None and (refusal := self.holds.unreachable([sealing_into], engine)):
                books.respond(session, seq, refusal)
                return
        if engine is not None and (
            refusal := self.quotas.side_door(engine, [session.leases[n] for n in numbers])
        ):
            books.respond(session, seq, refusal)
            return
        sealed: list[Hold] = []
        for sealing in call.leases:
            lease = session.leases[sealing.lease]
            feature = self._seal_one(session, lease, sealing, now)
            sealed.append(self.holds.claim(feature, session, engine, call.private, now))
            books.figures.lease_seconds.observe(now - lease.since)
            self._close(session, lease, now)
        books.counters["seals"] += len(sealed)
        self.holds.answer_when_acked(
            session,
            seq,
            engine,
            sealed,
            lambda: Sealed([hold.reference(books.boot) for hold in sealed]),
            lambda _: None,
            now,
            deadline,
        )

    def _seal_one(self, session: Session, lease: Lease, sealing: Sealing, now: float) -> Feature:
        books = self.books
        feature = books.features.get(lease.place)
        if feature is None:
            feature = Feature(
                next(self._feature_numbers), lease.place, lease.form, lease.slot, sealing.extra, sealing.cost
            )
            feature.maker = session.engine.name if session.engine is not None else ""
            books.enter(feature)
            self.seeking.sealed(feature, session)
            if sealing.retained:
                feature.pins.add(lease.number)
                session.pins[lease.number] = feature
        else:
            books.counters["seals_second"] += 1
            if sealing.retained:
                session.pins[lease.number] = lease.slot
            else:
                books.free(lease.slot, now)
        return feature

    def abort(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """Leases given back unwritten, and promises unkept."""
        for number in numbers:
            if number in session.promises:
                self.books.counters["promises_dropped"] += session.mover is None
                self.end_promise(session, number, now)
                continue
            lease = session.leases.get(number)
            if lease is None:
                self.books.counters["unknown_leases"] += 1
                continue
            self._close(session, lease, now)
            self.books.free(lease.slot, now)
            self.books.counters["aborts"] += 1

    def unpin(self, session: Session, numbers: Iterable[int], now: float) -> None:
        """The writer's tensors over these sealed leases' slots are gone."""
        for number in numbers:
            pinned = session.pins.pop(number, None)
            if pinned is None:
                self.books.counters["unknown_leases"] += 1
            elif isinstance(pinned, Slot):
                self.books.free(pinned, now)
            else:
                pinned.pins.discard(number)
                self.books.rest(pinned, now)

    def break_all(self, session: Session, now: float) -> None:
        """A writer's session ended: its slots are its own until its process is gone."""
        for lease in list(session.leases.values()):
            self._close(session, lease, now)
            session.quarantine.append(lease.slot)
            self.books.counters["leases_broken"] += 1
        for number in list(session.promises):
            self.books.counters["promises_broken"] += session.mover is None
            self.end_promise(session, number, now)

    def _close(self, session: Session, lease: Lease, now: float) -> None:
        del self.open[lease.number]
        del session.leases[lease.number]
        self.books.disclaim(session, lease.slot)
        self.books.close(lease.place[0])
        if lease.engine is not None:
            lease.engine.leases -= 1
            lease.engine.in_flight[lease.slot.tier] -= lease.slot.nbytes
            self.books.stirred = True
        self._leave(lease, now)

    def _leave(self, writer: Lease | Promise, now: float) -> None:
        """One writer of a key less."""
        self.seeking.left(writer, self.books.sessions[writer.session])
        if writer.awaited:
            self._unlist(writer, now)
        elif writer.place in self.books.features:
            self._landed(writer.place, now)

    def _overtake(self, writer: Lease | Promise, now: float) -> None:
        """Nobody waits for a writer any more. A promise is nothing else; a lease may still be sealed."""
        if isinstance(writer, Promise):
            self.end_promise(self.books.sessions[writer.session], writer.number, now)
        else:
            writer.awaited = False
            self._unlist(writer, now)
        self._landed(writer.place, now)

    def _unlist(self, writer: Lease | Promise, now: float) -> None:
        """Whoever waits for a key is told when nobody writes it any more, or when it is sealed."""
        writing = self.books.flights[writer.place]
        writing.remove(writer)
        if not writing:
            del self.books.flights[writer.place]
        if not writing or writer.place in self.books.features:
            self._landed(writer.place, now)


def conflict(form: Form, nbytes: int) -> Failed:
    """The key is taken by a feature of another form, this one."""
    return Failed(
        "DigestConflict",
        f"the key is taken by a feature of other form ({form.modality}, {form.dtype} {tuple(form.shape)}, "
        f"{form.nbytes} bytes), which stays; use another key, or a content key (key=None)",
        {"requested": nbytes, "existing": form.nbytes},
    )
