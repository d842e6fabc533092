"""How vLLM joins a broker: what it says meanwhile, and whether there is one at this moment."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mmbroker
from mmbroker.adapters import joining


class Joining(joining.Joining):
    """`says`: without a broker, it says so, once; one of an engine's processes is enough."""

    logger = logging.getLogger("vllm.mmbroker")

    def __init__(
        self,
        path: str | None,
        name: str,
        then: Callable[[mmbroker.Client], None] = lambda client: None,
        stats: Callable[[], dict[str, int]] = dict,
        says: bool = False,
    ) -> None:
        self._says = says
        super().__init__(path, name, then, stats)

    @property
    def there(self) -> mmbroker.Client | None:
        """The client, if it has a broker at this moment. No message, no wait."""
        client = self.client
        return client if client is not None and client.connected else None

    def _absent(self, error: Exception) -> None:
        if self._says:
            self._says = False
            self.logger.warning("mmbroker: %s has no broker, and vLLM serves without: %s", self._name, error)

    def _present(self, client: mmbroker.Client) -> None:
        self.logger.info("mmbroker: %s has joined the broker at %s", self._name, client.directory)
