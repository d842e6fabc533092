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
    """Counts at once; speaks at the first one, and then at most once a minute. `what` happened to features; `counter`:
    the name of what counts them, with the reason in it if it has a place for one."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        what: str = "features went SGLang's own way",
        counter: str = "fallback_{}",
    ) -> None:
        self._clock = clock
        self._what = what
        self._counter = counter
        self._said = -_EVERY
        self._since: dict[str, int] = {}

    def count(self, reason: str, features: int, why: str) -> None:
        """It happened to so many features; `why` is a sentence."""
        measure.counters.add(self._counter.format(reason), features)
        self._since[reason] = self._since.get(reason, 0) + features
        now = self._clock()
        if now - self._said < _EVERY:
            return
        self._said = now
        counts = ", ".join(f"{count} {reason}".rstrip() for reason, count in sorted(self._since.items()))
        self._since.clear()
        logger.warning("mmbroker: %s (%s). The last one: %s", self._what, counts, why)
