"""What the state machine says about itself: msgpack-native values, without secrets (ids, paths, descriptors)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from mmbroker.proto.tags import session_tag

from .arena.allocator import shares
from .health import health
from .pool import Segment
from .records import Engine, Feature, Mover, Request, Session
from .seeking import COUNTS

if TYPE_CHECKING:
    from .state import Broker


#: What lists things by namespace, and what sums them up.
_BY_NAMESPACE = ("arenas", "namespaces", "sessions", "ghosts", "engines", "movers", "waiting", "largest")


def within(report: dict[str, Any], namespace: str) -> dict[str, Any]:
    """A report for a user who is not the operator: nothing that belongs to other namespaces, but sums."""
    mine = {what: [one for one in report[what] if one["namespace"] == namespace] for what in _BY_NAMESPACE}
    return {**report, **mine, "health": {**report["health"], "stuck": []}}


def make(broker: Broker, now: float, features: int) -> dict[str, Any]:
    """Bytes are whole pages; ages are in seconds. `budget` is each client's, of leases and holds; 0 is none."""
    books = broker.books
    living = [s for s in books.sessions.values() if not s.ended]
    ghosts = [s for s in books.sessions.values() if s.ended]
    return {
        "draining": broker.admission.draining,
        "halting": broker.halting,
        "health": health(broker, now),
        "pool": _pool(broker, "host"),
        "device": _pool(broker, "device") | _device(broker) if "device" in books.pools else None,
        "arenas": _arenas(broker),
        "features": len(books.features),
        "features_idle": books.idle_count,
        "leases": len(broker.leases.open),
        "leased_bytes": sum(lease.slot.nbytes for lease in broker.leases.open.values()),
        "promises": sum(len(s.promises) for s in living),
        "holds": len(broker.holds.open),
        "holds_dismissed": sum(hold.over for hold in broker.holds.open.values()),
        "quarantined": sum(slot.nbytes for s in ghosts for slot in s.quarantine),
        "writer_pins": sum(len(s.pins) for s in books.sessions.values()),
        "budget": {
            "features": broker.limits.client_budget_features,
            "bytes": broker.limits.client_budget_bytes,
        },
        "namespaces": _namespaces(broker),
        "sessions": [_session(s, session_tag(books.boot, s.number), now) for s in living],
        "ghosts": [_session(s, session_tag(books.boot, s.number), now) for s in ghosts],
        "engines": [_engine(broker, engine, now) for engine in books.engines.values()],
        "movers": [_mover(mover) for mover in broker.seeking.movers.values()],
        "waiting": [_request(broker, r, now) for r in _waiting(broker)],
        "waiting_for": dict(Counter(request.reason.value for request in _all_waiting(broker).values())),
        "waiting_count": len(broker.admission.queue)
        + len({n for q in broker.admission.flying.values() for n in q}),
        "timers": len(books.timers),
        "counters": dict(books.counters),
        "figures": books.figures.report(),
        "told_before": broker.tallies.before,
        "largest": [_feature(broker, f) for f in _largest(broker, features)],
    }


def _pool(broker: Broker, tier: str) -> dict[str, Any]:
    pool = broker.books.pools[tier]
    return {
        "tier": tier,
        "limit": pool.limit,
        "capacity": pool.capacity,
        "used": pool.used,
        "idle": pool.idle,
        "held": pool.held,
        "watermark": broker.limits.watermark if tier == "host" else 0.0,
        "growth_blocked": broker.rooms[tier].blocked,
    }


def _device(broker: Broker) -> dict[str, Any]:
    replicas = broker.holds.replicas
    found = [f.replica for f in broker.books.features.values() if f.replica is not None]
    return {
        "uuid": broker.limits.device,
        "replicas": len(found),
        "loading": sum(not replica.ready for replica in found),
        "wanting": len(replicas.wanting) if replicas is not None else 0,
    }


