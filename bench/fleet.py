"""A fleet under Zipf-distributed pictures: how many requests its caches answer, and what that asks of the store. Pure.

Every request for a picture goes to some broker of the fleet, whichever; a broker answers it from its own cache, or
fetches it from the shared tier, or has it made. Caches drop what was used least recently. Two ways to the same shares:

`steady` computes them, for a fleet of any size, by the characteristic time of each cache: a picture is there if it was
asked for within that time, and the time is such that the cache is just full. What many brokers miss is close to
independent draws, so that the tier is computed in the same way, from the rates of misses.

`drawn` draws request after request, with real caches, and is the check of the first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The most popular pictures, each counted for itself; those behind them are counted in groups of `WIDTH` of their rank.
SINGLE = 4096
WIDTH = 0.01


@dataclass(frozen=True)
class Fleet:
    """Machines, what their brokers and the tier can keep, in features, and what is asked of them."""

    machines: int
    brokers: int = 8  # on each machine
    cache: float = 1700.0  # features that one broker keeps
    tier: float = 7000.0  # features that each machine adds to the tier; 0: there is none
    pictures: int = 10_000_000  # that come again and again
    skew: float = 0.9  # exponent of their popularity
    once: float = 0.2  # share of requests with a picture that nobody sends again
    rate: float = 18.0  # requests a second to each GPU, one picture each
    gpus: int = 8  # of each machine
    delay: float = 0.5  # s from a miss of the tier until it has what was made
    reuse: int = 0  # local uses again before a feature is stored, 0 or 1
    after: float = 3600.0  # s since the tier was empty

    @property
    def all_brokers(self) -> int:
        return self.machines * self.brokers

    @property
    def requests(self) -> float:
        """A second, of the whole fleet."""
        return self.machines * self.gpus * self.rate


@dataclass(frozen=True)
class Shares:
    """Of all requests: answered by a broker's own cache, by the tier, or made; and stored in the tier."""

    local: float
    tier: float
    made: float
    stored: float
    objects: float  # features in the tier

    def load(self, fleet: Fleet, nbytes: int) -> dict[str, float]:
        """What it asks of the parts; bytes are those of one feature."""
        per_machine = fleet.requests / fleet.machines
        return {
            "tier_lookups_per_s": fleet.requests * (1 - self.local) if fleet.tier else 0.0,
            "tier_gets_per_s": fleet.requests * self.tier,
            "tier_puts_per_s": fleet.requests * self.stored,
            "broker_lookups_per_s": per_machine / fleet.brokers,
            "machine_in_mb_per_s": per_machine * self.tier * nbytes / 1e6,
            "machine_out_mb_per_s": per_machine * self.stored * nbytes / 1e6,
        }


def popularity(pictures: int, skew: float) -> tuple[Floats, Floats]:
    """Shares of single pictures, most popular first, and how many pictures have each."""
    single = np.arange(1, min(pictures, SINGLE) + 1, dtype=np.float64)
    edges = [float(single[-1])]
    while edges[-1] < pictures:
        edges.append(min(float(pictures), np.ceil(edges[-1] * (1 + WIDTH))))
    low, high = np.array(edges[:-1]), np.array(edges[1:])
    # The sum over a group by its integral, from the middle between two ranks to the next such middle.
    a, b = low + 0.5, high + 0.5
    sums = np.log(b / a) if skew == 1 else (b ** (1 - skew) - a ** (1 - skew)) / (1 - skew)
    counts = np.concatenate([np.ones_like(single), high - low])
    each = np.concatenate([single**-skew, sums / (high - low)])
    return each / (each * counts).sum(), counts


def _until(full: float, occupied: Any) -> float:
    """The time at which `occupied(time)` is `full`; a very long one if it never is."""
    low, high = 0.0, 1.0
    while occupied(high) < full:
        low, high = high, high * 2
        if high > 1e15:
            return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if occupied(middle) < full else (low, middle)
    return high


def steady(fleet: Fleet) -> Shares:
    """Shares when the brokers' caches are as full as they become, and the tier has been there for `after` seconds."""
    share, count = popularity(fleet.pictures, fleet.skew)
    total = fleet.requests / fleet.all_brokers  # a second, of one broker
    rate = total * (1 - fleet.once) * share
    fresh = total * fleet.once

    def present(time: float) -> Floats:
        return -np.expm1(-np.minimum(rate * time, 700.0))

    time = _until(fleet.cache, lambda t: float((count * present(t)).sum()) + fresh * t)
    hit = present(time)
    local = float((count * rate * hit).sum()) / total
    if not fleet.tier:
        return Shares(local, 0.0, 1 - local, 0.0, 0.0)

    # The tier: what all brokers miss. Of those misses of the tier whose feature is then used again where it was made,
    # each leads to a store; stored is what comes again, if `reuse` asks for that.
    missed = fleet.all_brokers * rate * (1 - hit)
    chance = np.maximum(hit, 1e-12) if fleet.reuse else np.ones_like(hit)
    stray = 0.0 if fleet.reuse else fleet.all_brokers * fresh
    room = fleet.tier * fleet.machines
    misses = 1 / chance + missed * fleet.delay

    def found(t: float) -> Floats:
        # In one round a feature is found so often until it goes, and missed so often until it is there again. So it
        # comes and goes as if by chance, and since the start its share has come so near to that.
        finds = np.expm1(np.minimum(missed * t, 700.0))
        there = finds / (finds + misses)
        return np.asarray(there * -np.expm1(-missed / misses * fleet.after / np.maximum(there, 1e-12)))

    time = _until(room, lambda t: float((count * found(t)).sum()) + stray * min(t, fleet.after))
    there = found(time)
    tier = float((count * missed * there).sum()) / fleet.requests
    stored = float((count * missed * (1 - there) / misses).sum())
    objects = min(room, float((count * there).sum()) + (stray * min(time, fleet.after) if stray else 0.0))
    return Shares(local, tier, 1 - local - tier, (stored + stray) / fleet.requests, objects)


