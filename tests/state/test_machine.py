"""Random lives of a broker: producers, engines and processes that come, work, fail and go, in a small arena.

What is checked after every event is in `ledger` and `audit`; what must be true in the end is in `teardown`.
`MMBROKER_TEST_EXAMPLES` sets the number of lives (each of up to 100 moves), for a longer search: then a life that fails
is also made shorter, which takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind

from .shell import PAGE, Peer, Shell, form, item, key

#: Budgets and limits: none, one of each kind, several at once.
QUOTAS: list[dict[str, int]] = [
    {},
    {},
    {"client_budget_features": 3},
    {"client_budget_bytes": 5 * PAGE},
    {"features_per_engine": 3, "engine_bytes": 6 * PAGE},
    {"features_per_namespace": 6, "session_bytes": 6 * PAGE},
    {"namespace_bytes": 9 * PAGE, "client_budget_features": 4},
    {"client_budget_features": 4, "client_budget_bytes": 6 * PAGE, "features_per_engine": 5},
]
Draw = Callable[[st.SearchStrategy[Any]], Any]
NAMES = st.integers(0, 5)
KINDS = st.sampled_from([Kind.CONTENT, Kind.CONTENT, Kind.DERIVED, Kind.CALLER])
PAGES = st.sampled_from([0, 0.5, 1, 1, 2, 3, 5, 9, 14])
TIMEOUTS = st.sampled_from([0.0, 0.1, 1.0, 1.0, 5.0])
#: Errors of a seal whose leases were sealed all the same.
SEALED_ANYWAY = ("EngineLagging", "FeatureError")
COSTS = [None, 0, 1000, None, 1 << 40]
WAITS = st.sampled_from([0.02, 0.02, 0.3, 1.0])
SECONDS = st.sampled_from([0.01, 0.1, 0.25, 0.5, 2.0, 5.0])


@st.composite
def items(draw: st.DrawFn) -> list[m.Item]:
    """A batch; mostly the same size for the same key, so that forms seldom conflict."""
    batch = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=4)):
        pages = [1, 2, 3, 6, 0, 4][name] if draw(st.integers(0, 9)) else draw(PAGES)
        batch.append(item(name, pages, draw(KINDS)))
    return batch


#: What may happen next, and how often it is chosen.
MOVES = {
    "create": 4,
    "put": 10,
    "lookup": 2,
    "promise": 5,
    "keep": 5,
    "seal": 8,
    "abort": 2,
    "drop": 5,
    "unpin": 2,
    "acknowledge": 7,
    "settle": 7,
    "time_passes": 4,
    "segment": 2,
    "rank_comes": 3,
    "producer_comes": 2,
    "tier_comes": 2,
    "tier_says": 1,
    "fetch": 6,
    "absent": 3,
    "tier_ends": 1,
    "nonsense": 1,
    "repeat": 1,
    "status": 1,
    "evict": 1,
    "drain": 1,
    "detach": 1,
    "producer_ends": 1,
    "rank_ends": 2,
    "ghost_comes_back": 2,
    "ghost_goes": 1,
}


class Life(RuleBasedStateMachine):
    @initialize(
        segment=st.sampled_from([4, 8, 16]),
        watermark=st.sampled_from([0.0, 0.2]),
        grow=st.sampled_from([True, True, None]),
        quotas=st.sampled_from(QUOTAS),
        tier=st.sampled_from([None, m.Tier(True), m.Tier(True, 1.0, 2, 2)]),
    )
    def start(
        self, segment: int, watermark: float, grow: bool | None, quotas: dict[str, int], tier: m.Tier | None
    ) -> None:
        self.shell = Shell(
            grow,
            segment=segment,
            watermark=watermark,
            features_per_session=8,
            pending_per_session=3,
            items_per_call=5,
            producer_grace=3.0,
            answers_kept=6,
            cached_features=5,
            **quotas,
        )
        self.producers = [self.shell.client() for _ in range(2)]
        self.ranks: list[Peer] = []
        self.movers: list[Peer] = []
        self.ghosts: list[Peer] = []
        self.leases: dict[int, Peer] = {}
        self.promises: dict[int, Peer] = {}
        self.retained: list[tuple[Peer, int]] = []
        self.holds: list[tuple[Peer, int]] = []
        self.collected: set[tuple[int, int]] = set()
        self.sealing: dict[tuple[int, int], list[m.Sealing]] = {}
        for rank in range(2):
            self.join("a", "engine-a", rank, 2, prompt=True)
        if tier is not None:
            self.movers.append(self.shell.client("mover"))
            self.movers[0].ask(tier)

    @rule(
        data=st.data(), move=st.sampled_from([name for name, weight in MOVES.items() for _ in range(weight)])
    )
    def move(self, data: st.DataObject, move: str) -> None:
        note(move)
        getattr(self, move)(data.draw)
        self.collect()

    def join(
        self, namespace: str, engine: str, rank: int, world: int, prompt: bool, traceable: bool = True
    ) -> None:
        peer = self.shell.client(f"{engine}-rank", namespace, traceable=traceable)
        peer.prompt = prompt
        self.ranks.append(peer)
        peer.ask(m.Attach(engine, rank, world))

    def producer_comes(self, draw: Draw) -> None:
        if len(self.producers) < 5:
            namespace, traceable = (
                draw(st.sampled_from("aab")),
                draw(st.sampled_from([True, True, True, False])),
            )
            self.producers.append(self.shell.client(namespace=namespace, traceable=traceable))

    def rank_comes(self, draw: Draw) -> None:
        """Most often a rank that an engine lacks."""
        lacking = [
            (engine.namespace, engine.name, rank, engine.world)
            for engine in self.shell.broker.books.engines.values()
            for rank in range(engine.world)
            if rank not in engine.ranks
        ]
        if len(self.ranks) < 7:
            fresh = [
                ("a", "engine-a", 0, 2),
                ("a", "engine-b", 0, 1),
                ("a", "engine-b", 2, 3),
                ("b", "engine-a", 0, 1),
            ]
            traceable = draw(st.sampled_from([True, True, True, False]))
            self.join(*draw(st.sampled_from(lacking * 3 + fresh)), draw(st.booleans()), traceable)

    # --- producers ---

    def engine(self, draw: Draw) -> str | None:
        """Where a feature goes: mostly to an engine that is there."""
        there = [engine.name for engine in self.shell.broker.books.engines.values() if engine.complete]
        return draw(st.sampled_from([None, *there, *there, *there, "engine-b"]))

    def collect(self) -> None:
        """What the answers since the last time gave to producers."""
        for peer in {p.number: p for p in [*self.producers, *self.ranks, *self.movers]}.values():
            for seq, answer in list(peer.answers.items()):
                if (peer.number, seq) in self.collected:
                    continue
                self.collected.add((peer.number, seq))
                sealing = self.sealing.pop((peer.number, seq), [])
                match answer:
                    case m.Created(results):
                        self.leases |= {r.lease: peer for r in results if isinstance(r, m.Leased)}
                        self.holds += [(peer, r.ref.hold) for r in results if isinstance(r, m.Hit)]
                    case m.Promised(results):
                        self.holds += [(peer, r.ref.hold) for r in results if isinstance(r, m.Hit)]
                        self.promises |= {r.promise: peer for r in results if isinstance(r, m.Due)}
                    case m.Found(refs) | m.Sealed(refs):
                        self.holds += [(peer, ref.hold) for ref in refs if ref is not None]
                if not isinstance(answer, m.Failed) or answer.error in SEALED_ANYWAY:
                    self.retained += [(peer, s.lease) for s in sealing if s.retained]

    def create(self, draw: Draw) -> None:
        if self.producers:
            peer = draw(st.sampled_from(self.producers))
            peer.create(*draw(items()), to=self.engine(draw), timeout=draw(TIMEOUTS))

    def put(self, draw: Draw) -> None:
        """Create, and seal what was leased, as a client does."""
        if self.producers:
            peer, to = draw(st.sampled_from(self.producers)), self.engine(draw)
            seq = peer.create(*draw(items()), to=to)
            self.collect()
            answer = peer.answers.get(seq)
            if isinstance(answer, m.Created):
                mine = [r.lease for r in answer.results if isinstance(r, m.Leased) and r.lease in self.leases]
                if mine:
                    self.seal_these(peer, mine, to, draw(TIMEOUTS), False)

    def lookup(self, draw: Draw) -> None:
        if self.producers:
            keys = [key(draw(NAMES), draw(KINDS)), key(draw(NAMES), Kind.DERIVED), key(0)]
            draw(st.sampled_from(self.producers)).call(m.Lookup(keys, self.engine(draw)), draw(TIMEOUTS))

    def promise(self, draw: Draw) -> None:
        if self.producers:
            kind = st.sampled_from([Kind.DERIVED, Kind.DERIVED, Kind.CONTENT])
            keys = [key(draw(NAMES), draw(kind)) for _ in range(draw(st.integers(1, 3)))]
            draw(st.sampled_from(self.producers)).call(m.Promise(keys, self.engine(draw)), draw(TIMEOUTS))

    def keep(self, draw: Draw) -> None:
        """Create what was promised: all of a client's, or one, now and then under another's number."""
        if self.promises:
            peer = self.promises[draw(st.sampled_from(sorted(self.promises)))]
            mine = [n for n, owner in self.promises.items() if owner is peer][: draw(st.integers(1, 3))]
            words = self.shell.ledger.promises
            batch = [m.Item(words[n].key, form(draw(PAGES)), n) for n in mine]
            batch += [item(draw(NAMES), 1, Kind.DERIVED)] * draw(st.integers(0, 1))
            if not draw(st.integers(0, 9)):
                batch.append(m.Item(key("another's"), form(1), mine[0]))
            peer.create(*batch, to=self.engine(draw), timeout=draw(TIMEOUTS))
            self.promises = {n: owner for n, owner in self.promises.items() if words[n].state != "over"}

    def seal(self, draw: Draw) -> None:
        if self.leases:
            peer = self.leases[draw(st.sampled_from(sorted(self.leases)))]
            mine = [n for n, owner in self.leases.items() if owner is peer][: draw(st.integers(1, 4))]
            self.seal_these(peer, mine, self.engine(draw), draw(TIMEOUTS), draw(st.booleans()))

    def seal_these(self, peer: Peer, mine: list[int], to: str | None, timeout: float, retained: bool) -> None:
        sealings = [m.Sealing(n, retained, bytes(n % 3), COSTS[n % len(COSTS)]) for n in mine]
        seq = next(peer.seqs)
        self.sealing[peer.number, seq] = sealings
        peer.call(m.Seal(sealings, to), timeout, seq)
        answer = peer.answers.get(seq)
        if not isinstance(answer, m.Failed) or answer.error in SEALED_ANYWAY:
            self.leases = {n: owner for n, owner in self.leases.items() if n not in mine}
        elif answer.error == "DigestConflict":
            peer.cast(m.Abort(mine))
            self.leases = {n: owner for n, owner in self.leases.items() if n not in mine}

    def abort(self, draw: Draw) -> None:
        if self.leases:
            lease = draw(st.sampled_from(sorted(self.leases)))
            self.leases.pop(lease).cast(m.Abort([lease]))
        elif self.promises:
            number = draw(st.sampled_from(sorted(self.promises)))
            self.promises.pop(number).cast(m.Abort([number]))

    def drop(self, draw: Draw) -> None:
        if self.holds:
            peer, _ = draw(st.sampled_from(self.holds))
            mine = [place for place in self.holds if place[0] is peer][: draw(st.integers(1, 3))]
            self.holds = [place for place in self.holds if place not in mine]
            peer.drop(*(hold for _, hold in mine))

    def unpin(self, draw: Draw) -> None:
        if self.retained:
            peer, lease = self.retained.pop(draw(st.integers(0, len(self.retained) - 1)))
            peer.cast(m.Unpin([lease]))

    # --- the tier ---

    def tier(self, draw: Draw) -> m.Tier:
        most, reuse = draw(st.sampled_from([1, 2, 64])), draw(st.integers(1, 2))
        return m.Tier(draw(st.sampled_from([True, True, True, False])), draw(WAITS), most, reuse)

    def tier_comes(self, draw: Draw) -> None:
        """It may read, too, and then it is a rank as others are."""
        peer = self.shell.client("mover", draw(st.sampled_from("aab")))
        if isinstance(peer.ask(self.tier(draw)), m.Failed):
            peer.end()
            return
        self.movers.append(peer)
        if draw(st.booleans()):
            peer.prompt = draw(st.booleans())
            peer.ask(m.Attach("tier", 0, 1))
            self.ranks.append(peer)

    def tier_says(self, draw: Draw) -> None:
        if self.movers:
            answer = draw(st.sampled_from(self.movers)).ask(self.tier(draw))
            if isinstance(answer, m.Failed):  # it has as many calls open as it may have
                assert "calls waiting" in answer.message, answer
                assert answer.figures["used"] == self.shell.limits.pending_per_session, answer
            else:
                assert answer == m.Done()

    def tier_ends(self, draw: Draw) -> None:
        if self.movers:
            self.end(draw(st.sampled_from(self.movers)), draw(st.booleans()))

    def fetch(self, draw: Draw) -> None:
        """Write what it was asked for, in time or not, or only begin; or what it was not asked for; or read what is
        here."""
        if self.movers:
            mover = draw(st.sampled_from(self.movers))
            wanted = [m.Item(of, form(draw(PAGES)), number) for of, number in mover.sought.items()][:4]
            mover.sought.clear()
            if wanted:
                seq = mover.create(*wanted, timeout=draw(TIMEOUTS))
                self.collect()
                answer = mover.answers.get(seq)
                results = answer.results if isinstance(answer, m.Created) else []
                mine = [r.lease for r in results if isinstance(r, m.Leased) and r.lease in self.leases]
                if mine and draw(st.booleans()):
                    self.seal_these(mover, mine, None, draw(TIMEOUTS), draw(st.booleans()))
            elif draw(st.booleans()):
                mover.create(item(draw(NAMES), 1, Kind.DERIVED), timeout=draw(TIMEOUTS))
            else:
                reads = "tier" if mover in self.ranks else None
                mover.call(m.Lookup([key(draw(NAMES), Kind.DERIVED)], reads), draw(TIMEOUTS))

    def absent(self, draw: Draw) -> None:
        """Give promises back, or leases; some of them."""
        movers = [mover for mover in self.movers if mover.sought]
        if movers:
            mover = draw(st.sampled_from(movers))
            given_back = draw(
                st.lists(st.sampled_from(sorted(mover.sought.values())), min_size=1, unique=True)
            )
            mover.sought = {of: number for of, number in mover.sought.items() if number not in given_back}
            mover.cast(m.Abort(given_back))

    # --- ranks ---

    def acknowledge(self, draw: Draw) -> None:
        ranks = [rank for rank in self.ranks if rank.granted]
        if ranks:
            rank, fail = draw(st.sampled_from(ranks)), draw(st.sampled_from([False, False, False, True]))
            first = next(iter(rank.granted))
            settled = list(rank.dismissed) if draw(st.booleans()) else []
            rank.ack(
                [] if fail else None if draw(st.booleans()) else [first],
                [first] if fail else [],
                "no memory",
                settled,
            )

    def settle(self, draw: Draw) -> None:
        ranks = [rank for rank in self.ranks if rank.dismissed]
        if ranks:
            rank = draw(st.sampled_from(ranks))
            rank.settle(None if draw(st.booleans()) else [next(iter(rank.dismissed))])

    def detach(self, draw: Draw) -> None:
        """For good, or to come back as another rank."""
        if self.ranks:
            rank = draw(st.sampled_from(self.ranks))
            rank.ask(m.Detach())
            if draw(st.booleans()):
                rank.ask(
                    m.Attach(draw(st.sampled_from(["engine-a", "engine-b"])), draw(st.integers(0, 1)), 2)
                )

    # --- nonsense, repeats, the operator ---

    def nonsense(self, draw: Draw) -> None:
        """Numbers that may be anybody's. Only their owner's say counts."""
        if not self.producers + self.ranks:
            return
        peer = draw(st.sampled_from(self.producers + self.ranks))
        number = draw(st.integers(0, 40))
        mine = {n for n, owner in (self.leases | self.promises).items() if owner is peer}
        held = {hold for owner, hold in self.holds if owner is peer}
        kept = {lease for owner, lease in self.retained if owner is peer}
        granted = {*peer.granted, *peer.entries, *peer.dismissed}
        bodies: list[m.Body] = [m.Seal([m.Sealing(number), m.Sealing(number)])]
        bodies += [m.Abort([number]), m.Seal([m.Sealing(number)])] * (number not in mine)
        bodies += [m.Drop([number])] * (number not in held)
        bodies += [m.Unpin([number])] * (number not in kept | mine)
        bodies += [m.Ack([number], [number]), m.Settle([number])] * (number not in granted)
        body = draw(st.sampled_from(bodies))
        if draw(st.booleans()):
            peer.cast(body)
        else:
            peer.call(body)

    def repeat(self, draw: Draw) -> None:
        """An answered call again, or one that still waits."""
        if self.producers:
            peer = draw(st.sampled_from(self.producers))
            known = {*self.shell.ledger.clients[peer.number].answered}
            known |= {seq for owner, seq in self.shell.ledger.waiting if owner == peer.number}
            if known:
                peer.call(m.Create([item(0)]), seq=draw(st.sampled_from(sorted(known))))

    def status(self, draw: Draw) -> None:
        if self.producers:
            assert isinstance(
                draw(st.sampled_from(self.producers)).ask(m.Status(features=3)), m.Report | m.Failed
            )

    def operator(self) -> Peer:
        return self.shell.client("operator", "op")

    def evict(self, draw: Draw) -> None:
        """What is held stays, and the books say how much went."""
        operator, before, books = self.operator(), self.shell.report(), self.shell.broker.books
        tainted = [feature for feature in books.numbered.values() if feature.tainted and not feature.pinned]
        answer = operator.ask(m.Evict(draw(st.sampled_from([1, 2, 100])), draw(st.sampled_from([None, "a"]))))
        assert isinstance(answer, m.Evicted)
        after = self.shell.report()
        # Room that came free may have been given away at once, so the books are only compared where nobody waits.
        if not before["waiting_count"]:
            assert before["features_idle"] - after["features_idle"] == answer.features
            # What is read by who cannot be traced is free when its segment goes, and not before.
            gone = [feature.slot for feature in tainted if feature.number not in books.numbered]
            lost = sum(slot.nbytes for slot in gone if slot.segment in books.pool.segments)
            assert before["pool"]["held"] + lost == after["pool"]["held"]
            assert before["holds"] == after["holds"]
        operator.end()

    def drain(self, draw: Draw) -> None:
        """Begun, or undone. Meanwhile nothing new is given."""
        operator = self.operator()
        assert operator.ask(m.Drain(not self.shell.report()["draining"])) == m.Done()
        operator.end()

    def undrain(self) -> None:
        if self.shell.report()["draining"]:
            self.drain(lambda _: None)

    # --- time, memory, ends ---

    def time_passes(self, draw: Draw) -> None:
        """Nobody drains for long."""
        self.shell.advance(draw(SECONDS))
        self.undrain()

    def segment(self, draw: Draw) -> None:
        if self.shell.growing:
            self.shell.grown(draw(st.sampled_from([True, True, False])))

    def producer_ends(self, draw: Draw) -> None:
        if self.producers:
            self.end(draw(st.sampled_from(self.producers)), draw(st.booleans()))

    def rank_ends(self, draw: Draw) -> None:
        if self.ranks:
            self.end(draw(st.sampled_from(self.ranks)), draw(st.booleans()))

    def end(self, peer: Peer, alive: bool) -> None:
        peer.end(alive)
        self.producers = [p for p in self.producers if p is not peer]
        self.ranks = [p for p in self.ranks if p is not peer]
        self.movers = [p for p in self.movers if p is not peer]
        self.leases = {n: owner for n, owner in self.leases.items() if owner is not peer}
        self.promises = {n: owner for n, owner in self.promises.items() if owner is not peer}
        self.holds = [place for place in self.holds if place[0] is not peer]
        self.retained = [place for place in self.retained if place[0] is not peer]
        if alive:
            self.ghosts.append(peer)

    def ghost_comes_back(self, draw: Draw) -> None:
        """The process of a lost session connects again, and may confirm that it let go of everything."""
        if self.ghosts:
            ghost = draw(st.sampled_from(self.ghosts))
            peer = self.shell.client("back", ghost.namespace, pid=ghost.pid)
            self.ranks.append(peer)
            peer.ask(m.Attach("engine-a", 0, 2))
            peer.cast(m.Kept(draw(st.lists(st.integers(1, 60), max_size=10, unique=True))))
            if draw(st.booleans()):
                peer.ask(m.Released(ghost.number))
                self.ghosts.remove(ghost)

    def ghost_goes(self, draw: Draw) -> None:
        if self.ghosts:
            self.ghosts.pop(draw(st.integers(0, len(self.ghosts) - 1))).gone()

    # --- the end ---

    def teardown(self) -> None:
        if hasattr(self, "shell"):
            self.undrain()
            self.nobody_waits_where_nothing_is_held()
            self.nothing_is_left()

    def nobody_waits_where_nothing_is_held(self) -> None:
        shell = self.shell
        for ghost in self.ghosts:
            ghost.gone()
        for rank in self.ranks:
            rank.prompt = True
        for _ in range(60):
            self.let_go()
            if not shell.ledger.waiting:
                break
            shell.advance(0.25)
        stuck = [w for w in shell.ledger.waiting.values() if isinstance(w.body, m.Create | m.Promise)]
        assert not stuck, f"waiting for room that is there: {stuck}"
        self.let_go()
        shell.advance(shell.limits.producer_grace)
        self.let_go()
        report = shell.report()
        assert (report["leases"], report["holds"]) == (0, 0), "a lease or hold that nobody knows of"

    def let_go(self) -> None:
        """Everybody gives back what they have and answers what they were asked."""
        shell = self.shell
        while shell.growing:
            shell.grown(True)
        self.collect()
        for rank in self.ranks:
            if rank.granted:
                rank.ack()
            if rank.dismissed:
                rank.settle()
        self.collect()
        for number, peer in (self.leases | self.promises).items():
            peer.cast(m.Abort([number]))
        for peer, hold in self.holds:
            peer.drop(hold)
        for peer, number in self.retained:
            peer.cast(m.Unpin([number]))
        self.leases.clear()
        self.promises.clear()
        self.holds.clear()
        self.retained.clear()

    def nothing_is_left(self) -> None:
        shell = self.shell
        for peer in {p.number: p for p in [*self.producers, *self.ranks, *self.movers]}.values():
            peer.end()
        while shell.growing:
            shell.grown(True)
        shell.advance(60.0)
        report = shell.report()
        for books in (
            "leases",
            "holds",
            "promises",
            "quarantined",
            "writer_pins",
            "sessions",
            "ghosts",
            "engines",
            "movers",
            "waiting",
        ):
            assert not report[books], f"{books}: {report[books]}"
        assert report["pool"]["held"] == 0 and report["timers"] == 0, report
        last = shell.client(namespace="c")
        limits = shell.limits
        most = [limits.host_bytes, limits.client_budget_bytes, limits.session_bytes, limits.namespace_bytes]
        answer_seq = last.create(m.Item(key("all of it"), form(min(filter(None, most)) / PAGE)))
        while shell.growing:
            shell.grown(True)
        answer = last.answers.get(answer_seq)
        assert isinstance(answer, m.Created), f"the arena is empty, and not to be had: {answer}"


EXAMPLES = os.environ.get("MMBROKER_TEST_EXAMPLES")
PHASES = [phase for phase in Phase if EXAMPLES or phase not in (Phase.shrink, Phase.explain)]

TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(EXAMPLES or 200),
    derandomize=not EXAMPLES,  # a search of new lives is what the variable is for
    phases=PHASES,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
