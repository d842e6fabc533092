"""Random lives of ranks on a device: they load, share, park, want, detach, come back and go, in a small arena.

What is checked after every event is in `ledger` and `audit`; here it is that nothing is left of anything once everybody
has said their last word. `test_machine` does the same for the host, and for all that has nothing to do with devices.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from mmbroker.proto import messages as m

from .shell import Peer, Shell, item, key
from .test_device import DEVICE, MIB

#: Lives of so many moves, and how many of them a test runs.
MOVES_EACH, LIVES = 150, 40
PAGES = [1, 600, 300, 500, 1, 0, 1100]  # by name; a segment has 512 pages
NAMES = range(len(PAGES))
#: What may happen next, and how often it is chosen.
MOVES = {
    "create": 6, "seal": 8, "lookup": 6, "drop": 6, "acknowledge": 9, "settle": 6, "loaded": 6, "park": 3, "want": 3,
    "detach": 1, "attach_again": 1, "rank_comes": 2, "ends": 2, "ghost_goes": 1, "ghost_comes_back": 1,
    "time_passes": 5, "segment": 4, "evict": 1,
}  # fmt: skip


class Life:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        self.shell = Shell(
            choice([True, True, None]),
            pages=4096,
            segment=512,
            device=DEVICE,
            device_bytes=4 * MIB,
            device_linger=choice([0.0, 0.5, 10.0]),
            segment_linger=choice([0.5, 3000.0]),
            device_segment_linger=choice([0.1, 5.0]),
            producer_grace=3.0,
            grow_retry=0.3,
        )
        self.producers = [self.shell.client() for _ in range(2)]
        self.ranks: list[Peer] = []
        self.ghosts: list[Peer] = []
        self.leases: list[tuple[Peer, int]] = []
        self.holds: list[tuple[Peer, int]] = []
        self.collected: set[tuple[int, int]] = set()
        for _ in range(2):
            self.rank_comes()

    def live(self) -> None:
        for _ in range(MOVES_EACH):
            getattr(self, self.random.choices([*MOVES], [*MOVES.values()])[0])()
            self.collect()

    def collect(self) -> None:
        """What the answers since the last time gave to producers."""
        for peer in self.producers:
            for seq, answer in peer.answers.items():
                if (peer.number, seq) in self.collected:
                    continue
                self.collected.add((peer.number, seq))
                match answer:
                    case m.Created(results):
                        self.leases += [(peer, one.lease) for one in results if isinstance(one, m.Leased)]
                        self.holds += [(peer, one.ref.hold) for one in results if isinstance(one, m.Hit)]
                    case m.Sealed(refs) | m.Found(refs):
                        self.holds += [(peer, ref.hold) for ref in refs if ref is not None]

    def some(self, things: Iterable[int]) -> list[int]:
        """Some of these; a number that may be anybody's if there are none."""
        all_of_them = sorted(things) or [self.random.randint(1, 40)]
        return self.random.sample(all_of_them, self.random.randint(1, min(3, len(all_of_them))))

    def timeout(self) -> float:
        return self.random.choice([0.1, 1.0, 5.0])

    def engine(self) -> str | None:
        return self.random.choice(["a", "a", "b", "b", "c", None])

    # --- producers ---

    def create(self) -> None:
        batch = [item(name, PAGES[name]) for name in self.random.choices(NAMES, k=self.random.randint(1, 3))]
        tier = "device" if self.random.random() < 0.2 else "host"
        self.random.choice(self.producers).call(m.Create(batch, self.engine(), tier=tier), self.timeout())

    def seal(self) -> None:
        if self.leases:
            peer, _ = self.random.choice(self.leases)
            mine = [number for owner, number in self.leases if owner is peer][:2]
            self.leases = [one for one in self.leases if one[1] not in mine]
            seq = peer.call(m.Seal([m.Sealing(number) for number in mine], self.engine()), self.timeout())
            if isinstance(peer.answers.get(seq), m.Failed):
                peer.cast(m.Abort(mine))

    def lookup(self) -> None:
        keys = [key(name) for name in self.random.choices(NAMES, k=2)]
        self.random.choice(self.producers).call(m.Lookup(keys, self.engine()), self.timeout())

    def drop(self) -> None:
        """Or what nobody has been told of yet."""
        if self.holds and self.random.random() < 0.9:
            peer, hold = self.holds.pop(self.random.randrange(len(self.holds)))
            peer.drop(hold)
        elif self.shell.broker.holds.open:
            known = [hold for _, hold in self.holds]
            newest = max(self.shell.broker.holds.open)
            self.random.choice(self.producers).drop(*{newest} - {*known})

    # --- ranks ---

    def rank(self) -> Peer | None:
        return self.random.choice(self.ranks) if self.ranks else None

    def attach(self, peer: Peer) -> None:
        name, choice = self.random.choice("abc"), self.random.choice
        peer.ask(
            m.Attach(
                name,
                rank=choice([0, 1]) if name == "c" else 0,
                world=2 if name == "c" else 1,
                device=choice([DEVICE] * 9 + ["cpu"]),
                access=choice(["readonly"] * 5 + ["copy"]),
                path=choice(["device"] * 5 + ["pinned"]),
                lazy=choice([False] * 4 + [True]),
            )
        )

    def rank_comes(self) -> None:
        if len(self.ranks) < 5:
            rank = self.shell.client("rank", traceable=self.random.random() < 0.9)
            self.attach(rank)
            self.ranks.append(rank)

    def attach_again(self) -> None:
        if rank := self.rank():
            self.attach(rank)

    def detach(self) -> None:
        if rank := self.rank():
            rank.ask(m.Detach())
            if self.random.random() < 0.7:
                self.attach(rank)

    def acknowledge(self) -> None:
        if (rank := self.rank()) and rank.granted:
            some = self.some(rank.granted)
            loaded = self.some(self.replicas(rank)) if self.random.random() < 0.5 else []
            if self.random.random() < 0.2:
                rank.ack([], some[:1], "no memory", loaded=loaded)
            else:
                settled = self.some(rank.dismissed) if rank.dismissed and self.random.random() < 0.5 else []
                rank.ack(some, settled=settled, loaded=loaded)

    def settle(self) -> None:
        """What it was told to let go of, mostly."""
        if rank := self.rank():
            let_go = rank.dismissed if self.random.random() < 0.8 else rank.entries
            rank.settle(self.some(let_go) if let_go else [])

    def replicas(self, rank: Peer) -> list[int]:
        return list(self.shell.broker.books.sessions[rank.number].replicas)

    def loaded(self) -> None:
        if rank := self.rank():
            rank.cast(m.Loaded(self.some(self.replicas(rank))))

    def park(self) -> None:
        if rank := self.rank():
            rank.cast(m.Park(self.some(self.replicas(rank))))

    def want(self) -> None:
        if rank := self.rank():
            rank.cast(m.Want(self.some({*rank.granted, *rank.entries, *rank.dismissed})))

    # --- time, memory, ends ---

    def time_passes(self) -> None:
        self.shell.advance(self.random.choice([0.0, 0.05, 0.3, 1.0, 3.0]))

    def segment(self) -> None:
        if self.shell.growing:
            self.shell.grown(self.random.random() < 0.7)

    def evict(self) -> None:
        operator = self.shell.client("operator")
        operator.ask(m.Evict(self.random.choice([1, 10]), None))
        operator.end()

    def ends(self) -> None:
        peer, alive = self.random.choice(self.producers + self.ranks), self.random.random() < 0.6
        peer.end(alive)
        self.producers = [other for other in self.producers if other is not peer] or [self.shell.client()]
        self.ranks = [other for other in self.ranks if other is not peer]
        self.leases = [one for one in self.leases if one[0] is not peer]
        self.holds = [one for one in self.holds if one[0] is not peer]
        if alive:
            self.ghosts.append(peer)

    def ghost_goes(self) -> None:
        if self.ghosts:
            self.ghosts.pop(self.random.randrange(len(self.ghosts))).gone()

    def ghost_comes_back(self) -> None:
        if self.ghosts:
            ghost = self.ghosts.pop(self.random.randrange(len(self.ghosts)))
            peer = self.shell.client("back", pid=ghost.pid)
            self.attach(peer)
            peer.cast(m.Kept(self.some(range(1, 60))))
            peer.ask(m.Released(ghost.number))
            self.ranks.append(peer)

    # --- the end ---

    def let_go(self) -> None:
        """Everybody gives back what they have and answers what they were asked."""
        while self.shell.growing:
            self.shell.grown(True)
        for rank in self.ranks:
            rank.ack()
            rank.settle()
            mine = self.shell.broker.books.sessions[rank.number].replicas
            rank.cast(m.Loaded([hold for hold, replica in mine.items() if not replica.ready]))
        self.collect()
        for peer, lease in self.leases:
            peer.cast(m.Abort([lease]))
        for peer, hold in self.holds:
            peer.drop(hold)
        self.leases.clear()
        self.holds.clear()

    def quiet(self) -> None:
        """The clients stay, and nothing of what they did."""
        shell, books = self.shell, self.shell.broker.books
        for ghost in self.ghosts:
            ghost.gone()
        for _ in range(30):  # longer than any call or hold
            self.let_go()
            shell.advance(0.3)
        assert not shell.ledger.waiting
        report = shell.report()
        for left in ("leases", "holds", "quarantined", "writer_pins", "ghosts", "waiting"):
            assert not report[left], f"{left}: {report[left]}"
        for session in books.sessions.values():
            assert not (
                session.grants or session.unacked or session.replicas or session.kept or session.nbytes
            )
        for engine in books.engines.values():
            assert not (engine.features or engine.in_flight.total())
        shell.advance(4000.0)  # longer than anything lingers
        assert not shell.broker.pressed
        assert not any(feature.replica for feature in books.numbered.values())
        assert shell.report()["timers"] == 0
        for pool in books.pools.values():
            assert pool.held == sum(segment.held for segment in pool.segments.values() if segment.abandoned)


@pytest.mark.parametrize("first", range(0, 4 * LIVES, LIVES))
def test_lives(first: int) -> None:
    for seed in range(first, first + LIVES):
        life = Life(seed)
        try:
            life.live()
            life.quiet()
        except BaseException as error:
            error.add_note(f"in life {seed}")
            raise
