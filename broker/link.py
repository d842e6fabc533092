"""A client's living connection: calls and casts, answers, notices, and coming back after the broker was gone.

One background thread receives. It hands answers to the threads that wait for them, and notices to the hooks. When the
session is over it fails what waits, and connects anew with a growing pause, as often as it takes. No torch here.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import zmq

from mmbroker.proto import messages
from mmbroker.proto.errors import (
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    ClientForked,
    ConnectTimeout,
    DeadlineExceeded,
    ProtocolError,
    make,
)
from mmbroker.proto.messages import (
    Answer,
    Body,
    Broken,
    Created,
    Detach,
    Dismissed,
    Failed,
    Grant,
    Granted,
    Leased,
    Offer,
    Offered,
    Released,
    Reply,
    Retired,
)
from mmbroker.proto.tags import boot_tag, session_tag

from . import mapping, spans
from .calls import Waiter, describe, undoing
from .connection import Connection, start_command
from .mapping import Mapping

_log = logging.getLogger("mmbroker")

T = TypeVar("T")

#: How much longer than the broker a caller waits, in seconds: the broker's own answer says more than ours.
_ANSWER_GRACE: Final = 0.1
#: First and longest pause between attempts to connect, in seconds.
_PAUSE: Final = (0.01, 1.0)
#: How long one attempt to connect may take, once there has been a connection.
_ATTEMPT: Final = 2.0
#: The receiver thread looks after its chores at least this often, in seconds.
_TICK: Final = 1.0

_links: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """Connected when it is made; raises `ConnectTimeout`, `PermissionDenied`, `VersionMismatch`. Thread-safe.

    Hooks run in the receiver thread, and may call. `on_connected` runs after every handshake but the first, before
    `connected` turns true again; if it raises, the session is given up. `on_closing` runs before an orderly end.
    `chores` runs at least once a second, is told the time (`time.monotonic`), and returns in how many seconds it wants
    to run again.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str = "client",
        namespace: str | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.name = name
        self.timeout = timeout
        self.forked = False
        self.reconnects = 0
        self.late_answers = 0
        self.on_granted: Callable[[list[Grant], list[int]], None] = _ignore  # and what is dismissed
        self.on_offered: Callable[[list[Offer]], None] = _ignore
        self.on_retired: Callable[[list[int]], None] = _ignore
        self.on_device_lease: Callable[[int], None] = _ignore
        self.on_dismissed: Callable[[list[int]], None] = _ignore
        self.on_broken: Callable[[list[int]], None] = _ignore
        self.on_connected: Callable[[Link], None] = _ignore
        self.on_lost: Callable[[int], None] = _ignore
        self.on_closing: Callable[[Link], None] = _ignore
        self.on_ended: Callable[[], None] = lambda: None
        self.chores: Callable[[float], float] = lambda now: _TICK
        self._asked_namespace = namespace
        self._numbers = count(1)
        self._waiting: dict[int, Waiter] = {}
        self._unheard: dict[int, Body] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._chores_due = 0.0
        self._closing = False
        self._closed = False
        self._end = threading.RLock()  # a finaliser may wake the thread while its own is at it
        self._why = ""
        self.connected = True
        self._thread = threading.Thread(target=self._run, name="mmbroker-receiver", daemon=True)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with ExitStack() as failing:
            failing.callback(os.close, self._wake_fd)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            failing.callback(self._context.term)
            self._connection = self._connect_first(time.monotonic() + timeout)
            failing.callback(self._connection.close)
            _links.add(self)
            self._thread.start()
            failing.pop_all()
        self._say("is connected")

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

    # --- what callers use -------------------------------------------------------------------------------------------

    @property
    def boot(self) -> bytes:
        """The broker's life that this link speaks to, or last spoke to."""
        return self._connection.boot

    @property
    def session(self) -> int:
        return self._connection.session

    @property
    def namespace(self) -> str:
        return self._connection.namespace

    @property
    def device(self) -> str:
        """UUID of the GPU that the broker serves; empty: none."""
        return self._connection.device

    @property
    def backlog(self) -> int:
        """Messages that the broker has not taken yet."""
        return self._connection.backlog

    def check(self) -> None:
        """Raise unless calls can be made: `ClientForked`, `BrokerUnavailable` when closed, `BrokerLost`."""
        if self.forked:
            raise ClientForked(
                "this client was made by an ancestor of this process, before a fork: connect anew here"
            )
        if (self.connected and not self._closing) or threading.current_thread() is self._thread:
            return
        if self._closing:
            raise BrokerUnavailable("this client is closed: connect a new one")
        if not self.connected:
            raise BrokerLost(
                f"no connection to the broker at {self.directory} ({self._why}); the client keeps trying to reconnect"
            )

    def call(self, body: Body, timeout: float | None = None) -> Reply:
        """The answer to a call, within `timeout` seconds. Raises what the broker answers as an error,
        `DeadlineExceeded` for no answer, `BrokerLost` if the session ends meanwhile."""
        return self.exchange(body, timeout)[0]

    def exchange(
        self, body: Body, timeout: float | None = None, connection: Connection | None = None
    ) -> tuple[Reply, Connection]:
        """As `call`, with the connection that the answer belongs to: its leases and segments are of no other.
        To go on with these, give that connection."""
        self.check()
        timeout = self.timeout if timeout is None else timeout
        if not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise DeadlineExceeded(f"no time is left for {describe(body)}: the deadline has passed")
        connection = connection or self._connection
        seq = next(self._numbers)
        waiter = self._waiting[seq] = Waiter()
        try:
            connection.post(connection.encode(seq, timeout, body, spans.context()))
            if connection.lost:  # perhaps after the receiver thread had failed all others
                raise BrokerLost(f"the connection ended before {describe(body)}")
            if not self._wait(waiter, timeout + _ANSWER_GRACE) and self._waiting.pop(seq, None) is None:
                waiter.arrived.acquire(timeout=1.0)  # the answer is being handed over at this moment
        except BaseException:
            if self._waiting.pop(seq, None) is None:
                waiter.arrived.acquire(timeout=1.0)
                self._undo(waiter.answer)  # which nobody will see
            raise
        if waiter.error is not None:
            raise waiter.error
        if isinstance(waiter.answer, Failed):
            raise make(waiter.answer.error, waiter.answer.message, waiter.answer.figures)
        if waiter.answer is None:
            raise DeadlineExceeded(
                f"the broker at {self.directory} did not answer {describe(body)} within {timeout:.3g} s: "
                "see whether its process is stopped or overloaded"
            )
        return waiter.answer, connection

    def _wait(self, waiter: Waiter, seconds: float) -> bool:
        if threading.current_thread() is not self._thread:
            return waiter.arrived.acquire(timeout=seconds)
        # The receiver thread itself, in `on_connected`: it has to receive while it waits.
        deadline = time.monotonic() + seconds
        while waiter.arrived.locked() and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        return not waiter.arrived.locked()

    def cast(self, body: Body, session: int | None = None) -> None:
        """Tell the broker something; never waits, never fails. Forgotten if there is no session, or not `session`."""
        connection = self._connection
        if not (connection.lost or self.forked or session not in (None, connection.session)):
            # These two are calls: nobody waits for their answers, but a broker that has not heard them is told again.
            seq = next(self._numbers) if isinstance(body, (Detach, Released)) else 0
            if seq:
                self._unheard[seq] = body
            connection.post(connection.encode(seq, self.timeout, body))

    @property
    def unheard(self) -> list[Body]:
        """What was told and not answered yet. For `on_lost`: after that it is forgotten."""
        return list(self._unheard.values())

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

    def wake(self) -> None:
        """Let the receiver thread do its chores now. From any thread, also in a finaliser."""
        if self.forked:
            return  # that thread, and whoever had the lock, are the parent's
        with self._end:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def run(self, job: Callable[[], T], timeout: float) -> T:
        """What `job` returns, called in the receiver thread; raises what it raises, or `DeadlineExceeded`."""
        if threading.current_thread() is self._thread:
            return job()
        self.check()
        future: Future[T] = Future()
        self._jobs.append(lambda: _fulfil(future, job))
        self.wake()
        try:
            return future.result(timeout)
        except FutureTimeout:
            if future.done():  # the job's own error, which may be a time-out too
                raise
            raise DeadlineExceeded(f"the client's receiver thread was busy for {timeout:g} s") from None

    def close(self) -> None:
        """End the session and the thread. Idempotent; does nothing in a forked child."""
        if self.forked:
            return
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the receiver thread ----------------------------------------------------------------------------------------

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
            self.on_closing(self)
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
        self._unheard.clear()

    def _fail_all(self, error: BrokerError) -> None:
        while self._waiting:
            with suppress(KeyError):
                waiter = self._waiting.popitem()[1]
                # Each caller raises an exception of its own: a shared one would collect all their tracebacks.
                waiter.error = make(type(error).__name__, str(error), error.figures)
                waiter.arrived.release()

    def _reconnect(self) -> None:
        pause = _PAUSE[0]
        while not self._closing:
            try:
                self._connection = self._connect(time.monotonic() + _ATTEMPT)
                self._poller = None
                self.on_connected(self)
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

    def remind(self) -> None:
        """Have the chores run when the receiver thread is next awake. From any thread and finaliser."""
        self._chores_due = 0.0

    def _until_chores(self) -> float:
        """Seconds until the chores are due; if they are, they run first. Not for every message: each moment that this
        thread runs is one that a scheduler waits for the interpreter's lock."""
        if mapping.dead():
            mapping.sweep()
        now = time.monotonic()
        if now >= self._chores_due:
            self._chores_due = now + _TICK
            pause = self._do_chores()  # which may hasten the next ones
            self._chores_due = min(self._chores_due, now + pause)
        return max(0.0, self._chores_due - now)

    def _do_chores(self) -> float:
        mapping.sweep()
        while self._jobs:
            self._jobs.popleft()()
        try:
            return min(_TICK, self.chores(time.monotonic()))
        except Exception:
            _log.exception("mmbroker client %s: a chore failed", self.name)
            return _TICK

    _poller: select.poll | None = None

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
            for data in batch:
                self._dispatch(connection, data)

    def _dispatch(self, connection: Connection, data: bytes) -> None:
        message = messages.decode_downlink(data)
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

    def _answer(self, connection: Connection, answer: Answer) -> None:
        body = answer.body
        error: BrokerError | None = None
        if isinstance(body, Created):
            try:
                for result in body.results:
                    if isinstance(result, Leased) and result.segment:
                        if result.tier == "host":
                            connection.mapping(result.segment, True)
                        else:
                            self.on_device_lease(result.segment)
            except BrokerLost:
                raise
            except BrokerError as failure:
                self._undo(body)
                error = failure
        waiter = self._waiting.pop(answer.seq, None)
        if waiter is None and self._unheard.pop(answer.seq, None) is not None:
            return
        if waiter is None:
            self.late_answers += 1
            self._undo(body)
            return
        waiter.answer, waiter.error = body, error
        waiter.arrived.release()

    def _undo(self, answer: Reply | None) -> None:
        """Give back what an answer brought that its caller will not see."""
        for word in undoing(answer):
            self.cast(word)


def _ignore(*_: object) -> None:
    pass


def _fulfil(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.forked = True
        link._connection.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
