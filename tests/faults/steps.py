"""The hook: every step of the protocol has a name, and a process that was told so does something bad at one of them.

The names are given from outside: functions of the library that are one step are wrapped, in the processes that tests
start and only there. So the library carries nothing for this, and no setting of it can be turned on by accident. A
step that no longer exists makes `install` fail.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

ACTIONS = ("kill", "stop", "fork", "cut lifeline", "cut control")

#: What a producer does, in the order of its life; see `scene.live`.
PRODUCER = [
    "hello",
    "welcome",
    "control",
    "connected",
    "hash",
    "create.ask",
    "create.sent",
    "created.came",
    "segment.came",
    "segment.taken",
    "mmap",
    "mmapped",
    "created.handled",
    "write",
    "write.half",
    "written",
    "seal.ask",
    "seal.sent",
    "sealed.came",
    "sealed.handled",
    "unpin.ask",
    "unpin.sent",
    "abort.ask",
    "abort.sent",
    "lookup.ask",
    "lookup.sent",
    "found.came",
    "found.handled",
    "drop.ask",
    "drop.sent",
    "tally.ask",
    "tally.sent",
    "retired.came",
    "retired.handled",
    "munmap",
    "munmapped",
    "lost",
    "lost.told",
    "released.ask",
    "released.sent",
    "done.came",
    "done.handled",
    "leave",
    "left",
]

#: What an engine's rank does.
ENGINE = [
    "hello",
    "welcome",
    "control",
    "connected",
    "attach.ask",
    "attach.sent",
    "attached.came",
    "attached.handled",
    "granted.came",
    "enter",
    "segment.came",
    "segment.taken",
    "mmap",
    "mmapped",
    "copy",
    "copied",
    "entered",
    "ack.ask",
    "ack.sent",
    "granted.handled",
    "take",
    "taken",
    "release",
    "released",
    "dismissed.came",
    "withdrawn",
    "settle.ask",
    "settle.sent",
    "dismissed.handled",
    "tally.ask",
    "tally.sent",
    "retired.came",
    "retired.handled",
    "munmap",
    "munmapped",
    "lost",
    "lost.told",
    "kept.ask",
    "kept.sent",
    "released.ask",
    "released.sent",
    "done.came",
    "done.handled",
    "detach.ask",
    "detach.sent",
    "leave",
    "lookup.ask",
    "lookup.sent",
    "found.came",
    "found.handled",
    "left",
]

#: What the broker does for both.
BROKER = [
    "greet",
    "greeted",
    "admit",
    "admitted",
    "opened",
    "opened.handled",
    "attach",
    "attach.handled",
    "attached.respond",
    "attached.responded",
    "create",
    "create.handled",
    "segment.create",
    "segment.created",
    "grow",
    "growing",
    "ready",
    "ready.handled",
    "segment.send",
    "segment.sent",
    "created.respond",
    "created.responded",
    "seal",
    "seal.handled",
    "granted.notify",
    "granted.notified",
    "ack",
    "ack.handled",
    "sealed.respond",
    "sealed.responded",
    "abort",
    "abort.handled",
    "unpin",
    "unpin.handled",
    "lookup",
    "lookup.handled",
    "found.respond",
    "found.responded",
    "drop",
    "drop.handled",
    "dismissed.notify",
    "dismissed.notified",
    "settle",
    "settle.handled",
    "tally",
    "tally.handled",
    "discard",
    "discarded",
    "retired.notify",
    "retired.notified",
    "ended",
    "ended.handled",
    "kept",
    "kept.handled",
    "released",
    "released.handled",
    "done.respond",
    "done.responded",
    "detach",
    "detach.handled",
    "tick",
    "tick.handled",
]


class Trap:
    """What is to happen at which step: at its `nth` time, counted from `arm`."""

    def __init__(self) -> None:
        self.channel: socket.socket | None = None
        self.seen: dict[str, int] = {}
        self._lock = threading.Lock()
        self._order: tuple[str, str, int, list[int]] | None = None

    def arm(self, step: str, action: str, nth: int = 1, pids: list[int] | None = None) -> None:
        """`pids`: for a broker that cuts, the processes at the other end."""
        with self._lock:
            self._order = (step, action, nth, pids or [])

    def disarm(self) -> bool:
        """True if it had not gone off."""
        with self._lock:
            waiting, self._order = self._order is not None, None
        return waiting

    def step(self, name: str) -> None:
        with self._lock:
            self.seen[name] = self.seen.get(name, 0) + 1
            if self._order is None or self._order[0] != name:
                return
            _, action, nth, pids = self._order
            if nth > 1:
                self._order = (name, action, nth - 1, pids)
                return
            self._order = None
        self._act(name, action, pids)

    def _act(self, step: str, action: str, pids: list[int]) -> None:
        assert self.channel is not None
        child = 0
        if action == "fork":
            child = os.fork()
            if not child:
                poll = select.poll()
                poll.register(self.channel, 0)
                poll.poll()  # until whoever watches hangs up, or kills it
                os._exit(0)
        self.channel.send(json.dumps({"step": step, "action": action, "child": child}).encode())
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action.startswith("cut"):
            cut(action.removeprefix("cut "), pids)


trap = Trap()


def cut(which: str, pids: list[int] | None = None) -> int:
    """Shut down this process's connections over ``lifeline.sock`` or ``control.sock``; how many there were."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile, or the listing's own
        with connection, suppress(OSError):
            if connection.family != socket.AF_UNIX:
                continue
            ends = (connection.getsockname(), connection.getpeername())
            (pid,) = memoryview(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4]).cast(
                "i"
            )
            if any(str(end).endswith(f"/{which}.sock") for end in ends) and (not pids or pid in pids):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


