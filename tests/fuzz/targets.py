"""Whoever reads what others wrote: the decoders, and the state machine behind them. Each is fed one message at a time.

A target raises nothing for any bytes. What it refuses, it refuses by an error of ours that can be sent back.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.errors import BrokerError, InvalidMessage, ProtocolError, make
from mmbroker.proto.form import check_form, tensor_form
from mmbroker.proto.keys import Key
from mmbroker.proto.reference import BOOT_BYTES, PROTOCOL_VERSION, Reference
from mmbroker.state import Broker
from tests.state.audit import audit

Target = Callable[[bytes], str]

MIB = 1 << 20


def refused(error: ProtocolError) -> str:
    """A refusal goes back to the sender, and into the log."""
    assert str(error).isprintable() and len(str(error)) < 1000
    assert m.encode(m.Failed(type(error).__name__, str(error), error.figures))
    return type(error).__name__


def lifeline(data: bytes) -> str:
    return _read(m.decode_lifeline, data)


def call(data: bytes) -> str:
    assert isinstance(m.seq_of(data), int)
    read = _read(m.decode_call, data)
    if read == "read":
        body = m.decode_call(data).body
        for item in body.items if isinstance(body, m.Create) else ():
            try:
                check_form(item.form)
            except InvalidMessage as error:
                read = refused(error)
    return read


def downlink(data: bytes) -> str:
    read = _read(m.decode_downlink, data)
    failed = getattr(m.decode_downlink(data), "body", None) if read == "read" else None
    if isinstance(failed, m.Failed):
        assert isinstance(make(failed.error, failed.message, failed.figures), BrokerError)
    return read


def _read(decode: Callable[[bytes], msgspec.Struct], data: bytes) -> str:
    try:
        message = decode(data)
    except ProtocolError as error:
        return refused(error)
    again = m.encode(message)
    assert m.encode(decode(again)) == again, "what was read says everything that was in the bytes"
    return "read"


def reference(data: bytes) -> str:
    """A reference comes through the engine's own channel, which has decoded it already."""
    try:
        wire = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        wire = data
    try:
        ref = Reference.from_wire(wire)
    except ProtocolError as error:
        return refused(error)
    assert Reference.from_wire(ref.to_wire()) == ref and hash(ref) == hash(Reference.from_wire(ref.to_wire()))
    return "read"


DECODERS: dict[str, Target] = {
    "lifeline": lifeline,
    "call": call,
    "downlink": downlink,
    "reference": reference,
}


def envelope(tree: dict[str, Any]) -> None:
    """For a `Mutator`: put a call's envelope right, so that the state machine hears what is inside."""
    tree.update(v=PROTOCOL_VERSION, boot=b"B" * BOOT_BYTES)
    for name, kind, value in (("session", int, 1), ("seq", int, 1), ("timeout", float, 0.5)):
        if type(tree.get(name)) is not kind or not 0 <= tree[name] < 1 << 62:
            tree[name] = value


