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
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import uvloop

from mmbroker.proto import messages
from mmbroker.proto.errors import BrokerError, BrokerUnavailable, PermissionDenied
from mmbroker.proto.messages import (
    Answer,
    Attached,
    Call,
    Failed,
    Hello,
    Released,
    Reply,
    Report,
    SegmentFd,
    Shutdown,
    Welcome,
    encode,
)
from mmbroker.proto.reference import BOOT_BYTES
from mmbroker.proto.tags import boot_tag, session_tag

from . import cuda, logs, report, spans
from .arena import memory, numa
from .arena.device import DeviceSegment
from .arena.host import HostSegment
from .config import MIB, Settings
from .control import Control
from .door import Door
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
from .instance import Instance
from .lifeline import Lifelines, Peer
from .report import within
from .state import Broker
from .vitals import Vitals
from .web import address

log = logging.getLogger("mmbroker")

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Time for clients to read their last answers, in seconds: ZeroMQ drops what is unread when a connection is cut.
FAREWELL: Final = 0.1
#: Calls of whoever runs the broker, and what nobody else may do.
_OPERATORS: Final = {
    Shutdown: "shut this broker down",
    messages.Drain: "drain this broker",
    messages.Evict: "evict from this broker",
}
#: Clients that come and go all the time.
_PASSERS_BY: Final = ("mmbroker-cli",)
#: A timer may be late by its clock's grain, but must not be early.
_GRAIN: Final = 0.001

AnySegment = HostSegment | DeviceSegment

_running: weakref.WeakSet[Server] = weakref.WeakSet()


def serve(settings: Settings) -> int:
    """Run a broker in the foreground until it is told to end. Its exit code: 0, or 1 if its own books broke.

    Raises `InstanceError` if the instance directory cannot be used.
    """
    logs.set_up(settings.log_format, settings.log_level)
    return uvloop.run(Server(settings).run())