def _arenas(broker: Broker) -> list[dict[str, Any]]:
    arenas: dict[tuple[str, str], dict[str, Any]] = {}
    for tier, segment in [(t, s) for t, pool in broker.books.pools.items() for s in pool.segments.values()]:
        arena = arenas.setdefault(
            (tier, segment.namespace),
            {"tier": tier, "namespace": segment.namespace, "segments": 0, "growing": 0, "retired": 0, "bytes": 0,
             "used": 0, "largest_free": 0},
        )  # fmt: skip
        arena["segments"] += 1
        arena["growing"] += not segment.ready
        arena["retired"] += segment.retired
        arena["bytes"] += segment.allocator.nbytes
        arena["used"] += segment.allocator.used
        if segment.ready and not segment.retired:
            arena["largest_free"] = max(arena["largest_free"], segment.allocator.largest_free)
    return list(arenas.values())


def _namespaces(broker: Broker) -> list[dict[str, Any]]:
    """What is in use in each, of how much; 0 bytes is no limit of its own."""
    books, limits = broker.books, broker.limits
    names = {s.namespace for s in books.sessions.values()} | books.claims.keys()
    names |= {s.namespace for pool in books.pools.values() for s in pool.segments.values() if s.namespace}
    return [
        {
            "namespace": name,
            "features": books.claims[name],
            "features_limit": limits.features_per_namespace,
            "bytes": books.pool.held_by(name),
            "bytes_limit": limits.namespace_bytes,
        }
        for name in sorted(names)
    ]


def _session(session: Session, tag: str, now: float) -> dict[str, Any]:
    return {
        "name": session.name,
        "tag": tag,
        "uid": session.uid,
        "pid": session.pid,
        "namespace": session.namespace,
        "traceable": session.traceable,
        "age": round(now - session.since, 3),
        "leases": len(session.leases),
        "promises": len(session.promises),
        "holds": len(session.holds),
        "bytes": session.nbytes,
        "grants": len(session.grants),
        "unacked": len(session.unacked),
        "waiting": len(session.requests) + len(session.tickets),
        "quarantined": sum(slot.nbytes for slot in session.quarantine),
        "engine": session.engine.name if session.engine is not None else None,
        "tally": session.tally,
    }


def _engine(broker: Broker, engine: Engine, now: float) -> dict[str, Any]:
    ranks = []
    for rank, number in sorted(engine.ranks.items()):
        session = broker.books.sessions[number]
        oldest = next(iter(session.unacked.items()), None)
        silent = now - oldest[1] if oldest else 0.0
        ranks.append(
            {
                "rank": rank,
                "name": session.name,
                "pid": session.pid,
                "device": session.device,
                "path": session.path,
                "why": session.why,
                "access": session.access,
                "grants": len(session.grants),
                "unacked": len(session.unacked),
                "unacked_for": round(silent, 3),
                "unacked_feature": session.grants[oldest[0]].feature.number if oldest else None,
                "lagging": silent >= broker.limits.lagging_after,
            }
        )
    return {
        "engine": engine.name,
        "namespace": engine.namespace,
        "world": engine.world,
        "complete": engine.complete,
        "mover": engine.mover,
        "in_flight": engine.in_flight["host"],
        "in_flight_device": engine.in_flight["device"],
        "features": engine.features,
        "features_limit": broker.limits.features_per_engine,
        "budget": broker.books.budget("host", engine),
        "granted": {"features": engine.granted["features"], "bytes": engine.granted["bytes"]},
        "reused": [{"engine": name, **counts} for name, counts in engine.reused.items()],
        "shares": _shares(broker, engine),
        "ranks": ranks,
    }


def _mover(mover: Mover) -> dict[str, Any]:
    """`sought` is what it is asked for at present; what came of it is counted since it began."""
    return {
        "namespace": mover.session.namespace,
        "name": mover.session.name,
        "pid": mover.session.pid,
        "open": mover.open,
        "wait": mover.wait,
        "most": mover.most,
        "reuse": mover.reuse,
        "sought": len(mover.sought),
        "counts": {what: mover.counts[what] for what in COUNTS},
    }


