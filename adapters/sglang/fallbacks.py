"""Features that went SGLang's own way: counted by reason, and said once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from mmbroker.proto import errors

from . import measure

logger = logging.getLogger(__name__)

_EVERY: Final = 60.0


def reason_of(error: BaseException) -> str:
    """The counter for an error (`measure.REASONS`)."""
    if isinstance(error, errors.PoolFull):
        return "too_large" if error.requested > error.limit else "full"
    for kind, reason in (
        (errors.BrokerUnavailable, "absent"),
        (errors.NoSuchEngine, "not_attached"),
        (errors.EngineLagging, "lagging"),
        (errors.DeadlineExceeded, "late"),
        (errors.QuotaExceeded, "refused"),
    ):
        if isinstance(error, kind):
            return reason
    return "failed"


class Fallbacks:
    """Counts at once; speaks at the first one, and then at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = -_EVERY
        self._since: dict[str, int] = {}

    def count(self, reason: str, features: int, why: str) -> None:
        """`features` go SGLang's own way; `why` is a sentence."""
        measure.counters.add(f"fallback_{reason}", features)
        self._since[reason] = self._since.get(reason, 0) + features
        now = self._clock()
        if now - self._said < _EVERY:
            return
        self._said = now
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self._since.items()))
        self._since.clear()
        logger.warning("mmbroker: features went SGLang's own way (%s). The last one: %s", counts, why)
