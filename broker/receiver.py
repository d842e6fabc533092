"""The thread behind a client: it receives, and keeps the connection alive.

It hands answers to `Link`, whose callers wait for them, and notices to the hooks. When the session is over it fails
what waits, and connects anew with a growing pause, as often as it takes. No torch here.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import zmq

from mmbroker.proto import messages
from mmbroker.proto.errors import (
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    ConnectTimeout,
    ProtocolError,
)
from mmbroker.proto.messages import (
    Answer,
    Broken,
    Dismissed,
    Downlink,
    Fresh,
    Grant,
    Granted,
    Offer,
    Offered,
    Retired,
    Sought,
    Wanted,
    Worth,
)
from mmbroker.proto.tags import boot_tag, session_tag

from . import mapping
from .connection import Connection, start_command
from .mapping import Mapping

_log = logging.getLogger("mmbroker")

#: First and longest pause between attempts to connect, in seconds.
_PAUSE: Final = (0.01, 1.0)
#: How long one attempt to connect may take, once there has been a connection.
_ATTEMPT: Final = 2.0
#: The thread looks after its chores at least this often, in seconds.
_TICK: Final = 1.0

_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


class Receiver(ABC):
    """Connected when it is made; raises `ConnectTimeout`, `PermissionDenied`, `VersionMismatch`.

    Hooks run in the thread, and may call. `on_connected` runs after every handshake but the first, before `connected`
    turns true again; if it raises, the session is given up. `on_closing` runs before an orderly end. `chores` runs at
    least once a second, is told the time (`time.monotonic`), and returns in how many seconds it wants to run again.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, namespace: str | None, timeout: float
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.name = name
        self.timeout = timeout
        self.forked = False
        self.reconnects = 0
        self.on_granted: Callable[[list[Grant], list[int]], None] = _ignore  # and what is dismissed
        self.on_offered: Callable[[list[Offer]], None] = _ignore
        self.on_retired: Callable[[list[int]], None] = _ignore
        self.on_device_lease: Callable[[int], None] = _ignore
        self.on_dismissed: Callable[[list[int]], None] = _ignore
        self.on_broken: Callable[[list[int]], None] = _ignore
        self.on_sought: Callable[[list[Wanted]], None] = _ignore
        self.on_fresh: Callable[[list[Worth]], None] = _ignore
        self.on_connected: Callable[[], None] = _ignore
        self.on_lost: Callable[[int], None] = _ignore
        self.on_closing: Callable[[], None] = _ignore
        self.on_ended: Callable[[], None] = _ignore
        self.chores: Callable[[float], float] = lambda now: _TICK
        self._asked_namespace = namespace
        self._jobs: deque[Callable[[], None]] = deque()
        self._chores_due = 0.0
        self._closing = False
        self._closed = False
        self._end = threading.RLock()  # a finaliser may wake the thread while its own is at it
        self._why = ""
        self._poller: select.poll | None = None
        self.connected = True
        self._thread = threading.Thread(target=self._run, name="mmbroker-receiver", daemon=True)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with ExitStack() as failing:
            failing.callback(os.close, self._wake_fd)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            failing.callback(self._context.term)
            self._connection = self._connect_first(time.monotonic() + timeout)
            failing.callback(self._connection.close)
            _receivers.add(self)
            self._thread.start()
            failing.pop_all()
        self._say("is connected")

    @abstractmethod
    def _answer(self, connection: Connection, answer: Answer) -> None:
        """An answer has come."""

    @abstractmethod
    def _fail_all(self, error: BrokerError) -> None:
        """No answer comes any more to what has been asked."""

    @abstractmethod
    def _forget(self) -> None:
        """The session is over, and everybody knows: nothing that was said in it counts any more."""

    def _say(self, what: str) -> None:
        """With the tags that the broker's log has, too."""
        session = session_tag(self.boot, self.session)
        boot = boot_tag(self.boot)
        _log.info("mmbroker client %s %s: session %s of broker %s", self.name, what, session, boot)

    def _connect_first(self, deadline: float) -> Connection:
        pause = _PAUSE[0]
        while True:
            try:
                return self._connect(deadline)
            except ConnectTimeout:
                raise
            except BrokerUnavailable as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ConnectTimeout(
                        f"{error}, tried for {self.timeout:g} s; to start one: {start_command(self.directory)}"
                    ) from None
                time.sleep(min(pause, left))
                pause = min(pause * 2, 0.1)

    def _connect(self, deadline: float) -> Connection:
        return Connection(
            self.directory, self.name, self._asked_namespace, deadline, self._context, self._wake_fd
        )  # fmt: skip

    # --- the connection ---------------------------------------------------------------------------------------------

    @property
    def boot(self) -> bytes:
        """The broker's life that this link speaks to, or last spoke to."""
        return self._connection.boot

    @property
    def session(self) -> int:
        return self._connection.session

    @property
    def connection(self) -> Connection:
        """The session's connection. For hooks."""
        return self._connection

    @property
    def namespace(self) -> str:
        return self._connection.namespace

    @property
    def device(self) -> str:
        """UUID of the GPU that the broker serves; empty: none."""
        return self._connection.device

    def segment(self, number: int, writable: bool) -> Mapping:
        """The map of a segment that a grant has named. For hooks."""
        return self._connection.mapping(number, writable)

    def descriptor(self, number: int) -> tuple[int, int]:
        """Descriptor and size of a device segment that a grant has named. For hooks, followed by `descriptor_used`."""
        return self._connection.descriptor(number)

    def descriptor_used(self, number: int) -> None:
        self._connection.descriptor_used(number)

    def fresh_segments(self) -> list[int]:
        """Host segments that have come since the last call. For hooks."""
        return self._connection.fresh_segments()

    # --- from other threads -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the receiver thread do its chores now. From any thread, also in a finaliser."""
        if self.forked:
            return  # that thread, and whoever had the lock, are the parent's
        with self._end:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def later(self, job: Callable[[], None]) -> None:
        """Have a job, which must not fail, done by the receiver thread, after those that it was given before."""
        self._jobs.append(job)
        self.wake()
        if self._closed:  # it has looked for the last time
            self._do_jobs()

    def _do_jobs(self) -> None:
        while self._jobs:
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread was faster
                return
            job()

    def remind(self) -> None:
        """Have the chores run when the receiver thread is next awake. From any thread and finaliser."""
        self._chores_due = 0.0

    def close(self) -> None:
        """End the session and the thread. Idempotent; does nothing in a forked child."""
        if self.forked:
            return
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        mapping.add_sweeper(self)
        try:
            while not self._closing:
                self._serve()
                if not self._closing:
                    self._reconnect()
            if self.connected:
                self._take_leave()
        finally:
            self.connected = False
            self._connection.close()
            self._fail_all(BrokerUnavailable("this client was closed"))
            try:
                self.on_ended()
            except Exception:
                _log.exception("mmbroker client %s: giving things back failed", self.name)
            self._context.term()
            mapping.remove_sweeper(self)
            with self._end:
                self._closed = True
                os.close(self._wake_fd)
            self._do_jobs()  # whoever waits for one hears that it is too late

    def _serve(self) -> None:
        """Receive until the session is over, for whatever reason."""
        error: BrokerError
        try:
            while not self._closing:
                self._receive(self._until_chores())
            return
        except BrokerError as lost:
            error = lost
        except Exception:
            _log.exception(
                "mmbroker client %s: the receiver thread failed, and starts a new session", self.name
            )
            error = BrokerLost("the client's receiver thread failed; its log says why")
        self._lose(error)

    def _take_leave(self) -> None:
        try:
            self.on_closing()
        except BrokerError:
            pass  # the broker finds out by itself
        except Exception:
            _log.exception("mmbroker client %s: closing failed", self.name)

    def _lose(self, error: BrokerError) -> None:
        self.connected = False
        self._why = str(error)
        session = self._connection.session
        self._say(f"has lost its session ({error})")
        self._connection.close()
        self._fail_all(
            error if isinstance(error, ProtocolError) else BrokerLost(f"{error}; the client reconnects")
        )
        self.on_lost(session)
        self._forget()

    def _reconnect(self) -> None:
        pause = _PAUSE[0]
        while not self._closing:
            try:
                self._connection = self._connect(time.monotonic() + _ATTEMPT)
                self._poller = None
                self.on_connected()
                self.reconnects += 1
                self._say("is connected again")
                self.connected = True
                return
            except BrokerError as error:
                self._why = str(error)
            except Exception as error:
                _log.exception("mmbroker client %s: reconnecting failed", self.name)
                self._why = str(error)
            if not self._connection.lost:
                self._lose(BrokerLost(self._why))
            until = time.monotonic() + pause
            pause = min(pause * 2, _PAUSE[1])
            while not self._closing and (left := until - time.monotonic()) > 0:
                self._sleep(min(left, self._do_chores()))

    def _sleep(self, seconds: float) -> None:
        waker = select.poll()
        waker.register(self._wake_fd, select.POLLIN)
        if waker.poll(seconds * 1000):
            self._clear_wake()

    def _clear_wake(self) -> None:
        self.remind()
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def hasten(self, seconds: float) -> None:
        """Have the chores run in so many seconds, or sooner. For hooks."""
        self._chores_due = min(self._chores_due, time.monotonic() + seconds)

    def _until_chores(self) -> float:
        """Seconds until the chores are due; if they are, they run first. Not for every message: each moment that this
        thread runs is one that a scheduler waits for the interpreter's lock."""
        mapping.sweep()
        now = time.monotonic()
        if now >= self._chores_due:
            self._chores_due = now + _TICK
            pause = self._do_chores()  # which may hasten the next ones
            self._chores_due = min(self._chores_due, now + pause)
        return max(0.0, self._chores_due - now)

    def _do_chores(self) -> float:
        mapping.sweep()
        self._do_jobs()
        try:
            return min(_TICK, self.chores(time.monotonic()))
        except Exception:
            _log.exception("mmbroker client %s: a chore failed", self.name)
            return _TICK

    def _receive(self, seconds: float) -> None:
        """Wait for something to come, and handle all that has."""
        connection = self._connection
        if self._poller is None:
            self._poller = select.poll()
            watched = (
                connection.control_fd,
                connection.lifeline.fileno(),
                connection.monitor_fd,
                self._wake_fd,
            )
            for fd in watched:
                self._poller.register(fd, select.POLLIN)
            ready = [(connection.control_fd, select.POLLIN)]
        else:
            # Rounded up: a poll that ends too early would only be repeated.
            ready = self._poller.poll(0 if connection.cold else int(seconds * 1000) + 1)
            if connection.cold and not ready:
                connection.warm_ahead()  # what will be needed, while there is nothing else to do
                return
        for fd, _ in ready:
            if fd == self._wake_fd:
                self._clear_wake()
            elif fd == connection.monitor_fd:
                connection.read_monitor()
            elif fd != connection.control_fd:
                connection.read_lifeline()
                self.remind()
        more = True
        while more:
            batch, more = connection.receive()
            arrived = map(messages.decode_downlink, batch)
            for message in _joined(arrived) if len(batch) > 1 else arrived:
                self._dispatch(connection, message)

    def _dispatch(self, connection: Connection, message: Downlink) -> None:
        if isinstance(message, Answer):
            self._answer(connection, message)
        elif isinstance(message, Granted):
            self.on_granted(message.grants, message.dismissed)
        elif isinstance(message, Offered):
            self.on_offered(message.offers)
        elif isinstance(message, Dismissed):
            self.on_dismissed(message.holds)
        elif isinstance(message, Broken):
            self.on_broken(message.leases)
        elif isinstance(message, Retired):
            connection.forget(message.segments)
            self.on_retired(message.segments)
        elif isinstance(message, Sought):
            self.on_sought(message.wanted)
        elif isinstance(message, Fresh):
            self.on_fresh(message.features)


def _joined(arrived: Iterable[Downlink]) -> Iterator[Downlink]:
    """Messages in their order, with dismissals that follow each other as one: each is a look at all that is over, and
    several waits for the interpreter's lock, which a scheduler that has nothing to do is slow to give."""
    holds: list[int] = []
    for message in arrived:
        if isinstance(message, Dismissed):
            holds += message.holds
            continue
        if holds:
            yield Dismissed(holds)
            holds = []
        yield message
    if holds:
        yield Dismissed(holds)


def _ignore(*_: object) -> None:
    pass


def _after_fork_in_child() -> None:
    for receiver in list(_receivers):
        receiver.forked = True
        receiver._connection.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
