"""Drives a `Broker` as the daemon would, on a clock of its own: no sockets, no waiting.

Every event goes through `Shell.handle`, which gives what comes back to the peers, checks it against the `Ledger` (what
the outside may rely on) and the broker's own books (`audit`), and asks for nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.form import Form, tensor_form
from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.reference import Reference
from mmbroker.state import Broker

from .audit import audit
from .ledger import Ledger

PAGE = 4096
BOOT = b"boot" * 4


def key(name: int | str, kind: Kind = Kind.CONTENT) -> Key:
    return Key(kind, str(name).encode().rjust(32, b"."))


def form(pages: float, modality: str = "image") -> Form:
    return tensor_form("uint8", (int(pages * PAGE),), modality)


def item(name: int | str, pages: float = 1, kind: Kind = Kind.CONTENT) -> m.Item:
    return m.Item(key(name, kind), form(pages))


class Peer:
    """One client. As a rank it answers grants and dismissals by itself if `prompt`, else when told to."""

    def __init__(self, shell: Shell, number: int, pid: int, namespace: str) -> None:
        self.shell, self.number, self.pid, self.namespace = shell, number, pid, namespace
        self.seqs = itertools.count(1)
        self.answers: dict[int, m.Reply] = {}
        self.segments: set[tuple[int, bool]] = set()
        self.prompt = False
        self.granted: dict[int, m.Grant] = {}  # not acknowledged yet
        self.entries: dict[int, m.Grant] = {}  # acknowledged, not dismissed yet
        self.dismissed: dict[int, m.Grant] = {}  # not settled yet
        self.told: set[int] = set()  # holds it was ever dismissed from
        self.retired: list[int] = []
        self.sought: dict[Key, int] = {}  # what it is asked for as a tier: the last promise of each key
        self.fresh: list[m.Worth] = []  # what it was told of
        self.offered: dict[int, m.DevicePlace] = {}  # the last place on the device that it was offered
        self.ended = False

    # --- calls ---

    def call(self, body: m.Body, timeout: float = 5.0, seq: int | None = None) -> int:
        """Send a call; returns its number. The answer, if there is one already, is in `answers`."""
        seq = next(self.seqs) if seq is None else seq
        self.shell.handle(e.Called(self.number, seq, timeout, body))
        return seq

    def cast(self, body: m.Body) -> None:
        self.shell.handle(e.Called(self.number, 0, 0.0, body))

    def ask(self, body: m.Body, timeout: float = 5.0) -> Any:
        """Send a call that is answered at once."""
        seq = self.call(body, timeout)
        assert seq in self.answers, f"no answer yet to {body}"
        return self.answers[seq]

    def failure(self, body: m.Body, error: str, timeout: float = 5.0) -> m.Failed:
        """Send a call that fails at once with this error."""
        answer = self.ask(body, timeout)
        assert isinstance(answer, m.Failed), answer
        assert answer.error == error, answer
        return answer

    def create(self, *items: m.Item, to: str | None = None, timeout: float = 5.0) -> int:
        return self.call(m.Create(list(items), to=to), timeout)

    def lease(self, *items: m.Item, to: str | None = None) -> list[m.Leased]:
        """Create, all of them leased at once."""
        answer = self.ask(m.Create(list(items), to=to))
        assert isinstance(answer, m.Created), answer
        leases = [result for result in answer.results if isinstance(result, m.Leased)]
        assert len(leases) == len(items), answer
        return leases

    def seal(
        self, leases: Sequence[m.Leased], to: str | None = None, timeout: float = 5.0, retained: bool = False
    ) -> int:
        return self.call(m.Seal([m.Sealing(lease.lease, retained) for lease in leases], to=to), timeout)

    def put(self, *items: m.Item, to: str | None = None) -> list[Reference]:
        """Create and seal, all answered at once."""
        seq = self.seal(self.lease(*items, to=to), to)
        answer = self.answers.get(seq)
        assert isinstance(answer, m.Sealed), answer
        return answer.refs

    def drop(self, *refs: Reference | int) -> None:
        self.cast(m.Drop([ref if isinstance(ref, int) else ref.hold for ref in refs]))

    def abort(self, *leases: m.Leased) -> None:
        self.cast(m.Abort([lease.lease for lease in leases]))

    def status(self) -> dict[str, Any]:
        return self.ask(m.Status(features=100)).status

    # --- as a rank ---

    def attach(self, engine: str, rank: int = 0, world: int = 1) -> m.Attached:
        answer = self.ask(m.Attach(engine, rank, world))
        assert isinstance(answer, m.Attached), answer
        return answer

    def ack(
        self,
        holds: Iterable[int] | None = None,
        failed: Sequence[int] = (),
        reason: str = "",
        settled: Iterable[int] = (),
        loaded: Iterable[int] = (),
    ) -> None:
        """Acknowledge grants (all that wait, unless told which), and by the same word settle dismissed holds, and say
        what is loaded."""
        holds = [h for h in self.granted if h not in failed] if holds is None else list(holds)
        for hold in holds:
            if hold in self.granted:
                self.entries[hold] = self.granted.pop(hold)
        for hold in failed:
            self.granted.pop(hold, None)
            self.dismissed.pop(hold, None)
        for hold in [h for h in holds if h in self.dismissed]:
            self.entries.pop(hold, None)
        self.cast(m.Ack(list(holds), list(failed), reason, self._let_go(settled), list(loaded)))

    def settle(self, holds: Iterable[int] | None = None) -> None:
        """Settle dismissed holds (all of them, unless told which)."""
        self.cast(m.Settle(self._let_go(list(self.dismissed) if holds is None else holds)))

    def _let_go(self, holds: Iterable[int]) -> list[int]:
        let_go = list(holds)
        for hold in let_go:
            self.dismissed.pop(hold, None)
            self.granted.pop(hold, None)
            self.entries.pop(hold, None)
        return let_go

    # --- ends ---

    def end(self, alive: bool = False) -> None:
        """The session ends; with it the process, unless `alive`."""
        self.ended = True
        self.shell.handle(e.SessionEnded(self.number, alive))

    def gone(self) -> None:
        self.shell.handle(e.ProcessGone(self.number))

    def hear(self, notice: m.Notice) -> None:
        match notice:
            case m.Granted(grants):
                for grant in grants:
                    self.granted[grant.ref.hold] = grant
                if self.prompt:
                    self.shell.soon(self.ack)
            case m.Dismissed(holds):
                self.told.update(holds)
                for hold in holds:
                    grant = self.entries.pop(hold, None) or self.granted.get(hold)
                    if grant is not None:
                        self.dismissed[hold] = grant
                if self.prompt:
                    self.shell.soon(self.settle)
            case m.Offered(offers):
                self.offered.update((offer.hold, offer.place) for offer in offers)
            case m.Sought(wanted):
                self.sought.update((one.key, one.promise) for one in wanted)
            case m.Fresh(features):
                self.fresh += features
            case m.Retired(segments):
                self.retired += segments


class Shell:
    """A broker of 16 pages in segments of 8 (unless told otherwise) and whoever talks to it.

    `grow`: whether segments come when the broker asks for them, at once; None: when the test says so (`grown`).
    """

    def __init__(self, grow: bool | None = True, pages: int = 16, segment: int = 8, **limits: Any) -> None:
        limits = {"host_bytes": pages * PAGE, "segment_bytes": segment * PAGE, "watermark": 0.0, **limits}
        self.limits = e.Limits(**limits)
        self.broker = Broker(self.limits, BOOT)
        self.ledger = Ledger(self.limits)
        self.now = 1000.0
        self.grow = grow
        self.growing: deque[e.Grow] = deque()
        self.halted: list[str] = []
        self.peers: dict[int, Peer] = {}
        self._numbers = itertools.count(1)
        self._soon: deque[Callable[[], None]] = deque()
        self._busy = False
        self.checks = True  # off where a test counts steps

    def client(
        self, name: str = "worker", namespace: str = "a", *, pid: int | None = None, traceable: bool = True
    ) -> Peer:
        number = next(self._numbers)
        pid = 10_000 + number if pid is None else pid
        peer = self.peers[number] = Peer(self, number, pid, namespace)
        self.handle(e.SessionOpened(number, 1000, pid, f"{name}-{number}", namespace, traceable))
        return peer

    def engine(
        self, name: str = "engine", world: int = 1, *, namespace: str = "a", prompt: bool = True
    ) -> list[Peer]:
        """An engine with all its ranks."""
        ranks = [self.client(f"{name}-rank", namespace) for _ in range(world)]
        for rank, peer in enumerate(ranks):
            peer.prompt = prompt
            assert peer.attach(name, rank, world).complete == (rank == world - 1)
        return ranks

    def soon(self, action: Callable[[], None]) -> None:
        """Do this when the broker has handled what it is handling."""
        self._soon.append(action)

    def handle(self, event: e.Event) -> list[e.Effect]:
        effects = self.broker.handle(event, self.now)
        if self.checks:
            self.ledger.see(event, effects, self.now)
            self.ledger.check_deadline(self.broker.next_deadline(), self.now)
            audit(self.broker)
        for effect in effects:
            self._deliver(effect)
        if not self._busy:
            self._busy = True
            try:
                while self._soon:
                    self._soon.popleft()()
            finally:
                self._busy = False
        return effects

    def _deliver(self, effect: e.Effect) -> None:
        match effect:
            case e.Respond(session, seq, body):
                self.peers[session].answers[seq] = body
            case e.Notify(session, notice):
                self.peers[session].hear(notice)
            case e.SendSegment(session, segment, writable):
                self.peers[session].segments.add((segment, writable))
            case e.Grow():
                self.growing.append(effect)
                if self.grow is not None:
                    self.soon(self.grown)
            case e.Halt(reason):
                self.halted.append(reason)

    def grown(
        self, ready: bool | None = None, reason: str = "memory limit of cgroup test is reached"
    ) -> None:
        """The oldest segment that the broker asked for is there, or cannot be had."""
        ready = bool(self.grow) if ready is None else ready
        number = self.growing.popleft().segment
        self.handle(e.SegmentReady(number) if ready else e.SegmentFailed(number, reason))

    def advance(self, seconds: float) -> None:
        """Time passes; the broker is woken whenever it wants to be."""
        until = self.now + seconds
        while (due := self.broker.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.handle(e.Tick())
        self.now = until
        self.handle(e.Tick())

    def report(self) -> dict[str, Any]:
        return self.broker.report(self.now)

    def counters(self) -> dict[str, int]:
        return self.report()["counters"]
