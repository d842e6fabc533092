"""This process's counters among SGLang's own metrics, where those are switched on (``--enable-metrics``).

A thread of its own copies them once a second, so no other thread ever pays for it, least of all the scheduler's; and it
goes on while there is no broker. SGLang collects the metrics of all its processes; these are found beside its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from . import measure, pictures

logger = logging.getLogger(__name__)

#: How often, in seconds.
INTERVAL: Final = 1.0

#: Counters by metric: the counter's name here, what it counts, and what to multiply by to get to base units.
RANK: Final[Mapping[str, tuple[str, str, float]]] = {
    "requests": ("inputs", "Requests with multimodal inputs at this scheduler.", 1),
    "items": ("items", "Their items.", 1),
    "takes": ("takes", "Features taken from the table.", 1),
    "take_misses": ("misses", "Takes that found nothing.", 1),
    "errors": ("errors", "Requests failed because of their features.", 1),
    "scheduler_seconds": ("inputs_ns", "Time of the scheduler's thread on such requests' inputs.", 1e-9),
    "receiver_seconds": ("table_build_us", "Time of the receiver thread on making entries.", 1e-6),
    "copied_bytes": ("table_bytes_copied", "Private copies of features.", 1),
    "loaded_bytes": ("table_bytes_loaded", "Copies of features to the device.", 1),
}
WORKER: Final[Mapping[str, tuple[str, str, float]]] = {
    "put_requests": ("requests", "Requests whose features went through the broker.", 1),
    "put_features": ("features", "Features put into the broker, or found there.", 1),
    "put_bytes": ("bytes", "Their bytes.", 1),
    "put_seconds": ("put_ns", "Time from a request's arrival until its references were there.", 1e-9),
}
#: How things stand.
RANK_GAUGES: Final[Mapping[str, tuple[str, str]]] = {
    "entries": ("table_entries", "Features that this rank has at present."),
    "unsettled": ("table_unsettled", "Features whose request is over, and which something here still reads."),
}
#: Of a worker: what it counts, and the upper bounds of its buckets.
WORKER_HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[float, ...]]]] = {
    "request_pictures": ("Pictures of a request that has any.", (1, 2, 4, 8, 16, 32, 64, 128)),
    "picture_megapixels": (
        "Their sizes as the model sees them, where the processor's layout is known.",
        (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32),
    ),
    "picture_bytes": ("Sizes of their features.", tuple(float(4**power) for power in range(6, 15))),
}
#: Of the fallback counters, by reason.
FALLBACKS: Final = "worker_fallbacks"
_FALLBACKS_HELP: Final = "Features that went SGLang's own way."

_PREFIX: Final = "mmbroker_engine_"
NAMES: Final = (
    *(f"{_PREFIX}{name}_total" for name in (*RANK, *WORKER, FALLBACKS)),
    *(f"{_PREFIX}{name}" for name in RANK_GAUGES),
    *(f"{_PREFIX}{name}_{end}" for name in WORKER_HISTOGRAMS for end in ("bucket", "sum", "count")),
)


@cache
def _counter(name: str, text: str, labels: tuple[str, ...]) -> Any:
    """One of this process: two engines in it differ by their labels."""
    from prometheus_client import Counter

    return Counter(_PREFIX + name, text, labels)


@cache
def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Gauge

    return Gauge(_PREFIX + name, text, labels, multiprocess_mode="mostrecent")


@cache
def _histogram(name: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Histogram

    text, bounds = WORKER_HISTOGRAMS[name]
    return Histogram(_PREFIX + name, text, labels, buckets=bounds)


class Export:
    """Metrics of one process, brought up to date from its counters by `update`. `rank` None: a worker's."""

    def __init__(self, engine: str, rank: int | None) -> None:
        self._counted: dict[str, float] = {}
        labels = {"engine": engine} if rank is None else {"engine": engine, "rank": str(rank)}
        names = tuple(labels)
        self._counters = {
            counter: (_counter(name, text, names).labels(**labels), scale)
            for name, (counter, text, scale) in (WORKER if rank is None else RANK).items()
        }
        if rank is None:
            fallbacks = _counter(FALLBACKS, _FALLBACKS_HELP, (*names, "reason"))
            for reason in measure.REASONS:
                self._counters[f"fallback_{reason}"] = fallbacks.labels(**labels, reason=reason), 1
            self._seen = pictures.watch()
            self._sizes = {name: _histogram(name, names).labels(**labels) for name in WORKER_HISTOGRAMS}
        self._gauges = {
            counter: _gauge(name, text, names).labels(**labels)
            for name, (counter, text) in ({} if rank is None else RANK_GAUGES).items()
        }

    def update(self, counts: Mapping[str, int]) -> None:
        """`counts`: cumulative counters and present values, by name. From one thread."""
        for name, (metric, scale) in self._counters.items():
            value = counts.get(name, 0)
            if (more := value - self._counted.get(name, 0)) > 0:
                metric.inc(more * scale)
            self._counted[name] = value
        for name, gauge in self._gauges.items():
            gauge.set(counts.get(name, 0))

    def update_pictures(self) -> None:
        """Of a worker: what it has seen since the last time."""
        while self._seen:
            request = self._seen.popleft()
            self._sizes["request_pictures"].observe(len(request))
            for picture in request:
                self._sizes["picture_bytes"].observe(picture.nbytes)
                if picture.pixels is not None:
                    self._sizes["picture_megapixels"].observe(picture.pixels / 1e6)


def start(
    server_args: Any, engine: str, rank: int | None, table: Callable[[], Mapping[str, int]] = dict
) -> threading.Thread | None:
    """Keep SGLang's metrics up to date from now on, if it has any. `table`: the rank's table's own counters."""
    if not getattr(server_args, "enable_metrics", False):
        return None

    def run() -> None:
        pause = threading.Event()
        try:
            export = Export(engine, rank)
            while True:
                export.update({**measure.counters.read(), **{f"table_{n}": v for n, v in table().items()}})
                if rank is None:
                    export.update_pictures()
                pause.wait(INTERVAL)
        except Exception:  # metrics are no reason to end an engine
            logger.exception("mmbroker: counters are no longer exported")

    thread = threading.Thread(target=run, name="mmbroker-metrics", daemon=True)
    thread.start()
    return thread


def reference() -> str:
    """The table of these in `docs/metrics.md`."""
    rows = [(f"{name}_total", "counter", "engine, rank", text) for name, (_, text, _) in RANK.items()]
    rows += [(name, "gauge", "engine, rank", text) for name, (_, text) in RANK_GAUGES.items()]
    rows += [(f"{name}_total", "counter", "engine", text) for name, (_, text, _) in WORKER.items()]
    rows += [(f"{FALLBACKS}_total", "counter", "engine, reason", _FALLBACKS_HELP)]
    rows += [(name, "histogram", "engine", text) for name, (text, _) in WORKER_HISTOGRAMS.items()]
    lines = ["| metric | kind | labels | what |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| `{_PREFIX}{name}` | {' | '.join(rest)} |" for name, *rest in rows])
