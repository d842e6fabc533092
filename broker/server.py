"""The daemon: `serve` ties the sockets, the state machine and the arenas together on one event loop.

Everything that decides is in the state machine; here its effects are carried out and its events are collected. Only
making and freeing memory happens elsewhere, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import uvloop

from mmbroker.proto.errors import (
    BrokerError,
    BrokerUnavailable,
    InvalidMessage,
    PermissionDenied,
    QuotaExceeded,
)
from mmbroker.proto.messages import (
    Answer,
    Call,
    Failed,
    Hello,
    Released,
    Report,
    SegmentFd,
    Shutdown,
    Welcome,
    encode,
)
from mmbroker.proto.reference import BOOT_BYTES, PROTOCOL_VERSION

from .arena import memory
from .arena.host import HostSegment
from .config import Settings
from .control import Control
from .events import (
    Called,
    Discard,
    Drain,
    Effect,
    EndSession,
    Event,
    Grow,
    Halt,
    Notify,
    ProcessGone,
    Respond,
    SegmentFailed,
    SegmentReady,
    SendSegment,
    SessionEnded,
    SessionOpened,
    Tick,
)
from .instance import CONTROL, Instance
from .lifeline import Lifelines, Peer
from .state import Broker
from .vitals import Vitals

log = logging.getLogger("mmbroker")

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Longest name of a client or a namespace, in characters.
NAME_LIMIT: Final = 128
#: Ended sessions of one living process that are remembered, until it says what it still has of them or exits.
GHOSTS_PER_PROCESS: Final = 16
#: A timer may be late by its clock's grain, but must not be early.
_GRAIN: Final = 0.001


def serve(settings: Settings) -> int:
    """Run a broker in the foreground until it is told to end. Its exit code: 0, or 1 if its own books broke.

    Raises `InstanceError` if the instance directory cannot be used.
    """
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s", stream=sys.stderr)
    return uvloop.run(Server(settings).run())


class Server:
    """One broker. `run` reads: start up, wait, shut down."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.boot = secrets.token_bytes(BOOT_BYTES)
        self.broker = Broker(settings.limits, self.boot)
        self.segments: dict[int, HostSegment] = {}
        self.peers: dict[int, Peer] = {}  # by living session
        self._uids = settings.allow_uid | {os.geteuid(), 0}
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed = 0.0
        self._stopping = False

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self.loop.create_future()
        self.loop.set_exception_handler(self._broken)
        for signum in SIGNALS:
            self.loop.add_signal_handler(signum, self._stop, signum)
        with Instance(self.settings.path, shared=bool(self.settings.allow_uid)) as instance:
            try:
                self._start_up(instance)
                return await self._over
            finally:
                self._shut_down()

    # --- start, stop ------------------------------------------------------------------------------------------------

    def _start_up(self, instance: Instance) -> None:
        _raise_descriptor_limit()
        self.vitals = Vitals(self.loop)
        self.memory_thread = ThreadPoolExecutor(1, "mmbroker-memory")
        self.control = Control(self.loop, instance.control, self.boot, self._uids, self, self.vitals)
        self.lifelines = Lifelines(self.loop, instance.lifeline, self._uids.__contains__, self, self.vitals)
        instance.open_up()
        self.control.listen()
        self.lifelines.listen()
        self.vitals.watch_loop()
        print(
            f"mmbroker is ready at {instance.path} (process {os.getpid()}, host arena up to "
            f"{self.settings.host_mib} MiB)",
            flush=True,
        )

    def _stop(self, signum: int) -> None:
        """Drain; at once if asked again."""
        if self._stopping:
            self._end(0)
        else:
            log.info("%s: draining", signal.Signals(signum).name)
            self._stopping = True
            self.dispatch(Drain())

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Nothing of ours may fail in a callback: whatever it is, the books can no longer be trusted."""
        log.critical("internal error, exiting: %s", context.get("message"), exc_info=context.get("exception"))
        self._end(1)

    def _shut_down(self) -> None:
        """Give everything back, however far the start came. Answers leave before lifelines are cut."""
        if self._timer is not None:
            self._timer.cancel()
        for name in ("control", "lifelines", "vitals"):
            if hasattr(self, name):
                getattr(self, name).close()
        if hasattr(self, "memory_thread"):
            self.memory_thread.shutdown(wait=True)
        for segment in self.segments.values():
            segment.close()

    # --- the state machine ------------------------------------------------------------------------------------------

    def dispatch(self, event: Event) -> None:
        """Tell the state machine, and do what it wants. An event that follows from an effect waits for its turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events and not self._over.done():
                for effect in self.broker.handle(self._events.popleft(), time.monotonic()):
                    self._carry_out(effect)
        except Exception:
            log.critical("the broker's books are broken, exiting; engines carry on without it", exc_info=True)
            self._end(1)
        finally:
            self._handling = False
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Respond(session, seq, Report(status)):
                self.control.send(session, Answer(seq, Report({**status, "daemon": self._facts()})))
            case Respond(session, seq, body):
                self.control.send(session, Answer(seq, body))
            case Notify(session, notice):
                self.control.send(session, notice)
            case SendSegment(session, segment, writable):
                self.lifelines.send(session, segment, writable)
            case Grow(segment, _, nbytes):
                self._grow(segment, nbytes)
            case Discard(segment):
                self.memory_thread.submit(self.segments.pop(segment).close)
            case EndSession(session, reason):
                self.lifelines.end(session, BrokerUnavailable(reason))
            case Halt(reason):
                log.info("halting: %s", reason)
                self._end(0)

    def _arm(self) -> None:
        """Have a `Tick` sent at the next deadline. A timer that is too early stays: it re-arms itself."""
        deadline = self.broker.next_deadline()
        if deadline is None or self._over.done():
            return
        if self._timer is None or deadline < self._armed:
            if self._timer is not None:
                self._timer.cancel()
            self._armed = deadline
            self._timer = self.loop.call_later(max(0.0, deadline - time.monotonic()) + _GRAIN, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.dispatch(Tick())

    # --- memory -----------------------------------------------------------------------------------------------------

    def _grow(self, number: int, nbytes: int) -> None:
        future = self.loop.run_in_executor(self.memory_thread, HostSegment.create, nbytes)
        future.add_done_callback(lambda done: self._grown(number, nbytes, done))

    def _grown(self, number: int, nbytes: int, done: asyncio.Future[HostSegment]) -> None:
        try:
            segment = done.result()
        except memory.MemoryLimit as error:
            self.vitals.complain("segments_refused", str(error))
            self.dispatch(SegmentFailed(number, str(error)))
        except OSError as error:
            reason = f"the kernel refused a segment of {nbytes} bytes: {error.strerror}"
            self.vitals.complain("segments_refused", reason)
            self.dispatch(SegmentFailed(number, reason))
        else:
            self.segments[number] = segment
            self.dispatch(SegmentReady(number))

    # --- lifelines (Desk) -------------------------------------------------------------------------------------------

    def admit(self, peer: Peer, hello: Hello) -> Welcome:
        own = f"uid-{peer.uid}"
        namespace = own if hello.namespace is None else hello.namespace
        for what, name in (("name", hello.name), ("namespace", namespace)):
            if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
                raise InvalidMessage(
                    f"a {what} has 1 to {NAME_LIMIT} printable characters: choose another one"
                )
        if namespace.startswith("uid-") and namespace != own:
            raise PermissionDenied(
                f"namespace {namespace!r} is another user's: use {own!r}, or a name without the prefix 'uid-'"
            )
        if self.broker.halting:
            raise BrokerUnavailable("the broker is shutting down: connect again when it is back")
        limit = self.settings.limits.sessions
        if len(self.peers) >= limit:
            raise QuotaExceeded(
                f"{len(self.peers)} clients are connected, the limit is {limit}: close some, or raise sessions "
                "in the broker's settings",
                requested=1,
                used=len(self.peers),
                limit=limit,
            )
        ghosts = self.lifelines.ghosts(peer)
        if ghosts >= GHOSTS_PER_PROCESS:
            raise QuotaExceeded(
                f"process {peer.pid} has {ghosts} ended sessions that it has not released: restart it",
                requested=1,
                used=ghosts,
                limit=GHOSTS_PER_PROCESS,
            )
        session = secrets.randbits(63) or 1
        return Welcome(
            PROTOCOL_VERSION,
            self.boot,
            session,
            secrets.token_bytes(16),
            CONTROL,
            namespace,
            self.settings.name,
        )

    def opened(self, peer: Peer, hello: Hello, welcome: Welcome) -> None:
        self.peers[welcome.session] = peer
        self.control.open(welcome.session, welcome.routing)
        self.dispatch(
            SessionOpened(
                welcome.session, peer.uid, peer.pid, hello.name, welcome.namespace, traceable=peer.pidfd >= 0
            )
        )

    def ended(self, session: int, alive: bool) -> None:
        del self.peers[session]
        self.control.forget(session)
        self.dispatch(SessionEnded(session, alive))

    def gone(self, session: int) -> None:
        self.dispatch(ProcessGone(session))

    def parcel(self, segment: int, writable: bool) -> tuple[bytes, int] | None:
        memfd = self.segments.get(segment)
        if memfd is None:
            return None
        message = SegmentFd(segment, memfd.nbytes, writable)
        return encode(message), memfd.rw_fd if writable else memfd.ro_fd

    def relieved(self, session: int) -> None:
        self.control.flush(session)

    # --- control (Office) -------------------------------------------------------------------------------------------

    def called(self, session: int, call: Call) -> None:
        if isinstance(call.body, Shutdown) and self.peers[session].uid not in (os.geteuid(), 0):
            text = f"only user {os.geteuid()} and root may shut this broker down"
            self.control.send(session, Answer(call.seq, Failed(PermissionDenied.__name__, text)))
            return
        self.dispatch(Called(session, call.seq, call.timeout, call.body))
        if isinstance(call.body, Released) and not self._remembers(call.body.session):
            self.lifelines.exorcise(call.body.session)

    def _remembers(self, session: int) -> bool:
        return session in self.broker.books.sessions

    def held(self, session: int) -> bool:
        return self.lifelines.busy(session)

    def lost(self, session: int, error: BrokerError | None) -> None:
        self.lifelines.end(session, error)

    # --- status -----------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """What only the shell knows; see `Vitals.report` for the rest."""
        waiting, deepest = self.control.waiting()
        free, limit = memory.headroom()
        return {
            **self.vitals.report(),
            "instance": self.settings.name,
            "directory": str(self.settings.path),
            "sessions_limit": self.settings.limits.sessions,
            "outboxes": waiting,
            "outbox_deepest": deepest,
            "segment_descriptors": 2 * len(self.segments),
            "memory_headroom": free,
            "memory_limit": limit,
        }


def _raise_descriptor_limit() -> None:
    """Every session and segment needs descriptors: take as many as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
