"""Which encoder outputs can be had: asked by a thread of its own, read by the scheduler's as a dict.

The scheduler's thread *wants* an identifier and later is *done* with it, any number of times. From the first want to
the last done its `Output` stands in `answers`. The thread writes the answer into it, and holds what it has found until
it comes upon it in `_over`. Wanting and being done send nothing, wait for nothing and drop nothing.

`answers` and `fitting` are changed by the scheduler's thread alone, so that what it has seen in a step stays true in
that step. What was asked ahead of its request waits in `_ahead`; whoever pops it from there has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import mmbroker
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.keys import Key
from mmbroker.proto.reference import Reference

from .saying import Saying

logger = logging.getLogger("vllm.mmbroker")

#: How long one lookup may take, in seconds.
TIMEOUT: Final = 2.0
#: How often the thread looks after holds that are over, while there are any holds, in seconds.
_PAUSE: Final = 0.05
#: How long an answer of a session that was lost is good for, in seconds. Its holds pass away after 30 seconds, and the
#: step that loads what this answer promises must be over by then.
_AFTERLIFE: Final = 10.0
#: Most identifiers asked for in one call.
_BATCH: Final = 256


#: Of an output that nobody has, or that is not what it should be.
ABSENT: Final = -1


class Output:
    """An encoder output that is wanted, or will be.

    `tokens`: how many it has, None as long as the answer is not there, `ABSENT`. From then on `ref` is there, and every
    rank of this engine has an entry for it, as long as it is held. `expires`: when the hold may be over, by the
    monotonic clock, since its session was lost; None: it has not been.
    """

    __slots__ = ("expires", "held", "identifier", "over", "ref", "tokens", "until", "wants")

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier
        self.wants = 0  # of the scheduler's thread
        self.tokens: int | None = None
        self.ref: Reference
        self.expires: float | None = None
        self.held: Any = None  # this and what follows: of the lookups' thread
        self.over = False
        self.until = 0.0  # asked ahead: when it is given up

    def answered(self, held: Any) -> None:
        self.held = held
        self.until = time.monotonic() + TIMEOUT
        if held is None:
            self.tokens = ABSENT
        else:
            self.ref = held.ref
            self.tokens = self.ref.shape[0] if self.ref.shape else ABSENT


class Lookups:
    """`client` gives the client that has a broker at this moment; `key` the key of an identifier, None: it has none.

    `engine`: whom the answers are granted to. `fitting`: those in `answers` that the scheduler has found to be what its
    requests need.
    """

    def __init__(
        self,
        client: Callable[[], mmbroker.Client | None],
        engine: str,
        key: Callable[[str], Key | None],
    ) -> None:
        self.answers: dict[str, Output] = {}
        self.fitting: dict[str, Output] = {}
        self._client = client
        self._engine = engine
        self._key = key
        self._asked: deque[Output] = deque()
        self._ahead: dict[str, Output] = {}
        self._over: deque[Output] = deque()
        self._bell = threading.Event()
        self._stop = False
        self._saying = Saying("encoder outputs could not be looked up")
        self._reconnects: dict[mmbroker.Client, int] = {}
        self.counts = {"lookups": 0, "found": 0, "lookup_errors": 0}
        self._thread = threading.Thread(target=self._run, name="mmbroker-lookups", daemon=True)
        self._thread.start()

    # --- the scheduler's thread -------------------------------------------------------------------------------------

    def want(self, identifier: str) -> Output:
        """Its answer shall be known, from now until `done`."""
        output = self._ahead.pop(identifier, None) or self.answers.get(identifier) or self._ask(identifier)
        known = self.answers.setdefault(identifier, output)
        if known is not output:  # asked ahead in vain
            self._over.append(output)
        known.wants += 1
        return known

    def done(self, identifier: str) -> None:
        """Once for each `want`."""
        output = self.answers[identifier]
        output.wants -= 1
        if not output.wants:
            del self.answers[identifier]
            self.fitting.pop(identifier, None)
            self._over.append(output)

    def refuse(self, output: Output) -> None:
        """What was found is not what is needed: it counts as absent while it is wanted. It may be on its way to the
        workers for a request that it did fit, so it is held as long."""
        output.tokens = ABSENT
        self.fitting.pop(output.identifier, None)

    def renew(self, output: Output) -> Output:
        """What was found may be over soon: ask anew."""
        fresh = self.answers[output.identifier]
        if fresh is not output:  # another request has done so
            return fresh
        fresh = self.answers[output.identifier] = self._ask(output.identifier)
        fresh.wants = output.wants
        self.fitting.pop(output.identifier, None)
        self._over.append(output)
        return fresh

    # --- any thread -------------------------------------------------------------------------------------------------

    def expect(self, identifiers: list[str]) -> None:
        """Requests that will want these are on their way: ask ahead, so that the scheduler's thread wakes nobody."""
        for identifier in identifiers:
            if identifier not in self.answers:
                output = Output(identifier)
                if self._ahead.setdefault(identifier, output) is output:
                    self._asked.append(output)
        self._bell.set()

    def close(self) -> None:
        self._stop = True
        self._bell.set()
        self._thread.join(TIMEOUT + 1.0)

    def _ask(self, identifier: str) -> Output:
        output = Output(identifier)
        self._asked.append(output)
        if not self._bell.is_set():
            self._bell.set()
        return output

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            self._bell.wait(_PAUSE if self.answers or self._ahead or self._over else None)
            self._bell.clear()
            try:
                while self._asked:
                    self._look_up()
                self._tidy()
            except Exception:  # whatever it is, requests must not wait for a thread that is no more
                logger.exception("mmbroker: encoder outputs could not be looked up")
                self.counts["lookup_errors"] += 1
        for output in (*self.answers.values(), *self._ahead.values(), *self._over):
            self._give_back(output)

    def _look_up(self) -> None:
        batch: list[tuple[Output, Key | None]] = []
        while self._asked and len(batch) < _BATCH:
            output = self._asked.popleft()
            batch.append((output, self._key(output.identifier)))
        found: dict[str, Any] = {}
        try:
            found = self._fetch({output.identifier: key for output, key in batch if key is not None})
        finally:
            for output, _ in batch:
                output.answered(found.pop(output.identifier, None))
                if output.over:
                    self._give_back(output)

    def _give_back(self, output: Output) -> None:
        """Nobody wants it any more, or ever will."""
        output.over = True
        held, output.held = output.held, None
        if held is not None:
            held.drop()

    def _fetch(self, keys: dict[str, Key]) -> dict[str, Any]:
        """A hold for each key that is there, granted to all ranks of this engine."""
        client = self._client()
        if client is None or not keys:
            return {}
        self.counts["lookups"] += len(keys)
        try:
            helds = client.lookup_many(list(keys.values()), to=self._engine, private=True, timeout=TIMEOUT)
        except BrokerError as error:
            self.counts["lookup_errors"] += 1
            self._saying.count(f"{type(error).__name__}: {error}", len(keys))
            return {}
        found = {name: held for name, held in zip(keys, helds, strict=True) if held is not None}
        self.counts["found"] += len(found)
        return found

    def _tidy(self) -> None:
        """Give back what nobody wants any more, and see whether the session of what is held is still there."""
        now = time.monotonic()
        for output in list(self._ahead.values()):
            if output.tokens is not None and output.until <= now:
                ready = self._ahead.pop(output.identifier, None)
                if ready is not None:
                    self._give_back(ready)
        if (self.answers or self._ahead) and self._lost():
            for output in [*self.answers.values(), *self._ahead.values()]:
                if output.held is not None and output.expires is None:
                    output.expires = now + _AFTERLIFE
        while self._over:
            self._give_back(self._over.popleft())

    def _lost(self) -> bool:
        """Has the session of anything held been lost since this was last asked?"""
        client = self._client()
        if client is None:
            return True
        reconnects = client.stats()["reconnects"]
        before = self._reconnects.setdefault(client, reconnects)
        self._reconnects[client] = reconnects
        return reconnects != before
