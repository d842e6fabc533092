"""The client: put features, look them up, write them in place, attach as a rank of an engine."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mmbroker.proto.errors import DeadlineExceeded, FeatureError
from mmbroker.proto.form import Form, tensor_form
from mmbroker.proto.keys import Key, as_key
from mmbroker.proto.messages import MAX_EXTRA, Create, Created, Due, Found, Item, Leased, Lookup, Promised
from mmbroker.proto.messages import Hit as HitResult
from mmbroker.proto.messages import Promise as PromiseCall

from . import cuda, spans
from .belongings import Belongings
from .connection import Connection
from .find import find_instance
from .handles import Held, Hit, Lease, Promise
from .link import Link
from .table import FeatureTable
from .tensors import Source, dtype_name


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
        #: Counters of whoever uses this client, shown and told to the broker beside its own. Called from any thread.
        self.extra_stats: Callable[[], dict[str, int]] = dict
        self._own = Belongings(link, lambda: self.extra_stats())

    # --- writing features -------------------------------------------------------------------------------------------

    def put(
        self,
        tensor: torch.Tensor,
        *,
        to: str | None = None,
        modality: str = "image",
        key: Key | Promise | bytes | str | None = None,
        extra: bytes = b"",
        tier: str = "host",
        private: bool = False,
        cost: int | None = None,
        timeout: float | None = None,
    ) -> Held:
        """Store a tensor, unless its content (or `key`) is there already, and hold it.

        `to`: grant it to every rank of that engine first. `private`: each rank makes a copy of its own that outlives
        the hold. `tier`: ``host``, or ``device`` for a tensor on the GPU that the broker serves, which stays there; it
        is copied after what is in torch's current stream by now, and may be changed or freed afterwards. `key`: what it
        is found by, or the `Promise` that this keeps; if the put fails, an open promise stays open. `extra`: at most
        4 KiB that every later hit brings along. `cost`: the microseconds it takes to make it again; what costs more a
        byte stays longer as a cache.

        Raises `TypeError` for what is no tensor, `PoolFull`, `QuotaExceeded`, `NoSuchEngine`, `EngineLagging`,
        `DigestConflict`, `FeatureError` for a tensor on another device, `DeadlineExceeded`, `BrokerLost`.
        """
        keys = None if key is None else [key]
        return self._put([Source.one(tensor, modality)], keys, [extra], to, tier, private, cost, timeout)[0]

    def put_many(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        to: str | None = None,
        modality: str = "image",
        keys: Sequence[Key | Promise | bytes | str] | None = None,
        extras: Sequence[bytes] | None = None,
        tier: str = "host",
        private: bool = False,
        cost: int | Sequence[int | None] | None = None,
        timeout: float | None = None,
    ) -> list[Held]:
        """As `put`, for several features in two round trips. All of them or none; one hold each, in order. `cost`: of
        every one of them, or one for each."""
        sources = [Source.one(t, modality) for t in tensors]
        return self._put(sources, keys, extras, to, tier, private, cost, timeout)

    def put_list(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        to: str | None = None,
        modality: str = "image",
        key: Key | Promise | bytes | str | None = None,
        extra: bytes = b"",
        tier: str = "host",
        private: bool = False,
        cost: int | None = None,
        timeout: float | None = None,
    ) -> Held:
        """As `put`, for one feature that is made of several tensors."""
        keys = None if key is None else [key]
        return self._put([Source.many(tensors, modality)], keys, [extra], to, tier, private, cost, timeout)[0]

    def _put(
        self,
        sources: list[Source],
        keys: Sequence[Key | Promise | bytes | str] | None,
        extras: Sequence[bytes] | None,
        to: str | None,
        tier: str,
        private: bool,
        cost: int | Sequence[int | None] | None,
        timeout: float | None,
    ) -> list[Held]:
        self._link.check()
        if tier == "device":
            self._check_device(sources)
        deadline = self._deadline(timeout, f"the put of {len(sources)} feature(s)")
        beside = [b""] * len(sources) if extras is None else extras
        costs = [cost] * len(sources) if cost is None or isinstance(cost, int) else cost
        if len(costs) != len(sources):
            raise ValueError(f"{len(sources)} feature(s), and what {len(costs)} of them cost")
        if any(len(extra) > MAX_EXTRA for extra in beside):
            raise ValueError(f"what is put beside a feature has at most {MAX_EXTRA} bytes")
        nbytes = sum(source.form.nbytes for source in sources)
        about = {"features": len(sources), "bytes": nbytes, "to": to, "client": self._link.name}
        with spans.span("put", **about) as told:
            with _timed(told, "digest_seconds"):
                chosen = [source.digest() for source in sources] if keys is None else keys
            return self._put_items(chosen, beside, sources, to, tier, private, costs, deadline, told)

    def _put_items(
        self,
        chosen: Sequence[Key | Promise | bytes | str],
        beside: Sequence[bytes],
        sources: list[Source],
        to: str | None,
        tier: str,
        private: bool,
        costs: Sequence[int | None],
        deadline: Deadline,
        told: dict[str, Any],
    ) -> list[Held]:
        items = [_item(k, source.form) for k, source in zip(chosen, sources, strict=True)]
        pinned = _connection_of(chosen)
        held: list[Held | None] = [None] * len(items)
        todo = list(range(len(items)))
        with self._undoing(held) as leases:
            while todo:
                call = Create([items[i] for i in todo], to, private, tier)
                left = deadline.left("ask the broker for room")
                created, connection = self._own.ask(call, Created, left, pinned)
                for i in todo:
                    if isinstance(promise := chosen[i], Promise):
                        promise._kept()
                        items[i] = Item(items[i].key, items[i].form)
                mine: list[int] = []
                pending: list[int] = []
                for i, result in zip(todo, created.results, strict=True):
                    if isinstance(result, HitResult):
                        held[i] = self._own.hold(items[i].key, result.ref, connection, result.extra)
                    elif isinstance(result, Leased):
                        mine.append(i)
                        leases.append(self._own.lease(connection, result, items[i]))
                    else:
                        pending.append(i)
                with _timed(told, "write_seconds"):
                    for i, lease in zip(mine, leases, strict=True):
                        lease.write(sources[i])
                        lease.extra, lease.cost = bytes(beside[i]), costs[i]
                if mine:
                    # Before anything else is waited for: somebody may wait for us.
                    sealed = self._own.seal(leases, to, private, deadline.left("seal"))
                    for i, one in zip(mine, sealed, strict=True):
                        held[i] = one
                    leases.clear()
                put = len(todo) - len(pending)
                written = sum(items[i].form.nbytes for i in mine)
                self._own.count(puts=put, hits=put - len(mine), leases=len(mine), bytes_written=written)
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
        key: Key | Promise | bytes | str,
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
        item, pinned = _item(key, form), _connection_of([key])
        while True:
            call = Create([item], to, private, tier)
            left = deadline.left("wait for the key's writer")
            created, connection = self._own.ask(call, Created, left, pinned)
            if isinstance(key, Promise):
                key._kept()
            (result,) = created.results
            if isinstance(result, HitResult):
                self._own.count(hits=1)
                return Hit(self._own.hold(item.key, result.ref, connection, result.extra))
            if isinstance(result, Leased):
                self._own.count(leases=1)
                return self._own.lease(connection, result, item, to, private)

    # --- finding features -------------------------------------------------------------------------------------------

    def lookup(
        self,
        key: Key | bytes | str,
        *,
        to: str | None = None,
        private: bool = False,
        timeout: float | None = None,
    ) -> Held | None:
        """A hold on what is stored under a key, or None. `to`: grant it to that engine first.

        With a tier, a derived key that nobody here has is sought on other machines, for as long as its mover says.
        """
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
        with spans.span("lookup", features=len(keys), to=to, client=self._link.name):
            found, connection = self._own.ask(call, Found, timeout)
        extras = found.extras or [b""] * len(found.refs)
        held = [
            None if ref is None else self._own.hold(key, ref, connection, extra)
            for key, ref, extra in zip(call.keys, found.refs, extras, strict=True)
        ]
        self._own.count(lookups=len(held), hits=sum(one is not None for one in held))
        return held

    def get_or_promise(
        self,
        keys: Sequence[Key | bytes | str],
        *,
        to: str | None = None,
        private: bool = False,
        timeout: float | None = None,
    ) -> list[Held | Promise | None]:
        """For each key a hold on what is there, or a `Promise` to make it: for what takes long to make, and has a form
        that is known only afterwards. Whoever else asks for a promised key waits until it is kept or given back.

        None where somebody else is making it: then there is a promise for another of the keys. Keep or drop all
        promises, drop the holds, and ask again for all keys: a call that has nothing to promise waits, and whoever
        waits should hold nothing that others wait for. Errors as for `lookup`, and `DeadlineExceeded`.
        """
        self._link.check()
        if not keys:
            return []
        call = PromiseCall([as_key(key) for key in keys], to, private)
        with spans.span("promise", features=len(keys), to=to, client=self._link.name):
            answer, connection = self._own.ask(call, Promised, timeout)
        got: list[Held | Promise | None] = []
        for key, result in zip(call.keys, answer.results, strict=True):
            match result:
                case HitResult():
                    got.append(self._own.hold(key, result.ref, connection, result.extra))
                case Due():
                    got.append(Promise(self._own, connection, key, result.promise))
                case _:
                    got.append(None)
        hits = sum(isinstance(one, Held) for one in got)
        self._own.count(lookups=len(got), hits=hits, promises=sum(isinstance(one, Promise) for one in got))
        return got

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
        table = FeatureTable(
            self._link, engine, rank, world, device, access, lazy, self._own.gpu, self._own.detach
        )
        self._own.attach(table, timeout)
        return table

    @property
    def connected(self) -> bool:
        """Is there a session now? If not, the client is trying to get one."""
        return self._link.connected

    @property
    def namespace(self) -> str:
        return self._link.namespace

    @property
    def device(self) -> str:
        """UUID of the GPU that the broker serves; empty: none."""
        return self._link.device

    @property
    def directory(self) -> Path:
        """The instance directory of the broker."""
        return self._link.directory

    def stats(self) -> dict[str, int]:
        """Counters since `connect`, and what is open now; those of the table come with its ``table_`` prefix."""
        return self._own.stats()

    def close(self) -> None:
        """Drop all holds, abort leases, settle what is not in use, and end the session. Idempotent."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline(self, timeout: float | None, what: str) -> Deadline:
        return Deadline(self._link.timeout if timeout is None else timeout, what)


@contextmanager
def _timed(told: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds that this takes."""
    start = time.perf_counter()
    yield
    told[name] = told.get(name, 0.0) + time.perf_counter() - start


def _item(key: Key | Promise | bytes | str, form: Form) -> Item:
    return Item(key.key, form, key.number) if isinstance(key, Promise) else Item(as_key(key), form)


def _connection_of(keys: Sequence[object]) -> Connection | None:
    """The session that promises among keys were given in, if there are any: they can be kept in no other."""
    return next((key.connection for key in keys if isinstance(key, Promise)), None)
