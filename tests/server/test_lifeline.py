"""Lifelines where the kernel refuses: what cannot be had from a real one on demand."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from mmbroker import lifeline
from mmbroker.lifeline import Lifelines, Peer
from mmbroker.proto import messages as m
from mmbroker.proto.reference import PROTOCOL_VERSION
from mmbroker.vitals import Vitals

pytestmark = pytest.mark.usefixtures("no_leaks")

SESSION = 5


class Desk:
    """Admits everybody as one session, and has one parcel to send."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.descriptor = os.memfd_create("parcel")

    def admit(self, peer: Peer, hello: m.Hello) -> m.Welcome:
        return m.Welcome(PROTOCOL_VERSION, b"b" * 16, SESSION, b"r" * 16, "c", "n", "i")

    def opened(self, peer: Peer, hello: m.Hello, welcome: m.Welcome) -> None:
        self.events.put_nowait(("opened", welcome.session))

    def ended(self, session: int, alive: bool) -> None:
        self.events.put_nowait(("ended" if alive else "died", session))

    def gone(self, session: int) -> None:
        self.events.put_nowait(("gone", session))

    def parcel(self, segment: int, writable: bool) -> tuple[bytes, int] | None:
        return m.encode(m.SegmentFd(segment, 4096, writable)), self.descriptor

    def relieved(self, session: int) -> None:
        self.events.put_nowait(("relieved", session))


def on_a_loop(tmp_path: Path, play: Callable[[Lifelines, Desk, socket.socket], Awaitable[None]]) -> None:
    """A listening `Lifelines` with one client that has said hello."""

    async def stage() -> None:
        loop = asyncio.get_running_loop()
        desk, vitals = Desk(), Vitals(loop)
        lines = Lifelines(loop, tmp_path / "sock", lambda uid: True, desk, vitals)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            lines.listen()
            client.connect(str(tmp_path / "sock"))
            client.send(m.encode(m.Hello(PROTOCOL_VERSION, "x")))
            async with asyncio.timeout(10):
                assert await desk.events.get() == ("opened", SESSION)
                assert isinstance(m.decode_lifeline(client.recv(1 << 16)), m.Welcome)
                await play(lines, desk, client)
        finally:
            client.close()
            lines.close()
            os.close(desk.descriptor)

    uvloop.run(stage())


def refuse(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[int]:
    """Let the next sends of a descriptor fail so. Returns the list that they are taken from."""
    waiting, send = list(codes), lifeline._send_with_descriptor

    def refusing(sock: socket.socket, data: bytes, descriptor: int) -> None:
        if waiting:
            code = waiting.pop(0)
            raise OSError(code, os.strerror(code))
        send(sock, data, descriptor)

    monkeypatch.setattr(lifeline, "_send_with_descriptor", refusing)
    return waiting


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS])
def test_no_room_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It is tried again; what comes after it waits."""
    waiting = refuse(monkeypatch, code, code)

    async def play(lines: Lifelines, desk: Desk, client: socket.socket) -> None:
        lines.send(SESSION, 1, True)
        assert lines.busy(SESSION)
        lines.send(SESSION, 2, False)
        assert await desk.events.get() == ("relieved", SESSION)
        assert not lines.busy(SESSION) and not waiting
        for segment, writable in ((1, True), (2, False)):
            data, fds, _, _ = socket.recv_fds(client, 1 << 16, 1)
            os.close(fds[0])
            assert m.decode_lifeline(data) == m.SegmentFd(segment, 4096, writable)

    on_a_loop(tmp_path, play)


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ECONNRESET, errno.EBADF])
def test_a_lifeline_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    refuse(monkeypatch, code)

    async def play(lines: Lifelines, desk: Desk, client: socket.socket) -> None:
        lines.send(SESSION, 1, True)
        assert desk.events.get_nowait() == ("ended", SESSION)
        assert len(lines) == 0 and not lines.busy(SESSION)
        assert client.recv(1) == b""
        lines.send(SESSION, 1, True)  # nobody there any more

    on_a_loop(tmp_path, play)


def test_a_session_that_ends_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, *[errno.ENOBUFS] * 1000)

    async def play(lines: Lifelines, desk: Desk, client: socket.socket) -> None:
        lines.send(SESSION, 1, True)
        client.close()
        assert await desk.events.get() == ("ended", SESSION)

    on_a_loop(tmp_path, play)


@pytest.mark.parametrize(
    ("answers", "traceable"),
    [
        ([errno.ENOPROTOOPT], True),  # an older kernel: the pid does
        ([errno.ENOPROTOOPT, errno.EPERM], False),
        ([errno.EINVAL, errno.ENOSYS], False),
    ],
)
def test_ways_to_a_pidfd(monkeypatch: pytest.MonkeyPatch, answers: list[int], traceable: bool) -> None:
    fail_in_turn(monkeypatch, answers)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pidfd = lifeline._pidfd(ours, os.getpid())
        assert (pidfd >= 0) == traceable
        if traceable:
            peer = Peer(0, os.getpid(), pidfd)
            assert peer.alive()
            peer.forget()


@pytest.mark.parametrize("answers", [[errno.ESRCH], [errno.EMFILE], [errno.ENOPROTOOPT, errno.ENFILE]])
def test_no_pidfd_for_want_of_something(monkeypatch: pytest.MonkeyPatch, answers: list[int]) -> None:
    """A peer that could be traced is not let in untraced."""
    fail_in_turn(monkeypatch, answers)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(OSError) as caught:
        lifeline._pidfd(ours, os.getpid())
    assert caught.value.errno == answers[-1]


def test_a_process_that_this_namespace_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_turn(monkeypatch, [errno.ENOPROTOOPT])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert lifeline._pidfd(ours, 0) == -1


def fail_in_turn(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> None:
    """The socket's way to a pidfd, then the pid's, fail so; what is left over works."""

    def failing(code: int) -> Callable[..., int]:
        def fail(*args: object) -> int:
            raise OSError(code, os.strerror(code))

        return fail

    for name, code in zip(("_peer_pidfd", "pidfd_open"), codes, strict=False):
        monkeypatch.setattr(lifeline if name == "_peer_pidfd" else os, name, failing(code))
