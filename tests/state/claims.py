"""Who may still touch which slot, as far as the clients know: what they did, and nothing of what the broker did.

A writer may, with an open, broken or retained lease; producers with holds; ranks with grants. What is free here may
still be in use for the broker, never the other way round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from mmbroker import events as e
from mmbroker.arena.allocator import round_up
from mmbroker.proto import messages as m
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key

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
    life: int = 0  # of its engine: one that has lost all its ranks is another one when it attaches again
    tier: m.Tier | None = None  # what it said last
    kept: set[int] = field(default_factory=set)  # holds of lost sessions that it wants to be told of

    @property
    def process(self) -> tuple[int, int, str]:
        return self.opened.uid, self.opened.pid, self.opened.namespace


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
        return self.claimed or self.forever

    @property
    def claimed(self) -> bool:
        """Busy, but not only because a process that cannot be traced may read it for ever: that is cached, too."""
        return (
            self.state in ("open", "broken")
            or bool(self.retained or self.holds or self.ranks)
            or (self.forever and self.state != "sealed")
        )


@dataclass(eq=False)
class Word:
    """One promise."""

    session: int
    namespace: str
    key: Key
    state: str = "open"  # open, perhaps (it may have been kept by a call that failed later), over
    due: float = math.inf  # of what is sought: when it is over in any case


@dataclass(eq=False)
class HoldView:
    claim: Claim
    ranks: dict[int, str] = field(default_factory=dict)  # session -> granted, acked, failed, lost, settled
    dismissed: set[int] = field(default_factory=set)
    owner: int | None = None  # known once the reference was handed out
    engine: str | None = None
    read_by: str | None = None  # the engine whose ranks were granted it
    life: int = 0  # of that engine
    over: bool = False
    orphaned: float = math.inf


@dataclass(eq=False)
class Waiting:
    order: int
    body: m.Body
    since: float
    deadline: float
    fresh: bool  # a create of which nobody knew any key when it came: it can wait for room or budget alone


class Claims:
    def __init__(self, limits: e.Limits) -> None:
        self.limits = limits
        self.clients: dict[int, Client] = {}
        self.claims: dict[int, Claim] = {}  # by generation
        self.leases: dict[int, Claim] = {}  # by number, all there ever were
        self.promises: dict[int, Word] = {}  # by number, all there ever were
        self.guessed: set[tuple[int, int]] = set()  # what a session gave back that it had not been told of
        self.holds: dict[int, HoldView] = {}
        self.waiting: dict[tuple[int, int], Waiting] = {}
        self.calls = 0
        self.lives = 0  # of engines
        self.longest = 0.0  # that anybody may wait for a tier
        self.now = 0.0

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
                    word = self.promises.get(number)
                    if word is not None and word.session == session:
                        word.state = "over"
                    elif claim is None and word is None:
                        self.guessed.add((session, number))
            case m.Unpin(leases):
                for number in leases:
                    if number in self.leases and self.leases[number].writer == session:
                        self.leases[number].retained = False
            case m.Ack(holds, failed, _, settled):
                for number in holds:
                    self._rank_says(session, number, "acked")
                for number in failed:
                    self._rank_says(session, number, "failed")
                for number in settled:
                    self._rank_says(session, number, "settled")
            case m.Settle(holds):
                for number in holds:
                    self._rank_says(session, number, "settled")
            case m.Kept(holds):
                client.kept.update(holds)
            case m.Released(old):
                self._released(client, old)
            case m.Detach():
                client.engine = None
                client.kept.clear()
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
        if client.process == old.process:
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
        for word in self.promises.values():
            if word.session == session:
                word.state = "over"
        for number, hold in self.holds.items():
            if hold.owner == session and not hold.over:
                hold.orphaned = self.now
                if not self._readers(number, hold):
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

    def _readers(self, number: int, hold: HoldView) -> bool:
        """Is there a rank that may still take what it was granted?"""
        return any((rank, number) in hold.claim.ranks for rank in hold.ranks)

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

    # --- how much somebody has --------------------------------------------------------------------------------------

    def having(self, claims: Iterable[Claim]) -> tuple[int, int]:
        """So many leases or holds, of so many bytes in whole pages."""
        sizes = [round_up(claim.form.nbytes) for claim in claims]
        return len(sizes), sum(sizes)

    def _has(self, session: int) -> tuple[int, int]:
        """What a client knows it has: its open leases and promises, and its holds."""
        promised = sum(w.state == "open" and w.session == session for w in self.promises.values())
        held = [hold.claim for hold in self.holds.values() if hold.owner == session and not hold.over]
        count, nbytes = self.having(
            held + [c for c in self.leases.values() if c.writer == session and c.state == "open"]
        )
        return count + promised, nbytes

    def _may_have(self, session: int) -> tuple[int, int]:
        """The most that it may have, or be about to have: with all that its waiting calls may get, or have got, and the
        promises that a call which failed may have kept, or not."""
        count, nbytes = self._has(session)
        count += sum(w.state == "perhaps" and w.session == session for w in self.promises.values())
        for (owner, _), waiting in self.waiting.items():
            if owner == session:
                match waiting.body:
                    case m.Create(items):
                        sizes = [round_up(item.form.nbytes) for item in items]
                    case m.Lookup(keys) | m.Promise(keys):
                        sizes = [
                            max((round_up(c.form.nbytes) for c in self.claims.values()), default=0)
                        ] * len(keys)
                    case m.Seal(leases):
                        sizes = [
                            round_up(self.leases[s.lease].form.nbytes)
                            for s in leases
                            if s.lease in self.leases
                        ]
                    case _:
                        continue
                count, nbytes = count + len(sizes), nbytes + sum(sizes)
        return count, nbytes

    def _within_limits(self) -> None:
        """Nobody has been given more than the limits say."""
        limits = self.limits
        namespaces: Counter[str] = Counter()
        for session, client in self.clients.items():
            if not client.ended:
                count, nbytes = self._has(session)
                namespaces[client.opened.namespace] += count
                for has, limit in (
                    (count, limits.features_per_session),
                    (count, limits.client_budget_features),
                    (nbytes, limits.session_bytes),
                    (nbytes, limits.client_budget_bytes),
                ):
                    assert not limit or has <= limit, (
                        f"client {session} has {count} features of {nbytes} bytes"
                    )
        for namespace, count in namespaces.items():
            assert count <= limits.features_per_namespace, f"namespace {namespace} has {count} features"
            claimed = [
                c
                for c in self.claims.values()
                if c.namespace == namespace and c.claimed and not c.overwritten
            ]
            nbytes = self.having(claimed)[1]
            assert not limits.namespace_bytes or nbytes <= limits.namespace_bytes, (
                f"{namespace} has {nbytes} bytes"
            )
        engines: dict[tuple[str, str, int], set[int]] = {}
        for hold in self.holds.values():
            if hold.engine is not None and not hold.over:
                place = (hold.claim.namespace, hold.engine, hold.life)
                engines.setdefault(place, set()).add(hold.claim.generation)
        for engine, features in engines.items():
            assert len(features) <= limits.features_per_engine, (
                f"engine {engine} has {len(features)} features"
            )

    def _refused(self, waiting: Waiting, figures: dict[str, int]) -> None:
        """A refusal for lack of quota: over a limit that there is, unless that gave way at the call's last moment."""
        limits = self.limits
        assert figures.keys() == {"requested", "used", "limit"} and figures["requested"] >= 0
        over = figures["used"] + figures["requested"] > figures["limit"]
        assert over or isinstance(waiting.body, m.Seal) or waiting.deadline <= self.now, figures
        known = {getattr(limits, f.name) for f in fields(limits) if isinstance(getattr(limits, f.name), int)}
        assert figures["limit"] in known and figures["limit"] > 0

    # --- questions --------------------------------------------------------------------------------------------------

    def _writes(self, session: int) -> bool:
        """May others wait for this client while it waits for them?"""
        writes = any(c.writer == session and c.state == "open" for c in self.leases.values())
        return writes or any(w.state != "over" and w.session == session for w in self.promises.values())

    def _moves(self, session: int) -> bool:
        """Is it a tier? Others wait for it for a moment only, and write beside it."""
        return self.clients[session].tier is not None

    def _promised(self, namespace: str, key: Key, *states: str) -> bool:
        """Is there a promise on this key in one of these states (without any: one that is not over)?"""
        return any(
            word.state in (states or ("open", "perhaps")) and (word.namespace, word.key) == (namespace, key)
            for word in self.promises.values()
        )

    def _writers(self, namespace: str, key: Key) -> list[Claim]:
        return [
            c for c in self.leases.values() if c.state == "open" and (c.namespace, c.key) == (namespace, key)
        ]

    def _asked(self, namespace: str, key: Key, besides: Waiting | None = None) -> bool:
        """May a create that waits (for acknowledgements) have a lease on this key that it was not told of yet?"""
        return any(
            isinstance(waiting.body, m.Create | m.Promise)
            and waiting is not besides
            and waiting.body.to is not None
            and namespace == self.clients[session].opened.namespace
            and key in keys_of(waiting.body)
            for (session, _), waiting in self.waiting.items()
        )

    def _known(self, namespace: str, key: Key) -> bool:
        """Is somebody writing this key, or about to, or may it be cached?"""
        return self._promised(namespace, key) or any(
            (c.namespace, c.key) == (namespace, key) and c.state != "free" and not c.overwritten
            for c in self.claims.values()
        )


def keys_of(call: m.Create | m.Promise) -> list[Key]:
    return [item.key for item in call.items] if isinstance(call, m.Create) else call.keys
