"""Joining a broker, now or later: vLLM starts without one, and uses it from the moment it is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import mmbroker
from mmbroker.adapters import turns
from mmbroker.proto.errors import BrokerError

logger = logging.getLogger("vllm.mmbroker")

#: First and longest pause between two attempts, in seconds.
_PAUSES: Final = (0.1, 1.0)
#: How long one attempt may take, in seconds.
_ATTEMPT: Final = 2.0


class Joining:
    """A client that is there as soon as a broker is. Once joined, the client itself reconnects after each loss.

    `then` runs with each new client, in the joining thread; only after it has returned is `client` set. If it raises
    something, the client is closed and everything is tried again. `stats`: counters that the broker shows. `says`:
    without a broker, it says so; one of an engine's processes is enough.
    """

    def __init__(
        self,
        path: str | None,
        name: str,
        then: Callable[[mmbroker.Client], None] = lambda client: None,
        stats: Callable[[], dict[str, int]] = dict,
        says: bool = False,
    ) -> None:
        self._path = path
        self._name = name
        self._then = then
        self._stats = stats
        self._says = says
        self._stop = threading.Event()
        self.client: mmbroker.Client | None = None
        self.joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmbroker-joining", daemon=True)
        self._thread.start()

    @property
    def there(self) -> mmbroker.Client | None:
        """The client, if it has a broker at this moment. No message, no wait."""
        client = self.client
        return client if client is not None and client.connected else None

    def _run(self) -> None:
        pause, says = _PAUSES[0], self._says
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
                    logger.exception("mmbroker: %s cannot join a broker", self._name)
                if says:
                    says = False
                    logger.warning(
                        "mmbroker: %s has no broker, and vLLM serves without: %s", self._name, error
                    )
                self._stop.wait(pause)
                pause = min(pause * 2, _PAUSES[1])
                continue
            turns.shorten()
            self.client = client
            self.joined.set()
            logger.info("mmbroker: %s has joined the broker at %s", self._name, client.directory)
            if self._stop.is_set():
                client.close()
            return

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_ATTEMPT + 1.0)
        if self.client is not None:
            self.client.close()
