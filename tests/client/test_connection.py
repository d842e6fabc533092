"""Posting and receiving, step by step, on a socket that does what it is told."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from mmbroker.connection import _BATCH, Connection


class Control:
    """A control socket of no ZeroMQ."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.incoming: deque[bytes] = deque()
        self.room = 1 << 30
        self.on_send: Callable[[], Any] = lambda: None
        self.on_recv: Callable[[], Any] = lambda: None
        self.on_look: Callable[[], Any] = lambda: None

    def events(self) -> int:
        self.on_look()
        return zmq.POLLIN if self.incoming else 0

    def send(self, data: bytes) -> bool:
        self.on_send()
        if not self.room:
            return False
        self.room -= 1
        self.sent.append(data)
        return True

    def recv(self) -> bytes | None:
        self.on_recv()
        return self.incoming.popleft() if self.incoming else None


class NeverWaited:
    """A lock that fails whoever would have to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release = self._lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._lock.acquire(blocking=False)
        assert got or not blocking, "somebody waited"
        return got

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def connection(control: Control) -> Iterator[Connection]:
    made = Connection.__new__(Connection)
    made._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    made._quick = control  # type: ignore[assignment]
    made._lock = NeverWaited()  # type: ignore[assignment]
    made._outbox = deque()
    made._cut = False
    yield made
    os.close(made._wake_fd)


def woken(connection: Connection) -> bool:
    try:
        return os.eventfd_read(connection._wake_fd) > 0
    except BlockingIOError:
        return False


def test_a_post_is_sent_at_once(connection: Connection, control: Control) -> None:
    connection.post(b"a")
    assert control.sent == [b"a"]
    assert not woken(connection)


def test_a_finaliser_posts_in_the_middle_of_a_send(connection: Connection, control: Control) -> None:
    """On the thread that has the lock: it neither waits for it, nor gets lost, nor overtakes."""
    inner = iter([b"b", b"c"])
    control.on_send = lambda: [connection.post(data) for data in list(inner)]
    connection.post(b"a")
    assert control.sent == [b"a", b"b", b"c"]


def test_a_finaliser_posts_in_the_middle_of_a_receive(connection: Connection, control: Control) -> None:
    """What it posts goes out in the receiver's next turn, which comes at once."""
    control.incoming.append(b"in")
    inner = iter([b"out"])
    control.on_recv = lambda: [connection.post(data) for data in inner]
    assert connection.receive() == ([b"in"], False)
    assert control.sent == []
    assert woken(connection)
    connection.receive()
    assert control.sent == [b"out"]
    assert not woken(connection)


def test_another_thread_posts_while_the_lock_is_held(connection: Connection, control: Control) -> None:
    """It goes on; the holder sends for it."""
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go.wait(20)
        control.on_send = lambda: None

    control.on_send = hold
    first = threading.Thread(target=connection.post, args=(b"a",))
    first.start()
    entered.wait(20)
    connection.post(b"b")  # returns
    assert control.sent == []
    go.set()
    first.join()
    assert control.sent == [b"a", b"b"]


def test_a_post_between_the_last_send_and_the_release(connection: Connection, control: Control) -> None:
    """Nobody else would send it."""
    late = iter([b"b"])
    control.on_look = lambda: [connection.post(data) for data in late]
    connection.post(b"a")
    assert control.sent == [b"a", b"b"]


def test_a_message_that_came_during_a_send_wakes_the_receiver(
    connection: Connection, control: Control
) -> None:
    """The send may have taken in its signal."""
    control.on_send = lambda: control.incoming.append(b"in")
    connection.post(b"a")
    assert woken(connection)


def test_what_the_peer_does_not_take_waits_in_order(connection: Connection, control: Control) -> None:
    control.room = 2
    for data in (b"a", b"b", b"c", b"d"):
        connection.post(data)
    assert control.sent == [b"a", b"b"]
    assert list(connection._outbox) == [b"c", b"d"]
    assert connection.backlog == 2
    assert connection.receive() == ([], False)
    assert not woken(connection)  # or it would turn round and round
    control.room = 1
    connection.receive()
    control.room = 1
    connection.post(b"e")
    assert control.sent == [b"a", b"b", b"c", b"d"]
    control.room = 10
    connection.receive()
    assert control.sent == [b"a", b"b", b"c", b"d", b"e"]


def test_a_flood_is_handled_in_batches(connection: Connection, control: Control) -> None:
    control.incoming += [b"%d" % n for n in range(2 * _BATCH + 1)]
    got: list[bytes] = []
    more = True
    turns = 0
    while more:
        batch, more = connection.receive()
        got += batch
        turns += 1
    assert got == [b"%d" % n for n in range(2 * _BATCH + 1)]
    assert turns == 3


def test_after_the_end_posts_are_forgotten(connection: Connection, control: Control) -> None:
    connection._quick = None
    connection.post(b"a")
    assert connection.backlog == 0
    assert connection.receive() == ([], False)
    assert control.sent == []