class Server:
    """One broker. `run` reads: start up, wait, shut down."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.boot = secrets.token_bytes(BOOT_BYTES)
        self.broker = Broker(settings.limits, self.boot)
        self.door = Door(settings.name, self.boot, settings.limits.sessions, settings.limits.device)
        self.segments: dict[int, AnySegment] = {}
        self.peers: dict[int, Peer] = {}  # by living session
        self._uids = settings.allow_uid | {os.geteuid(), 0}
        self._doubtful: list[int] = []  # sessions of which nothing may be left
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed = 0.0
        self._stopping = False
        self._url = ""  # of the page

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self.loop.create_future()
        _running.add(self)
        self.loop.set_exception_handler(self._broken)
        for signum in SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                self.loop.add_signal_handler(signum, self._stop, signum)
        with ExitStack() as stack:
            shared = bool(self.settings.allow_uid)
            await self._start_up(stack.enter_context(Instance(self.settings.path, shared=shared)), stack)
            return await self._over

    # --- start, stop ------------------------------------------------------------------------------------------------

    async def _start_up(self, instance: Instance, stack: ExitStack) -> None:
        """Take the reserve, then listen. `stack` gives everything back at the end, however far the start came."""
        _raise_descriptor_limit()
        self.vitals = Vitals(self.loop)
        stack.callback(self.vitals.close)
        self.spans = spans.set_up(self._about, os.environ)
        stack.callback(self.spans.close)
        self.memory_thread = ThreadPoolExecutor(1, "mmbroker-memory", self._near_the_gpu)
        stack.callback(self._free)
        self.lifelines = Lifelines(self.loop, instance.lifeline, self._uids.__contains__, self, self.vitals)
        stack.callback(self.lifelines.close)
        self.control = Control(self.loop, instance.control, self.boot, self._uids, self, self.vitals)
        stack.callback(self.control.close)
        instance.open_up()
        if instance.shared and (barrier := instance.barrier()) is not None:
            log.warning(
                "other users may not get through %s: set MMBROKER_DIR to a directory that they can reach, "
                "or `chmod o+x` that one",
                barrier,
            )
        await self._take_reserve()
        if self._over.done():  # told to end meanwhile
            return
        url = self._open_page(stack) if self.settings.http else ""
        self.control.listen()
        self.lifelines.listen()
        self.vitals.watch_loop()
        log.info("ready", extra=logs.about(directory=self.settings.path, boot=boot_tag(self.boot)))
        device = f", device arena on {self.settings.limits.device} up to {self.settings.device_mib} MiB"
        print(
            f"mmbroker is ready at {instance.path} (process {os.getpid()}, host arena up to "
            f"{self.settings.host_mib} MiB{device if self.settings.limits.device else ''})"
            + (f", its page is {url}" if url else ""),
            flush=True,
        )

    async def _take_reserve(self) -> None:
        """The device's reserve, whole, before an engine can see this broker and size its own memory.

        Raises `BrokerError` if it cannot be had.
        """
        for grow in self.broker.start():
            try:
                self.segments[grow.segment] = await self._make(grow.tier, grow.nbytes)
            except (memory.MemoryLimit, cuda.DriverError) as error:
                reserve = self.settings.device_reserve_mib
                raise BrokerError(
                    f"the reserve of {reserve} MiB on the device cannot be taken ({error}); without "
                    "--device-reserve-mib the arena grows when it is needed"
                ) from None
            self.dispatch(SegmentReady(grow.segment))

    def _open_page(self, stack: ExitStack) -> str:
        """Listen for operators' browsers and metrics collectors; the page's URL."""
        from .web.http import Listener
        from .web.site import Site

        site = Site(
            self.loop,
            lambda: self._with_facts(self.broker.report(time.monotonic())),
            lambda cells, most: report.segments(self.broker, cells, most),
            self.vitals.complain,
        )
        stack.callback(site.close)
        listener = Listener(self.loop, address.parse(self.settings.http), site)
        stack.callback(listener.close)
        self._url = listener.address.url
        return self._url

    def _near_the_gpu(self) -> None:
        """Host memory lies where the GPU that reads it is near, wherever this broker was started."""
        device = self.settings.limits.device
        try:
            node = cuda.open_driver().node(device) if device else None
            if node is not None:
                numa.prefer(node)
        except (cuda.DriverError, OSError) as error:
            log.warning("host memory may lie far from the GPU, which makes copies slower: %s", error)

    def _free(self) -> None:
        self.memory_thread.shutdown(wait=True)
        for segment in self.segments.values():
            segment.close()

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
        log.critical(
            "internal error, exiting; engines carry on without this broker: %s",
            context.get("message"),
            exc_info=context.get("exception"),
        )
        self._end(1)

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
        finally:
            self._handling = False
        if self.broker.pressed:
            self.control.hurry()
        while self._doubtful:
            if not self.broker.remembers(session := self._doubtful.pop()):
                self.lifelines.exorcise(session)
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Respond(session, seq, Report(status)):
                self.control.send(session, Answer(seq, Report(self._told(session, status))))
            case Respond(session, seq, body):
                self._note(session, body)
                self.spans.answered(session, seq, body)
                self.control.send(session, Answer(seq, body))
            case Notify(session, notice):
                self.control.send(session, notice)
            case SendSegment(session, segment, writable):
                self.lifelines.send(session, segment, writable)
            case Grow(segment, tier, nbytes):
                self._grow(segment, tier, nbytes)
            case Discard(segment):
                self.memory_thread.submit(self.segments.pop(segment).close)
            case EndSession(session, reason):
                self.lifelines.end(session, BrokerUnavailable(reason))
            case Halt(reason):
                log.info("halting: %s", reason)
                self.loop.call_later(FAREWELL if self.peers else 0.0, self._end, 0)

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

    def _grow(self, number: int, tier: str, nbytes: int) -> None:
        self._make(tier, nbytes).add_done_callback(lambda done: self._grown(number, nbytes, done))

    def _make(self, tier: str, nbytes: int) -> asyncio.Future[AnySegment]:
        create: Callable[[int], AnySegment] = HostSegment.create if tier == "host" else self._create_on_device
        return self.loop.run_in_executor(self.memory_thread, create, nbytes)

    def _create_on_device(self, nbytes: int) -> DeviceSegment:
        uuid, headroom = self.settings.limits.device, self.settings.device_headroom_mib * MIB
        return DeviceSegment.create(cuda.open_driver(), uuid, nbytes, headroom)

    def _grown(self, number: int, nbytes: int, done: asyncio.Future[AnySegment]) -> None:
        try:
            segment = done.result()
        except (memory.MemoryLimit, cuda.DriverError) as error:
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
        self.door.closed = self.broker.halting
        ghosts = self.lifelines.ghosts(peer)
        return self.door.admit(peer.uid, peer.pid, hello, len(self.peers), ghosts)

    def opened(self, peer: Peer, hello: Hello, welcome: Welcome) -> None:
        self.peers[welcome.session] = peer
        self.control.open(welcome.session, welcome.routing)
        self.dispatch(
            SessionOpened(
                welcome.session, peer.uid, peer.pid, hello.name, welcome.namespace, traceable=peer.pidfd >= 0
            )
        )
        self._say_session("connected", welcome.session)

    def _say_session(self, what: str, session: int) -> None:
        about = self._about(session)
        level = logging.DEBUG if about["client"] in _PASSERS_BY else logging.INFO
        log.log(level, "a client has %s", what, extra=logs.about(**about))

    def ended(self, session: int, alive: bool) -> None:
        self._say_session("left" if alive else "ended", session)
        del self.peers[session]
        self.control.forget(session)
        self.spans.ended(session)
        self._doubtful.append(session)
        self.dispatch(SessionEnded(session, alive))

    def gone(self, session: int) -> None:
        self.dispatch(ProcessGone(session))

    def parcel(self, segment: int, writable: bool) -> tuple[bytes, int] | None:
        memfd = self.segments.get(segment)
        if memfd is None:
            return None
        tier = "device" if isinstance(memfd, DeviceSegment) else "host"
        message = SegmentFd(segment, memfd.nbytes, writable, tier)
        return encode(message), memfd.rw_fd if writable else memfd.ro_fd

    def relieved(self, session: int) -> None:
        self.control.flush(session)

    # --- control (Office) -------------------------------------------------------------------------------------------

    def called(self, session: int, call: Call) -> None:
        what = _OPERATORS.get(type(call.body))
        if what is not None and not self._operates(session):
            text = f"only user {os.geteuid()} and root may {what}"
            self.control.send(session, Answer(call.seq, Failed(PermissionDenied.__name__, text)))
            return
        if isinstance(call.body, Released):
            self._doubtful.append(call.body.session)
        followed = self.spans.called(session, call)
        self.dispatch(Called(session, call.seq, call.timeout, call.body))
        if followed:
            self.spans.waits(session, call.seq, self.broker.waits_for(session, call.seq))

    def _operates(self, session: int) -> bool:
        """Is it the broker's own user, or root?"""
        peer = self.peers.get(session)
        return peer is not None and peer.uid in (os.geteuid(), 0)

    def held(self, session: int) -> bool:
        return self.lifelines.busy(session)

    def pressed(self) -> bool:
        return self.broker.pressed

    def lost(self, session: int, error: BrokerError | None) -> None:
        self.lifelines.end(session, error)

    # --- log --------------------------------------------------------------------------------------------------------

    def _about(self, session: int) -> dict[str, Any]:
        """Whose record it is."""
        tag = session_tag(self.boot, session)
        peer, known = self.peers.get(session), self.broker.books.sessions.get(session)
        return {
            "client": known.name if known is not None else "",
            "process": peer.pid if peer is not None else "",
            "session": tag,
            "engine": known.engine.name if known is not None and known.engine is not None else "",
        }

    def _note(self, session: int, body: Reply) -> None:
        """Answers that an operator wants to know of."""
        if isinstance(body, Attached):
            words = "a rank has attached" if body.complete else "a rank has attached, others are awaited"
            log.info(words, extra=logs.about(**self._about(session)))
        elif isinstance(body, Failed):
            extra = logs.about(**self._about(session), error=body.error, **body.figures)
            log.info("a call failed: %s", body.message, extra=extra)

    # --- status -----------------------------------------------------------------------------------------------------

    def _told(self, session: int, status: dict[str, Any]) -> dict[str, Any]:
        """The state machine's report with the daemon's facts; other users than the operator see their own things."""
        asker = self.broker.books.sessions.get(session)
        if asker is not None and not self._operates(session):
            status = within(status, asker.namespace)
        return self._with_facts(status)

    def _with_facts(self, status: dict[str, Any]) -> dict[str, Any]:
        try:
            return {**status, "daemon": self._facts()}
        except OSError as error:  # no descriptors left to read them with
            return {**status, "daemon": {"unreadable": str(error)}}

    def _facts(self) -> dict[str, Any]:
        """What only the shell knows; see `Vitals.report` for the rest."""
        waiting, deepest = self.control.waiting()
        free, limit = memory.headroom()
        return {
            **self.vitals.report(),
            "instance": self.settings.name,
            "directory": str(self.settings.path),
            "page": self._url,
            "sessions_limit": self.settings.limits.sessions,
            "messages_in": self.control.received,
            "messages_out": self.control.sent,
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


def _after_fork_in_child() -> None:
    """A forked child is no broker. It must not keep this one's lock, listeners, lifelines and memory once it is gone:
    clients would wait for it, and no other could start in its place."""
    if _running:
        _running.clear()
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


os.register_at_fork(after_in_child=_after_fork_in_child)
