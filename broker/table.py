"""A rank's local table: tensors by reference, for a scheduler thread that must not wait.

The receiver thread enters what is granted, and settles what is dismissed. How it meets the schedulers at an entry is
told in `entry`, and which entries are on the device is decided in `residence`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

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
    Grant,
    Kept,
    Loaded,
    Offer,
    Settle,
)
from mmbroker.proto.reference import Reference

from . import mapping, spans
from .buffers import BufferPool
from .endings import Endings
from .entry import Entry, Key, Use
from .gpu import Gpu
from .path import PATIENCE, Path, again, choose, spell_out
from .residence import Residence

if TYPE_CHECKING:
    from .link import Link

_log = logging.getLogger("mmbroker")

#: How often the receiver thread looks at entries that are over, but in use: at first, and at most, in seconds.
_WATCH: Final = (0.02, 0.32)
#: And when all is as it should be.
_REST: Final = 1.0
#: How long entries of a lost session stay usable, in seconds.
_LOST_ENTRIES: Final = 600.0
#: How many earlier lives of the broker are told apart from unknown ones.
_BOOTS: Final = 64

#: And whether a device that was full when it attached has room: at first, and at most, in seconds.
_FULL_WATCH: Final = (0.5, 8.0)
#: And at copies to the device that are not done. A reader waits for them on the GPU; other ranks wait for our word, but
#: mostly there are none, and each look takes turns with the scheduler. The next message brings one anyway.
_DEVICE_WATCH: Final = 0.01


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
        detach: Callable[[], None],
    ) -> None:
        """`gpus` has the client's `Gpu` by UUID. `detach`, in the receiver thread, ends the client's attachment unless
        another table has it."""
        self._residence = Residence(link, engine)
        self._gpus = gpus
        self._detach = detach
        self.path = "host"
        self.lazy = lazy
        self._put_off: list[Grant | Offer] = []  # until graphs are captured
        self.engine = engine
        self.rank = rank
        self.world = world
        self.access = access
        self.device = spell_out(device)
        self._link = link
        self._entries: dict[Key, Entry] = {}
        self._boots: dict[bytes, None] = {link.boot: None}
        self._lost: list[tuple[float, int]] = []  # when entries of which session expire
        self._buffers = BufferPool()
        self._endings = Endings(link, self._residence, self._buffers)
        self._pause = _WATCH[0]
        self._open = True
        self._next_try = math.inf  # when to look whether the device has room for us
        self._try_pause = _FULL_WATCH[0]
        self._takes = self._misses = self._stale = 0
        self._acks = self._failed = self._expired = self._bytes_copied = self._build_ns = 0

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
        if entry.gone:
            use.release()
            raise self._missing(entry.ref)
        if entry.place is None and self._residence.gpu is not None:
            self._residence.want(entry)
        self._takes += 1
        return use

    @property
    def gpu(self) -> Gpu | None:
        """This rank's use of its GPU; None: everything is on the host."""
        return self._residence.gpu

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
            gpu.await_quiet(1.0)
            yield
        finally:
            gpu.quiet -= 1
            self._link.wake()

    @property
    def _quiet(self) -> bool:
        gpu = self._residence.gpu
        return gpu is not None and gpu.quiet > 0

    def _look_closer(self, ref: object) -> Entry:
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
        over = list(self._endings)
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
            "settled": self._endings.settled,
            "expired": self._expired,
            "bytes_copied": self._bytes_copied,
            "build_us": self._build_ns // 1000,
            "imports": 0 if self.gpu is None else self.gpu.imports,
            "loads": 0 if self.gpu is None else self.gpu.loads,
            "bytes_loaded": 0 if self.gpu is None else self.gpu.bytes_loaded,
            "load_failures": self._residence.failures,
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
        except BaseException:
            # Perhaps it was never sent, because the receiver thread is attaching us to a new session at this moment.
            self._link.later(self._detach)
            raise
        finally:
            self._withdraw(list(self._entries))
            self._residence.make_none_ready()
            self._link.wake()  # from now on each of the chores looks

    # --- the receiver thread ----------------------------------------------------------------------------------------

    def granted(self, grants: list[Grant], dismissed: Sequence[int] = ()) -> None:
        """Make entries, and say so. What was dismissed with them or before is settled by the same word, if it is time
        to look at it, and it can be."""
        if self._quiet or self._put_off:
            # What was put off comes first, and what of it is dismissed never comes.
            self._put_off += grants
            self.dismissed(dismissed)
            return
        with spans.span("grant", engine=self.engine, rank=self.rank, features=len(grants)):
            self._make_entries(grants, dismissed)

    def _make_entries(self, grants: list[Grant], dismissed: Sequence[int]) -> None:
        started = time.perf_counter_ns()
        if dismissed:
            boot = self._link.boot
            self._withdraw([(boot, hold) for hold in dismissed])
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
        loaded = self._loaded()  # first: what is on its way cannot be settled
        settled: list[int] = []
        if self._endings and self._endings.due(started):
            settled = self._endings.settle(started)
            self._endings.fence()  # what is left, to be passed by the next look
        self._build_ns += time.perf_counter_ns() - started
        self._watch_soon()
        self._link.cast(Ack(acked, failed, reason, settled, loaded))
        self._residence.tell_declined()

    def _enter(self, grant: Grant) -> None:
        ref = grant.ref
        if (ref.boot, ref.hold) in self._entries:
            return
        residence, private = self._residence, grant.private or self.access == "copy"
        entry = Entry(residence, ref, self._link.session, grant.private)
        if ref.nbytes and grant.tier == "device":
            residence.enter(entry, grant, private)
        elif ref.nbytes:
            host = self._link.segment(grant.segment, False)
            entry.memory = host.view(grant.offset, ref.nbytes)
            entry.asked = not self.lazy  # the broker has it in its own line
            if residence.gpu is not None:
                residence.gpu.pin(host)
                if private or grant.device is not None:
                    residence.load(entry, None if private else grant.device)
            if private and entry.place is None:
                self._copy_on_host(entry)
        if residence.gpu is not None:  # on the host, making it costs a scheduler less than waiting for us to
            residence.make_ready(entry)  # and here, too, if it takes the entry at once
        self._entries[entry.key] = entry

    def _copy_on_host(self, entry: Entry) -> None:
        nbytes = entry.ref.nbytes
        entry.buffer = self._buffers.take(nbytes)
        copied = entry.buffer.view(0, nbytes)
        mapping.copy(copied, mapping.address_of(entry.memory))
        entry.memory = copied
        self._bytes_copied += nbytes

    def offered(self, offers: list[Offer]) -> None:
        """Places on the device for entries that had none."""
        if self._quiet or self._put_off:
            self._put_off += offers
        else:
            boot = self._link.boot
            self._residence.offered((offer, self._entries.get((boot, offer.hold))) for offer in offers)
            self._watch_soon()

    def dismissed(self, holds: Sequence[int]) -> None:
        boot = self._link.boot
        self._withdraw([(boot, hold) for hold in holds])
        unheard = {p.ref.hold for p in self._put_off if isinstance(p, Grant)}.intersection(holds)
        if unheard:
            self._put_off = [p for p in self._put_off if not (isinstance(p, Grant) and p.ref.hold in unheard)]
            self._link.cast(Settle(list(unheard)))
        self._let_go()
        self._watch_soon()
        self._endings.look_again()  # no grant came with them: perhaps because somebody waits for what they free

    def _watch_soon(self) -> None:
        """Have the chores look after what cannot be finished now, unless another message comes before."""
        if self._residence.gpu is not None:
            self._link.hasten(_DEVICE_WATCH if self._residence.loading else _WATCH[0])
        elif self._endings:
            self._link.hasten(_WATCH[0])

    def _withdraw(self, keys: list[Key]) -> None:
        """Take entries out of the table: from now on nobody takes them. From any thread."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                entry.gone = True
                entry.ready.clear()
                self._endings.add(entry)

    def fence(self) -> None:
        """Find out where what has read the entries that are over comes to its end."""
        self._endings.fence()

    def _let_go(self) -> bool:
        """True if something has come to its end, or will in a moment."""
        before = self._endings.settled
        loaded = self._loaded()
        fenced = self._endings.fence()
        settled = self._endings.settle(time.perf_counter_ns())
        if loaded:
            self._link.cast(Loaded(loaded))
        if settled:
            self._link.cast(Settle(settled))
        return fenced or self._endings.settled > before  # those of lost sessions, too

    def _loaded(self) -> list[int]:
        """The holds whose copies to the device are complete by now. The broker is to be told of them before it is told
        that they are settled."""
        gpu = self._residence.gpu
        return self._residence.loaded(gpu) if gpu is not None and gpu.busy and not gpu.quiet else []

    def _device_chores(self, gpu: Gpu) -> None:
        """Make up for what was put off, and see that everything is where it should be."""
        if self._put_off:
            put_off, self._put_off = self._put_off, []
            self.granted([item for item in put_off if isinstance(item, Grant)])
            self.offered([item for item in put_off if isinstance(item, Offer)])
        self._residence.chores(gpu)
        if self._open and time.monotonic() >= self._next_try and self._link.connected:
            self._try_again(gpu)

    def _try_again(self, gpu: Gpu) -> None:
        """The device had no room when this rank attached. If it has some now, this rank moves there."""
        self._try_pause = min(self._try_pause * 2, _FULL_WATCH[1])
        self._next_try = time.monotonic() + self._try_pause
        with suppress(BrokerError):
            self._move(again(self._link, gpu), PATIENCE)

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
                self._endings.hasten()
        self._buffers.trim(now)
        look = not self._open or self._endings.due(time.perf_counter_ns())
        moved = self._let_go() if look else False
        unfinished = bool(self._endings) or self._residence.unfinished
        self._pause = _WATCH[0] if moved or not (look and unfinished) else min(self._pause * 2, _WATCH[1])
        pause = self._pause if unfinished else _REST
        return min(pause, _DEVICE_WATCH) if self._residence.loading and not self._quiet else pause

    def lost(self, session: int) -> None:
        """Entries stay usable without their session, because requests that carry their references still run."""
        self._put_off.clear()
        self._residence.shared = False
        self._lost.append((time.monotonic() + _LOST_ENTRIES, session))

    def give_up(self) -> None:
        """Nobody waits for the attachment any more."""
        self._open = False
        self._link.later(self._detach)

    def attach(self, timeout: float | None = None) -> None:
        """Tell the broker who we are; also after each reconnection."""
        if not self._open:
            return
        if self._quiet:
            raise BrokerError("graphs are being captured: the table is attached after that")
        path = choose(self._link, self.device, self._gpus)
        self._boots[self._link.boot] = None
        while len(self._boots) > _BOOTS:
            del self._boots[next(iter(self._boots))]
        self._try_pause = _FULL_WATCH[0]
        self._move(path, timeout)
        self._tell_kept()
        if path.why:
            _log.warning(
                "mmbroker: rank %d of engine %s is on the %s path: %s",
                self.rank, self.engine, path.name, path.why,
            )  # fmt: skip

    def _tell_kept(self) -> None:
        """Have the broker tell when the holds of lost sessions end."""
        boot, session = self._link.boot, self._link.session
        entries = list(self._entries.values())
        kept = iter([e.ref.hold for e in entries if e.ref.boot == boot and e.session != session])
        while batch := list(islice(kept, 4096)):
            self._link.cast(Kept(batch))

    def _move(self, path: Path, timeout: float | None) -> None:
        """Take a path, and tell the broker which."""
        self._residence.gpu = path.gpu or self.gpu  # what was entered before needs it
        self._residence.shared = path.name == "device"  # offers may come before the answer
        call = Attach(
            self.engine, self.rank, self.world, path.device, self.access, self.lazy, path.name, path.why
        )
        try:
            reply = self._link.call(call, timeout)
        finally:
            if not self._open:  # closed meanwhile: its word may have come before ours
                self._detach()
        self.path = path.name
        self._residence.shared = isinstance(reply, Attached) and reply.tier == "device"
        self._next_try = time.monotonic() + self._try_pause if path.full else math.inf

    def touches(self, session: int) -> bool:
        """Can anything of a session that is over still be read here?"""
        entries = [*self._entries.values(), *self._endings]
        return any(entry.session == session for entry in entries)

    def end(self) -> None:
        """Nobody receives for this table any more."""
        self._residence.make_none_ready()
        for entry in (*self._entries.values(), *self._endings):
            entry.let_go()

    @property
    def empty(self) -> bool:
        return not (self._open or self._entries or self._endings or self._put_off)
