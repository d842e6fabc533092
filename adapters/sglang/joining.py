"""How SGLang joins a broker: what it says meanwhile, and how long a starting process waits for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import mmbroker
from mmbroker.adapters import joining

from . import measure
from .settings import Settings

#: How long a starting process waits for a broker, in seconds: so that the first request goes through it already.
_PATIENCE: Final = 3.0


class Joining(joining.Joining):
    """Says whenever it has no broker for another reason than before."""

    logger = logging.getLogger(__name__)

    def __init__(
        self, settings: Settings, name: str, then: Callable[[mmbroker.Client], None] = lambda client: None
    ) -> None:
        self._engine = settings.engine
        self._said = ""
        super().__init__(settings.path, name, then, measure.told)

    def _absent(self, error: Exception) -> None:
        if str(error) != self._said:
            self._said = str(error)
            self.logger.warning(
                "mmbroker: %s has no broker yet (%s); SGLang's own transport serves until then",
                self._name,
                error,
            )

    def _present(self, client: mmbroker.Client) -> None:
        self.logger.info("mmbroker: %s has joined a broker as engine %s", self._name, self._engine)

    def wait(self) -> None:
        """A little, for a broker that is there already."""
        self.joined.wait(_PATIENCE)
