"""A client's living connection, for those who call: calls and their answers, casts, and jobs for the receiver thread.

Any thread may call; its `Receiver` hands it the answer. No torch here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from itertools import count
from typing import Final, NoReturn, TypeVar

from mmbroker.proto.errors import (
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    ClientForked,
    DeadlineExceeded,
    make,
)
from mmbroker.proto.messages import (
    Answer,
    Body,
    Created,
    Detach,
    Failed,
    Leased,
    Released,
    Reply,
    Tier,
)

from . import spans
from .calls import Waiter, describe, undoing
from .connection import Connection
from .receiver import Receiver

T = TypeVar("T")

#: How much longer than the broker a caller waits, in seconds: the broker's own answer says more than ours.
_ANSWER_GRACE: Final = 0.1


class Link(Receiver):
    """Thread-safe. `timeout`, in seconds, is for connecting, and the default of every call."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str = "client",
        namespace: str | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.late_answers = 0
        self._numbers = count(1)
        self._waiting: dict[int, Waiter] = {}
        self._unheard: dict[int, Body] = {}
        super().__init__(directory, name, namespace, timeout)

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
            self._refuse()
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
            if self._closing and not self.connected:  # nobody needs the new session any more
                self._refuse()
            self._receive(left)
        return not waiter.arrived.locked()

    def cast(self, body: Body, session: int | None = None) -> None:
        """Tell the broker something; never waits, never fails. Forgotten if there is no session, or not `session`."""
        connection = self._connection
        if not (connection.lost or self.forked or session not in (None, connection.session)):
            # These are calls: nobody waits for their answers, but a broker that has not heard them is told again.
            seq = next(self._numbers) if isinstance(body, (Detach, Released, Tier)) else 0
            if seq:
                self._unheard[seq] = body
            connection.post(connection.encode(seq, self.timeout, body))

    @property
    def unheard(self) -> list[Body]:
        """What was told and not answered yet. For `on_lost`: after that it is forgotten."""
        return list(self._unheard.values())

    def run(self, job: Callable[[], T], timeout: float) -> T:
        """What `job` returns, called in the receiver thread; raises what it raises, or `DeadlineExceeded`."""
        if threading.current_thread() is self._thread:
            return job()
        self.check()
        future: Future[T] = Future()
        self.later(lambda: _fulfil(future, self._refuse if self._closed else job))
        try:
            return future.result(timeout)
        except FutureTimeout:
            if future.done():  # the job's own error, which may be a time-out too
                raise
            raise DeadlineExceeded(f"the client's receiver thread was busy for {timeout:g} s") from None

    def _refuse(self) -> NoReturn:
        raise BrokerUnavailable("this client is closed: connect a new one")

    # --- in the receiver thread -------------------------------------------------------------------------------------

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

    def _fail_all(self, error: BrokerError) -> None:
        while self._waiting:
            with suppress(KeyError):
                waiter = self._waiting.popitem()[1]
                # Each caller raises an exception of its own: a shared one would collect all their tracebacks.
                waiter.error = make(type(error).__name__, str(error), error.figures)
                waiter.arrived.release()

    def _forget(self) -> None:
        self._unheard.clear()


def _fulfil(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
