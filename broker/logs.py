"""Logs: sentences for people, or one JSON object a line for machines; never so many that they hide each other.

A record may carry fields (`extra=about(session=..., client=...)`). Sessions and a broker's lives go by their tags
(`proto.tags`), which clients' own logs have too. Nothing is logged for each feature.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
#: So many records of one kind in so many seconds; the rest is counted, and told with the next one that is written.
BURST: Final = 20
WINDOW: Final = 60.0
#: Kinds that are told apart.
_KINDS: Final = 256


def about(**fields: Any) -> dict[str, Any]:
    """Fields of a record, for `extra`."""
    return {"about": fields}


def set_up(style: str, level: str, stream: TextIO = sys.stderr) -> None:
    """Write this process's log to a stream, and to nothing else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Json() if style == "json" else Text())
    handler.addFilter(Limiter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class Limiter(logging.Filter):
    """Lets the first few records of each kind through. What says that the process ends is never held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL:
            return True
        now = self._clock()
        kind = (record.name, record.levelno, str(record.msg))
        since, count = self._kinds.pop(kind, (now, 0))
        held_back = 0
        if now - since >= WINDOW:
            held_back = max(0, count - BURST)
            since, count = now, 0
        while len(self._kinds) >= _KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = since, count + 1
        if held_back:
            fields = {**getattr(record, "about", {}), "held_back": held_back}
            record.about = fields
        return count < BURST


class Text(logging.Formatter):
    """``2026-11-29 17:00:00,123 mmbroker WARNING: words (client worker-0, session 1f2e3d4c)``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "about", {})
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items() if value != "")
        return super().formatMessage(record) + (f" ({told})" if told else "")


class Json(logging.Formatter):
    """``{"time": ..., "level": "warning", "logger": "mmbroker", "message": ..., "client": "worker-0", ...}``"""

    def format(self, record: logging.LogRecord) -> str:
        seconds, zone = (self.formatTime(record, form) for form in ("%Y-%m-%dT%H:%M:%S", "%z"))
        told = {
            "time": f"{seconds}.{int(record.msecs):03d}{zone}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)