# --- where the steps are --------------------------------------------------------------------------------------------

Name = str | Callable[..., str | None] | None


def _named(name: Name, arguments: tuple[Any, ...]) -> None:
    chosen = name(*arguments) if callable(name) else name
    if chosen:
        trap.step(chosen)


def _wrap(owner: Any, attribute: str, before: Name = None, after: Name = None) -> None:
    """Name the step before a function of a class or module, and the one after it; names may depend on its arguments."""
    original = getattr(owner, attribute)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        _named(before, arguments)
        result = original(*arguments, **named)
        _named(after, arguments)
        return result

    setattr(owner, attribute, wrapped)


def _kind(message: Any) -> str:
    return type(message).__name__.lower()


def install_client() -> None:
    """Name the steps of a producer and of an engine, in this process."""
    from mmbroker import connection, entry, mapping, receiver, table, tensors
    from mmbroker.proto import messages as m

    asked = threading.local()

    def ask(_connection: Any, _seq: int, _timeout: float, body: Any, *_: Any) -> str:
        asked.kind = _kind(body)
        return f"{asked.kind}.ask"

    def sent(*_: Any) -> str | None:
        kind, asked.kind = getattr(asked, "kind", None), None
        return kind and f"{kind}.sent"

    def came(_link: Any, _connection: Any, message: Any) -> str:
        return _kind(message.body if isinstance(message, m.Answer) else message)

    def half(source: Any, slot: memoryview) -> None:
        trap.step("write")
        slot[: len(slot) // 2] = bytes(len(slot) // 2)
        trap.step("write.half")
        original(source, slot)
        trap.step("written")

    _wrap(connection.Connection, "_shake_hands", "hello", "welcome")
    _wrap(connection.Connection, "_open_control", "control", "connected")
    _wrap(connection.Connection, "encode", ask)
    _wrap(connection.Connection, "post", None, sent)
    _wrap(connection.Connection, "_take_segment", "segment.came", "segment.taken")
    _wrap(receiver.Receiver, "_dispatch", lambda *a: f"{came(*a)}.came", lambda *a: f"{came(*a)}.handled")
    _wrap(receiver.Receiver, "_lose", "lost", "lost.told")
    _wrap(receiver.Receiver, "_take_leave", "leave", "left")
    _wrap(mapping, "_mmap", "mmap", "mmapped")
    _wrap(mapping, "_munmap", "munmap", "munmapped")
    _wrap(tensors.Source, "digest", "hash")
    original = tensors.Source.write
    tensors.Source.write = half  # type: ignore[method-assign]
    _wrap(table.FeatureTable, "_enter", "enter", "entered")
    _wrap(table.FeatureTable, "_copy_on_host", "copy", "copied")
    _wrap(table.FeatureTable, "take", "take", "taken")
    _wrap(table.FeatureTable, "_withdraw", None, "withdrawn")
    _wrap(entry.Use, "release", "release", "released")


def install_broker() -> None:
    """Name the steps of the broker, in this process."""
    from mmbroker import events as e
    from mmbroker import lifeline, server

    def event(_server: Any, event: e.Event) -> str:
        if isinstance(event, e.Called):
            return _kind(event.body)
        kinds = {e.SessionOpened: "opened", e.SessionEnded: "ended", e.SegmentReady: "ready"}
        return kinds.get(type(event), _kind(event))

    def effect(_server: Any, effect: e.Effect) -> tuple[str, str]:
        match effect:
            case e.Respond(_, _, body):
                return f"{_kind(body)}.respond", f"{_kind(body)}.responded"
            case e.Notify(_, notice):
                return f"{_kind(notice)}.notify", f"{_kind(notice)}.notified"
            case e.SendSegment():
                return "segment.send", "segment.sent"
            case e.Grow():
                return "grow", "growing"
            case e.Discard():
                return "discard", "discarded"
        return _kind(effect), f"{_kind(effect)}.done"

    _wrap(lifeline.Lifelines, "_greet", "greet", "greeted")
    _wrap(server.Server, "admit", "admit", "admitted")
    _wrap(server.Server, "dispatch", event, lambda *a: f"{event(*a)}.handled")
    _wrap(server.Server, "_carry_out", lambda *a: effect(*a)[0], lambda *a: effect(*a)[1])
    create = server.HostSegment.create

    def created(nbytes: int) -> Any:
        trap.step("segment.create")
        segment = create(nbytes)
        trap.step("segment.created")
        return segment

    server.HostSegment.create = staticmethod(created)  # type: ignore[method-assign,assignment]
