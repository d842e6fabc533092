"""Control: one ZeroMQ ROUTER for calls, answers and notices, and an outbox for each session that does not keep up.

The socket's descriptor is edge-triggered: it is readable once for any number of changes, and a send may swallow the
news of a message that has come in. So whenever something was sent, the socket is looked at again.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path
from typing import Final, Protocol

import zmq

from mmbroker.proto.errors import BrokerError, InvalidMessage, ProtocolError, QuotaExceeded, UnknownSession
from mmbroker.proto.messages import (
    MAX_MESSAGE,
    Answer,
    Call,
    Dismissed,
    Downlink,
    Failed,
    Granted,
    decode_call,
    encode,
    seq_of,
)

from .vitals import Vitals

#: Most messages, and bytes, that wait for one session; beyond, the session is ended.
OUTBOX_MESSAGES: Final = 10_000
OUTBOX_BYTES: Final = 64 << 20
#: Messages handled in one go before the loop looks at everything else.
_PER_PASS: Final = 256
#: Longer messages are cut off by ZeroMQ, with their connection; up to here the sender gets an error.
_CUT_OFF: Final = 4 * MAX_MESSAGE
#: How long dismissals wait for a grant to travel with, and for each other, in seconds: while nobody, and while somebody
#: waits for what they free; and how many holds do at most.
_COMPANY: Final = 0.02
_HURRY: Final = 0.001
_DISMISSALS: Final = 1000
#: A session that had no room is tried again after so long, in seconds: from the first to the second, doubling.
_RETRY: Final = (0.002, 0.1)


class Office(Protocol):
    """Whoever handles calls."""

    def called(self, session: int, call: Call) -> None: ...

    def held(self, session: int) -> bool:
        """Must messages to this session wait, because descriptors do?"""

    def pressed(self) -> bool:
        """Is somebody waiting for room, so that what ends must end soon?"""

    def lost(self, session: int, error: BrokerError | None) -> None:
        """Messages to this session can no longer be delivered: end it."""


class _Line:
    """One session's way back."""

    def __init__(self, session: int, routing: bytes) -> None:
        self.session = session
        self.routing = routing
        self.outbox: deque[bytes] = deque()
        self.nbytes = 0
        self.dismissed: list[int] = []  # holds, until there is something else to say


