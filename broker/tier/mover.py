"""The mover: a desk at a broker, a store, and threads between them.

Fetching has as many threads as may be sought at once, made when they are needed; what is stuck in the store keeps its
thread, and counts. Storing has one thread, and a backlog. A third looks after the store when nothing else does: it asks
from time to time whether it is there, and tries again when it was left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mmbroker.connection import Connection
from mmbroker.link import Link
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import Wanted, Worth

from . import objects
from .breaker import Breaker, State
from .desk import Desk, Terms
from .fetch import Fetcher
from .keep import Keeper
from .policy import MIB, Backlog, Bucket, Policy, Stored
from .registry import Registry, Scratch
from .store import Store, StoreError

log = logging.getLogger("mmbroker")

#: How often the store is asked whether it is there while nothing else is asked of it, in seconds.
HEALTH: Final = 5.0
#: How long an orderly end may wait for the store, in seconds.
_FAREWELL: Final = 5.0
#: A call that takes so many times the wait for a feature is a failure, also while it has not returned.
SLOW: Final = 5


@dataclass(frozen=True)
class Options:
    """`write_rate`: bytes per second that may be stored. `namespace`: what they go by in the store; empty: as here.
    `health`: how often the store is asked whether it is there, in seconds."""

    terms: Terms = field(default_factory=Terms)
    policy: Policy = field(default_factory=Policy)
    write_rate: float = 256.0 * MIB
    namespace: str = ""
    health: float = HEALTH


@dataclass(eq=False)
class _Errand:
    """What one thread is to fetch, or several features that it is to look for."""

    connection: Connection
    wanted: list[Wanted]
    asked: float
    started: float = 0.0
    stuck: bool = False


class Mover:
    """Moves features between a broker, by way of a link of its own, and a store, until `close`.

    `wall`: seconds since the epoch. The store is the caller's, and stays open.
    """

    def __init__(
        self,
        link: Link,
        store: Store,
        options: Options,
        wall: Callable[[], float],
        breaker: Breaker | None = None,
    ) -> None:
        self.namespace = options.namespace or link.namespace
        self.options = options
        self._store = store
        self._breaker = breaker or Breaker()
        lock = threading.RLock()  # guards all below
        self._work = threading.Condition(lock)  # for those who fetch
        self._changed = threading.Condition(lock)  # for the two others
        self._closing = False
        self._errands: deque[_Errand] = deque()
        self._running: set[_Errand] = set()
        self._wanted: set[Key] = set()  # of all errands
        self._fetchers = 0
        self._backlog = Backlog(Bucket(options.write_rate, time.monotonic()))
        self._stored = Stored()
        self._storing: Key | None = None
        self._heard = time.monotonic()  # of the store
        registry = Registry(store)
        scratch = Scratch(registry, options.terms.most + 1)
        self.desk = Desk(link, registry, options.terms)
        shared = (self.desk, store, scratch, self.namespace, self._judge, wall)
        self._patience = SLOW * options.terms.wait
        self._fetcher = Fetcher(*shared, self._patience, self._gone)
        self._keeper = Keeper(*shared, options.policy.ttl)
        self.desk.on_sought = self._sought
        self.desk.on_fresh = self._fresh
        self._keeping = threading.Thread(target=self._keep, name="mmbroker-tier-keep", daemon=True)
        self._keeping.start()
        threading.Thread(target=self._look_after, name="mmbroker-tier-look", daemon=True).start()

    def close(self) -> None:
        """End the session, and the threads as soon as the store lets go of them. Idempotent.

        What is being stored is waited for, so that it is not held beyond the session; but not for long."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._work.notify_all()
        self._keeping.join(_FAREWELL)
        self.desk.link.close()

    @property
    def stuck(self) -> bool:
        """Is a thread in the store that has been there for too long?"""
        with self._changed:
            return any(errand.stuck for errand in self._running)

    @property
    def state(self) -> State:
        """Of the breaker."""
        return self._breaker.state

    # --- from the store ---------------------------------------------------------------------------------------------

    def _sought(self, connection: Connection, wanted: list[Wanted]) -> None:
        now = time.monotonic()
        mine: list[Wanted] = []
        busy: list[Wanted] = []
        with self._changed:
            self._count_stuck(now)
            closed = self._breaker.state is State.CLOSED
            for one in wanted:
                # A key whose wait was over may be sought again while it is still being fetched.
                fits = len(self._wanted) < self.options.terms.most and one.key not in self._wanted
                if closed and fits:
                    mine.append(one)
                    self._wanted.add(one.key)
                else:
                    busy.append(one)
            if mine:
                self._send(_Errand(connection, mine, now))
        if busy:
            self.desk.count("busy", len(busy))
            self.desk.decline(connection, busy)

    def _send(self, errand: _Errand) -> None:
        self._errands.append(errand)
        if self._fetchers - len(self._running) < len(self._errands):
            self._fetchers += 1
            threading.Thread(target=self._fetch, name="mmbroker-tier-fetch", daemon=True).start()
        self._work.notify()

    def _count_stuck(self, now: float) -> None:
        """What has not come back by now is a failure, once, though nobody has said so."""
        for errand in self._running:
            if not errand.stuck and now - errand.started > self._patience:
                errand.stuck = True
                self._failed(now, f"it has not answered for {self._patience * 1e3:.0f} ms")

    def _fetch(self) -> None:
        while True:
            with self._work:
                while not self._errands and not self._closing:
                    self._work.wait()
                if self._closing:
                    return
                errand = self._errands.popleft()
                errand.started = time.monotonic()
                self._running.add(errand)
            found: list[Wanted] = []
            try:
                found = self._run(errand)
            except Exception:
                log.exception("mmbroker tier: a fetch failed")
                self.desk.decline(errand.connection, errand.wanted)
            finally:
                with self._work:
                    self._running.discard(errand)
                    self._wanted.difference_update(one.key for one in errand.wanted)
                    for one in found:
                        self._wanted.add(one.key)
                        self._send(_Errand(errand.connection, [one], errand.asked))

    def _run(self, errand: _Errand) -> list[Wanted]:
        """Fetch one; of several, say which are to be fetched, each by a thread of its own."""
        if time.monotonic() - errand.asked > self.options.terms.wait:
            self.desk.count("late", len(errand.wanted))  # the broker has ended the promises
            self.desk.decline(errand.connection, errand.wanted)
            return []
        if len(errand.wanted) > 1:
            return self._fetcher.sift(errand.connection, errand.wanted)
        self._fetcher.fetch(errand.connection, errand.wanted[0])
        return []

    # --- to the store -----------------------------------------------------------------------------------------------

    def _fresh(self, features: list[Worth]) -> None:
        skipped = 0
        with self._changed:
            for worth in features:
                known = (
                    worth.key == self._storing or objects.name_of(self.namespace, worth.key) in self._stored
                )
                if known or not self.options.policy.wants(worth):
                    skipped += not known
                else:
                    self._backlog.add(worth)
            self._changed.notify_all()
        if skipped:
            self.desk.count("put_skipped", skipped)

    def _gone(self, wanted: Sequence[Wanted]) -> None:
        """The store has them no more, if it ever had: what is made in their place is stored."""
        with self._changed:
            for one in wanted:
                self._stored.forget(objects.name_of(self.namespace, one.key))

    def _keep(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (pause := self._put_pause()) != 0.0:
                    self._changed.wait(pause)
                if self._closing:
                    return
                now = time.monotonic()
                over, worth = self._stored.over(now), self._backlog.take(now)
                self._storing = None if worth is None else worth.key
            kept = False
            try:
                if over is not None:
                    self._keeper.remove(over)
                kept = worth is not None and self._keeper.keep(worth)
            except Exception:
                log.exception("mmbroker tier: a feature could not be stored")
            with self._changed:
                self._storing = None
                if worth is not None and kept:
                    ttl = self.options.policy.ttl
                    name = objects.name_of(self.namespace, worth.key)
                    self._stored.add(name, None if ttl is None else now + ttl)

    def _put_pause(self) -> float | None:
        """Seconds until there may be something to do, unless somebody says so before: None, as while the store is left
        alone."""
        if self._breaker.state is not State.CLOSED:
            return None
        now = time.monotonic()
        pauses = [self._stored.left(now), self._backlog.left(now)]
        return min((pause for pause in pauses if pause is not None), default=None)

    # --- how the store does -----------------------------------------------------------------------------------------

    def _judge(self, wrong: str | None) -> None:
        """The store has moved bytes in time (None), or something was wrong with it."""
        now = time.monotonic()
        with self._changed:
            if wrong is None:
                self._heard = now
                self._breaker.succeeded()
            else:
                self._failed(now, wrong)

    def _failed(self, now: float, wrong: str) -> None:
        if self._breaker.failed(now, wrong):
            log.warning("mmbroker tier: the store is left alone, and tried again by and by: %s", wrong)
            self.desk.tell(False)
            self.desk.count("breaker_opened")
            # Its master may have been started anew, and forgotten everything.
            self._stored.doubt()
            self._changed.notify_all()

    def _look_after(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                while not self._closing and (pause := self._probe_pause(now)) > 0:
                    self._changed.wait(pause)
                    now = time.monotonic()
                if self._closing:
                    return
                trial = self._breaker.due(now)
                self._heard = now
            self._probe(trial)

    def _probe_pause(self, now: float) -> float:
        left = self._breaker.left(now)
        return max(0.0, self._heard + self.options.health - now) if left is None else left

    def _probe(self, trial: bool) -> None:
        asked = time.monotonic()
        wrong: str | None = None
        try:
            self._store.probe()
            took = time.monotonic() - asked
            if took > self._patience:
                wrong = f"the store took {took * 1e3:.0f} ms to say that it is there"
        except StoreError as error:
            wrong = str(error)
        if not trial:
            if wrong is not None:
                self._judge(wrong)
            return
        with self._changed:
            closed = self._breaker.tried(time.monotonic(), wrong)
            self._changed.notify_all()
            if closed:  # said before anybody can open it again
                self.desk.tell(True)
        if closed:
            log.warning("mmbroker tier: the store is asked again")
