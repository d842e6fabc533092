"""How long a producer's holds last: counted, because one put may serve several requests, and they have many ends.

Every put starts a `Claim` with a count of one, which ends with the first answer (or the failure) of the call that made
it: by then everything that is to be sent has been sent. Each dispatched request id counts one more, until it leaves
SGLang's table of requests. The last count drops the holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from typing import Any, Final, Protocol

from . import measure

#: How long a hold goes on after SGLang gave a request up early, unless the scheduler's last word comes first, in
#: seconds: the request may still be on its way, and a rank that cannot find its features fails it loudly.
GRACE: Final = 30.0


class Held(Protocol):
    @property
    def ref(self) -> Any: ...

    def drop(self) -> None: ...


class Claim:
    """The holds of one put, and how many still need them. Only in the event loop's thread."""

    __slots__ = ("_count", "_helds")

    def __init__(self, helds: Iterable[Held]) -> None:
        self._helds = list(helds)
        self._count = 1
        measure.counters.add("holds", len(self._helds))

    @property
    def keys(self) -> list[tuple[bytes, int]]:
        return [(held.ref.boot, held.ref.hold) for held in self._helds]

    @property
    def over(self) -> bool:
        return self._count == 0

    def again(self) -> None:
        self._count += 1

    def also(self, helds: Iterable[Held]) -> None:
        """Further holds that last as long."""
        more = list(helds)
        self._helds += more
        measure.counters.add("holds", len(more))

    def end_one(self) -> None:
        self._count -= 1
        if self._count:
            return
        for held in self._helds:
            held.drop()
        measure.counters.add("dropped", len(self._helds))


class Claims:
    """All claims of one tokenizer process: found by a reference's hold, and by the ids they were dispatched under."""

    def __init__(self) -> None:
        self._by_hold: dict[tuple[bytes, int], Claim] = {}
        self._by_rid: dict[str, Claim] = {}
        self._lingering: dict[str, tuple[Claim, asyncio.TimerHandle]] = {}

    def add(self, claim: Claim) -> None:
        for key in claim.keys:
            self._by_hold[key] = claim

    def dispatched(self, rid: str, keys: Iterable[tuple[bytes, int]]) -> None:
        """The request `rid` goes to the scheduler with references to these holds."""
        for key in keys:
            claim = self._by_hold.get(key)
            if claim is not None and rid not in self._by_rid:
                claim.again()
                self._by_rid[rid] = claim
                return

    def left(self, rid: str, state: Any) -> None:
        """The request `rid` has left SGLang's table."""
        claim = self._by_rid.pop(rid, None)
        if claim is None:
            return
        if getattr(state, "finished", True) or not getattr(state, "dispatched", True):
            self.end_one(claim)  # the scheduler's last word, or it was never sent
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.end_one(claim)
        else:
            self.last_word(rid)
            self._lingering[rid] = claim, loop.call_later(GRACE, self.last_word, rid)

    def last_word(self, rid: str) -> None:
        """The scheduler is done with a request that SGLang gave up early, or has had the time to be."""
        claim, timer = self._lingering.pop(rid, (None, None))
        if claim is not None and timer is not None:
            timer.cancel()
            self.end_one(claim)

    @property
    def lingering(self) -> bool:
        """Is there a hold whose request SGLang has given up?"""
        return bool(self._lingering)

    def end_one(self, claim: Claim) -> None:
        claim.end_one()
        if claim.over:
            for key in claim.keys:
                self._by_hold.pop(key, None)


class States(dict[str, Any]):
    """SGLang's table of requests by id, which tells when one leaves."""

    def __init__(self, states: dict[str, Any], left: Callable[[str, Any], None]) -> None:
        super().__init__(states)
        self._left = left

    def __delitem__(self, rid: str) -> None:
        state = self[rid]
        super().__delitem__(rid)
        self._left(rid, state)

    def pop(self, rid: str, *default: Any) -> Any:
        known = rid in self
        state = super().pop(rid, *default)
        if known:
            self._left(rid, state)
        return state

    def popitem(self) -> tuple[str, Any]:
        rid, state = super().popitem()
        self._left(rid, state)
        return rid, state

    def clear(self) -> None:
        while self:
            self.popitem()


async def answers_of(answers: Any, states: dict[str, Any], rid: str, state: Any) -> Any:
    """A request's answers, unchanged, although it may have left SGLang's table before they are asked for."""
    forgotten = rid not in states
    if forgotten:
        states[rid] = state
    try:
        async for answer in answers:
            if forgotten:
                forgotten = states.pop(rid, None) is None
            yield answer
    finally:
        if forgotten:
            states.pop(rid, None)
        await answers.aclose()


class Turn:
    """One request's way through the tokenizer, and what was held for it before its output was there. A context manager:
    what the output does not refer to is let go of at the end. `derived`: it may be found by derived keys."""

    def __init__(self, request: Any, seconds: float, derived: bool) -> None:
        self.private = bool(getattr(request, "session_params", None))
        self.derived = derived
        self._deadline = time.monotonic() + seconds
        self._helds: dict[tuple[bytes, int], Held] = {}
        self._token: Token[Turn | None] | None = None

    def left(self) -> float:
        """Seconds that the request may still wait for room, and for others."""
        return max(self._deadline - time.monotonic(), 0.0)

    def hold(self, helds: Iterable[Held]) -> None:
        self._helds.update(((held.ref.boot, held.ref.hold), held) for held in helds)

    def taken(self, keys: Iterable[tuple[bytes, int]]) -> list[Held]:
        """Those that these references name: they are the caller's from now on."""
        return [held for key in dict.fromkeys(keys) if (held := self._helds.pop(key, None)) is not None]

    def __enter__(self) -> Turn:
        self._token = turn.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            turn.reset(self._token)
        for held in self._helds.values():
            held.drop()
        self._helds.clear()


#: The request that is being tokenized.
turn: ContextVar[Turn | None] = ContextVar("mmbroker_turn", default=None)
#: The claims made on behalf of the call that is running: each `generate_request` has a list of its own.
scope: ContextVar[list[Claim] | None] = ContextVar("mmbroker_scope", default=None)


async def first_answer_ends(answers: Any, claims: Claims) -> Any:
    """`generate_request`'s answers, unchanged. Its claims' first count ends with the first of them, or without one."""
    mine: list[Claim] = []
    try:
        # The generator runs in its caller's context, so the scope is put back before anything is yielded.
        token = scope.set(mine)
        try:
            first = await anext(answers, None)
        finally:
            scope.reset(token)
            for claim in mine:
                claims.end_one(claim)
        if first is None:
            return
        yield first
        async for answer in answers:
            yield answer
    finally:
        await answers.aclose()
