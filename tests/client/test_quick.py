"""A socket that keeps the interpreter's lock: bytes, room, and what it refuses."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import mmbroker.quick
from mmbroker.proto.errors import InvalidMessage
from mmbroker.quick import Quick

MOST = 1 << 20


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two sockets that speak with each other."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (ours, theirs):
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 10
    theirs.bind(f"ipc://{tmp_path / 'pair'}")
    ours.connect(f"ipc://{tmp_path / 'pair'}")
    yield ours, theirs
    ours.close()
    theirs.close()
    context.term()


def arrived(socket: zmq.Socket[bytes]) -> None:
    assert socket.poll(20_000, zmq.POLLIN)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"a\0b\0", bytes(range(256)) * 100, b"x" * MOST], ids=lambda data: str(len(data))
)
def test_bytes_are_what_they_were(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], data: bytes) -> None:
    ours, theirs = pair
    quick = Quick(ours, MOST)
    assert quick.recv() is None
    assert quick.send(data)
    assert theirs.recv() == data
    theirs.send(data)
    theirs.send(b"short")
    arrived(ours)
    assert quick.events() & zmq.POLLIN
    assert quick.recv() == data
    arrived(ours)
    assert quick.recv() == b"short"
    assert quick.recv() is None
    assert not quick.events() & zmq.POLLIN


def test_the_descriptor_tells_again_after_nothing_had_come(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    """As the receiver thread waits for it."""
    ours, theirs = pair
    quick = Quick(ours, MOST)
    poller = zmq.Poller()
    poller.register(ours.get(zmq.FD), zmq.POLLIN)
    got: list[bytes] = []
    for number in range(300):
        theirs.send(b"%d" % number)
        while (data := quick.recv()) is None:
            assert poller.poll(20_000), "it never tells"
        got.append(data)
    assert got == [b"%d" % number for number in range(300)]


def test_a_peer_that_does_not_read(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    ours, theirs = pair
    quick = Quick(ours, MOST)
    sent = 0
    while ours.poll(500, zmq.POLLOUT):  # the kernel takes some of it a little later
        sent += quick.send(b"x" * 100_000)
        assert sent < 1000, "a pipe without an end"
    assert not quick.events() & zmq.POLLOUT
    assert not quick.send(b"one more")
    for _ in range(sent):
        assert theirs.recv() == b"x" * 100_000
    assert ours.poll(20_000, zmq.POLLOUT)
    assert quick.send(b"again")
    assert theirs.recv() == b"again"


def test_a_message_too_long_is_refused(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    ours, theirs = pair
    quick = Quick(ours, 1000)
    theirs.send(b"x" * 1001)
    theirs.send(b"y")
    arrived(ours)
    with pytest.raises(InvalidMessage, match="1001 bytes exceeds the limit of 1000"):
        quick.recv()
    arrived(ours)
    assert quick.recv() == b"y"


def test_a_socket_whose_context_has_ended() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    quick = Quick(socket, MOST)
    ending = threading.Thread(target=context.term)  # returns once the socket is closed
    ending.start()
    try:
        with pytest.raises(zmq.ZMQError) as refused:
            while quick.recv() is None:
                pass
        assert refused.value.errno == zmq.ETERM
    finally:
        socket.close()
        ending.join(20)


def test_a_call_that_a_signal_interrupts_is_repeated(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would tell again of a message that is there already."""
    ours, theirs = pair
    quick = Quick(ours, MOST)
    interrupted: list[str] = []

    def interrupt(name: str) -> None:
        real = getattr(mmbroker.quick, name)

        def once(*args: Any) -> int:
            if name not in interrupted:
                interrupted.append(name)
                ctypes.set_errno(errno.EINTR)
                return -1
            return int(real(*args))

        monkeypatch.setattr(mmbroker.quick, name, once)

    theirs.send(b"here")
    arrived(ours)
    for name in ("_send", "_recv", "_getsockopt"):
        interrupt(name)
    assert quick.events() & zmq.POLLIN
    assert quick.recv() == b"here"
    assert quick.send(b"there")
    assert theirs.recv() == b"there"
    assert interrupted == ["_getsockopt", "_recv", "_send"]


def test_a_pyzmq_without_its_library_is_told() -> None:
    code = (
        "import sys, zmq.backend.cython as found\n"
        "del found._zmq\n"
        "sys.modules['zmq.backend.cython._zmq'] = None\n"
        "import mmbroker.quick"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    assert "pip install --force-reinstall pyzmq" in told.stderr


def test_the_lock_is_kept(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """Another thread wants it all the time, and gets it in none of a thousand calls."""
    ours, theirs = pair
    quick = Quick(ours, MOST)
    turns, stop = 0, False

    def busy() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)  # gives it up

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # nobody has to give it up
    other = threading.Thread(target=busy)
    try:
        other.start()
        while not turns:
            theirs.poll(1)
        before = turns
        for _ in range(1000):
            quick.send(b"x")
            quick.recv()
            quick.events()
        assert turns == before
    finally:
        stop = True
        sys.setswitchinterval(interval)
        other.join(20)