def _shares(broker: Broker, engine: Engine) -> list[dict[str, Any]]:
    """What it has in use at present that other engines have in use, too."""
    found = []
    for other in broker.books.engines.values():
        if other is not engine and (common := engine.uses.keys() & other.uses.keys()):
            nbytes = sum(broker.books.numbered[number].slot.nbytes for number in common)
            found.append({"engine": other.name, "features": len(common), "bytes": nbytes})
    return found


def _all_waiting(broker: Broker) -> dict[int, Request]:
    found = {n: r for waiting in broker.admission.flying.values() for n, r in waiting.items()}
    found.update(broker.admission.queue)
    return found


def _waiting(broker: Broker) -> list[Request]:
    found = _all_waiting(broker)
    return [found[n] for n in islice(sorted(found), 100)]


def _request(broker: Broker, request: Request, now: float) -> dict[str, Any]:
    return {
        "client": broker.books.sessions[request.session].name,
        "namespace": request.namespace,
        "for": request.reason.value,
        "items": len(request.items),
        "bytes": request.nbytes,
        "engine": request.engine.name if request.engine is not None else None,
        "age": round(now - request.since, 3),
    }


def _largest(broker: Broker, count: int) -> list[Feature]:
    if not count:
        return []
    return sorted(broker.books.features.values(), key=lambda f: -f.form.nbytes)[:count]


def _feature(broker: Broker, feature: Feature) -> dict[str, Any]:
    namespace, key = feature.place
    engines = {h.engine.name for n in feature.holds if (h := broker.holds.open[n]).engine is not None}
    return {
        "feature": feature.number,
        "namespace": namespace,
        "kind": key.kind.name.lower(),
        "key": key.value.hex(),
        "modality": feature.form.modality,
        "dtype": feature.form.dtype,
        "shape": list(feature.form.shape),
        "bytes": feature.form.nbytes,
        "holds": len(feature.holds),
        "engines": sorted(engines),
        "hits": feature.hits,
    }


def segments(broker: Broker, cells: int, most: int) -> list[dict[str, Any]]:
    """Segments, at most so many, each drawn as so many cells: what is in slots (`cells`), and what of it has to stay
    (`held`: all but the cache). In tenths, rounded up: a digit each, ``a`` for full."""
    found = [(tier, s) for tier, pool in broker.books.pools.items() for s in pool.segments.values()][:most]
    # In most segments everything is held, or everything is cache: only the others are looked into.
    idle: dict[int, list[tuple[int, int]]] = {s.number: [] for _, s in found if 0 < s.held < s.allocator.used}
    for resting in broker.books.idle.values() if idle else ():
        for entry in resting:
            slot = entry.slot
            if slot.segment in idle:
                idle[slot.segment].append((slot.offset, slot.nbytes))
    return [_drawn(tier, segment, idle.get(segment.number, []), cells) for tier, segment in found]


def _drawn(tier: str, segment: Segment, idle: list[tuple[int, int]], cells: int) -> dict[str, Any]:
    used = segment.allocator.occupancy(cells)
    cached = shares(segment.allocator.nbytes, idle, cells) if segment.held else used
    return {
        "segment": segment.number,
        "tier": tier,
        "namespace": segment.namespace,
        "bytes": segment.allocator.nbytes,
        "used": segment.allocator.used,
        "slots": segment.allocator.slots,
        "state": "growing" if not segment.ready else "retired" if segment.retired else "ready",
        "cells": _tenths(used),
        "held": _tenths(all_of - some for all_of, some in zip(used, cached, strict=True)),
    }


def _tenths(shown: Iterable[float]) -> str:
    return "".join(
        "0123456789a"[max(0, math.ceil(10 * share - 1e-6))] for share in shown
    )  # that much is rounding
