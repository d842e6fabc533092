"""A rank's local table: ready tensors by reference, for a scheduler thread that must not wait.

Two kinds of threads meet at an entry. The receiver thread enters it when a grant comes and takes it out when the hold
is dismissed; schedulers take it and release it, from any thread, without locks, messages or system calls:

* a *take* looks the entry up, marks itself in the entry's `uses`, and looks again: if the entry is no longer in the
  table, it was dismissed in between, and the take unmarks itself and misses;
* a *release* unmarks itself, and lets go of its tensors;
* a *dismissal* takes the entry out of the table, one atomic operation, and only then looks at its `uses`. A take whose
  second look came before has left its mark; one whose second look comes after will miss. So once there is no mark,
  there is no user, and there will be none: the grant is settled as soon as no tensor handed out is alive either.

Every use has an exporter of its own, what its tensors lie over, which is watched by a weak reference.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from mmbroker.proto.errors import (
    BrokerError,
    ClientForked,
    FeatureError,
    FeatureMissing,
    ProtocolError,
    StaleReference,
)
from mmbroker.proto.messages import (
    Ack,
    Attach,
    Attached,
    Detach,
    DevicePlace,
    Grant,
    Loaded,
    Offer,
    Park,
    Settle,
    Want,
)
from mmbroker.proto.reference import Reference

from . import mapping
from .buffers import BufferPool
from .cuda import DriverError
from .gpu import Gpu, Place
from .mapping import Mapping
from .path import PATIENCE, Path, again, choose, spell_out
from .tensors import Layout, build, export, layout

if TYPE_CHECKING:
    from types import TracebackType

    from .link import Link

_log = logging.getLogger("mmbroker")

#: A use that reads nothing at present, and does not keep a feature on the device.
_PAUSED: Final = False
#: How often the receiver thread looks at entries that are over, but in use: at first, and at most, in seconds.
_WATCH: Final = (0.02, 0.32)
#: How long entries of a lost session stay usable, in seconds.
_LOST_ENTRIES: Final = 600.0
#: How many earlier lives of the broker are told apart from unknown ones.
_BOOTS: Final = 64

#: And whether a device that was full when it attached has room: at first, and at most, in seconds.
_FULL_WATCH: Final = (0.5, 8.0)
#: And at copies to the device that are not done.
_DEVICE_WATCH: Final = 0.001
#: How often it says that features could not be loaded, in seconds.
_COMPLAINT: Final = 60.0

Key = tuple[bytes, int]  # boot and hold
#: A weak reference to what lives exactly as long as an entry's tensors.
Watch = weakref.ref[Any]
#: Tensors, the watch on their exporter, and where on the device they are.
Built = tuple[list[torch.Tensor], Watch | None, Place | None]


class _Entry:
    """What the table keeps for one grant."""

    __slots__ = (
        "asked", "buffer", "exporters", "fences", "key", "layout", "memory", "outlived", "place", "private", "ready",
        "ref", "session", "table", "uses", "wire",
    )  # fmt: skip

    def __init__(self, table: FeatureTable, ref: Reference, session: int, private: bool) -> None:
        self.table = table
        self.key: Key = (ref.boot, ref.hold)
        self.ref = ref
        self.wire = ref.to_wire()
        self.session = session
        self.private = private
        self.layout: Layout = layout(ref)
        self.memory = memoryview(b"")
        self.buffer: Mapping | None = None
        self.uses: dict[int, bool | None] = {}  # or `_PAUSED`
        self.exporters: dict[int, Watch] = {}
        self.ready: list[Built] = []
        self.place: Place | None = None  # on the device
        self.fences: deque[int] = deque()  # events of work that may read what was released
        self.asked = False  # for a place on the device
        self.outlived = False  # a tensor was kept beyond the last use

    def build(self) -> Built:
        """Tensors over an exporter of their own: on the device, if the feature is there, or will be in a moment."""
        if not self.ref.nbytes:
            return build(self.layout, self.memory), None, None
        place, gpu = self.place, self.table.gpu
        watch: Watch
        if place is not None and gpu is not None:
            tensors, watch = gpu.build(self.layout, place, self.ref.nbytes)
        else:
            tensors, exporter = export(self.layout, self.memory)
            watch = weakref.ref(exporter)
        self.exporters[id(watch)] = watch
        return tensors, watch, place

    def let_go(self) -> None:
        """The client is closed: what nobody uses goes now, what is in use goes with its last tensor."""
        self.ready.clear()
        if not self.uses:
            self.place, self.memory = None, memoryview(b"")

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
        self._watch: Watch | None = None
        entry.uses[id(self)] = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The feature's tensors; one, unless it was put as a list. The same objects each time."""
        if self._built is None:
            entry = self._live()
            if entry.uses.get(id(self)) is _PAUSED:
                entry.uses[id(self)] = None  # before it is looked where the feature is: see `_park`
            try:
                self._built, self._watch, place = entry.ready.pop()
            except IndexError:
                self._built, self._watch, place = entry.build()
            if place is not None and entry.table.gpu is not None:
                entry.table.gpu.wait(place)
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

        `stream`: the device stream that last read it, as torch's object or its raw number; None: the current one. The
        memory stays in use until what is in that stream by now is done. The stream must live as long as the client, as
        torch's own do. Of no meaning on the CPU.
        """
        entry, self._entry = self._entry, None
        if entry is None:
            return
        gpu = entry.table.gpu
        try:
            if self._built is not None and gpu is not None:
                self._fence(entry, gpu, stream)
            self._built = None
            watch = self._watch
            if watch is None or watch() is None:
                entry.exporters.pop(id(watch), None)
            else:
                entry.outlived = True
        finally:
            entry.uses.pop(id(self), None)
        if gpu is not None and gpu.closed:
            entry.let_go()

    def _fence(self, entry: _Entry, gpu: Gpu, stream: object) -> None:
        place = entry.place
        if place is not None and place.private:
            return  # torch minds its own memory
        entry.outlived = True  # until it is known where the reading ends
        if gpu.quiet:
            return  # what is recorded now would become part of a graph
        with suppress(DriverError):
            entry.fences.append(gpu.fence(stream, remember=True))
            entry.outlived = False
            if gpu.closed:  # nobody asks about it any more
                gpu.recycle(entry.fences)

    def park(self, stream: object = None) -> None:
        """A release, and the feature is not needed on the device for now. A later take has the host's copy at once, and
        the device's again when there is room. `stream`: see `release`. On the CPU: a release."""
        entry = self._entry
        self.release(stream)
        place = None if entry is None else entry.place
        if entry is not None and place is not None and not place.private:
            entry.table.parking.append(entry)

    def pause(self, stream: object = None) -> None:
        """As `park`, but the use goes on: its tensors can be had again, on the host if the device has let them go."""
        entry = self._live()
        entry.uses[-id(self)] = _PAUSED  # so that it is never unused
        self.release(stream)
        self._entry, self._watch = entry, None
        entry.uses[id(self)] = _PAUSED
        del entry.uses[-id(self)]
        place = entry.place
        if place is not None and not place.private:
            entry.table.parking.append(entry)

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        entry = self._entry
        if entry is not None:
            entry.outlived = True  # this thread is any, and its stream need not be the one that read
            self._built, self._entry = None, None
            entry.uses.pop(id(self), None)


