"""Admission: who gets a slot or a hit now, and who waits for what.

A create is served whole or waits whole, and holds nothing while it waits. It waits for room in the arena (in order of
arrival), for its engine's budget (in order, passed over by the others), or, if it has no slot to write, for the writer
of a key (single flight).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

from mmbroker.proto.errors import InvalidMessage
from mmbroker.proto.form import check_form
from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.messages import Created, Due, Failed, Found, Hit, Item, Leased, Pending, Promised

from .arena.allocator import round_up
from .books import Books
from .holds import Holds
from .leases import Leases, conflict
from .pool import Slot
from .quotas import Demand, Quotas
from .records import Engine, Feature, Hold, Place, Request, Session, Wait
from .room import Room

_NO_PROMISE: Final = (
    "promise {} is not open under that key: it was kept, given back, or never yours; ask again"
)
_DRAINING: Final = "the broker is draining and takes no new work: send another way until it is back"


class Admission:
    def __init__(self, books: Books, holds: Holds, rooms: dict[str, Room]) -> None:
        """`rooms` by tier."""
        self.books = books
        self.rooms = rooms
        self.holds = holds
        self.quotas = Quotas(books)
        self.leases = Leases(books, self.quotas, holds, self._landed)
        self.seeking = self.leases.seeking
        self.queue: OrderedDict[int, Request] = OrderedDict()  # waits for room or budget, in order of arrival
        self.flying: dict[Place, OrderedDict[int, Request]] = {}  # waits for a key's writer
        self.draining = False
        self._numbers = count(1)

    # --- arrival ----------------------------------------------------------------------------------------------------

    def submit(
        self, session: Session, seq: int, items: list[Item], engine: Engine | None, private: bool, now: float,
        deadline: float, lookup: bool = False, tier: str = "host", promise: bool = False,
    ) -> None:  # fmt: skip
        """Serve a create or a lookup, now or when what it waits for is there; answered by `deadline` in any case.

        `promise`: a lookup that is promised what is missing, or waits for whoever makes it.
        """
        refusal = self._refusal(session, items, tier, lookup)
        if refusal is not None:
            self.books.respond(session, seq, refusal)
            return
        distinct = {item.key: round_up(item.form.nbytes) for item in items}
        request = Request(
            next(self._numbers), session.number, seq, session.namespace, items, engine, private, now,
            sum(distinct.values()), tier, lookup, promise,
        )  # fmt: skip
        request.wants = (len(items), request.nbytes)
        session.requests[seq] = request
        request.timer = self.books.timers.at(deadline, lambda at: self._expire(request, at))
        ahead = [r for r in self.queue.values() if _is_ahead(r, request)]
        if not self._serve(request, now, may_allocate=not ahead):
            reasons = {r.reason for r in ahead}
            if request.reason is Wait.ROOM and ahead and Wait.ROOM not in reasons:
                # Behind its own engine or client only: nobody else waits for it.
                request.reason = Wait.BUDGET if Wait.BUDGET in reasons else Wait.CLIENT
            self._wait(request, now)

    def _refusal(self, session: Session, items: list[Item], tier: str, lookup: bool) -> Failed | None:
        """Why a call can never be served, if so: the limit, the figures, the next step."""
        if self.draining and items:
            return Failed("BrokerLost", _DRAINING)
        refused = self.quotas.batch(session, items)
        if refused is not None:
            return refused
        if lookup:
            return None
        try:
            for item in items:
                check_form(item.form)
        except InvalidMessage as error:
            return Failed("InvalidMessage", str(error), error.figures)
        requested = sum({item.key: round_up(item.form.nbytes) for item in items}.values())
        if requested > self.books.pools[tier].limit:
            what = "the feature is" if len(items) == 1 else f"the batch of {len(items)} is"
            return self._too_large(tier, requested, what)
        return None

    # --- serving ----------------------------------------------------------------------------------------------------

    def _serve(self, request: Request, now: float, may_allocate: bool = True) -> bool:
        """Answer a request if it can be answered whole; else say in `request.reason` what it waits for."""
        books = self.books
        if request.engine is not None and not request.engine.complete:  # it went away while this waited
            self._finish(request, books.no_such_engine(request.namespace, request.engine.name))
            return True
        promises = books.sessions[request.session].promises
        circular = not (request.promise or request.patient) and self._circular(
            request, self._written(request)
        )
        found: list[Feature | None] = []
        fresh: dict[Place, Item] = {}
        flights: list[Place] = []
        sought = False
        for item in request.items:
            place = (request.namespace, item.key)
            if item.promise and (item.promise not in promises or promises[item.promise].place != place):
                self._finish(request, Failed("LeaseClosed", _NO_PROMISE.format(item.promise)))
                return True
            feature = books.features.get(place)
            found.append(feature)
            if feature is not None:
                if not request.lookup and feature.form != item.form:
                    books.counters["conflicts"] += 1
                    self._finish(request, conflict(feature.form, item.form.nbytes))
                    return True
            elif request.lookup and place not in fresh and self.seeking.awaited(request, place, now):
                flights.append(place)
                sought = True
            elif (request.promise or not request.lookup) and place not in fresh:
                if not item.promise and place in books.flights and self._awaits(request, item.key, circular):
                    flights.append(place)
                else:
                    fresh[place] = item
        if flights and (sought or not fresh):
            request.reason, request.flights = Wait.FLIGHT, flights
            return False
        hits = {feature.number: feature for feature in found if feature is not None}
        if request.engine is not None and (
            unreachable := self.holds.unreachable(hits.values(), request.engine)
        ):
            self._finish(request, unreachable)
            return True
        present = [feature for feature in found if feature is not None]
        if request.promise:
            demand = Demand(present, [], promised=len(fresh))
        else:
            kept = {item.promise for item in request.items if item.promise}
            demand = Demand(present, list(fresh.values()), kept=len(kept))
        request.wants = (demand.count, demand.nbytes)
        if refused := self.quotas.refusal(request, demand):
            self._finish(request, refused)
            return True
        if budget := self.quotas.budget(request, demand):
            request.reason = budget
            return False
        if request.promise:
            self._commit(request, found, dict.fromkeys(fresh), now)
            return True
        request.reason = Wait.ROOM
        if fresh and not may_allocate:
            return False
        sizes = [item.form.nbytes for item in fresh.values()]
        slots = self.rooms[request.tier].allocate(request.namespace, sizes, list(hits.values()), now)
        if slots is None:
            return self._hopeless(request)
        self._commit(request, found, dict(zip(fresh, slots, strict=True)), now)
        return True

    @staticmethod
    def _awaits(request: Request, key: Key, circular: bool) -> bool:
        """Does a request wait for a key's writer, rather than write it, too?"""
        return request.promise or request.patient or (key.kind is Kind.DERIVED and not circular)

    def _written(self, request: Request) -> list[Place]:
        """What is missing, and written by others or promised to them."""
        places = [(request.namespace, item.key) for item in request.items if not item.promise]
        return [place for place in places if place in self.books.flights and place not in self.books.features]

    def _commit(
        self, request: Request, found: list[Feature | None], slots: Mapping[Place, Slot | None], now: float
    ) -> None:
        """Hand out what was found and allocated; a promise where there is no slot."""
        books = self.books
        session = books.sessions[request.session]
        if now > request.since:
            books.finished = now
        results: list[Any] = []
        fresh = dict(slots)
        holds: list[Hold] = []
        for item, feature in zip(request.items, found, strict=True):
            place = (request.namespace, item.key)
            if feature is not None:
                if session.mover is None:  # else it is no use of the feature, but a look at it
                    feature.hits += 1
                    books.counters["hits"] += 1
                    self.seeking.hit(feature)
                hold = self.holds.claim(feature, session, request.engine, request.private, now)
                holds.append(hold)
                results.append(Hit(hold.reference(books.boot), feature.extra))
            elif place in fresh:
                books.counters["misses"] += session.mover is None
                slot = fresh.pop(place)
                if slot is None:
                    results.append(self.leases.promise(session, item.key))
                else:
                    results.append(self.leases.grant(session, item, slot, request.engine, now))
            elif request.lookup and not request.promise:
                books.counters["misses"] += session.mover is None
                results.append(None)
            else:
                results.append(Pending())
        for promise in {item.promise for item in request.items if item.promise}:
            self.leases.end_promise(session, promise, now)  # after its lease: the key's flight goes on
        if request.waited:
            books.figures.wait_seconds.observe(now - request.since)
        if not request.lookup:
            books.figures.create_items.observe(len(request.items))
        self._forget(request)
        deadline = request.timer.when if request.timer is not None else now
        answer: Created | Found | Promised = Promised(results) if request.promise else Created(results)
        if request.lookup and not request.promise:
            extras = [result.extra if result is not None else b"" for result in results]
            answer = Found(
                [None if hit is None else hit.ref for hit in results], extras if any(extras) else []
            )
        leases = [result.lease for result in results if isinstance(result, Leased)]
        leases += [result.promise for result in results if isinstance(result, Due)]
        self.holds.answer_when_acked(
            session,
            request.seq,
            request.engine,
            holds,
            lambda: answer,
            lambda at: self.leases.abort(session, leases, at),
            now,
            deadline,
        )

    def _hopeless(self, request: Request) -> bool:
        """If growth is refused and the request is larger than all there is, say so at once."""
        room = self.rooms[request.tier]
        arena = sum(s.allocator.nbytes for s in room.pool.arena(request.namespace) if s.ready)
        if not room.blocked or request.nbytes <= arena:
            return False
        self._give_up(request)
        return True

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, request: Request, now: float) -> None:
        request.waited = True
        self.books.counters["waits"] += 1
        self.books.counters[f"waits_{request.reason.value}"] += 1
        if request.reason is not Wait.FLIGHT:
            self._enqueue(request)
            return
        for place in request.flights:
            self.flying.setdefault(place, OrderedDict())[request.number] = request
        if request.lookup:
            return  # for as long as the writers live, and its deadline allows
        derived = all(place[1].kind is Kind.DERIVED for place in request.flights)
        lasting = derived and not self._circular(request, request.flights)
        if request.patience is None and not lasting:
            patience = request.since + self.books.limits.single_flight
            request.patience = self.books.timers.at(patience, lambda at: self._impatient(request, at))

    def _enqueue(self, request: Request) -> None:
        """The queue is in order of arrival, also for those who waited for a key's writer in between."""
        late = bool(self.queue) and next(reversed(self.queue)) > request.number
        self.queue[request.number] = request
        if late:
            self.queue = OrderedDict(sorted(self.queue.items()))

    def _circular(self, request: Request, places: list[Place]) -> bool:
        """Does a writer of what this request waits for wait, itself or through others, for a key of this client's?

        That a client waits for a key it writes itself is no circle: two of its threads want the same.
        """
        books = self.books
        seen = {request.session}
        todo = [places]
        while todo:
            waited_for = todo.pop()
            for place in waited_for:
                for writer in {lease.session for lease in books.flights.get(place, ())}:
                    if writer == request.session and waited_for is not places:
                        return True
                    if writer not in seen:
                        seen.add(writer)
                        todo += [r.flights for r in books.sessions[writer].requests.values() if r.flights]
        return False

    def _leave_flights(self, request: Request) -> None:
        for place in request.flights:
            waiting = self.flying.get(place)
            if waiting is not None:
                waiting.pop(request.number, None)
                if not waiting:
                    del self.flying[place]
        request.flights = []

    def _landed(self, place: Place, now: float) -> None:
        """A key was sealed, or its writers have given up: whoever waited for it is looked at again."""
        for request in list(self.flying.get(place, {}).values()):
            self._look_again(request)

    def lacks(self, engine: Engine) -> None:
        """A rank has left an engine: what was for it waits for no writer any more, only to be refused then."""
        flying = {r.number: r for requests in self.flying.values() for r in requests.values()}
        for request in flying.values():
            if request.engine is engine:
                self._look_again(request)

    def _impatient(self, request: Request, now: float) -> None:
        """The writer takes too long: this request gets a lease of its own, and the first seal wins."""
        request.patient = False
        self._look_again(request)

    def _look_again(self, request: Request) -> None:
        """Have the next pump look at a request that waited for writers."""
        self._leave_flights(request)
        self._enqueue(request)
        request.reason = Wait.BUDGET
        self.books.stirred = True

    def pump(self, now: float) -> None:
        """Serve what can be served, in order: who is over a budget is passed over, lack of room is not."""
        while self.books.stirred:
            self.books.stirred = False
            over: set[Engine | int | None] = set()  # engines, and clients by session
            may_allocate = True
            for request in list(self.queue.values()):
                if request.number not in self.queue:
                    continue
                if request.session in over or request.engine in over:
                    request.reason = Wait.CLIENT if request.session in over else Wait.BUDGET
                    continue
                if not may_allocate and request.reason is Wait.ROOM:
                    continue
                if self._serve(request, now, may_allocate):
                    continue
                if request.reason is Wait.BUDGET:
                    over.add(request.engine)
                elif request.reason is Wait.CLIENT:
                    over.add(request.session)
                elif request.reason is Wait.ROOM:
                    may_allocate = False
                else:
                    del self.queue[request.number]
                    self._wait(request, now)

    def _forget(self, request: Request) -> None:
        """A request is answered, or will never be: it waits for nothing."""
        self.queue.pop(request.number, None)
        self._leave_flights(request)
        self.books.sessions[request.session].requests.pop(request.seq, None)
        for timer in (request.timer, request.patience):
            if timer is not None:
                timer.cancel()
        self.books.stirred = self.books.stirred or bool(self.queue)

    def _finish(self, request: Request, answer: Failed) -> None:
        self._forget(request)
        self.books.respond(self.books.sessions[request.session], request.seq, answer)

    def forget_session(self, session: Session) -> None:
        for request in list(session.requests.values()):
            self._forget(request)

    def drain(self) -> None:
        """No new leases from now on."""
        self.draining = True
        waiting = list(self.queue.values()) + [r for rs in self.flying.values() for r in rs.values()]
        for request in {r.number: r for r in waiting}.values():
            self._finish(
                request,
                Failed("BrokerLost", _DRAINING),
            )

    # --- deadlines --------------------------------------------------------------------------------------------------

    def _expire(self, request: Request, now: float) -> None:
        self.pump(now)  # what it waits for may have come at this very moment
        if self.books.sessions[request.session].requests.get(request.seq) is not request:
            return
        waited = now - request.since
        self.books.counters[f"expired_{request.reason.value}"] += 1
        if request.reason is Wait.FLIGHT:
            writers = {
                self.books.sessions[lease.session].name
                for place in request.flights
                for lease in self.books.flights.get(place, ())
            }
            answer = Failed(
                "DeadlineExceeded",
                f"waited {waited:.2f} s for {', '.join(sorted(writers)) or 'another client'} to seal the same key; "
                "allow more time, or make the feature yourself under another key",
                {"waited_ms": int(waited * 1000)},
            )
            self._finish(request, answer)
        else:
            self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """Answer with what a request lacks."""
        lack = self.lack(request)
        self.books.counters["pool_full" if lack.error == "PoolFull" else "quota_refusals"] += 1
        self._finish(request, lack)

    def lack(self, request: Request) -> Failed:
        """What a request waits for, if not for a writer: room, memory or a budget; and what would help."""
        tier = request.tier
        room, pool = self.rooms[tier], self.books.pools[tier]
        if request.reason is Wait.CLIENT or (request.reason is Wait.BUDGET and request.engine is not None):
            return self.quotas.lack(request)
        growing = pool.growing(request.namespace)
        if room.blocked or (growing and room.refused):  # it was refused before, and is being asked for again
            why, then = f"the arena cannot grow: {room.refused}", "free memory, or raise that limit"
        elif growing:
            why, then = "the next segment is not there yet", "allow more time"
        else:
            why, then = self._fullness(request), f"drop holds, or raise --{tier}-mib"
        limit = pool.capacity if room.blocked else pool.limit
        free = max(0, limit - pool.held)
        text = f"{why}: {request.nbytes} bytes requested, {free} free of a limit of {limit}; {then}"
        return Failed("PoolFull", text, {"requested": request.nbytes, "free": free, "limit": limit})

    def _fullness(self, request: Request) -> str:
        """That the arena is full: of how large pieces, and who has the most of it."""
        books, pool = self.books, self.books.pools[request.tier]
        gap = max((s.allocator.largest_free for s in pool.arena(request.namespace) if s.ready), default=0)
        has = {f"engine {e.name!r}": e.in_flight[request.tier] for e in books.engines.values()}
        has |= {f"client {s.name!r} (pid {s.pid})": s.nbytes for s in books.sessions.values()}
        most = [f"{who} {has[who]}" for who in sorted(has, key=lambda who: -has[who])[:3] if has[who]]
        held = f"; most bytes are with {', '.join(most)}" if most else ""
        return f"the arena is full of held features (largest gap {gap} bytes{held})"

    def _too_large(self, tier: str, requested: int, what: str) -> Failed:
        """`PoolFull` for what can never fit."""
        pool = self.books.pools[tier]
        free = max(0, pool.limit - pool.held)
        self.books.counters["pool_full"] += 1
        return Failed(
            "PoolFull",
            f"{what} larger than the arena: {requested} bytes requested, {free} free of a limit of {pool.limit}; "
            f"send it in smaller batches, or raise --{tier}-mib",
            {"requested": requested, "free": free, "limit": pool.limit},
        )


def _is_ahead(first: Request, later: Request) -> bool:
    """Must a request that waits be served before one that comes?"""
    if first.reason is Wait.CLIENT:
        return first.session == later.session
    return first.reason is Wait.ROOM or first.engine is later.engine
