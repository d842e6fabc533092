"""Joining a broker, now or later: the engine starts without one, and uses it from the moment it is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import mmbroker
from mmbroker.adapters import turns
from mmbroker.proto.errors import BrokerError

from . import measure
from .settings import Settings

logger = logging.getLogger(__name__)

#: First and longest pause between two attempts, in seconds.
_PAUSES = (0.1, 1.0)
#: How long one attempt may take, in seconds.
_ATTEMPT = 2.0
#: How long a starting process waits for a broker, in seconds: so that the first request goes through it already.
_PATIENCE = 3.0


class Joining:
    """A client that is there as soon as a broker is. Once joined, the client itself reconnects after each loss.

    `then` runs with each new client, in the joining thread; only after it has returned is `client` set. If it raises
    something, the client is closed and everything is tried again.
    """

    def __init__(
        self, settings: Settings, name: str, then: Callable[[mmbroker.Client], None] = lambda client: None
    ) -> None:
        self._settings = settings
        self._name = name
        self._then = then
        self._stop = threading.Event()
        self.client: mmbroker.Client | None = None
        self.joined = threading.Event()
        threading.Thread(target=self._run, name="mmbroker-joining", daemon=True).start()

    def _run(self) -> None:
        pause, said = _PAUSES[0], ""
        while not self._stop.is_set():
            try:
                client = mmbroker.connect(self._settings.path, name=self._name, timeout=_ATTEMPT)
                client.extra_stats = measure.told
                try:
                    self._then(client)
                except BaseException:
                    client.close()
                    raise
            except Exception as error:
                if not isinstance(error, BrokerError):
                    logger.exception("mmbroker: %s cannot join a broker", self._name)
                if str(error) != said:
                    said = str(error)
                    logger.warning(
                        "mmbroker: %s has no broker yet (%s); SGLang's own transport serves until then",
                        self._name,
                        error,
                    )
                self._stop.wait(pause)
                pause = min(pause * 2, _PAUSES[1])
                continue
            turns.shorten()
            self.client = client
            self.joined.set()
            logger.info("mmbroker: %s has joined a broker as engine %s", self._name, self._settings.engine)
            return

    def wait(self) -> None:
        """A little, for a broker that is there already."""
        self.joined.wait(_PATIENCE)

    def close(self) -> None:
        self._stop.set()
        if self.client is not None:
            self.client.close()
