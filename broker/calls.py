"""Calls that wait for their answer: who waits, what for, and what undoes an answer that came too late."""

from __future__ import annotations

import threading

from mmbroker.proto.errors import BrokerError
from mmbroker.proto.messages import (
    Abort,
    Attach,
    Body,
    Create,
    Created,
    Drop,
    Due,
    Found,
    Hit,
    Leased,
    Lookup,
    Promise,
    Promised,
    Reply,
    Seal,
    Sealed,
)


class Waiter:
    """One thread that waits for one answer."""

    __slots__ = ("answer", "arrived", "error")

    def __init__(self) -> None:
        self.answer: Reply | None = None
        self.error: BrokerError | None = None
        self.arrived = threading.Lock()
        self.arrived.acquire()


def undoing(answer: Reply | None) -> list[Body]:
    """The words that give back what an answer has brought."""
    holds: list[int] = []
    leases: list[int] = []
    match answer:
        case Created(results=results):
            holds = [result.ref.hold for result in results if isinstance(result, Hit)]
            leases = [result.lease for result in results if isinstance(result, Leased)]
        case Promised(results=promised):
            holds = [result.ref.hold for result in promised if isinstance(result, Hit)]
            leases = [result.promise for result in promised if isinstance(result, Due)]
        case Found(refs=refs):
            holds = [ref.hold for ref in refs if ref is not None]
        case Sealed(refs=sealed):
            holds = [ref.hold for ref in sealed]
    return [*([Drop(holds)] if holds else []), *([Abort(leases)] if leases else [])]


def describe(call: Body) -> str:
    """A call in a few words, for messages."""
    match call:
        case Create(items=items, to=to):
            nbytes = sum(item.form.nbytes for item in items)
            return f"the request for {len(items)} feature(s), {nbytes} bytes{_for(to)}"
        case Seal(leases=leases, to=to):
            return f"the seal of {len(leases)} feature(s){_for(to)}"
        case Lookup(keys=keys, to=to):
            return f"the lookup of {len(keys)} key(s){_for(to)}"
        case Promise(keys=keys, to=to):
            return f"the question who makes {len(keys)} feature(s){_for(to)}"
        case Attach(engine=engine, rank=rank):
            return f"the attachment as rank {rank} of engine {engine!r}"
        case _:
            return f"the {type(call).__name__.lower()} call"


def _for(engine: str | None) -> str:
    return "" if engine is None else f" for engine {engine!r}"
