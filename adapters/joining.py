"""Joining a broker, now or later: the engine starts without one, and uses it from the moment it is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import mmbroker
from mmbroker.adapters import turns
from mmbroker.proto.errors import BrokerError

#: First and longest pause between two attempts, in seconds.
_PAUSES: Final = (0.1, 1.0)
#: How long one attempt may take, in seconds.
_ATTEMPT: Final = 2.0


class Joining:
    """A client that is there as soon as a broker is. Once joined, the client itself reconnects after each loss.

    `path`: the instance directory, None: find it. `then` runs with each new client, in the joining thread; only after
    it has returned is `client` set. If it raises something, the client is closed and everything is tried again.
    `stats`: counters that the broker shows. Each engine says in its own words and to its own log, `logger`, how it
    goes: `_absent` and `_present`, called in the joining thread.
    """

    logger = logging.getLogger(__name__)

    def __init__(
        self,
        path: str | None,
        name: str,
        then: Callable[[mmbroker.Client], None],
        stats: Callable[[], dict[str, int]],
    ) -> None:
        self._path = path
        self._name = name
        self._then = then
        self._stats = stats
        self._stop = threading.Event()
        self.client: mmbroker.Client | None = None
        self.joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmbroker-joining", daemon=True)
        self._thread.start()

    def _absent(self, error: Exception) -> None:
        """An attempt has failed."""

    def _present(self, client: mmbroker.Client) -> None:
        """There is a broker, and `client` has joined it."""

    def _run(self) -> None:
        pause = _PAUSES[0]
        while not self._stop.is_set():
            try:
                client = mmbroker.connect(self._path, name=self._name, timeout=_ATTEMPT)
                client.extra_stats = self._stats
                try:
                    self._then(client)
                except BaseException:
                    client.close()
                    raise
            except Exception as error:
                if not isinstance(error, BrokerError):
                    self.logger.exception("mmbroker: %s cannot join a broker", self._name)
                self._absent(error)
                self._stop.wait(pause)
                pause = min(pause * 2, _PAUSES[1])
                continue
            turns.shorten()
            self.client = client
            self.joined.set()
            self._present(client)
            if self._stop.is_set():
                client.close()
            return

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_ATTEMPT + 1.0)
        if self.client is not None:
            self.client.close()
