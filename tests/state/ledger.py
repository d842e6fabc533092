"""What the outside may rely on, checked from the outside: events and effects are all that the `Ledger` sees."""

from __future__ import annotations

import math

from mmbroker import events as e
from mmbroker.arena.allocator import round_up
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.reference import Reference

from .claims import Claim, Claims, Client, HoldView, Waiting, Word

ANSWERS: dict[type, type] = {
    m.Create: m.Created,
    m.Lookup: m.Found,
    m.Promise: m.Promised,
    m.Seal: m.Sealed,
    m.Attach: m.Attached,
    m.Status: m.Report,
    m.Evict: m.Evicted,
}
#: Errors of a call that may have been served all the same.
PERHAPS_SERVED = ("EngineLagging", "FeatureError", "NoSuchEngine")


class Ledger(Claims):
    def __init__(self, limits: e.Limits) -> None:
        super().__init__(limits)
        self.segments: dict[int, int] = {}  # living ones: number -> bytes
        self.tiers: dict[int, str] = {}  # of all there ever were
        self.ready: set[int] = set()
        self.namespaces: dict[int, str] = {}  # segment -> namespace
        self.served: list[
            tuple[int, str, str | None]
        ] = []  # creates that got leases now: order, namespace, to

    def see(self, event: e.Event, effects: list[e.Effect], now: float) -> None:
        assert now >= self.now
        self.now = now
        match event:
            case e.SegmentReady(segment):
                self.ready.add(segment)
            case e.SegmentFailed(segment, _):
                del self.segments[segment]
        repeated = self._event(event)
        for word in self.promises.values():
            if word.due <= now:
                word.state = "over"
        for number, hold in self.holds.items():
            # A dead producer's hold ends after a while, or with the last rank that could take it.
            alone = hold.orphaned < math.inf and not self._readers(number, hold)
            if not hold.over and (alone or hold.orphaned + self.limits.producer_grace <= now):
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
            case e.Grow(segment, tier, nbytes):
                assert segment not in self.segments and segment > max(self.namespaces, default=0)
                self.segments[segment] = nbytes
                self.namespaces[segment] = ""
                self.tiers[segment] = tier
                arena = sum(size for n, size in self.segments.items() if self.tiers[n] == tier)
                limit = self.limits.host_bytes if tier == "host" else self.limits.device_bytes
                assert arena <= limit, "the arena exceeds its limit"
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
                    self._dismissed(session, client, number)
            case m.Sought(wanted):
                for one in wanted:
                    self._sought(session, client, one)
            case m.Fresh(features):
                assert client.tier is not None and client.tier.open, (
                    "told to somebody who is no tier, or is closed"
                )
                for worth in features:
                    self._fresh(client, worth)
            case m.Retired(segments):
                for number in segments:
                    assert {(number, True), (number, False)} & client.segments
                    assert number not in self.segments

    def _sought(self, session: int, client: Client, one: m.Wanted) -> None:
        """Nobody here has it, makes it or is asked for it, and somebody waits for it."""
        namespace = client.opened.namespace
        assert client.tier is not None and client.tier.open, "sought of somebody who is no tier, or is closed"
        assert one.key.kind is Kind.DERIVED and one.promise not in self.promises | self.leases
        assert not self._promised(namespace, one.key, "open"), "sought though somebody has promised it"
        assert not [c for c in self._writers(namespace, one.key) if not self._moves(c.writer)], (
            "somebody writes it"
        )
        self.promises[one.promise] = Word(session, namespace, one.key, due=self.now + client.tier.wait)
        mine = [w for w in self.promises.values() if w.session == session and w.state == "open"]
        assert len(mine) <= client.tier.most

    def _fresh(self, client: Client, worth: m.Worth) -> None:
        assert worth.key.kind is Kind.DERIVED and worth.hits in (0, client.tier.reuse)  # type: ignore[union-attr]
        of = [
            c for c in self.claims.values()
            if (c.namespace, c.key) == (client.opened.namespace, worth.key) and c.state in ("sealed", "sealing")
        ]  # fmt: skip
        assert any(c.form.nbytes == worth.nbytes and not self._moves(c.writer) for c in of), (
            "told of what it brought"
        )

    def _dismissed(self, session: int, client: Client, number: int) -> None:
        if number in client.kept:  # said to be an entry of a lost session
            client.kept.discard(number)
            hold = self.holds.get(number)
            own = (client.opened.namespace, client.engine)
            if hold is None or client.engine is None or own != (hold.claim.namespace, hold.read_by):
                return
        else:
            hold = self.holds[number]
            assert hold.ranks.get(session) in ("granted", "acked"), "dismissed without a grant"
            assert session not in hold.dismissed, "dismissed twice"
            hold.dismissed.add(session)
        ended = hold.over or hold.orphaned + self.limits.producer_grace <= self.now
        assert ended or hold.owner is None, "dismissed though its producer holds it"

    def _granted(self, session: int, client: Client, grant: m.Grant) -> None:
        ref = grant.ref
        claim = self.claims[ref.generation]
        if claim.state == "sealing":
            claim.state = "sealed"
        self._describes(ref, claim)
        assert client.engine is not None, "a grant for a session that is no rank"
        assert client.opened.namespace == claim.namespace
        assert (grant.segment, grant.offset) == (claim.segment, claim.offset)
        descriptor = (claim.segment, grant.tier == "device")  # the device's is for both maps
        assert not claim.segment or descriptor in client.segments, "a grant before its descriptor"
        hold = self.holds.setdefault(ref.hold, HoldView(claim))
        assert hold.claim is claim and session not in hold.ranks
        hold.read_by, hold.life = client.engine, client.life
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
            if body.error == "QuotaExceeded":
                self._refused(waiting, body.figures)
            if body.error in PERHAPS_SERVED:
                self._kept(call, "perhaps")
            return
        assert isinstance(body, ANSWERS.get(type(call), m.Done)), f"{body} answers {call}"
        match call, body:
            case m.Tier(), _:
                client.tier = call
                self.longest = max(self.longest, call.wait)
            case m.Attach(engine, rank), m.Attached():
                self._attached(client, engine)
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
                self._kept(call, "over")
            case m.Promise(), m.Promised(results):
                self._due(session, call, results)

    def _attached(self, client: Client, engine: str) -> None:
        namespace = client.opened.namespace
        lives = {
            c.life for c in self.clients.values() if (c.opened.namespace, c.engine) == (namespace, engine)
        }
        assert len(lives) <= 1
        if not lives:
            self.lives += 1
        client.life = lives.pop() if lives else self.lives

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

    def _due(self, session: int, call: m.Promise, results: list[m.Hit | m.Due | m.Pending]) -> None:
        namespace = self.clients[session].opened.namespace
        due: set[Key] = set()
        for key, result in zip(call.keys, results, strict=True):
            if isinstance(result, m.Due):
                assert result.promise not in self.promises and result.promise not in self.leases
                if (session, result.promise) in self.guessed:
                    self.promises[result.promise] = Word(session, namespace, key, "over")
                    due.add(key)
                    continue
                assert not self._promised(namespace, key, "open"), "promised twice"
                if call.to is None:  # else it may have changed until the hits were acknowledged
                    writers = [c for c in self._writers(namespace, key) if not self._moves(c.writer)]
                    assert not writers, "promised though somebody writes it"
                due.add(key)
                self.promises[result.promise] = Word(session, namespace, key)
            elif isinstance(result, m.Hit):
                self._hit(session, key, result.ref, call.to)
            elif call.to is None:
                assert (
                    self._writers(namespace, key)
                    or self._promised(namespace, key)
                    or self._asked(namespace, key)
                )
        pending = any(isinstance(result, m.Pending) for result in results)
        assert due or not pending, "a call that was promised nothing was told to wait for others"

    def _kept(self, call: m.Body, state: str) -> None:
        """The promises of a create are over, or may be."""
        for item in call.items if isinstance(call, m.Create) else ():
            if item.promise in self.promises and self.promises[item.promise].state != "over":
                self.promises[item.promise].state = state

    def _created(self, session: int, call: m.Create, results: list[m.Result], waiting: Waiting) -> None:
        namespace = self.clients[session].opened.namespace
        fresh: set[Key] = set()
        for item, result in zip(call.items, results, strict=True):
            if isinstance(result, m.Leased):
                assert item.key not in fresh, "two leases for equal keys in one batch"
                fresh.add(item.key)
                writers = [c for c in self._writers(namespace, item.key) if not self._moves(c.writer)]
                patient = self.now - waiting.since < self.limits.single_flight
                lasting = item.key.kind is Kind.DERIVED and not self._writes(session)
                others = writers or self._promised(namespace, item.key, "open")
                assert item.promise or not (others and (patient or lasting)), (
                    "a second lease beside a living writer"
                )
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
                written = written or self._promised(namespace, item.key)
                assert written, "pending, but nobody writes it"

    def _leased(self, session: int, namespace: str, item: m.Item, leased: m.Leased) -> None:
        end = leased.offset + round_up(item.form.nbytes)
        new = Claim(
            leased.lease, leased.generation, leased.segment, leased.offset, end, namespace, item.key, item.form, session
        )  # fmt: skip
        assert leased.generation > 0 and leased.generation not in self.claims, "a generation came twice"
        assert leased.lease not in self.leases and leased.lease not in self.promises, (
            "a lease number came twice"
        )
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
            alone = isinstance(waiting.body, m.Lookup) and waiting.body.to is None
            if alone and not (self.limits.client_budget_features or self.limits.client_budget_bytes):
                assert self.now < waiting.since + self.longest, (
                    "a lookup waits for what is not sought any more"
                )
        for number, hold in self.holds.items():
            if hold.over:
                told = {
                    s
                    for s, w in hold.ranks.items()
                    if w in ("acked", "granted") and not self.clients[s].ended
                }
                assert told <= hold.dismissed, f"hold {number} is over and {told} were not told"
        self._within_limits()
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
                    or self._may_have_been_over_budget(session, to)
                ):
                    continue
                if namespace == self.clients[session].opened.namespace:
                    known = any(
                        self._known(namespace, item.key) or self._asked(namespace, item.key, waiting)
                        for item in call.items
                    )
                    assert known, f"create {order} was served before create {waiting.order}"
        self.served.clear()

    def _may_have_been_over_budget(self, session: int, to: str | None) -> bool:
        """Did this client wait for something of its own, when one that is answered now was served?

        A create that has hits for an engine is answered later than it was served: when they are acknowledged.
        """
        count, nbytes = self._may_have(session)
        features, size = self.limits.client_budget_features, self.limits.client_budget_bytes
        if to is not None and (features or size):
            return True
        return bool((features and count > features) or (size and nbytes > size))

    def check_deadline(self, due: float | None, now: float) -> None:
        """`Broker.next_deadline` after `now` was handled."""
        assert due is None or due > now, "the broker wants to be woken in the past"
        first = min((w.deadline for w in self.waiting.values()), default=None)
        assert first is None or (due is not None and due <= first), "the broker sleeps through a deadline"
