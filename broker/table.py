"""A rank's local table: ready tensors by reference, for a scheduler thread that must not wait.

Two kinds of threads meet at an entry. The receiver thread enters it when a grant comes and takes it out when the hold
is dismissed; schedulers take it and release it, from any thread, without locks, messages or system calls:

* a *take* looks the entry up, marks itself in the entry's `uses`, and looks again: if the entry is no longer in the
  table, it was dismissed in between, and the take unmarks itself and misses;
* a *release* unmarks itself, and lets go of its tensors;
* a *dismissal* takes the entry out of the table, one atomic operation, and only then looks at its `uses`. A take whose
  second look came before has left its mark; one whose second look comes after will miss. So once there is no mark,
  there is no user, and there will be none: the grant is settled as soon as no tensor handed out is alive either.

Every use has an exporter of its own, the memoryview under its tensors, which is watched by a weak reference.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from mmbroker.proto.errors import ClientForked, FeatureError, FeatureMissing, ProtocolError, StaleReference
from mmbroker.proto.messages import Ack, Attach, Detach, Grant, Settle
from mmbroker.proto.reference import Reference

from . import mapping
from .buffers import BufferPool
from .mapping import Mapping
from .tensors import Layout, build, layout

if TYPE_CHECKING:
    from types import TracebackType

    from .link import Link

_log = logging.getLogger("mmbroker")

#: How often the receiver thread looks at entries that are over, but in use: at first, and at most, in seconds.
_WATCH: Final = (0.02, 0.32)
#: How long entries of a lost session stay usable, in seconds.
_LOST_ENTRIES: Final = 600.0
#: How many earlier lives of the broker are told apart from unknown ones.
_BOOTS: Final = 64

Key = tuple[bytes, int]  # boot and hold


class _Entry:
    """What the table keeps for one grant."""

    __slots__ = (
        "buffer", "exporters", "key", "layout", "memory", "private", "ready", "ref", "session", "uses", "wire",
    )  # fmt: skip

    def __init__(self, ref: Reference, session: int, private: bool) -> None:
        self.key: Key = (ref.boot, ref.hold)
        self.ref = ref
        self.wire = ref.to_wire()
        self.session = session
        self.private = private
        self.layout: Layout = layout(ref)
        self.memory = memoryview(b"")
        self.buffer: Mapping | None = None
        self.uses: dict[int, None] = {}
        self.exporters: dict[int, weakref.ref[memoryview]] = {}
        self.ready: list[tuple[list[torch.Tensor], weakref.ref[memoryview] | None]] = []

    def build(self) -> tuple[list[torch.Tensor], weakref.ref[memoryview] | None]:
        """Tensors over an exporter of their own."""
        if not self.ref.nbytes:
            return build(self.layout, self.memory), None
        exporter = self.memory[:]
        watch = weakref.ref(exporter)
        self.exporters[id(watch)] = watch
        return build(self.layout, exporter), watch

    @property
    def kept(self) -> bool:
        """Is a tensor that was handed out still alive?"""
        return any(watch() is not None for watch in list(self.exporters.values()))


class Use:
    """One use of an entry by the scheduler, from `FeatureTable.take` to `release`. Also a context manager."""

    __slots__ = ("_built", "_entry", "_watch")

    def __init__(self, entry: _Entry) -> None:
        self._entry: _Entry | None = entry
        self._built: list[torch.Tensor] | None = None
        self._watch: weakref.ref[memoryview] | None = None
        entry.uses[id(self)] = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The feature's tensors; one, unless it was put as a list. The same objects each time."""
        if self._built is None:
            entry = self._live()
            try:
                self._built, self._watch = entry.ready.pop()
            except IndexError:
                self._built, self._watch = entry.build()
        return self._built

    @property
    def tensor(self) -> Any:
        """The feature's tensor, or the list of them if it was put as a list.

        Not to be written, unless the table was attached with ``access="copy"``.
        """
        tensors = self.tensors
        return tensors[0] if self._live().ref.parts is None else tensors

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the feature's key."""
        return self._live().ref.digest

    @property
    def ref(self) -> Reference:
        return self._live().ref

    def _live(self) -> _Entry:
        if self._entry is None:
            raise FeatureMissing("this use was released: take the reference again")
        return self._entry

    def release(self, stream: object = None) -> None:
        """No longer in use. Idempotent. A tensor kept beyond this stays valid, and its memory stays in use.

        `stream`: the device stream that last read it; of no meaning on the CPU.
        """
        entry, self._entry = self._entry, None
        if entry is not None:
            self._built = None
            watch = self._watch
            if watch is not None and watch() is None:
                entry.exporters.pop(id(watch), None)
            entry.uses.pop(id(self), None)

    def park(self) -> None:
        """The feature is not needed on the device for now; a later take has it again. On the CPU: a release."""
        self.release()

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class FeatureTable:
    """Made by `Client.attach`. `take` may be called from any thread; it never waits."""

    def __init__(self, link: Link, engine: str, rank: int, world: int, device: str, access: str) -> None:
        self.engine = engine
        self.rank = rank
        self.world = world
        self.access = access
        self.device = device
        self._link = link
        self._entries: dict[Key, _Entry] = {}
        self._boots: dict[bytes, None] = {link.boot: None}
        self._over: deque[_Entry] = deque()  # out of the table, but still in use, or a tensor of it alive
        self._lost: list[tuple[float, int]] = []  # when entries of which session expire
        self._buffers = BufferPool()
        self._pause = _WATCH[0]
        self._open = True
        self._takes = self._misses = self._stale = 0
        self._acks = self._failed = self._settled = self._expired = self._bytes_copied = self._build_ns = 0

    # --- schedulers -------------------------------------------------------------------------------------------------

    def take(self, ref: Reference | dict[str, Any]) -> Use:
        """The entry that a reference names, for use. Never waits, does no I/O.

        Raises `FeatureMissing` if its hold is over or was not granted here, `StaleReference` if the reference is
        another broker life's, or does not fit the entry.
        """
        try:
            if type(ref) is dict:
                entry = self._entries[ref["boot"], ref["hold"]]
                fits = entry.wire == ref
            else:
                entry = self._entries[ref.boot, ref.hold]  # type: ignore[union-attr]
                fits = entry.ref == ref
        except (KeyError, TypeError, AttributeError, ValueError):
            fits = False
        if not fits or self._link.forked:
            entry = self._look_closer(ref)
        use = Use(entry)
        if self._entries.get(entry.key) is not entry:
            use.release()
            raise self._missing(entry.ref)
        self._takes += 1
        return use

    def _look_closer(self, ref: object) -> _Entry:
        """The entry of a reference that is not written as usual, such as one whose shape became a tuple on its way.
        Raises for all others."""
        if self._link.forked:
            raise ClientForked("this table was made before a fork: connect and attach anew in the child")
        try:
            parsed = ref if isinstance(ref, Reference) else Reference.from_wire(ref)
        except ProtocolError as error:
            self._stale += 1
            raise StaleReference(str(error)) from None
        entry = self._entries.get((parsed.boot, parsed.hold))
        if entry is None:
            raise self._missing(parsed)
        if entry.ref != parsed:
            self._stale += 1
            wrong = (
                name
                for name in Reference.__struct_fields__
                if getattr(parsed, name) != getattr(entry.ref, name)
            )
            raise StaleReference(
                f"the reference to hold {parsed.hold} differs from its entry in {', '.join(wrong)}: "
                "it was forged or damaged; have the producer send the feature again"
            )
        return entry

    def _missing(self, ref: Reference) -> FeatureError:
        """Why there is no entry for a reference."""
        if ref.boot not in self._boots:
            self._stale += 1
            return StaleReference(
                f"the reference to hold {ref.hold} belongs to a broker's life that rank {self.rank} of engine "
                f"{self.engine!r} has not seen: have the producer send the feature again"
            )
        self._misses += 1
        return FeatureMissing(
            f"rank {self.rank} of engine {self.engine!r} has no entry for hold {ref.hold}: the hold is over, or "
            "was granted to another engine; have the producer send the feature again"
        )

    def stats(self) -> dict[str, int]:
        """Counters since the start, and how things stand now: entries, idle, busy, unsettled, kept."""
        entries = list(self._entries.values())
        busy = sum(1 for entry in entries if entry.uses)
        over = list(self._over)
        return {
            "entries": len(entries),
            "idle": len(entries) - busy,
            "busy": busy,
            "unsettled": len(over),
            "kept": sum(1 for entry in over if not entry.uses),
            "takes": self._takes,
            "misses": self._misses,
            "stale": self._stale,
            "acks": self._acks,
            "failed": self._failed,
            "settled": self._settled,
            "expired": self._expired,
            "bytes_copied": self._bytes_copied,
            "build_us": self._build_ns // 1000,
            "buffer_bytes": self._buffers.idle_bytes,
        }

    @property
    def attached(self) -> bool:
        return self._open

    def close(self, timeout: float | None = None) -> None:
        """No further grants; what is in use is settled when it ends. Idempotent."""
        if not self._open:
            return
        self._open = False
        try:
            self._link.call(Detach(), timeout)
        finally:
            self._withdraw(list(self._entries))
            self._link.wake()

    # --- the receiver thread ----------------------------------------------------------------------------------------

    def granted(self, grants: list[Grant]) -> None:
        """Make entries, then say so."""
        started = time.perf_counter_ns()
        acked: list[int] = []
        failed: list[int] = []
        reason = ""
        for grant in grants:
            try:
                if not self._open:
                    raise FeatureMissing(f"rank {self.rank} of engine {self.engine!r} has closed its table")
                self._enter(grant)
                acked.append(grant.ref.hold)
            except Exception as error:  # whatever it is, it must not take other grants with it
                failed.append(grant.ref.hold)
                reason = f"{type(error).__name__}: {error}"
        self._acks += len(acked)
        if failed:
            self._failed += len(failed)
            _log.warning("mmbroker: %d grant(s) to engine %s failed: %s", len(failed), self.engine, reason)
        self._build_ns += time.perf_counter_ns() - started
        self._link.cast(Ack(acked, failed, reason))

    def _enter(self, grant: Grant) -> None:
        ref = grant.ref
        if (ref.boot, ref.hold) in self._entries:
            return
        entry = _Entry(ref, self._link.session, grant.private)
        if ref.nbytes:
            memory = self._link.segment(grant.segment, False).view(grant.offset, ref.nbytes)
            if grant.private or self.access == "copy":
                entry.buffer = self._buffers.take(ref.nbytes)
                copied = entry.buffer.view(0, ref.nbytes)
                mapping.copy(copied, mapping.address_of(memory))
                memory = copied
                self._bytes_copied += ref.nbytes
            entry.memory = memory
        entry.ready.append(entry.build())
        self._entries[entry.key] = entry

    def dismissed(self, holds: list[int]) -> None:
        boot = self._link.boot
        self._withdraw([(boot, hold) for hold in holds])
        self._settle()

    def _withdraw(self, keys: list[Key]) -> None:
        """Take entries out of the table: from now on nobody takes them. From any thread."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                entry.ready.clear()
                self._over.append(entry)

    def _settle(self) -> bool:
        """Settle what is over and can no longer be touched; False if nothing was."""
        session = self._link.session
        count = self._settled
        settled: list[int] = []
        for _ in range(len(self._over)):
            entry = self._over.popleft()
            if not entry.private and (entry.uses or entry.kept):
                self._over.append(entry)
                continue
            self._settled += 1
            if entry.session == session:
                settled.append(entry.ref.hold)
            if entry.buffer is not None and not entry.private:
                self._buffers.give(entry.buffer, time.monotonic())
        if settled:
            self._link.cast(Settle(settled), session)
        return self._settled > count

    def chores(self, now: float) -> float:
        """Settle what has come to its end; returns in how many seconds to look again."""
        for expiry, session in list(self._lost):
            if expiry <= now:
                self._lost.remove((expiry, session))
                expired = [entry.key for entry in list(self._entries.values()) if entry.session == session]
                self._expired += len(expired)
                self._withdraw(expired)
        self._buffers.trim(now)
        moved = self._settle()
        self._pause = _WATCH[0] if moved or not self._over else min(self._pause * 2, _WATCH[1])
        return self._pause if self._over else 1.0

    def lost(self, session: int) -> None:
        """Entries stay usable without their session, because requests that carry their references still run."""
        self._lost.append((time.monotonic() + _LOST_ENTRIES, session))

    def attach(self, timeout: float | None = None) -> None:
        """Tell the broker who we are; also after each reconnection."""
        if not self._open:
            return
        self._boots[self._link.boot] = None
        while len(self._boots) > _BOOTS:
            del self._boots[next(iter(self._boots))]
        self._link.call(Attach(self.engine, self.rank, self.world, self.device, self.access), timeout)

    def touches(self, session: int) -> bool:
        """Can anything of a session that is over still be read here?"""
        entries = [*self._entries.values(), *self._over]
        return any(entry.session == session for entry in entries)

    @property
    def empty(self) -> bool:
        return not (self._open or self._entries or self._over)
