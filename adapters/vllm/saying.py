"""What goes vLLM's own way is counted each time, and said once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("vllm.mmbroker")

_EVERY: Final = 60.0


class Saying:
    """Says `what` happened, how often since it was last said, and why the last time. Speaks at the first one."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._said = float("-inf")
        self._since = 0

    def count(self, why: object, times: int = 1) -> None:
        self._since += times
        now = self._clock()
        if now - self._said < _EVERY:
            return
        self._said = now
        since, self._since = self._since, 0
        logger.warning("mmbroker: %s (%d). The last one: %s", self._what, since, why)
