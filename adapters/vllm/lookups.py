"""Which encoder outputs can be had: asked by a thread of its own, read by the scheduler's as a dict.

The scheduler's thread *wants* an identifier and later is *done* with it, any number of times. From the first want to
the last done its answer stands in `answers`, once it is known: a `Found`, which is held so long, or `ABSENT`. Wanting
and being done send nothing, wait for nothing and drop nothing: the thread does, when it comes by.

An answer that stands there changes only by the scheduler's thread, so that what it has seen in a step stays true in
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


class Found:
    """An encoder output that every rank of this engine has an entry for, as long as it is held.

    `fits`: the scheduler has seen that it has the size that its request needs. `expires`: by the monotonic clock.
    """

    __slots__ = ("expires", "fits", "held", "ref")

    def __init__(self, held: Any) -> None:
        self.held = held
        self.ref: Reference = held.ref
        self.fits = False
        self.expires = float("inf")


class Absent:
    """There is no such output, or nobody who knows."""


ABSENT: Final = Absent()


class Lookups:
    """`client` gives the client that has a broker at this moment; `key` the key of an identifier, None: it has none.

    `engine`: whom the answers are granted to. `want` and `done`: from the scheduler's thread alone.
    """

    def __init__(
        self,
        client: Callable[[], mmbroker.Client | None],
        engine: str,
        key: Callable[[str], Key | None],
    ) -> None:
        self.answers: dict[str, Found | Absent] = {}
        self._client = client
        self._engine = engine
        self._key = key
        self._wants: dict[str, int] = {}
        self._asked: deque[str] = deque()
        self._expected: set[str] = set()  # asked for, and not answered yet
        self._ahead: dict[str, tuple[Found | Absent, float]] = {}  # the answer, and when it is given up
        self._over: deque[Found] = deque()
        self._bell = threading.Event()
        self._stop = False
        self._saying = Saying("encoder outputs could not be looked up")
        self._reconnects: dict[mmbroker.Client, int] = {}
        self.counts = {"lookups": 0, "found": 0, "lookup_errors": 0}
        self._thread = threading.Thread(target=self._run, name="mmbroker-lookups", daemon=True)
        self._thread.start()

    # --- the scheduler's thread -------------------------------------------------------------------------------------

    def want(self, identifier: str) -> None:
        """Its answer shall be known, from now until `done`."""
        count = self._wants.get(identifier, 0)
        self._wants[identifier] = count + 1
        if count:
            return
        ready = self._ahead.pop(identifier, None)
        if ready is not None:
            self.answers[identifier] = ready[0]
        elif identifier not in self._expected:
            self._ask(identifier)

    def hold(self, identifier: str) -> None:
        """As `want`, for what is known already."""
        self._wants[identifier] += 1

    def done(self, identifier: str) -> None:
        """Once for each `want` or `hold`."""
        count = self._wants[identifier] - 1
        if count:
            self._wants[identifier] = count
            return
        # In this order: the thread enters an answer and then looks whether it is still wanted.
        del self._wants[identifier]
        self._withdraw(identifier)

    def refuse(self, identifier: str) -> None:
        """What was found is not what is needed: it counts as absent while it is wanted."""
        self._withdraw(identifier)
        self.answers[identifier] = ABSENT

    def renew(self, identifier: str) -> None:
        """What was found may be over soon: ask anew."""
        self._withdraw(identifier)
        self._ask(identifier)

    # --- any thread -------------------------------------------------------------------------------------------------

    def expect(self, identifiers: list[str]) -> None:
        """Requests that will want these are on their way: ask ahead, so that the scheduler's thread wakes nobody."""
        for identifier in identifiers:
            if identifier not in self.answers and identifier not in self._ahead:
                self._expected.add(identifier)
                self._asked.append(identifier)
        self._bell.set()

    def close(self) -> None:
        self._stop = True
        self._bell.set()
        self._thread.join(TIMEOUT + 1.0)

    def _ask(self, identifier: str) -> None:
        self._expected.add(identifier)
        self._asked.append(identifier)
        if not self._bell.is_set():
            self._bell.set()

    def _withdraw(self, identifier: str) -> None:
        answer = self.answers.pop(identifier, None)
        if isinstance(answer, Found):
            self._over.append(answer)

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
        for answer in (*self.answers.values(), *(ready for ready, _ in self._ahead.values()), *self._over):
            if isinstance(answer, Found):
                answer.held.drop()

    def _look_up(self) -> None:
        batch: dict[str, Key | None] = {}
        while self._asked and len(batch) < _BATCH:
            identifier = self._asked.popleft()
            batch[identifier] = self._key(identifier)
        found: dict[str, Any] = {}
        try:
            found = self._fetch({name: key for name, key in batch.items() if key is not None})
        finally:
            for identifier in batch:
                held = found.get(identifier)
                self._enter(identifier, ABSENT if held is None else Found(held))
                self._expected.discard(identifier)

    def _enter(self, identifier: str, answer: Found | Absent) -> None:
        if identifier in self.answers:  # asked twice
            if isinstance(answer, Found):
                self._over.append(answer)
        elif identifier not in self._wants:
            before = self._ahead.pop(identifier, None)
            if before is not None and isinstance(before[0], Found):
                self._over.append(before[0])
            self._ahead[identifier] = answer, time.monotonic() + TIMEOUT
            if identifier in self._wants:  # since a moment ago: it may have come too early for this answer
                ready = self._ahead.pop(identifier, None)
                if ready is not None:
                    self.answers[identifier] = ready[0]
        else:
            self.answers[identifier] = answer
            if identifier not in self._wants and self.answers.get(identifier) is answer:
                self._withdraw(identifier)

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
        """Drop what nobody wants any more, and see whether the session of what is held is still there."""
        now = time.monotonic()
        for identifier, (_, until) in list(self._ahead.items()):
            if until <= now:
                ready = self._ahead.pop(identifier, None)
                if ready is not None and isinstance(ready[0], Found):
                    self._over.append(ready[0])
        if (self.answers or self._ahead) and self._lost():
            for answer in [*self.answers.values(), *(ready for ready, _ in list(self._ahead.values()))]:
                if isinstance(answer, Found):
                    answer.expires = min(answer.expires, now + _AFTERLIFE)
        while self._over:
            self._over.popleft().held.drop()

    def _lost(self) -> bool:
        """Has the session of anything held been lost since this was last asked?"""
        client = self._client()
        if client is None:
            return True
        reconnects = client.stats()["reconnects"]
        before = self._reconnects.setdefault(client, reconnects)
        self._reconnects[client] = reconnects
        return reconnects != before
