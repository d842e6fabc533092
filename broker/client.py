"""The client: put features, look them up, write them in place, attach as a rank of an engine."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec
import torch

from mmbroker.proto.errors import BrokerError, DeadlineExceeded, FeatureError, InvalidMessage
from mmbroker.proto.form import Form, tensor_form
from mmbroker.proto.keys import Key, as_key
from mmbroker.proto.messages import (
    Abort,
    Body,
    Create,
    Created,
    Drop,
    Found,
    Item,
    Leased,
    Lookup,
    Released,
    Reply,
    Seal,
    Sealed,
    Sealing,
    Tally,
    Unpin,
)
from mmbroker.proto.messages import Hit as HitResult
from mmbroker.proto.reference import Reference

from . import cuda
from .connection import Connection
from .find import find_instance
from .gpu import Gpu
from .handles import Held, Hit, Lease, Slot
from .link import Link
from .table import FeatureTable
from .tensors import Source, dtype_name

#: How often the receiver thread looks at tensors that outlived their lease, in seconds.
_WATCH: Final = 0.02
#: How often counters are told to the broker, in seconds.
_TALLY: Final = 1.0
#: How long an orderly end may take, in seconds.
_FAREWELL: Final = 1.0

R = TypeVar("R", bound=Reply)


def connect(
    path: str | Path | None = None,
    *,
    name: str = "client",
    namespace: str | None = None,
    timeout: float = 5.0,
) -> Client:
    """A client of the broker at an instance directory; None: of the only one that lives.

    `timeout`, in seconds, is for connecting, and the default of every call. `namespace` None: this user's own.
    Raises `ConnectTimeout` if there is none, `BrokerUnavailable` if there are several, `PermissionDenied`,
    `VersionMismatch`.
    """
    deadline = time.monotonic() + timeout
    directory = Path(path) if path is not None else find_instance(deadline)
    return Client(Link(directory, name, namespace, max(0.05, deadline - time.monotonic())), timeout)


class Deadline:
    """The time that one call of ours may take, over all its steps."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._what = what

    def left(self, step: str) -> float:
        """Seconds left; raises `DeadlineExceeded` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"{self._what} had no time left to {step}: its {self._seconds:.3g} s were over"
            )
        return left


class Client:
    """One session with a broker, and its holds, leases and table. Thread-safe and blocking. Made by `connect`.

    It reconnects by itself when the broker comes back; meanwhile every call raises `BrokerLost`.
    Every call takes at most `timeout` seconds (default: that of `connect`), then raises `DeadlineExceeded`.
    """

    def __init__(self, link: Link, timeout: float) -> None:
        link.timeout = timeout
        self._link = link
        self._holds: dict[tuple[int, int], Held] = {}  # by session and number
        self._leases: dict[
            tuple[int, int], weakref.ref[Lease]
        ] = {}  # by session and number, while they may write
        self._retained: deque[tuple[Slot, list[Body]]] = deque()  # what to say once their tensors are gone
        self._tables: list[FeatureTable] = []
        self._boot = link.boot
        self._lost: list[int] = []  # earlier sessions with this life of the broker
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._told: dict[str, int] = {}
        self._next_tally = 0.0
        self._gpus: dict[str, Gpu] = {}  # by UUID
        link.on_granted = self._granted
        link.on_offered = self._offered
        link.on_retired = self._retired
        link.on_device_lease = self._device_lease
        link.on_dismissed = self._dismissed
        link.on_broken = self._broken
        link.on_lost = self._session_lost
        link.on_connected = self._reconnected
        link.on_closing = self._farewell
        link.on_ended = self._ended
        link.chores = self._chores

    # --- writing features -------------------------------------------------------------------------------------------

    def put(
        self,
        tensor: torch.Tensor,
        *,
        to: str | None = None,
        modality: str = "image",
        key: Key | bytes | str | None = None,
        tier: str = "host",
        private: bool = False,
        timeout: float | None = None,
    ) -> Held:
        """Store a tensor, unless its content (or `key`) is there already, and hold it.

        `to`: grant it to every rank of that engine first. `private`: each rank makes a copy of its own that outlives
        the hold. `tier`: ``host``, or ``device`` for a tensor on the GPU that the broker serves, which stays there; it
        is copied after what is in torch's current stream by now, and may be changed or freed afterwards.

        Raises `TypeError` for what is no tensor, `PoolFull`, `QuotaExceeded`, `NoSuchEngine`, `EngineLagging`,
        `DigestConflict`, `FeatureError` for a tensor on another device, `DeadlineExceeded`, `BrokerLost`.
        """
        keys = None if key is None else [key]
        return self._put([Source.one(tensor, modality)], keys, to, tier, private, timeout)[0]

    def put_many(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        to: str | None = None,
        modality: str = "image",
        keys: Sequence[Key | bytes | str] | None = None,
        tier: str = "host",
        private: bool = False,
        timeout: float | None = None,
    ) -> list[Held]:
        """As `put`, for several features in two round trips. All of them or none; one hold each, in order."""
        return self._put([Source.one(t, modality) for t in tensors], keys, to, tier, private, timeout)

    def put_list(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        to: str | None = None,
        modality: str = "image",
        key: Key | bytes | str | None = None,
        tier: str = "host",
        private: bool = False,
        timeout: float | None = None,
    ) -> Held:
        """As `put`, for one feature that is made of several tensors."""
        keys = None if key is None else [key]
        return self._put([Source.many(tensors, modality)], keys, to, tier, private, timeout)[0]

    def _put(
        self,
        sources: list[Source],
        keys: Sequence[Key | bytes | str] | None,
        to: str | None,
        tier: str,
        private: bool,
        timeout: float | None,
    ) -> list[Held]:
        self._link.check()
        if tier == "device":
            self._check_device(sources)
        deadline = self._deadline(timeout, f"the put of {len(sources)} feature(s)")
        chosen = [source.digest() for source in sources] if keys is None else keys
        items = [Item(as_key(k), source.form) for k, source in zip(chosen, sources, strict=True)]
        held: list[Held | None] = [None] * len(items)
        todo = list(range(len(items)))
        with self._undoing(held) as leases:
            while todo:
                call = Create([items[i] for i in todo], to, private, tier)
                created, connection = self._ask(call, Created, deadline.left("ask the broker for room"))
                mine: list[int] = []
                pending: list[int] = []
                for i, result in zip(todo, created.results, strict=True):
                    if isinstance(result, HitResult):
                        held[i] = self._hold(result.ref, connection)
                    elif isinstance(result, Leased):
                        mine.append(i)
                        leases.append(self._lease(connection, result, items[i].form))
                    else:
                        pending.append(i)
                for i, lease in zip(mine, leases, strict=True):
                    lease.write(sources[i])
                if mine:
                    # Before anything else is waited for: somebody may wait for us.
                    sealed = self._seal(leases, to, private, deadline.left("seal"))
                    for i, one in zip(mine, sealed, strict=True):
                        held[i] = one
                    leases.clear()
                put = len(todo) - len(pending)
                written = sum(items[i].form.nbytes for i in mine)
                self._count(puts=put, hits=put - len(mine), leases=len(mine), bytes_written=written)
                todo = pending
        return [one for one in held if one is not None]

    def _check_device(self, sources: list[Source]) -> None:
        """Raise `FeatureError` unless these can be put on the device from here. Makes no context."""
        served = self._link.device
        if not served:
            raise FeatureError(
                f"the broker at {self.directory} serves no GPU: use tier='host', or start one with --gpu"
            )
        driver = cuda.load() if sources else None
        for tensor in (tensor for source in sources for tensor in source.tensors):
            home = driver.home(tensor) if driver is not None else ""
            if home != served:
                raise FeatureError(
                    f"the tensor is on {home or 'the CPU'}, and this broker serves {served}: use tier='host', or "
                    "move the tensor there first"
                )

    @contextmanager
    def _undoing(self, held: list[Held | None]) -> Iterator[list[Lease]]:
        """On an error nothing of the batch stays: leases are aborted, holds dropped."""
        leases: list[Lease] = []
        try:
            yield leases
        except BaseException:
            for lease in leases:
                lease.abort()
            for one in held:
                if one is not None:
                    one.drop()
            raise

    def get_or_create(
        self,
        key: Key | bytes | str,
        shape: Sequence[int],
        dtype: torch.dtype | str,
        *,
        modality: str = "image",
        to: str | None = None,
        tier: str = "host",
        private: bool = False,
        timeout: float | None = None,
    ) -> Hit | Lease:
        """A `Hit` on what is stored under a key, or a `Lease` to write it in place. Errors as for `put`."""
        self._link.check()
        if tier == "device":
            self._check_device([])
        deadline = self._deadline(timeout, "get_or_create")
        form = tensor_form(dtype_name(dtype), tuple(operator.index(n) for n in shape), modality)
        while True:
            call = Create([Item(as_key(key), form)], to, private, tier)
            created, connection = self._ask(call, Created, deadline.left("wait for the key's writer"))
            (result,) = created.results
            if isinstance(result, HitResult):
                self._count(hits=1)
                return Hit(self._hold(result.ref, connection))
            if isinstance(result, Leased):
                self._count(leases=1)
                return self._lease(connection, result, form, to, private)

    def _lease(
        self,
        connection: Connection,
        leased: Leased,
        form: Form,
        to: str | None = None,
        private: bool = False,
    ) -> Lease:
        lease = Lease(self, connection, leased, form, to, private)
        self._leases[connection.session, lease.number] = weakref.ref(lease)
        return lease

    def _seal(self, leases: list[Lease], to: str | None, private: bool, timeout: float | None) -> list[Held]:
        """Seal leases of one connection. If that fails they are aborted."""
        connection = leases[0].connection
        slots = [lease.end() for lease in leases]
        retained = [slot.retained for slot in slots]
        call = Seal(
            [Sealing(slot.lease, kept) for slot, kept in zip(slots, retained, strict=True)], to, private
        )
        sealed: Sealed | None = None
        try:
            sealed, _ = self._ask(call, Sealed, timeout, connection)
        finally:
            for slot, kept in zip(slots, retained, strict=True):
                # After a failure they may be sealed or not: the word that does not fit is ignored.
                unwritten = [] if sealed else [Abort([slot.lease])]
                self._lease_over(slot, [*unwritten, *([Unpin([slot.lease])] if kept else [])])
        return [self._hold(ref, connection) for ref in sealed.refs]

    def _lease_over(self, slot: Slot, words: list[Body]) -> None:
        """Tell the broker that a slot is ours no more, once the last tensor over it is gone. Never waits."""
        self._leases.pop((slot.session, slot.lease), None)
        if words and slot.retained:
            self._retained.append((slot, words))
            return
        for word in words:
            self._link.cast(word, slot.session)

    # --- finding features -------------------------------------------------------------------------------------------

    def lookup(
        self,
        key: Key | bytes | str,
        *,
        to: str | None = None,
        private: bool = False,
        timeout: float | None = None,
    ) -> Held | None:
        """A hold on what is stored under a key, or None. `to`: grant it to that engine first."""
        return self.lookup_many([key], to=to, private=private, timeout=timeout)[0]

    def lookup_many(
        self,
        keys: Sequence[Key | bytes | str],
        *,
        to: str | None = None,
        private: bool = False,
        timeout: float | None = None,
    ) -> list[Held | None]:
        """As `lookup`, for several keys in one round trip."""
        self._link.check()
        if not keys:
            return []
        call = Lookup([as_key(key) for key in keys], to, private)
        found, connection = self._ask(call, Found, timeout)
        held = [ref if ref is None else self._hold(ref, connection) for ref in found.refs]
        self._count(lookups=len(held), hits=sum(one is not None for one in held))
        return held

    # --- the rest of the API ----------------------------------------------------------------------------------------

    def attach(
        self,
        *,
        engine: str,
        rank: int = 0,
        world: int = 1,
        device: str = "cpu",
        access: str = "copy",
        lazy: bool = False,
        timeout: float | None = None,
    ) -> FeatureTable:
        """Become rank `rank` of the `world` ranks of an engine; once all are attached, features can be put to it.

        `access`: ``copy`` gives each entry memory of its own; ``readonly`` shares it, and a model that writes into its
        input dies. A client has one table at a time.

        `device`: where the tensors shall be, ``cpu``, ``cuda``, ``cuda:N`` or a GPU's UUID. The ways there are tried;
        `FeatureTable.path` and `status` tell which one works. `lazy`: features go to the device at their first take.
        """
        self._link.check()
        if access not in ("copy", "readonly"):
            raise ValueError(f"access is 'copy' or 'readonly', not {access!r}")
        if not (device in ("cpu", "cuda") or device.startswith(("cuda:", "GPU-"))):
            raise ValueError(f"device is 'cpu', 'cuda', 'cuda:N' or a GPU's UUID, not {device!r}")
        if any(table.attached for table in self._tables):
            raise BrokerError(
                "this client is attached already: close its table first, or connect another client"
            )
        table = FeatureTable(self._link, engine, rank, world, device, access, lazy, self._gpu)
        self._tables.append(table)
        try:
            table.attach(timeout)
        except BaseException:
            self._tables.remove(table)
            raise
        return table

    @property
    def connected(self) -> bool:
        """Is there a session now? If not, the client is trying to get one."""
        return self._link.connected

    @property
    def namespace(self) -> str:
        return self._link.namespace

    @property
    def directory(self) -> Path:
        """The instance directory of the broker."""
        return self._link.directory

    def stats(self) -> dict[str, int]:
        """Counters since `connect`, and what is open now; those of the table come with its ``table_`` prefix."""
        counts = {
            **self._counts,
            "holds": len(self._holds),
            "open_leases": len(self._leases),
            "retained": len(self._retained),
            "reconnects": self._link.reconnects,
            "late_answers": self._link.late_answers,
        }
        for table in list(self._tables):
            for name, value in table.stats().items():
                counts[f"table_{name}"] = counts.get(f"table_{name}", 0) + value
        return counts

    def close(self) -> None:
        """Drop all holds, abort leases, settle what is not in use, and end the session. Idempotent."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _deadline(self, timeout: float | None, what: str) -> Deadline:
        return Deadline(self._link.timeout if timeout is None else timeout, what)

    def _ask(
        self, call: Body, kind: type[R], timeout: float | None, connection: Connection | None = None
    ) -> tuple[R, Connection]:
        started = time.perf_counter_ns()
        reply, used = self._link.exchange(call, timeout, connection)
        self._count(calls=1, wait_us=(time.perf_counter_ns() - started) // 1000)
        if not isinstance(reply, kind) or len(_first_field(reply)) != len(_first_field(call)):
            raise InvalidMessage(
                f"the broker answered a {type(call).__name__} with a {type(reply).__name__} that does not fit: "
                "install the same mmbroker on both sides"
            )
        return reply, used

    def _hold(self, ref: Reference, connection: Connection) -> Held:
        held = Held(self, ref, connection.session)
        self._holds[held.session, ref.hold] = held
        return held

    def _drop(self, held: Held) -> None:
        if self._link.forked:
            self._link.check()
        if self._holds.pop((held.session, held.ref.hold), None) is not None:
            self._link.cast(Drop([held.ref.hold]), held.session)

    def _count(self, **counts: int) -> None:
        """Not for finalisers: it takes a lock."""
        with self._counting:
            self._counts.update(counts)

    # --- in the receiver thread -------------------------------------------------------------------------------------

    def _granted(self, grants: list[Any]) -> None:
        if self._tables:
            self._tables[-1].granted(grants)

    def _offered(self, offers: list[Any]) -> None:
        if self._tables:
            self._tables[-1].offered(offers)

    def _gpu(self, uuid: str) -> Gpu:
        """This client's use of a GPU."""
        found = self._gpus.get(uuid)
        if found is None:
            found = self._gpus[uuid] = Gpu(cuda.open_driver(), uuid, self._link)
        return found

    def _device_lease(self, segment: int) -> None:
        """A lease on the device has come: its writer shall find the segment mapped."""
        self._gpu(self._link.device).maps(segment)

    def _retired(self, segments: list[int]) -> None:
        for gpu in self._gpus.values():
            gpu.retire(segments)

    def _ended(self) -> None:
        """The receiver thread's last act."""
        for table in list(self._tables):
            table.end()
        for gpu in self._gpus.values():
            gpu.close()

    def _dismissed(self, holds: list[int]) -> None:
        for table in list(self._tables):
            table.dismissed(holds)

    def _broken(self, leases: list[int]) -> None:
        session = self._link.session
        for number in leases:
            watch = self._leases.get((session, number))
            lease = None if watch is None else watch()
            if lease is not None:
                lease.broken = True

    def _session_lost(self, session: int) -> None:
        self._lost.append(session)
        for key in [key for key in list(self._holds) if key[0] == session]:
            self._holds.pop(key, None)
        for table in list(self._tables):
            table.lost(session)
        for gpu in self._gpus.values():
            gpu.forget()

    def _reconnected(self, link: Link) -> None:
        if link.boot != self._boot:
            self._boot = link.boot
            self._lost.clear()
        for table in list(self._tables):
            table.attach()
        self._told = {}

    def _chores(self, now: float) -> float:
        pause = _TALLY
        for table in list(self._tables):
            pause = min(pause, table.chores(now))
            if table.empty:
                self._tables.remove(table)
        for gpu in self._gpus.values():
            gpu.sweep()
        if self._retained:
            pause = _WATCH
            for _ in range(len(self._retained)):
                self._lease_over(*self._retained.popleft())
        for session in list(self._lost):
            if not self._touches(session):
                self._lost.remove(session)
                self._link.cast(Released(session))
        if now >= self._next_tally and self._link.connected:
            self._next_tally = now + _TALLY
            counts = self.stats()
            if counts != self._told:
                self._told = counts
                self._link.cast(Tally(counts))
        return pause

    def _touches(self, session: int) -> bool:
        """Can anything of a session that is over still be read or written by this process?"""
        return (
            any(key[0] == session for key in list(self._leases))
            or any(slot.session == session for slot, _ in list(self._retained))
            or any(table.touches(session) for table in list(self._tables))
        )

    def _farewell(self, link: Link) -> None:
        """Give everything back, and wait until the broker has read it: what is still in a socket at its end is lost."""
        for table in list(self._tables):
            table.close(_FAREWELL)
        for watch in list(self._leases.values()):
            lease = watch()
            if lease is not None:
                lease.abort()
        for gpu in self._gpus.values():
            gpu.await_copies()
            gpu.await_readers()
        self._chores(time.monotonic())
        holds = iter([hold for session, hold in list(self._holds) if session == link.session])
        while batch := list(islice(holds, 4096)):
            link.cast(Drop(batch))
        self._holds.clear()
        link.call(Lookup([]), _FAREWELL)


def _first_field(message: msgspec.Struct) -> Sequence[Any]:
    """What batch calls and their answers have item by item."""
    items: Sequence[Any] = getattr(message, message.__struct_fields__[0])
    return items