class FeatureTable:
    """Made by `Client.attach`. `take` may be called from any thread; it never waits."""

    def __init__(
        self,
        link: Link,
        engine: str,
        rank: int,
        world: int,
        device: str,
        access: str,
        lazy: bool,
        gpus: Callable[[str], Gpu],
    ) -> None:
        """`gpus` has the client's `Gpu` by UUID."""
        self.gpu: Gpu | None = None
        self._gpus = gpus
        self.path = "host"
        self.lazy = lazy
        self.parking: deque[_Entry] = deque()  # to be let go of on the device
        self.wanting: deque[_Entry] = deque()  # taken without a place on the device
        self._put_off: list[Grant | Offer] = []  # until graphs are captured
        self._load_failures = 0
        self._next_complaint = 0.0
        self.engine = engine
        self.rank = rank
        self.world = world
        self.access = access
        self.device = spell_out(device)
        self._link = link
        self._entries: dict[Key, _Entry] = {}
        self._boots: dict[bytes, None] = {link.boot: None}
        self._over: deque[_Entry] = deque()  # out of the table, but still in use, or a tensor of it alive
        self._lost: list[tuple[float, int]] = []  # when entries of which session expire
        self._buffers = BufferPool()
        self._pause = _WATCH[0]
        self._open = True
        self._shared = False  # the broker gives places on our device
        self._next_try = math.inf  # when to look whether the device has room for us
        self._try_pause = _FULL_WATCH[0]
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
        if entry.place is None and self.gpu is not None:
            self._want(entry)
        if self._entries.get(entry.key) is not entry:
            use.release()
            raise self._missing(entry.ref)
        self._takes += 1
        return use

    def _want(self, entry: _Entry) -> None:
        """Ask for a place on the device; the model copies by itself if it reads before there is one."""
        if self._shared and not entry.asked and entry.memory.nbytes:
            entry.asked = True
            self.wanting.append(entry)
            self._link.wake()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While CUDA graphs are captured: nothing is mapped, pinned, loaded or queried; grants and seals wait."""
        gpu = self.gpu
        if gpu is None:
            yield
            return
        gpu.quiet += 1
        try:
            with suppress(BrokerError):
                self._link.run(lambda: None, 1.0)  # what it is at now is over after this
            yield
        finally:
            gpu.quiet -= 1
            self._link.wake()

    @property
    def _quiet(self) -> bool:
        return self.gpu is not None and self.gpu.quiet > 0

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
            "imports": 0 if self.gpu is None else self.gpu.imports,
            "loads": 0 if self.gpu is None else self.gpu.loads,
            "bytes_loaded": 0 if self.gpu is None else self.gpu.bytes_loaded,
            "load_failures": self._load_failures,
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

    def granted(self, grants: list[Grant], dismissed: Sequence[int] = ()) -> None:
        """Make entries, and say so. What was dismissed with them is settled by the same word, if it can be."""
        if self._quiet:
            self._put_off += grants
            self.dismissed(dismissed)
            return
        started = time.perf_counter_ns()
        acked: list[int] = []
        failed: list[int] = []
        self._declined: list[int] = []
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
        settled: list[int] = []
        if dismissed:
            boot = self._link.boot
            self._withdraw([(boot, hold) for hold in dismissed])
            settled = self._settle()
        self._build_ns += time.perf_counter_ns() - started
        self._watch_soon()
        self._link.cast(Ack(acked, failed, reason, settled))
        if self._declined:
            self._link.cast(Park(self._declined))

    def _enter(self, grant: Grant) -> None:
        ref = grant.ref
        if (ref.boot, ref.hold) in self._entries:
            return
        entry = _Entry(self, ref, self._link.session, grant.private)
        if ref.nbytes and grant.tier == "device":
            self._enter_device(entry, grant)
        elif ref.nbytes:
            host = self._link.segment(grant.segment, False)
            entry.memory = host.view(grant.offset, ref.nbytes)
            entry.asked = not self.lazy  # the broker has it in its own line
            private = grant.private or self.access == "copy"
            if self.gpu is not None:
                self.gpu.pin(host)
                if private or grant.device is not None:
                    self._try_to_load(entry, None if private else grant.device)
            if private and entry.place is None:
                self._copy_on_host(entry)
        try:
            if (
                self.gpu is not None
            ):  # on the host a scheduler makes it in 2 us: less than waiting for us costs it
                entry.ready.append(entry.build())
        except BaseException:
            if entry.place is not None and self.gpu is not None:
                self.gpu.await_copies()  # what has begun must not go on when its slot is another's
            raise
        self._entries[entry.key] = entry

    def _enter_device(self, entry: _Entry, grant: Grant) -> None:
        """A feature that is nowhere but on the device."""
        if self.gpu is None:
            raise FeatureMissing(f"rank {self.rank} of engine {self.engine!r} is not on that device")
        hold, nbytes = grant.ref.hold, grant.ref.nbytes
        entry.place = self.gpu.share(DevicePlace(grant.segment, grant.offset, False), hold)
        if grant.private or self.access == "copy":
            entry.place = self.gpu.load_private(hold, entry.place, nbytes)

    def _try_to_load(self, entry: _Entry, place: DevicePlace | None) -> bool:
        """To a place of the broker's, or (None) into private memory. If that fails, the host's copy has to do."""
        hold = entry.ref.hold
        try:
            if place is None:
                assert self.gpu is not None
                entry.place = self.gpu.load_private(hold, entry.memory, entry.ref.nbytes)
            else:
                entry.place = self._place(place, hold, entry.memory)
        except (BrokerError, RuntimeError, OSError) as error:  # torch's allocator raises RuntimeErrors
            entry.asked = True  # not again
            self._load_failures += 1
            if place is not None:
                self._declined.append(hold)
            now = time.monotonic()
            if now >= self._next_complaint:
                self._next_complaint = now + _COMPLAINT
                _log.warning(
                    "mmbroker: engine %s has features on the host, %d up to now, because: %s",
                    self.engine, self._load_failures, str(error),
                )  # fmt: skip
            return False
        return True

    def _copy_on_host(self, entry: _Entry) -> None:
        nbytes = entry.ref.nbytes
        entry.buffer = self._buffers.take(nbytes)
        copied = entry.buffer.view(0, nbytes)
        mapping.copy(copied, mapping.address_of(entry.memory))
        entry.memory = copied
        self._bytes_copied += nbytes

    def _place(self, place: DevicePlace, hold: int, memory: memoryview) -> Place:
        assert self.gpu is not None
        return self.gpu.load(place, hold, memory) if place.load else self.gpu.share(place, hold)

    def offered(self, offers: list[Offer]) -> None:
        """Places on the device for entries that had none."""
        if self._quiet:
            self._put_off += offers
            return
        boot = self._link.boot
        self._declined = []
        for offer in offers:
            entry = self._entries.get((boot, offer.hold))
            if entry is None or entry.place is not None:
                self._declined.append(offer.hold)  # nobody needs it any more
            elif self._try_to_load(entry, offer.place):
                entry.ready.clear()
                with suppress(Exception):  # then it is built when it is read
                    entry.ready.append(entry.build())
        if self._declined:
            self._link.cast(Park(self._declined))

    def dismissed(self, holds: Sequence[int]) -> None:
        boot = self._link.boot
        self._withdraw([(boot, hold) for hold in holds])
        unheard = {p.ref.hold for p in self._put_off if isinstance(p, Grant)}.intersection(holds)
        if unheard:  # granted and dismissed while graphs are captured
            self._put_off = [p for p in self._put_off if not (isinstance(p, Grant) and p.ref.hold in unheard)]
            self._link.cast(Settle(list(unheard)))
        if settled := self._settle():
            self._link.cast(Settle(settled))
        self._watch_soon()

    def _watch_soon(self) -> None:
        """Have the chores look after what cannot be finished now."""
        if self.gpu is not None:
            self._link.remind()
        elif self._over:
            self._link.hasten(_WATCH[0])

    def _withdraw(self, keys: list[Key]) -> None:
        """Take entries out of the table: from now on nobody takes them. From any thread."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                entry.ready.clear()
                self._over.append(entry)

    def _settle(self) -> list[int]:
        """Let go of what is over and can no longer be touched; the holds of it to settle."""
        session = self._link.session
        settled: list[int] = []
        if self.gpu is not None and not self._quiet:
            self._tell_loaded(self.gpu)
        for _ in range(len(self._over)):
            entry = self._over.popleft()
            try:
                free = self._untouchable(entry)
            except DriverError as error:
                _log.warning("mmbroker: a feature of engine %s stays unsettled: %s", self.engine, error)
                free = False
            if not free:
                self._over.append(entry)
                continue
            self._settled += 1
            if self.gpu is not None:
                self.gpu.recycle(entry.fences)
            if entry.session == session:
                settled.append(entry.ref.hold)
            if entry.buffer is not None and not entry.private:
                self._buffers.give(entry.buffer, time.monotonic())
        return settled

    def _untouchable(self, entry: _Entry) -> bool:
        """Can nothing here touch the entry's memory any more: no use, no tensor, no work on the GPU?"""
        place = entry.place
        if self.gpu is None:
            return entry.private or not (entry.uses or entry.kept)
        if self._quiet or (place is not None and place.event):
            return False
        if entry.private and entry.buffer is not None:
            return True
        if place is not None and place.private:
            return True
        return not entry.uses and self._unread(entry, self.gpu)

    def _unread(self, entry: _Entry, gpu: Gpu) -> bool:
        """Whether nothing reads tensors that were handed out and let go of, here or on the GPU."""
        if entry.kept:
            return False
        if entry.outlived:  # whatever read the tensors that outlived their uses may still be at work
            fences = gpu.fences()
            entry.outlived = False
            entry.fences += fences
        return gpu.passed(entry.fences)

    def _tell_loaded(self, gpu: Gpu) -> None:
        session = self._link.session
        done = [place.hold for place in gpu.loaded() if place.session == session and not place.private]
        if done and self._shared:
            self._link.cast(Loaded(done), session)

    def _device_chores(self, gpu: Gpu) -> None:
        """Tell what is loaded, ask for what is wanted, let go of what is parked."""
        if self._put_off:
            put_off, self._put_off = self._put_off, []
            self.granted([item for item in put_off if isinstance(item, Grant)])
            self.offered([item for item in put_off if isinstance(item, Offer)])
        for number in self._link.fresh_segments():
            gpu.pin(self._link.segment(number, False))
        self._tell_loaded(gpu)
        if self.wanting:
            session = self._link.session
            wanted = [self.wanting.popleft() for _ in range(len(self.wanting))]
            self._link.cast(Want([e.ref.hold for e in wanted if e.session == session]), session)
        self._park(gpu)
        if time.monotonic() >= self._next_try and self._link.connected:
            self._try_again(gpu)

    def _try_again(self, gpu: Gpu) -> None:
        """The device had no room when this rank attached. If it has some now, this rank moves there."""
        self._try_pause = min(self._try_pause * 2, _FULL_WATCH[1])
        self._next_try = time.monotonic() + self._try_pause
        with suppress(BrokerError):
            self._move(again(self._link, gpu), PATIENCE)

    def _park(self, gpu: Gpu) -> None:
        """Let go of places on the device. As with a dismissal: first out of sight, and only then a look at the uses."""
        session = self._link.session
        parked: list[int] = []
        for _ in range(len(self.parking)):
            entry = self.parking.popleft()
            place = entry.place
            if place is None or self._entries.get(entry.key) is not entry or not entry.memory.nbytes:
                continue  # parked already, over, or without a replica on the host
            entry.place = None
            entry.ready.clear()
            if None in list(entry.uses.values()):
                entry.place = place  # in use again, and parked again when that is over
            elif place.event or not self._unread(entry, gpu):
                entry.place = place
                self.parking.append(entry)
            else:
                entry.asked = False
                entry.ready.append(entry.build())
                if entry.session == session:
                    parked.append(entry.ref.hold)
        if parked and self._shared:
            self._link.cast(Park(parked), session)

    def chores(self, now: float) -> float:
        """Settle what has come to its end; returns in how many seconds to look again."""
        gpu = self.gpu
        if gpu is not None and not gpu.quiet:
            self._device_chores(gpu)
        for expiry, session in list(self._lost):
            if expiry <= now:
                self._lost.remove((expiry, session))
                expired = [entry.key for entry in list(self._entries.values()) if entry.session == session]
                self._expired += len(expired)
                self._withdraw(expired)
        self._buffers.trim(now)
        before = self._settled
        if settled := self._settle():
            self._link.cast(Settle(settled))
        moved = self._settled > before
        unfinished = bool(self._over or self.parking)
        self._pause = _WATCH[0] if moved or not unfinished else min(self._pause * 2, _WATCH[1])
        pause = self._pause if unfinished else 1.0
        return min(pause, _DEVICE_WATCH) if gpu is not None and gpu.busy and not gpu.quiet else pause

    def lost(self, session: int) -> None:
        """Entries stay usable without their session, because requests that carry their references still run."""
        self._put_off.clear()
        self._shared = False
        self._lost.append((time.monotonic() + _LOST_ENTRIES, session))

    def attach(self, timeout: float | None = None) -> None:
        """Tell the broker who we are; also after each reconnection."""
        if self._open:
            seconds = self._link.timeout if timeout is None else timeout
            self._link.run(lambda: self._attach(timeout), seconds + PATIENCE + 1.0)

    def _attach(self, timeout: float | None) -> None:
        if self._quiet:
            raise BrokerError("graphs are being captured: the table is attached after that")
        path = choose(self._link, self.device, self._gpus)
        self._boots[self._link.boot] = None
        while len(self._boots) > _BOOTS:
            del self._boots[next(iter(self._boots))]
        self._try_pause = _FULL_WATCH[0]
        self._move(path, timeout)
        if path.why:
            _log.warning(
                "mmbroker: rank %d of engine %s is on the %s path: %s",
                self.rank, self.engine, path.name, path.why,
            )  # fmt: skip

    def _move(self, path: Path, timeout: float | None) -> None:
        """Take a path, and tell the broker which."""
        self.gpu = path.gpu or self.gpu  # what was entered before needs it
        self._shared = path.name == "device"  # offers may come before the answer
        reply = self._link.call(
            Attach(
                self.engine, self.rank, self.world, path.device, self.access, self.lazy, path.name, path.why
            ),
            timeout,
        )
        self.path = path.name
        self._shared = isinstance(reply, Attached) and reply.tier == "device"
        self._next_try = time.monotonic() + self._try_pause if path.full else math.inf

    def touches(self, session: int) -> bool:
        """Can anything of a session that is over still be read here?"""
        entries = [*self._entries.values(), *self._over]
        return any(entry.session == session for entry in entries)

    def end(self) -> None:
        """Nobody receives for this table any more."""
        for entry in (*self._entries.values(), *self._over):
            if self.gpu is not None:
                self.gpu.recycle(entry.fences)
            entry.let_go()

    @property
    def empty(self) -> bool:
        return not (self._open or self._entries or self._over)
