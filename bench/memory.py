"""Memory of every process: proportional and resident, with segments and without.

Proportional size (PSS) shares a page among the processes that map it; the broker maps no segment, so that its own
figures are without any. The bare process has imported torch and nothing else: what a client adds is the difference.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import mmbroker

from . import ways
from .processes import Workshop
from .producer import ENGINE


class Bare:
    """A process that has imported what the bench imports, and has done nothing yet."""

    def usage(self) -> dict[str, float]:
        return usage("self")

    def close(self) -> None:
        pass


class Producer(Bare):
    """A producer that has sealed features to an engine."""

    def __init__(self, broker: str, mb: float, count: int) -> None:
        self._client = mmbroker.connect(broker, name="bench-producer", timeout=30.0)
        feature = ways.tensors(mb, 1, seed=4)[0]
        self._helds: deque[mmbroker.Held] = deque()
        for number in range(count):
            feature[0, 0] = number
            self._helds.append(self._client.put(feature, to=ENGINE))

    def close(self) -> None:
        for held in self._helds:
            held.drop()
        self._client.close()


class Rank(Bare):
    """An engine's rank; it has entries for what is granted, and reads nothing."""

    def __init__(self, broker: str, access: str) -> None:
        self._client = mmbroker.connect(broker, name="bench-rank")
        self._table = self._client.attach(engine=ENGINE, rank=0, world=1, access=access)

    def close(self) -> None:
        self._table.close()
        self._client.close()


def measure(shop: Workshop, mb: float, count: int, say: Any) -> dict[str, Any]:
    """Every process while `count` features of `mb` MB are held for one engine, with either access. Sizes in MiB."""
    found: dict[str, Any] = {
        "mb": mb,
        "features": count,
        "feature_mib": round(mb * count * 1e6 / (1 << 20), 1),
    }
    consumer, sender = shop.worker("memory-rank"), shop.worker("memory-producer")
    with consumer.make(Bare) as bare:
        found["processes"] = [{"process": "torch and the bench alone", **bare.call("usage")}]
    for access in ("readonly", "copy"):
        say(f"memory: {access}")
        with shop.broker(host_mib=round(2 * mb * count) + 64) as broker:
            idle = usage(broker.pid)
            with (
                consumer.make(Rank, broker.path, access) as rank,
                sender.make(Producer, broker.path, mb, count) as producer,
            ):
                lines = [
                    {"process": f"broker, {access}", **usage(broker.pid)},
                    {"process": f"producer, {access}", **producer.call("usage")},
                    {"process": f"engine's rank, {access}", **rank.call("usage")},
                ]
            if access == "readonly":
                found["processes"].append({"process": "broker, idle", **idle})
            found["processes"] += lines
    return found


def usage(pid: int | str) -> dict[str, float]:
    """MiB: proportional, resident, and resident without shared memory."""
    sizes: dict[str, float] = {}
    for file in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[name] = int(value.removesuffix(" kB")) / 1024
    return {
        "pss_mib": round(sizes["Pss"], 1),
        "rss_mib": round(sizes["VmRSS"], 1),
        "rss_without_segments_mib": round(sizes["RssAnon"] + sizes["RssFile"], 1),
    }