class Machine:
    """The state machine of a small broker: hears every call that can be decoded, from one of its clients.

    In between its clients do honest work, so that there is something to damage. Lives are short: at the end of each,
    when everybody is gone, nothing may be left.
    """

    LIFE = 2000
    CLIENTS = 7  # the last is a tier, and the two before it are ranks of an engine in each namespace

    def __init__(self) -> None:
        self.lives = 0
        self.answers: Counter[str] = Counter()
        self._begin()

    def _begin(self) -> None:
        self.lives += 1
        limits = e.Limits(
            host_bytes=4 * MIB,
            segment_bytes=MIB,
            features_per_session=60,
            pending_per_session=8,
            items_per_call=50,
            client_budget_bytes=2 * MIB,
            features_per_namespace=300,
            answers_kept=8,
            cached_features=50,
        )
        self.broker = Broker(limits, b"B" * BOOT_BYTES)
        self.now = 0.0
        self._seqs = itertools.count(1)
        self._leased: list[int] = []
        self._heard = 0
        for session in range(1, self.CLIENTS + 1):
            self._handle(e.SessionOpened(session, 1000, 10 + session, f"client-{session}", "ab"[session % 2]))
        for rank in (self.CLIENTS - 2, self.CLIENTS - 1):
            self._call(rank, m.Attach("engine-a", 0, 1))
        self._call(self.CLIENTS, m.Tier(True))
        self._call(self.CLIENTS, m.Attach("tier", 0, 1))

    def feed(self, data: bytes) -> str:
        try:
            call = m.decode_call(data)
        except ProtocolError as error:
            return refused(error)
        self._heard += 1
        if isinstance(call.body, m.Shutdown) and self._heard % 50:
            return "spared"
        if self._heard % 4 == 0:
            self._work(1 + self._heard % (self.CLIENTS - 3))
        session = 1 + call.session % self.CLIENTS
        repeated = self._heard % 7 == 0 and 0 < call.seq < 100
        seq = call.seq if call.seq <= 0 or repeated else next(self._seqs)
        self.now += min(call.timeout, 1.0) / 100
        self._handle(e.Called(session, seq, call.timeout, call.body))
        if self._heard % 100 == 0:
            audit(self.broker)
        if self._heard % self.LIFE == 0 or self.broker.halting:
            self.end()
        return "heard"

    def _call(self, session: int, body: m.Body) -> None:
        self._handle(e.Called(session, next(self._seqs), 1.0, body))

    def _work(self, session: int) -> None:
        """Put a feature to the engine, as far as that goes."""
        if self.broker.admission.draining:
            self._call(session, m.Drain(False))
        name = self._heard % 37
        self._leased = []
        form = tensor_form("uint8", (1000 * name,), "image")
        key = Key.derived(bytes([name]) * 32) if self._heard % 3 else Key.caller(str(name))
        self._call(session, m.Create([m.Item(key, form)], "engine-a"))
        if self._leased:
            self._call(session, m.Seal([m.Sealing(lease) for lease in self._leased], "engine-a"))
        derived = Key.derived(bytes([self._heard % 5]) * 32)
        self._call(session, m.Lookup([derived]) if self._heard % 8 else m.Promise([derived]))
        if self._heard % 3 == 0:
            self._call(session, m.Drop(list(self.broker.books.sessions[session].holds)[:20]))

    def _handle(self, event: e.Event) -> None:
        events = deque([event])
        while events:
            for effect in self.broker.handle(events.popleft(), self.now):
                match effect:
                    case e.Respond(_, seq, body):
                        self._sent(m.Answer(seq, body))
                        if isinstance(body, m.Created):
                            self._leased = [r.lease for r in body.results if isinstance(r, m.Leased)]
                    case e.Notify(session, notice):
                        self._sent(notice)
                        if isinstance(notice, m.Granted) and self._heard % 5:
                            acked = m.Ack([grant.ref.hold for grant in notice.grants])
                            events.append(e.Called(session, 0, 0.0, acked))
                        elif isinstance(notice, m.Sought) and self._heard % 5:
                            promises = [one.promise for one in notice.wanted]
                            events.append(e.Called(session, 0, 0.0, m.Abort(promises)))
                        elif isinstance(notice, m.Dismissed) and self._heard % 5:
                            events.append(e.Called(session, 0, 0.0, m.Settle(notice.holds)))
                    case e.Grow(segment):
                        events.append(e.SegmentReady(segment))

    def _sent(self, message: Any) -> None:
        body = message.body if isinstance(message, m.Answer) else message
        self.answers[body.error if isinstance(body, m.Failed) else type(body).__name__] += 1
        assert m.encode(m.decode_downlink(m.encode(message))), "a client can read it"

    def end(self) -> None:
        """Everybody is gone: nothing is left."""
        for session in range(1, self.CLIENTS + 1):
            self._handle(e.SessionEnded(session, alive=False))
        self.now += 3600.0
        self._handle(e.Tick())
        audit(self.broker)
        report = self.broker.report(self.now)
        for what in (
            "sessions",
            "ghosts",
            "leases",
            "holds",
            "waiting",
            "engines",
            "movers",
            "quarantined",
            "timers",
        ):
            assert not report[what], f"{what} after everybody's end: {report[what]}"
        assert report["pool"]["held"] == 0
        self._begin()
