"""What `top` and the page show: a report, and what changed since an earlier one, as a few figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from .figures import quantile, since
from .metrics import fallbacks, told

Report = Mapping[str, Any]

#: What is shown as a rate: its name, and the broker's counter.
RATES: Final = {
    "features": "seals",
    "hits": "hits",
    "misses": "misses",
    "grants": "grants",
    "evictions": "evictions",
}
#: What is shown as percentiles: its name, and the figure.
LATENCIES: Final = {
    "lease to seal": "lease_seconds",
    "grant to entry": "grant_seconds",
    "hold": "hold_seconds",
    "end to settled": "settle_seconds",
    "load": "load_seconds",
    "wait": "wait_seconds",
}


def overview(report: Report, before: Report | None = None, clients: int = 100) -> dict[str, Any]:
    """Figures of the time between two reports of one broker; without an earlier one, since the broker started.

    At most so many `clients`, those that hold the most first. Sizes in bytes, times in seconds, rates per second.
    """
    daemon = report["daemon"]
    if before is not None and before["daemon"]["pid"] != daemon["pid"]:
        before = None
    seconds = daemon["uptime"] - (before["daemon"]["uptime"] if before else 0.0)
    counted: Counter[str] = Counter(report["counters"])
    counted["fallbacks"] = sum(fallbacks(told(report)).values())
    if before is not None:
        counted.subtract(before["counters"])
        counted["fallbacks"] -= sum(fallbacks(told(before)).values())
    rates = {name: counted[key] / seconds if seconds > 0 else 0.0 for name, key in RATES.items()}
    rates["fallbacks"] = max(0, counted["fallbacks"]) / seconds if seconds > 0 else 0.0
    asked = counted["hits"] + counted["misses"]
    calls = sum(count for name, count in counted.items() if name.endswith("_calls"))
    return {
        "instance": daemon["instance"],
        "pid": daemon["pid"],
        "version": daemon["version"],
        "uptime": daemon["uptime"],
        "resident": daemon["rss"],
        "loop_lag": daemon["loop_lag"],
        "draining": report["draining"],
        "health": report["health"],
        "seconds": seconds,
        "tiers": [_tier(report, pool) for pool in ("pool", "device") if report[pool] is not None],
        "features": {"held": report["features"] - report["features_idle"], "cached": report["features_idle"]},
        "leases": report["leases"],
        "holds": report["holds"],
        "rates": {**rates, "messages": calls / seconds if seconds > 0 else 0.0},
        "hit_rate": counted["hits"] / asked if asked else None,
        "latencies": {name: _latency(report, before, figure) for name, figure in LATENCIES.items()},
        "waiting": report["waiting_for"],
        "waiting_calls": report["waiting"][:10],
        "fallbacks": {reason: count for reason, count in fallbacks(told(report)).items() if count},
        "engines": report["engines"],
        "movers": report["movers"],
        "clients": [_client(session) for session in _holders(report)[:clients]],
        "client_count": len(report["sessions"]) + len(report["ghosts"]),
    }


def _tier(report: Report, name: str) -> dict[str, Any]:
    pool = report[name]
    arenas = [arena for arena in report["arenas"] if arena["tier"] == pool["tier"]]
    free = sum(arena["bytes"] - arena["used"] for arena in arenas)
    largest = max((arena["largest_free"] for arena in arenas), default=0)
    return {
        "tier": pool["tier"],
        "limit": pool["limit"],
        "taken": pool["capacity"],
        "in_use": pool["held"],
        "cached": pool["idle"],
        "segments": sum(arena["segments"] for arena in arenas),
        "largest_free": largest,
        #: 0: all that is free lies in one piece; near 1: in many small ones.
        "fragmentation": 1 - largest / free if free else 0.0,
        "blocked": pool["growth_blocked"],
    }


def _latency(report: Report, before: Report | None, figure: str) -> dict[str, Any]:
    between = since(report["figures"][figure], before["figures"][figure] if before else None)
    return {
        "count": sum(between["counts"]),
        "p50": quantile(between, 0.5),
        "p99": quantile(between, 0.99),
    }


def _holders(report: Report) -> list[dict[str, Any]]:
    everybody = [{**s, "ended": False} for s in report["sessions"]]
    everybody += [{**s, "ended": True} for s in report["ghosts"]]
    return sorted(everybody, key=lambda session: -session["bytes"])


def _client(session: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "pid", "age", "leases", "holds", "bytes", "grants", "waiting", "engine", "ended")
    return {
        **{name: session[name] for name in names},
        "fallbacks": sum(fallbacks(session["tally"]).values()),
    }
