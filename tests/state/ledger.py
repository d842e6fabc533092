"""What the outside may rely on, checked from the outside: events and effects are all that the `Ledger` sees.

It knows of every slot who may still touch it: a writer with an open, broken or retained lease, producers with holds,
ranks with grants. It knows no more than the clients do, so what it takes for free may still be in use for the broker,
never the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mmbroker import events as e
from mmbroker.arena.allocator import round_up
from mmbroker.proto import messages as m
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.reference import Reference

ANSWERS: dict[type, type] = {
    m.Create: m.Created,
    m.Lookup: m.Found,
    m.Seal: m.Sealed,
    m.Attach: m.Attached,
    m.Status: m.Report,
}
NOTHING_SEALED = {"LeaseClosed", "NoSuchEngine", "InvalidMessage", "QuotaExceeded", "DigestConflict"}


@dataclass(eq=False)
class Client:
    """One session."""

    opened: e.SessionOpened
    ended: bool = False
    released: bool = False
    segments: set[tuple[int, bool]] = field(default_factory=set)
    answered: dict[int, m.Reply] = field(default_factory=dict)
    engine: str | None = None
    rank: int = 0


@dataclass(eq=False)
class Claim:
    """One use of a slot."""

    lease: int
    generation: int
    segment: int
    offset: int
    end: int
    namespace: str
    key: Key
    form: Form
    writer: int
    state: str = "open"  # open, sealing, sealed, broken (its writer's session ended, the process lives), free
    retained: bool = False
    overwritten: bool = False
    holds: set[int] = field(default_factory=set)  # that a producer knows of, and that are not over
    ranks: set[tuple[int, int]] = field(default_factory=set)  # (session, hold) that may still touch it
    forever: bool = False

    @property
    def busy(self) -> bool:
        return self.state in ("open", "broken") or bool(
            self.retained or self.holds or self.ranks or self.forever
        )


@dataclass(eq=False)
class HoldView:
    claim: Claim
    ranks: dict[int, str] = field(default_factory=dict)  # session -> granted, acked, failed, lost, settled
    dismissed: set[int] = field(default_factory=set)
    owner: int | None = None  # known once the reference was handed out
    engine: str | None = None
    over: bool = False
    orphaned: float = math.inf


@dataclass(eq=False)
class Waiting:
    order: int
    body: m.Body
    since: float
    deadline: float
    fresh: bool  # a create of which nobody knew any key when it came: it can wait for room or budget alone


class Ledger:
    def __init__(self, limits: e.Limits) -> None:
        self.limits = limits
        self.clients: dict[int, Client] = {}
        self.claims: dict[int, Claim] = {}  # by generation
        self.leases: dict[int, Claim] = {}  # by number, all there ever were
        self.holds: dict[int, HoldView] = {}
        self.segments: dict[int, int] = {}  # living ones: number -> bytes
        self.ready: set[int] = set()
        self.namespaces: dict[int, str] = {}  # segment -> namespace
        self.waiting: dict[tuple[int, int], Waiting] = {}
        self.served: list[
            tuple[int, str, str | None]
        ] = []  # creates that got leases: order, namespace, engine
        self.calls = 0
        self.now = 0.0

    def see(self, event: e.Event, effects: list[e.Effect], now: float) -> None:
        assert now >= self.now
        self.now = now
        repeated = self._event(event)
        for number, hold in self.holds.items():
            if hold.orphaned + self.limits.producer_grace <= now and not hold.over:
                self._over(number)
        granted = {
            grant.ref.generation
            for effect in effects
            if isinstance(effect, e.Notify) and isinstance(effect.notice, m.Granted)
            for grant in effect.notice.grants
        }
        if isinstance(event, e.Called) and isinstance(event.body, m.Seal) and event.seq and not repeated:
            self._sealing(event, effects, granted)
        for effect in effects:
            self._effect(effect)
        if repeated is not None:
            assert effects == [e.Respond(event.session, event.seq, repeated)], (
                "a repeat gets the same answer only"
            )  # type: ignore[union-attr]
        self._after()

    # --- what happened ----------------------------------------------------------------------------------------------

    def _event(self, event: e.Event) -> m.Reply | None:
        """Returns the answer that must come again, for a repeat of an answered call."""
        match event:
            case e.SessionOpened():
                self.clients[event.session] = Client(event)
            case e.SessionEnded(session, alive):
                self._ended(session, alive)
            case e.ProcessGone(session):
                if self.clients[session].ended:
                    self._gone(session)
            case e.SegmentReady(segment):
                self.ready.add(segment)
            case e.SegmentFailed(segment, _):
                del self.segments[segment]
            case e.Called() if not self.clients[event.session].ended:
                return self._called(event)
        return None

    def _called(self, event: e.Called) -> m.Reply | None:
        session, seq, body = event.session, event.seq, event.body
        client = self.clients[session]
        if seq:
            if seq in client.answered:
                return client.answered[seq]
            if (session, seq) in self.waiting:
                return None
            self.calls += 1
            seconds = min(max(event.timeout, 0.0), self.limits.max_timeout)
            namespace = client.opened.namespace
            keys = [item.key for item in body.items] if isinstance(body, m.Create) else []
            fresh = not any(self._known(namespace, key) or self._asked(namespace, key) for key in keys)
            self.waiting[session, seq] = Waiting(self.calls, body, self.now, self.now + seconds, fresh)
        match body:
            case m.Drop(holds):
                for number in holds:
                    if number in self.holds and self.holds[number].owner == session:
                        self._over(number)
            case m.Abort(leases):
                for number in leases:
                    claim = self.leases.get(number)
                    if claim is not None and claim.writer == session and claim.state == "open":
                        claim.state = "free"
            case m.Unpin(leases):
                for number in leases:
                    if number in self.leases and self.leases[number].writer == session:
                        self.leases[number].retained = False
            case m.Ack(holds, failed):
                for number in holds:
                    self._rank_says(session, number, "acked")
                for number in failed:
                    self._rank_says(session, number, "failed")
            case m.Settle(holds):
                for number in holds:
                    self._rank_says(session, number, "settled")
            case m.Released(old):
                self._released(client, old)
            case m.Detach():
                client.engine = None
        return None

    def _rank_says(self, session: int, number: int, word: str) -> None:
        hold = self.holds.get(number)
        if hold is None or session not in hold.ranks:
            return
        if word == "settled" or hold.ranks[session] == "granted":
            hold.ranks[session] = word
            if word != "acked":
                hold.claim.ranks.discard((session, number))

    def _released(self, client: Client, number: int) -> None:
        old = self.clients.get(number)
        if old is None or old is client:
            return
        mine = (client.opened.uid, client.opened.pid, client.opened.namespace)
        if mine == (old.opened.uid, old.opened.pid, old.opened.namespace):
            old.released = True
            if old.ended:
                self._gone(number)

    def _ended(self, session: int, alive: bool) -> None:
        client = self.clients[session]
        if client.ended:
            return
        client.ended = True
        client.engine = None
        for place in [p for p in self.waiting if p[0] == session]:
            del self.waiting[place]
        for claim in self.claims.values():
            if claim.writer == session and claim.state == "open":
                claim.state = "broken"
        for number, hold in self.holds.items():
            if hold.owner == session and not hold.over:
                hold.orphaned = self.now
                if not any((rank, number) in hold.claim.ranks for rank in hold.ranks):
                    self._over(number)  # nobody could take it any more
            if hold.ranks.get(session) == "granted":
                hold.ranks[session] = "lost"
        if not alive or client.released:
            self._gone(session)
        elif not client.opened.traceable:
            for claim in self.claims.values():
                touched = any(rank == session for rank, _ in claim.ranks)
                if touched or (claim.writer == session and (claim.state == "broken" or claim.retained)):
                    claim.forever = True
            self._gone(session)

    def _gone(self, session: int) -> None:
        """The process is gone, or touches nothing of this session any more."""
        for claim in self.claims.values():
            claim.ranks = {(rank, hold) for rank, hold in claim.ranks if rank != session}
            if claim.writer == session:
                claim.retained = False
                if claim.state == "broken":
                    claim.state = "free"

    def _over(self, number: int) -> None:
        hold = self.holds[number]
        hold.over = True
        hold.claim.holds.discard(number)

    def _sealing(self, event: e.Called, effects: list[e.Effect], granted: set[int]) -> None:
        """Which of the leases in a seal are leases no more? Either the call fails whole, or all are."""
        body = event.body
        assert isinstance(body, m.Seal)
        mine = [
            claim
            for sealing in body.leases
            if (claim := self.leases.get(sealing.lease)) is not None and claim.writer == event.session
        ]
        refused = any(
            isinstance(x, e.Respond)
            and (x.session, x.seq) == (event.session, event.seq)
            and isinstance(x.body, m.Failed)
            and x.body.error in NOTHING_SEALED
            for x in effects
        )
        if refused:
            failed = [x.body for x in effects if isinstance(x, e.Respond) and x.seq == event.seq]
            if any(isinstance(f, m.Failed) and f.error == "DigestConflict" for f in failed):
                self._conflict(mine)
            return
        for claim, sealing in zip(mine, body.leases, strict=True):
            assert claim.state == "open", f"a lease that is {claim.state} was sealed"
            claim.state = "sealed" if claim.generation in granted else "sealing"
            claim.retained = sealing.retained

    def _conflict(self, leases: list[Claim]) -> None:
        """The first lease whose key is taken by another form, or by another form's lease before it, is one no more."""
        forms = {
            (c.namespace, c.key): c.form
            for c in self.claims.values()
            if c.state == "sealed" and not c.overwritten
        }
        for claim in leases:
            if forms.setdefault((claim.namespace, claim.key), claim.form) != claim.form:
                claim.state = "free"
                return

    # --- what the broker did ----------------------------------------------------------------------------------------

    def _effect(self, effect: e.Effect) -> None:
        match effect:
            case e.Respond(session, seq, body):
                self._answer(session, seq, body)
            case e.Notify(session, notice):
                assert not self.clients[session].ended, f"{notice} for a session that ended"
                self._notice(session, notice)
            case e.SendSegment(session, segment, writable):
                assert segment in self.ready and segment in self.segments
                assert not self.clients[session].ended
                assert (segment, writable) not in self.clients[session].segments, "sent twice"
                self.clients[session].segments.add((segment, writable))
            case e.Grow(segment, _, nbytes):
                assert segment not in self.segments and segment > max(self.namespaces, default=0)
                self.segments[segment] = nbytes
                self.namespaces[segment] = ""
                assert sum(self.segments.values()) <= self.limits.host_bytes, "the arena exceeds its limit"
            case e.Discard(segment):
                del self.segments[segment]
                for claim in self.claims.values():
                    if claim.segment == segment:
                        assert not claim.busy or claim.forever, f"{claim} was given back with its segment"
                        claim.overwritten = True

    def _notice(self, session: int, notice: m.Notice) -> None:
        client = self.clients[session]
        match notice:
            case m.Granted(grants):
                for grant in grants:
                    self._granted(session, client, grant)
            case m.Dismissed(holds):
                for number in holds:
                    hold = self.holds[number]
                    assert hold.ranks.get(session) in ("granted", "acked"), "dismissed without a grant"
                    assert session not in hold.dismissed, "dismissed twice"
                    ended = hold.over or hold.orphaned + self.limits.producer_grace <= self.now
                    assert ended or hold.owner is None, "dismissed though its producer holds it"
                    hold.dismissed.add(session)
            case m.Retired(segments):
                for number in segments:
                    assert {(number, True), (number, False)} & client.segments
                    assert number not in self.segments

    def _granted(self, session: int, client: Client, grant: m.Grant) -> None:
        ref = grant.ref
        claim = self.claims[ref.generation]
        if claim.state == "sealing":
            claim.state = "sealed"
        self._describes(ref, claim)
        assert client.engine is not None, "a grant for a session that is no rank"
        assert client.opened.namespace == claim.namespace
        assert (grant.segment, grant.offset) == (claim.segment, claim.offset)
        assert not claim.segment or (claim.segment, False) in client.segments, "a grant before its descriptor"
        hold = self.holds.setdefault(ref.hold, HoldView(claim))
        assert hold.claim is claim and session not in hold.ranks
        hold.ranks[session] = "granted"
        claim.ranks.add((session, ref.hold))

    def _describes(self, ref: Reference, claim: Claim) -> None:
        form = claim.form
        assert claim.state == "sealed" and not claim.overwritten, (
            f"a reference to a slot that is {claim.state}"
        )
        assert (ref.digest, ref.dtype, ref.shape, ref.nbytes, ref.parts) == (
            claim.key.value,
            form.dtype,
            form.shape,
            form.nbytes,
            form.parts,
        )

    def _answer(self, session: int, seq: int, body: m.Reply) -> None:
        client = self.clients[session]
        assert not client.ended, "an answer for a session that ended"
        if seq in client.answered:
            return  # a repeat, see `see`
        waiting = self.waiting.pop((session, seq), None)
        assert waiting is not None, f"call {seq} is answered though nobody waits: {body}"
        if not isinstance(body, m.Report):
            client.answered[seq] = body
            while len(client.answered) > self.limits.answers_kept:
                del client.answered[next(iter(client.answered))]
        call = waiting.body
        if isinstance(body, m.Failed):
            assert len(body.message) > 20
            return
        assert isinstance(body, ANSWERS.get(type(call), m.Done)), f"{body} answers {call}"
        match call, body:
            case m.Attach(engine, rank), m.Attached():
                client.engine, client.rank = engine, rank
            case m.Seal(leases, to), m.Sealed(refs):
                for sealing, ref in zip(leases, refs, strict=True):
                    self._sealed(session, self.leases[sealing.lease], ref, to)
            case m.Lookup(keys, to), m.Found(found):
                for key, ref in zip(keys, found, strict=True):
                    if ref is not None:
                        self._hit(session, key, ref, to)
            case m.Create(), m.Created(results):
                self._created(session, call, results, waiting)

    def _sealed(self, session: int, claim: Claim, ref: Reference, to: str | None) -> None:
        assert claim.writer == session
        if ref.generation == claim.generation:
            claim.state = "sealed"
        else:
            assert claim.state == "sealing"
            claim.state = "free"
            assert self.claims[ref.generation].form == claim.form, "sealed to a feature of another form"
        self._hit(session, claim.key, ref, to)

    def _hit(self, session: int, key: Key, ref: Reference, to: str | None) -> None:
        claim = self.claims[ref.generation]
        self._describes(ref, claim)
        assert claim.key == key, "a reference to another key's feature"
        assert claim.namespace == self.clients[session].opened.namespace, "another namespace's feature"
        hold = self.holds.setdefault(ref.hold, HoldView(claim))
        assert hold.claim is claim and hold.owner is None
        hold.owner, hold.engine = session, to
        claim.holds.add(ref.hold)
        words = set(hold.ranks.values())
        if to is None:
            assert not words
        else:
            assert words and words <= {"acked", "settled"}, f"answered though the ranks said {hold.ranks}"

    def _created(self, session: int, call: m.Create, results: list[m.Result], waiting: Waiting) -> None:
        namespace = self.clients[session].opened.namespace
        fresh: set[Key] = set()
        for item, result in zip(call.items, results, strict=True):
            if isinstance(result, m.Leased):
                assert item.key not in fresh, "two leases for equal keys in one batch"
                fresh.add(item.key)
                writers = self._writers(namespace, item.key)
                patient = self.now - waiting.since < self.limits.single_flight
                lasting = item.key.kind is Kind.DERIVED and not self._writes(session)
                assert not (writers and (patient or lasting)), "a second lease beside a living one"
                self._leased(session, namespace, item, result)
            elif isinstance(result, m.Hit):
                assert self.claims[result.ref.generation].form == item.form
                self._hit(session, item.key, result.ref, call.to)
        if fresh:
            self.served.append((waiting.order, namespace, call.to))
        pending = [
            item for item, result in zip(call.items, results, strict=True) if isinstance(result, m.Pending)
        ]
        assert fresh or not pending, "a batch without leases was told to wait for others"
        if call.to is None:  # else it may have changed until the hits were acknowledged
            for item in pending:
                written = self._writers(namespace, item.key) or self._asked(namespace, item.key)
                assert written, "pending, but nobody writes it"

    def _writes(self, session: int) -> bool:
        """May others wait for this client while it waits for them?"""
        return any(c.writer == session and c.state == "open" for c in self.leases.values())

    def _writers(self, namespace: str, key: Key) -> list[Claim]:
        return [
            c for c in self.leases.values() if c.state == "open" and (c.namespace, c.key) == (namespace, key)
        ]

    def _asked(self, namespace: str, key: Key, besides: Waiting | None = None) -> bool:
        """May a create that waits (for acknowledgements) have a lease on this key that it was not told of yet?"""
        return any(
            isinstance(waiting.body, m.Create)
            and waiting is not besides
            and waiting.body.to is not None
            and namespace == self.clients[session].opened.namespace
            and any(item.key == key for item in waiting.body.items)
            for (session, _), waiting in self.waiting.items()
        )

    def _leased(self, session: int, namespace: str, item: m.Item, leased: m.Leased) -> None:
        end = leased.offset + round_up(item.form.nbytes)
        new = Claim(
            leased.lease, leased.generation, leased.segment, leased.offset, end, namespace, item.key, item.form, session
        )  # fmt: skip
        assert leased.generation > 0 and leased.generation not in self.claims, "a generation came twice"
        assert leased.lease not in self.leases, "a lease number came twice"
        if leased.segment:
            assert leased.segment in self.ready and leased.offset % 4096 == 0
            assert end <= self.segments[leased.segment]
            assert self.namespaces[leased.segment] in ("", namespace), "a segment with two namespaces"
            self.namespaces[leased.segment] = namespace
            assert (leased.segment, True) in self.clients[session].segments, "a lease before its descriptor"
            for old in self.claims.values():
                if old.segment == new.segment and old.offset < end and new.offset < old.end:
                    assert not old.busy, f"a slot in use was given away: {old}"
                    old.overwritten = True
        else:
            assert leased.offset == 0 and item.form.nbytes == 0
        self.claims[new.generation] = self.leases[new.lease] = new

    # --- after every event ------------------------------------------------------------------------------------------

    def _after(self) -> None:
        for (session, seq), waiting in self.waiting.items():
            assert waiting.deadline > self.now, f"call {seq} of session {session} has passed its deadline"
        for number, hold in self.holds.items():
            if hold.over:
                told = {
                    s
                    for s, w in hold.ranks.items()
                    if w in ("acked", "granted") and not self.clients[s].ended
                }
                assert told <= hold.dismissed, f"hold {number} is over and {told} were not told"
        self._in_order()

    def _in_order(self) -> None:
        """Nobody who waits for room alone is passed over by a later create of the same namespace and engine."""
        for order, namespace, to in self.served:
            for (session, _), waiting in self.waiting.items():
                call = waiting.body
                if (
                    not isinstance(call, m.Create)
                    or not waiting.fresh
                    or waiting.order > order
                    or call.to != to
                ):
                    continue
                if namespace == self.clients[session].opened.namespace:
                    known = any(
                        self._known(namespace, item.key) or self._asked(namespace, item.key, waiting)
                        for item in call.items
                    )
                    assert known, f"create {order} was served before create {waiting.order}"
        self.served.clear()

    def _known(self, namespace: str, key: Key) -> bool:
        """Is somebody writing this key, or may it be cached?"""
        return any(
            (c.namespace, c.key) == (namespace, key) and c.state != "free" and not c.overwritten
            for c in self.claims.values()
        )

    def check_deadline(self, due: float | None, now: float) -> None:
        """`Broker.next_deadline` after `now` was handled."""
        assert due is None or due > now, "the broker wants to be woken in the past"
        first = min((w.deadline for w in self.waiting.values()), default=None)
        assert first is None or (due is not None and due <= first), "the broker sleeps through a deadline"