class Control:
    """The ROUTER at `path`. `uids`: the kernel lets only these users connect (empty: no such rule)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        boot: bytes,
        uids: frozenset[int],
        office: Office,
        vitals: Vitals,
    ) -> None:
        self._loop = loop
        self._boot = boot
        self._office = office
        self._vitals = vitals
        self._by_session: dict[int, _Line] = {}
        self._by_routing: dict[bytes, _Line] = {}
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_delay = _RETRY[0]
        self._dismissing: asyncio.Handle | None = None  # uvloop's need not know when it is due
        self._dismissing_due = 0.0
        self._looking = False  # the socket is being looked at, or will be
        self.received = self.sent = 0  # messages
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.ROUTER_HANDOVER: 0,
            zmq.SNDHWM: 1000,
            zmq.RCVHWM: 1000,
            zmq.MAXMSGSIZE: _CUT_OFF,
            zmq.LINGER: 0,
        }
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            for uid in uids:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, uid if uid < 1 << 31 else uid - (1 << 32))
            self._socket.bind(b"ipc://" + os.fsencode(path))  # type: ignore[arg-type]  # bytes do, at run time
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))

    def listen(self) -> None:
        self._loop.add_reader(self._fd, self._look)
        self._look_again()

    def open(self, session: int, routing: bytes) -> None:
        """From now on `routing` speaks for this session."""
        line = _Line(session, routing)
        self._by_session[session] = self._by_routing[routing] = line

    def forget(self, session: int) -> None:
        """The session has ended. Unknown ones are ignored."""
        line = self._by_session.pop(session, None)
        if line is not None:
            del self._by_routing[line.routing]

    def waiting(self) -> tuple[int, int]:
        """Messages in all outboxes, and in the fullest one."""
        depths = [len(line.outbox) for line in self._by_session.values()]
        return sum(depths), max(depths, default=0)

    # --- in ---------------------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Handle what has come in. Every send on the way is followed by another receive."""
        self._looking = True
        for _ in range(_PER_PASS):
            if self._socket.closed:
                return
            try:
                routing, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._looking = False
                return
            self._receive(routing, frames)
        self._loop.call_soon(self._look)

    def _receive(self, routing: bytes, frames: list[bytes]) -> None:
        self.received += 1
        line = self._by_routing.get(routing)
        try:
            if len(frames) != 1:
                raise InvalidMessage(f"a call has one frame, not {len(frames)}")
            call = decode_call(frames[0])
        except ProtocolError as error:
            self._vitals.complain("undecodable_messages", f"a client sent nonsense: {error}")
            self._refuse(routing, line, seq_of(frames[0]) if frames else 0, error)
            return
        if line is None or call.session != line.session or call.boot != self._boot:
            self._vitals.complain("stray_calls", "a call came for a session that its sender does not have")
            if call.seq:
                unknown = UnknownSession("this broker knows no such session of yours: connect again")
                self._refuse(routing, line, call.seq, unknown)
            return
        if line.outbox:
            self._flush(line)
        self._office.called(line.session, call)

    def _refuse(self, routing: bytes, line: _Line | None, seq: int, error: BrokerError) -> None:
        answer = Answer(seq, Failed(type(error).__name__, str(error), error.figures))
        if line is not None:
            self.send(line.session, answer)
            return
        try:
            self._socket.send_multipart((routing, encode(answer)), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._vitals.counters["refusals_dropped"] += 1  # no session: nobody to keep it for

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, session: int, message: Downlink) -> None:
        """Send a message, in order; while the client has no room, it waits. Unknown sessions are ignored."""
        line = self._by_session.get(session)
        if line is None:
            return
        if isinstance(message, Dismissed):
            self._dismiss(line, message.holds)
            return
        if line.dismissed:
            # While somebody waits for their end, they go before it and alone, so that the rank looks at them at once.
            if isinstance(message, Granted) and not self._office.pressed():
                message = Granted(message.grants, line.dismissed)
                line.dismissed = []
            else:
                self._tell_dismissed(line)
        self._send(line, message)

    def _dismiss(self, line: _Line, holds: list[int]) -> None:
        """Dismissals can wait a little for a grant to travel with: each message wakes a thread of the client that takes
        turns with its scheduler."""
        line.dismissed += holds
        if len(line.dismissed) > _DISMISSALS:
            self._tell_dismissed(line)
        else:
            self._tell_within(_HURRY if self._office.pressed() else _COMPANY)

    def hurry(self) -> None:
        """Somebody waits for room: what is over must end soon. Not each by itself: at a change of many requests a rank
        would be busy with nothing but the words, and whoever waits for its acknowledgements would wait longer."""
        if self._dismissing is not None:
            self._tell_within(_HURRY)

    def _tell_within(self, seconds: float) -> None:
        due = self._loop.time() + seconds
        if self._dismissing is not None:
            if self._dismissing_due <= due:
                return
            self._dismissing.cancel()
        self._dismissing, self._dismissing_due = self._loop.call_later(seconds, self._dismiss_all), due

    def _dismiss_all(self) -> None:
        self._dismissing = None
        for line in list(self._by_session.values()):
            if line.dismissed:
                self._tell_dismissed(line)

    def _tell_dismissed(self, line: _Line) -> None:
        dismissed, line.dismissed = line.dismissed, []
        self._send(line, Dismissed(dismissed))

    def _send(self, line: _Line, message: Downlink) -> None:
        data = encode(message)
        if len(data) > MAX_MESSAGE:
            if isinstance(message, Answer):
                data = encode(Answer(message.seq, _too_long(len(data))))
            elif isinstance(message, Granted) and message.dismissed:
                self._send(line, Granted(message.grants))
                data = encode(Dismissed(message.dismissed))
        if (line.outbox or not self._deliver(line, data)) and line.session in self._by_session:
            self._keep(line, data)
        self._look_again()

    def _deliver(self, line: _Line, data: bytes) -> bool:
        """False if the client has no room, or must get descriptors first."""
        if self._office.held(line.session):
            return False
        try:
            self._socket.send_multipart((line.routing, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # It has closed its control socket, or was cut off: without it the session is of no use.
            self._vitals.counters["unroutable_messages"] += 1
            self.forget(line.session)
            self._office.lost(line.session, None)
            return False
        self.sent += 1
        return True

    def _keep(self, line: _Line, data: bytes) -> None:
        line.outbox.append(data)
        line.nbytes += len(data)
        if len(line.outbox) > OUTBOX_MESSAGES or line.nbytes > OUTBOX_BYTES:
            self.forget(line.session)
            self._office.lost(
                line.session,
                QuotaExceeded(
                    f"{len(line.outbox)} messages ({line.nbytes} bytes) were waiting to be read, the limit is "
                    f"{OUTBOX_MESSAGES} ({OUTBOX_BYTES}): read faster, then connect again",
                    requested=1,
                    used=len(line.outbox),
                    limit=OUTBOX_MESSAGES,
                ),
            )
        elif self._retry_timer is None:
            self._retry_timer = self._loop.call_later(self._retry_delay, self._retry)

    def flush(self, session: int) -> None:
        """The session may have room again."""
        line = self._by_session.get(session)
        if line is not None:
            self._flush(line)
            self._look_again()

    def _flush(self, line: _Line) -> bool:
        """Send what waits, until there is no more room. True if something went out."""
        before = len(line.outbox)
        while line.outbox and self._deliver(line, line.outbox[0]):
            line.nbytes -= len(line.outbox.popleft())
        return len(line.outbox) < before

    def _retry(self) -> None:
        """Try all outboxes again; ever more rarely while nobody reads."""
        self._retry_timer = None
        moved = [self._flush(line) for line in list(self._by_session.values()) if line.outbox]
        self._retry_delay = _RETRY[0] if any(moved) else min(2 * self._retry_delay, _RETRY[1])
        if any(line.outbox for line in self._by_session.values()):
            self._retry_timer = self._loop.call_later(self._retry_delay, self._retry)
        self._look_again()

    def close(self) -> None:
        """Drop what has not left yet. Idempotent."""
        for timer in (self._retry_timer, self._dismissing):
            if timer is not None:
                timer.cancel()
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)


def _too_long(nbytes: int) -> Failed:
    return Failed(
        "QuotaExceeded",
        f"the answer has {nbytes} bytes, the limit is {MAX_MESSAGE}: ask for less at once",
        {"requested": nbytes, "used": 0, "limit": MAX_MESSAGE},
    )
