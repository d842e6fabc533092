"""Brokers' own books while servers are under load: what they hold of each tier, at its most."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from bench.processes import Broker
from mmbroker import reach
from mmbroker.link import Link
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.messages import Report, Status

from .watch import PERIOD

#: Bytes of a tier: its segments, all slots, and those that cannot be had by evicting.
FIGURES: Final = ("capacity", "used", "held")
#: Tiers, by what a report calls them.
_TIERS: Final = {"host": "pool", "device": "device"}


class Books:
    """A context manager: what the books of all brokers say while it lasts. `found` says it afterwards."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers
        self._links: list[Link] = []
        self._looks: list[list[dict[str, Any]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="books", daemon=True)
        self._error: BrokerError | None = None
        self.found: dict[str, Any] = {}

    def __enter__(self) -> Books:
        self._links = [reach.connect(Path(broker.path), "bench") for broker in self._brokers]
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        try:
            if kind is None and self._error is None:
                self._look()
                self.found = summary(self._looks)
        finally:
            for link in self._links:
                link.close()
        if kind is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._links and not self._over.wait(PERIOD):
                self._look()
        except BrokerError as error:
            self._error = error

    def _look(self) -> None:
        self._looks.append([ask(link) for link in self._links])


def ask(link: Link) -> dict[str, Any]:
    answer = link.call(Status())
    assert isinstance(answer, Report)
    return answer.status


def summary(looks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Of the reports of all brokers at several moments: bytes by tier at their most, of all brokers `together` at one
    moment and of `each`; what was counted meanwhile; and where ranks read at the end."""
    last = looks[-1]

    def most(reports: Sequence[Sequence[dict[str, Any]]]) -> dict[str, dict[str, int]]:
        made = {}
        for tier, name in _TIERS.items():
            pools = [[report[name] for report in look if report[name] is not None] for look in reports]
            if any(pools):
                made[tier] = {
                    what: max(sum(pool[what] for pool in look) for look in pools) for what in FIGURES
                }
        return made

    counted = [
        {k: v - before["counters"].get(k, 0) for k, v in after["counters"].items()}
        for before, after in zip(looks[0], last, strict=True)
    ]
    return {
        "looks": len(looks),
        "together": most(looks),
        "each": [most([[look[index]] for look in looks]) for index in range(len(last))],
        "limits": [
            {tier: report[name]["limit"] for tier, name in _TIERS.items() if report[name] is not None}
            for report in last
        ],
        "counters": [{k: v for k, v in counts.items() if v} for counts in counted],
        "ranks": [
            {"engine": engine["engine"], **{key: rank[key] for key in ("rank", "path", "why", "access")}}
            for report in last
            for engine in report["engines"]
            for rank in engine["ranks"]
        ],
    }


def emptied(brokers: Sequence[Broker], patience: float) -> bool:
    """Drop all that nobody holds, until no broker has a feature, or memory of the GPU; False: some still has."""
    deadline = time.monotonic() + patience
    links = [reach.connect(Path(broker.path), "bench") for broker in brokers]
    try:
        while True:
            for broker in brokers:
                broker.evict()
            reports = [ask(link) for link in links]
            if not any(one["pool"]["used"] or (one["device"] or {}).get("capacity") for one in reports):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)  # segments are given back when nobody has asked for them for a while
    finally:
        for link in links:
            link.close()