class Cache:
    """Keeps the features that were used most recently."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, int] = OrderedDict()  # picture -> uses again

    def get(self, picture: int) -> int:
        """How often it has been used again, with this time; 0: it is not here."""
        uses = self._kept.get(picture)
        if uses is None:
            return 0
        self._kept.move_to_end(picture)
        self._kept[picture] = uses + 1
        return uses + 1

    def put(self, picture: int) -> None:
        self._kept[picture] = 0
        self._kept.move_to_end(picture)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)


def drawn(fleet: Fleet, requests: int, seed: int) -> Shares:
    """Shares of the last half of so many requests; the first half fills the caches. Stores take no time here."""
    draw = np.random.default_rng(seed)
    share, count = popularity(fleet.pictures, fleet.skew)
    groups = np.cumsum(share * count)
    ends = np.cumsum(count)
    group = np.searchsorted(groups, draw.random(requests) * groups[-1])
    pictures = ends[group] - 1 - np.floor(draw.random(requests) * count[group])
    fresh = draw.random(requests) < fleet.once
    pictures[fresh] = fleet.pictures + np.flatnonzero(fresh)
    brokers = draw.integers(0, fleet.all_brokers, requests)

    caches = [Cache(round(fleet.cache)) for _ in range(fleet.all_brokers)]
    tier = Cache(round(fleet.tier * fleet.machines))
    made_here: set[tuple[int, int]] = set()  # by this broker, and not stored yet
    local = fetched = stored = 0
    half = requests // 2
    todo = zip(pictures.astype(np.int64).tolist(), brokers.tolist(), strict=True)
    for number, (picture, broker) in enumerate(todo):
        if number == half:
            local = fetched = stored = 0
        cache, store = caches[broker], False
        if uses := cache.get(picture):
            local += 1
            store = uses == fleet.reuse and (broker, picture) in made_here
        else:
            cache.put(picture)
            if fleet.tier and tier.get(picture):
                fetched += 1
                made_here.discard((broker, picture))
            elif fleet.tier and fleet.reuse:
                made_here.add((broker, picture))
            else:
                store = bool(fleet.tier)
        if store:
            stored += 1
            tier.put(picture)
    n = requests - half
    return Shares(local / n, fetched / n, 1 - (local + fetched) / n, stored / n, float(len(tier)))


# --- several masters ------------------------------------------------------------------------------------------------


def ring(masters: int, points: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """A hash ring: where its points are in [0, 1), sorted, and whose they are."""
    draw = np.random.default_rng(seed)
    places = draw.random((masters, points))
    order = np.argsort(places, axis=None)
    return places.ravel()[order], np.repeat(np.arange(masters), points)[order]


def owner(places: Floats, whose: NDArray[np.int64], keys: Floats) -> NDArray[np.int64]:
    """The master of each key: that of the next point."""
    return np.asarray(whose[np.searchsorted(places, keys) % len(places)])


def sharding(
    masters: int, points: int, namespaces: int, skew: float, rounds: int, seed: int
) -> dict[str, float]:
    """The busiest master's load against the mean, if namespaces are divided and if keys are, and the share of keys
    that one more master takes over. Means of `rounds` rings."""
    draw = np.random.default_rng(seed)
    share, count = popularity(namespaces, skew)
    weights = np.repeat(share, count.astype(np.int64))
    by_namespace, by_key, moved = [], [], []
    for _ in range(rounds):
        places, whose = ring(masters, points, int(draw.integers(1 << 31)))
        load = np.bincount(owner(places, whose, draw.random(namespaces)), weights, masters)
        by_namespace.append(load.max() * masters)
        keys = draw.random(100_000)
        before = owner(places, whose, keys)
        by_key.append(np.bincount(before, minlength=masters).max() * masters / len(keys))
        more = np.concatenate([places, draw.random(points)])
        order = np.argsort(more)
        after = owner(more[order], np.concatenate([whose, np.full(points, masters)])[order], keys)
        moved.append(float((before != after).mean()))
    return {
        "masters": masters,
        "points": points,
        "by_namespace": round(float(np.mean(by_namespace)), 2),
        "by_key": round(float(np.mean(by_key)), 2),
        "moved": round(float(np.mean(moved)), 3),
    }
