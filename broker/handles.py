"""What a producer has in its hands: a hold on a feature, a lease to write one, or a promise to make one."""

from __future__ import annotations

import weakref
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmbroker.proto.errors import LeaseBroken, LeaseClosed
from mmbroker.proto.keys import Digest, Key, Kind
from mmbroker.proto.messages import Abort, Item, Leased
from mmbroker.proto.reference import Reference

from .connection import Connection
from .cuda import DriverError
from .fences import Fence
from .gpu import Exporter, Gpu, Place
from .tensors import Source, export, layout

if TYPE_CHECKING:
    from .belongings import Belongings


class Held:
    """A hold on a sealed feature: the engine may read it, and it stays, until `drop`.

    Losing a `Held` does not drop it, because requests that carry its reference may still run: it lives until `drop`,
    the end of a ``with`` block, or `Client.close`; and for a grace time after its process has died.
    """

    __slots__ = ("_owner", "extra", "key", "ref", "session")

    def __init__(self, owner: Belongings, key: Key, ref: Reference, session: int, extra: bytes = b"") -> None:
        self._owner = owner
        self.key = key  #: what `lookup` finds the feature by
        self.ref = ref
        self.session = session
        self.extra = extra  #: what was sealed beside the feature

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the feature's key; a `Digest` if they are its content's, so that `lookup` takes them for it.

        To look up a derived key, give the whole `key`: its bytes alone would be taken for a caller's own.
        """
        return Digest(self.key.value) if self.key.kind is Kind.CONTENT else self.key.value

    def drop(self) -> None:
        """End the hold. Idempotent, never waits, from any thread and any finaliser; nothing for a lost session's."""
        self._owner.drop(self)

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<Held {self.ref.hold}: {self.ref.dtype} {self.ref.shape}>"


class Hit:
    """The answer of `get_or_create` when the feature exists: `held` is the hold on it."""

    lease = None

    def __init__(self, held: Held) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"<Hit {self.held!r}>"


class Promise:
    """This client's word that it will make the feature of `key`; others who ask for it wait meanwhile.

    It is kept by a put under it (`key=promise`), or by `get_or_create`, and otherwise given back by `drop`, which the
    end of a ``with`` block does, too. Wait for no other promise while you have one.
    """

    __slots__ = ("_over", "_owner", "connection", "key", "number")

    def __init__(self, owner: Belongings, connection: Connection, key: Key, number: int) -> None:
        self._owner = owner
        self._over = False
        self.connection = connection
        self.key = key
        self.number = number

    @property
    def open(self) -> bool:
        """Is it neither kept nor given back, nor lost with its session?"""
        return not self._over and not self.connection.lost

    def _kept(self) -> None:
        """The broker has taken a create for it."""
        self._over = True

    def drop(self) -> None:
        """Give it back unkept: the next who waits gets it. Idempotent, never waits, nothing once it is kept."""
        if not self._over:
            self._over = True
            self._owner.link.cast(Abort([self.number]), self.connection.session)

    def __del__(self) -> None:
        self.drop()

    def __enter__(self) -> Promise:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<Promise {self.number} ({'open' if self.open else 'over'})>"


class Slot(NamedTuple):
    """What is left of a lease that is over: its tensors, if somebody keeps them."""

    lease: int
    session: int
    exporter: weakref.ref[Any] | None
    gpu: Gpu | None  # if it is on the device
    fences: deque[Fence]  # behind work that may write it

    @property
    def retained(self) -> bool:
        """Is a tensor over the slot still alive, or work that writes it?"""
        if self.exporter is not None and self.exporter() is not None:
            return True
        try:
            return self.gpu is not None and not self.gpu.passed(self.fences)
        except DriverError:
            return True  # nobody will ever know


