"""The lifeline: a connection is a session. Handshakes, descriptors, and the news that a client or its process is gone.

A peer's user is checked before anything is read from it. Its process is known by a pidfd: a session is over when its
connection ends or its process does, whichever comes first, because a forked child may keep the connection open.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from mmbroker.proto.errors import BrokerError, InvalidMessage, PermissionDenied, QuotaExceeded
from mmbroker.proto.messages import Hello, Refused, Welcome, decode_lifeline, encode

from .vitals import Vitals

#: How long a peer may take to say hello, in seconds, and how many may be about to.
HELLO_TIMEOUT: Final = 2.0
MOST_GUESTS: Final = 64
#: Longest hello, in bytes.
_LONGEST_HELLO: Final = 1 << 16
#: Connections accepted in one go, so that a flood of them leaves time for everybody else.
_ACCEPTS: Final = 32
#: How long to wait after the kernel had no descriptor or room for one more, in seconds.
_BREATHER: Final = 0.05
_SO_PEERPIDFD: Final = 77
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)


class Peer(NamedTuple):
    """Who is at the other end. `pidfd` is -1 if the process cannot be traced."""

    uid: int
    pid: int
    pidfd: int

    @property
    def process(self) -> tuple[int, int]:
        """Tells processes apart as well as this kernel can."""
        return self.pid, os.fstat(self.pidfd).st_ino if self.pidfd >= 0 else 0

    def alive(self) -> bool:
        """May the process still be running?"""
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def forget(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


class Desk(Protocol):
    """Whoever runs the sessions."""

    def admit(self, peer: Peer, hello: Hello) -> Welcome:
        """The session for a peer, or a `BrokerError`."""

    def opened(self, peer: Peer, hello: Hello, welcome: Welcome) -> None:
        """The session is open; its welcome follows."""

    def ended(self, session: int, alive: bool) -> None:
        """The session is over; `gone` follows if its process can be traced."""

    def gone(self, session: int) -> None:
        """The process behind an ended session has exited."""

    def parcel(self, segment: int, writable: bool) -> tuple[bytes, int] | None:
        """Message and descriptor for a segment; None if it has been discarded."""

    def relieved(self, session: int) -> None:
        """Descriptors that were waiting for a slow session have all been sent."""


class _Line:
    """One connection: a guest until it is welcome, then a session."""

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.sock = sock
        self.peer = peer
        self.session = 0
        self.timer: asyncio.TimerHandle | None = None
        self.waiting: deque[tuple[int, bool]] = deque()
        self.blocked = False


class Lifelines:
    """All lifelines of a broker, listening at `path`. `welcome_uid` says which users may come in."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        welcome_uid: Callable[[int], bool],
        desk: Desk,
        vitals: Vitals,
    ) -> None:
        self._loop = loop
        self._welcome_uid = welcome_uid
        self._desk = desk
        self._vitals = vitals
        self._guests: dict[_Line, None] = {}  # in order of arrival
        self._sessions: dict[int, _Line] = {}
        self._ghosts: dict[int, Peer] = {}  # ended sessions whose process lives
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(os.fspath(path))
        except BaseException:
            self._listener.close()
            raise

    def __len__(self) -> int:
        return len(self._sessions)

    def listen(self) -> None:
        self._listener.listen(128)
        self._loop.add_reader(self._listener, self._accept)

    def ghosts(self, peer: Peer) -> int:
        """How many ended sessions the broker still remembers of a peer's process."""
        process = peer.process
        return sum(ghost.process == process for ghost in self._ghosts.values())

    # --- arrival ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _address = self._listener.accept()
                self._greet(sock)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    continue  # that peer has gone already
                self._vitals.complain(
                    "accepts_failed",
                    f"cannot accept a client: {error.strerror}; raise the limit on open files",
                )
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_BREATHER, self._accept_again)
                return

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if not self._welcome_uid(uid):
                self._vitals.complain("peers_denied", f"user {uid} (process {pid}) was turned away")
                _part(
                    sock,
                    PermissionDenied(f"user {uid} may not use this broker: start it with --allow-uid {uid}"),
                )
                return
            line = _Line(sock, Peer(uid, pid, _pidfd(sock, pid)))
        except BaseException:
            sock.close()
            raise
        self._guests[line] = None
        line.timer = self._loop.call_later(HELLO_TIMEOUT, self._too_slow, line)
        self._loop.add_reader(sock, self._read, line)
        if len(self._guests) > MOST_GUESTS:
            self._turn_away(
                next(iter(self._guests)),
                QuotaExceeded(
                    f"{len(self._guests)} connections have not said hello, the limit is {MOST_GUESTS}: connect again",
                    requested=1,
                    used=MOST_GUESTS,
                    limit=MOST_GUESTS,
                ),
            )

    def _too_slow(self, line: _Line) -> None:
        self._turn_away(
            line, InvalidMessage(f"no hello within {HELLO_TIMEOUT} s: connect again, and say hello at once")
        )

    def _turn_away(self, line: _Line, error: BrokerError) -> None:
        """Refuse a guest."""
        self._vitals.complain("peers_refused", f"process {line.peer.pid} was refused: {error}")
        self._let_go(line, error)
        line.peer.forget()

    def _read(self, line: _Line) -> None:
        try:
            data, _, flags, _ = line.sock.recvmsg(_LONGEST_HELLO)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, flags = b"", 0
        if line.session:
            error = InvalidMessage("a client says nothing on the lifeline after its hello") if data else None
            self.end(line.session, error)
        elif not data:
            self._let_go(line)
            line.peer.forget()
        else:
            self._hello(line, data, bool(flags & socket.MSG_TRUNC))

    def _hello(self, line: _Line, data: bytes, truncated: bool) -> None:
        try:
            if truncated:
                raise InvalidMessage(f"a hello has at most {_LONGEST_HELLO} bytes", limit=_LONGEST_HELLO)
            hello = decode_lifeline(data)
            if not isinstance(hello, Hello):
                raise InvalidMessage(f"a client says hello first, not {type(hello).__name__}")
            welcome = self._desk.admit(line.peer, hello)
        except BrokerError as error:
            self._turn_away(line, error)
            return
        del self._guests[line]
        if line.timer is not None:
            line.timer.cancel()
        line.session = welcome.session
        self._sessions[line.session] = line
        self._desk.opened(line.peer, hello, welcome)
        if line.peer.pidfd >= 0:
            self._loop.add_reader(line.peer.pidfd, self._process_gone, line.session)
        try:
            line.sock.send(encode(welcome))
        except OSError:
            self.end(line.session)

    # --- departure --------------------------------------------------------------------------------------------------

    def end(self, session: int, error: BrokerError | None = None) -> None:
        """End a session, with a last word to the client if there is something to say. Unknown ones are ignored."""
        line = self._sessions.pop(session, None)
        if line is None:
            return
        if error is not None:
            self._vitals.complain(
                "sessions_ended", f"the session of process {line.peer.pid} was ended: {error}"
            )
        self._let_go(line, error)
        alive = line.peer.alive()
        if line.peer.pidfd >= 0:
            self._ghosts[session] = line.peer
        self._desk.ended(session, alive)
        if not alive:
            self._process_gone(session)

    def exorcise(self, session: int) -> None:
        """An ended session of which nothing is left: its process need not be watched any more."""
        peer = self._ghosts.pop(session, None)
        if peer is not None:
            self._loop.remove_reader(peer.pidfd)
            peer.forget()

    def _process_gone(self, session: int) -> None:
        self.end(session)
        if session in self._ghosts:
            self.exorcise(session)
            self._desk.gone(session)

    def _let_go(self, line: _Line, error: BrokerError | None = None) -> None:
        self._guests.pop(line, None)
        if line.timer is not None:
            line.timer.cancel()
        self._loop.remove_reader(line.sock)
        self._loop.remove_writer(line.sock)
        _part(line.sock, error)

    # --- descriptors ------------------------------------------------------------------------------------------------

    def send(self, session: int, segment: int, writable: bool) -> None:
        """Pass a segment's descriptor, as soon as the client has room for it; see `busy`."""
        line = self._sessions.get(session)
        if line is not None:
            line.waiting.append((segment, writable))
            if not line.blocked:
                self._flush(line)

    def busy(self, session: int) -> bool:
        """Are descriptors waiting for room? Control messages that name them must wait as well."""
        line = self._sessions.get(session)
        return line is not None and line.blocked

    def _flush(self, line: _Line) -> None:
        """Send what waits, until there is no more room."""
        while line.waiting:
            parcel = self._desk.parcel(*line.waiting[0])
            if parcel is not None:
                try:
                    _send_with_descriptor(line.sock, *parcel)
                except (BlockingIOError, InterruptedError):
                    self._wait_for_room(line)
                    return
                except OSError as error:
                    if error.errno in _OUT_OF_RESOURCES:
                        line.blocked = True
                        self._loop.call_later(_BREATHER, self._retry, line)
                    else:
                        self.end(line.session)
                    return
            line.waiting.popleft()
        line.blocked = False

    def _wait_for_room(self, line: _Line) -> None:
        if not line.blocked:
            line.blocked = True
            self._loop.add_writer(line.sock, self._retry, line)

    def _retry(self, line: _Line) -> None:
        if line.sock.fileno() < 0:
            return
        self._loop.remove_writer(line.sock)
        line.blocked = False
        self._flush(line)
        if not line.blocked:
            self._desk.relieved(line.session)

    def close(self) -> None:
        """Stop listening and cut every line; no news are sent any more."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for line in [*self._guests, *self._sessions.values()]:
            self._let_go(line)
            if line.session and line.peer.pidfd >= 0:
                self._ghosts[line.session] = line.peer
            else:
                line.peer.forget()
        self._sessions.clear()
        for session in list(self._ghosts):
            self.exorcise(session)


def _pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor that is readable once the peer's process is gone; -1 if this kernel has no way to it."""
    for way in (_peer_pidfd, lambda _: os.pidfd_open(pid) if pid > 0 else -1):
        try:
            return way(sock)
        except OSError as error:
            if error.errno == errno.ESRCH or error.errno in _OUT_OF_RESOURCES:
                raise
    return -1


def _peer_pidfd(sock: socket.socket) -> int:
    (pidfd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
    return int(pidfd)


def _send_with_descriptor(sock: socket.socket, data: bytes, descriptor: int) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def _part(sock: socket.socket, error: BrokerError | None) -> None:
    """Close a connection, with a last word if there is one: unread data must go first, or the word would be lost."""
    if error is not None:
        with suppress(OSError):
            sock.send(encode(Refused(type(error).__name__, str(error), error.figures)))
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        while sock.recv(1):
            pass
    sock.close()