class Lease:
    """The right to write one feature, until `seal` or `abort`; a context manager that aborts unless it was sealed.

    `held` is None until it is sealed. Raises `LeaseClosed` after the end, `LeaseBroken` after the session's.
    """

    def __init__(
        self,
        owner: Belongings,
        connection: Connection,
        leased: Leased,
        item: Item,
        to: str | None = None,
        private: bool = False,
    ) -> None:
        self.number = leased.lease
        self.key = item.key
        self.form = item.form
        self.held: Held | None = None
        self.extra = b""  # to be sealed with it
        self.cost: int | None = None  # likewise
        self.broken = False
        self.closed = False
        self._owner = owner
        self.connection = connection
        self._leased = leased
        self._to = to
        self._private = private
        self._tensors: list[torch.Tensor] | None = None
        self._exporter: weakref.ref[Any] | None = None
        self._touched = False  # our streams may be writing it
        self._gpu: Gpu | None = None
        if leased.tier == "device" and leased.segment:
            self._gpu = owner.gpu(connection.device)

    @property
    def lease(self) -> Lease:
        """Itself, so that the answer of `get_or_create` always has a `lease` and a `held`."""
        return self

    @property
    def tensor(self) -> torch.Tensor:
        """The slot as a tensor of the feature's dtype and shape, to be written."""
        self.check()
        tensors = self._tensors
        if tensors is None:
            if self._gpu is not None:
                tensors, self._exporter = self._gpu.build(layout(self.form), self._place(self._gpu))
            else:
                tensors, exporter = export(layout(self.form), self.memory())
                self._exporter = weakref.ref(exporter)
            self.check()  # closed by another thread before it could see the exporter, its slot is somebody else's now
            self._tensors = tensors
        return tensors[0]

    def memory(self) -> memoryview:
        """The slot's bytes, writable."""
        if not self.form.nbytes:
            return memoryview(bytearray())
        return self.connection.mapped(self._leased.segment).view(self._leased.offset, self.form.nbytes)

    def _place(self, gpu: Gpu) -> Place:
        """The slot on the device."""
        self._touched = True
        return gpu.mapped(self._leased.segment, self._leased.offset, self.connection.session)

    def write(self, source: Source) -> None:
        """Copy the whole feature into the slot. Waits until it is there."""
        writing = Exporter(None)  # a client that is closed meanwhile does not give the slot away under us
        try:
            self._exporter = weakref.ref(writing)
            if self.closed:  # looked at only now: whoever closed it before has not seen that we write
                self._owner.link.check()
                self.check()
            if self._gpu is not None:
                self._gpu.write(self._place(self._gpu), source.tensors, layout(self.form))
            else:
                source.write(self.memory())
        finally:
            del writing  # a traceback would keep it

    def check(self) -> None:
        """Raise unless the slot is still to be written by us."""
        if self._owner.link.forked:
            self._owner.link.check()
        if self.closed:
            raise LeaseClosed("this lease was sealed or aborted already: get a new one")
        if self.broken or self.connection.lost:
            raise LeaseBroken(
                "the broker has taken this lease back, because its session ended: get a new one"
            )

    def seal(self, timeout: float | None = None, *, extra: bytes = b"", cost: int | None = None) -> Held:
        """Make the content visible, and grant it to the engine that the lease was made for. `extra`, `cost`: see `put`.

        A tensor over the slot that is still alive must not be written any more. On the device, this waits for what is
        in torch's current stream by now: write there, or wait for other streams first.
        """
        self.check()
        if self._gpu is not None:
            self._gpu.finish()
        self.extra, self.cost = extra, cost
        held = self._owner.seal([self], self._to, self._private, timeout)[0]
        self.held = held
        return held

    def abort(self) -> None:
        """Give the slot back unwritten. Idempotent, never waits."""
        if not self.closed:
            slot = self.end()
            # Of a client that is closed, the broker waits for the process to end.
            if self._gpu is not None and self._touched and not self._gpu.closed:
                slot.fences.append(self._gpu.drain())
            self._owner.lease_over(slot, [Abort([self.number])])

    def end(self) -> Slot:
        """The slot is no longer to be written by us: let go of our own tensor over it."""
        self.closed = True
        self._tensors = None
        return Slot(self.number, self.connection.session, self._exporter, self._gpu, deque())

    def __del__(self) -> None:
        self.abort()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self.broken else "open"
        return f"<Lease {self.number} ({state}): {self.form.dtype} {self.form.shape}>"
