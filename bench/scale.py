"""From what was measured to a fleet: the costs of a broker and of the store's master, and hit rates of many machines.

    python bench/scale.py [--json FILE] [--only SECTION ...] [--quick]

`costs` measures this machine; `simulation` draws and computes, the same figures for the same seed. What a GPU is asked
is taken from a stored run of the real SGLang on one. With the simulation alone, a result's measured costs stay as they
are. A full run takes about two minutes on two cores.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from bench import costs, fleet, frame, machine, store, tables
from bench.fleet import Fleet
from bench.frame import Say
from bench.processes import Workshop
from mmbroker.screen import table

#: The run that says how many requests a GPU serves, and of which pictures.
SERVED = Path(__file__).parent / "results" / "serve-h200-b-2026-11-29.json"
LOAD, TRANSPORT = "one", "broker"
#: Bytes that a patch of the Qwen-VL family takes, and its edge in pixels; edges of pictures are even numbers of them.
PATCH_BYTES, PATCH = 1176 * 4, 14
#: Share of a broker's arena that its cache may fill, and of a store's memory.
FILLED = 0.9
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much is measured, and which fleets are looked at."""

    seconds: float = 4.0
    features: int = 50_000
    objects: int = 50_000
    idle: int = 16
    idle_seconds: float = 15.0
    machines: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    skews: tuple[float, ...] = (0.7, 0.9, 1.1)
    cache_gib: tuple[int, ...] = (4, 16, 64)
    tier_gib: tuple[int, ...] = (0, 16, 64, 256)
    drawn: int = 2_000_000
    masters: tuple[int, ...] = (2, 4, 8, 16)
    rounds: int = 200
    seed: int = 8


#: The same in a few seconds: to see that everything works, not to learn anything.
QUICK = Plan(
    seconds=0.1, features=2000, objects=2000, idle=2, idle_seconds=0.1, machines=(1, 1000), skews=(0.9,),
    cache_gib=(16,), tier_gib=(0, 64), drawn=20_000, masters=(4,), rounds=2,
)  # fmt: skip
#: What stands for a fleet where only one thing is varied.
SKEW, CACHE_GIB, TIER_GIB = 0.9, 16, 64
#: Points of each master on the hash ring, and namespaces, with loads that are Zipf-distributed, too.
POINTS, NAMESPACES = 256, 1000
#: A machine's network, in each direction; threads of a master that answer, as it is started; connections that a mover
#: makes to each one that lends memory.
NETWORK_GBIT_S, MASTER_THREADS, CONNECTIONS = 100, 16, 2


def served() -> dict[str, Any]:
    """What one GPU served: requests a second with one picture each, and the bytes of its features."""
    found = json.loads(SERVED.read_text())
    run = next(r for r in found["runs"] if (r["load"]["name"], r["transport"]) == (LOAD, TRANSPORT))
    width, height = run["load"]["size"]
    patches = 2 * round(width / (2 * PATCH)) * 2 * round(height / (2 * PATCH))
    return {
        "from": SERVED.name,
        "picture": [width, height],
        "requests_per_s": run["figures"]["requests_per_second"]["value"],
        "feature_bytes": patches * PATCH_BYTES,
    }


def measured(plan: Plan, say: Say) -> dict[str, Any]:
    """What a broker and a master cost on this machine."""
    with Workshop() as shop:
        say("broker: bytes of its books")
        return {
            "broker": {
                "books": costs.books(shop, plan.features),
                "lookups": costs.lookups(shop, plan.seconds, say),
                "hash_gb_per_core_s": costs.hashing(plan.seconds),
            },
            "master": store.measure(shop, plan.seconds, plan.objects, plan.idle, plan.idle_seconds, say),
        }


# --- the simulation -------------------------------------------------------------------------------------------------


def features(gib: float, nbytes: int) -> float:
    """How many fit."""
    return gib * GIB * FILLED / nbytes


def line(asked: dict[str, Any], cache_gib: float, tier_gib: float, **given: Any) -> dict[str, Any]:
    """One fleet, its shares, and what they ask of the parts."""
    nbytes = asked["feature_bytes"]
    one = Fleet(
        cache=features(cache_gib, nbytes),
        tier=features(tier_gib, nbytes),
        rate=asked["requests_per_s"],
        **given,
    )
    shares = fleet.steady(one)
    return {
        "machines": one.machines,
        "brokers": one.brokers,
        "skew": one.skew,
        "cache_gib": cache_gib,
        "tier_gib": tier_gib,
        "reuse": one.reuse,
        **{name: round(share, 5) for name, share in asdict(shares).items() if name != "objects"},
        "objects": round(shares.objects),
        **{name: round(value, 1) for name, value in shares.load(one, nbytes).items()},
    }


def varied(plan: Plan, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """By machines and skew; by memory; by what shares a cache; by what is stored."""
    most = plan.machines[-1]
    for skew in plan.skews:
        for machines in plan.machines:
            yield {"of": "machines", **line(asked, CACHE_GIB, TIER_GIB, machines=machines, skew=skew)}
    for cache in plan.cache_gib:
        for tier in plan.tier_gib:
            yield {"of": "memory", **line(asked, cache, tier, machines=most, skew=SKEW)}
    for brokers in (8, 1):  # each GPU's own, or one of a machine, with as much memory in all
        gib = CACHE_GIB * 8 / brokers
        yield {"of": "brokers", **line(asked, gib, TIER_GIB, machines=most, skew=SKEW, brokers=brokers)}
    for reuse in (0, 1):
        yield {"of": "reuse", **line(asked, CACHE_GIB, TIER_GIB, machines=most, skew=SKEW, reuse=reuse)}


#: Small fleets that are drawn request by request: caches and pictures are fewer, or most would never fill.
CHECKED = (
    Fleet(1, cache=300, tier=5000, pictures=100_000, delay=0.0),
    Fleet(4, cache=200, tier=2000, pictures=100_000, delay=0.0, skew=0.7),
    Fleet(4, cache=200, tier=2000, pictures=100_000, delay=0.0, skew=1.1),
    Fleet(4, cache=200, tier=100, pictures=100_000, delay=0.0, skew=1.1, reuse=1),
)


def checked(plan: Plan) -> Iterator[dict[str, Any]]:
    """Shares that were drawn beside those that were computed."""
    for number, one in enumerate(CHECKED):
        drawn = fleet.drawn(one, plan.drawn, plan.seed + number)
        # What is counted comes in the last half: on the average when three quarters are over.
        steady = fleet.steady(replace(one, after=0.75 * plan.drawn / one.requests))
        yield {
            **{
                name: getattr(one, name)
                for name in ("machines", "skew", "cache", "tier", "pictures", "reuse")
            },
            "requests": plan.drawn,
            **{f"{name}_drawn": round(getattr(drawn, name), 4) for name in ("local", "tier", "stored")},
            **{f"{name}_computed": round(getattr(steady, name), 4) for name in ("local", "tier", "stored")},
        }


def simulated(plan: Plan, say: Say) -> dict[str, Any]:
    asked = served()
    example = Fleet(1)
    say("simulation: fleets")
    lines = list(varied(plan, asked))
    say("simulation: the same by drawing")
    checks = list(checked(plan))
    say("simulation: several masters")
    return {
        "asked": asked,
        "assumed": {
            "gpus": example.gpus,
            "pictures": example.pictures,
            "once": example.once,
            "delay_s": example.delay,
            "after_s": example.after,
            "filled": FILLED,
            "cache_gib": CACHE_GIB,
            "tier_gib": TIER_GIB,
            "skew": SKEW,
            "namespaces": NAMESPACES,
            "points": POINTS,
            "network_gbit_s": NETWORK_GBIT_S,
            "master_threads": MASTER_THREADS,
            "connections_of_a_pair": CONNECTIONS,
        },
        "seed": plan.seed,
        "lines": lines,
        "checks": checks,
        "sharding": [
            fleet.sharding(masters, POINTS, NAMESPACES, 1.0, plan.rounds, plan.seed)
            for masters in plan.masters
        ],
    }


SECTIONS: dict[str, Callable[[Plan, Say], dict[str, Any]]] = {
    "costs": measured,
    "simulation": simulated,
}


def run(sections: list[str], plan: Plan) -> dict[str, Any]:
    started = time.monotonic()
    say = frame.saying(started)
    found = frame.origin(mooncake=machine.version(store.PACKAGE))
    for section in sections:
        found[section] = SECTIONS[section](plan, say)
    found["seconds"] = round(time.monotonic() - started, 1)
    return found


# --- what a person reads --------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    console = Console(width=120, highlight=False, emoji=False)
    console.print(frame.heading(found))
    if "costs" in found:
        _show_costs(console, found["costs"])
    if "simulation" in found:
        _show_simulation(console, found["simulation"])


def _show_costs(console: Console, found: dict[str, Any]) -> None:
    for title, lines in (
        ("The broker: features", found["broker"]["lookups"]),
        ("Mooncake's master: objects", found["master"]["lines"]),
    ):
        made = table(title, "what", ">clients", ">a second", ">a second of its own core")
        for each in lines:
            made.add_row(
                each["what"],
                str(each["clients"]),
                *(f"{each[n]:,}" for n in ("per_second", "per_core_second")),
            )
        console.print(made)
    books, master = found["broker"]["books"], found["master"]
    console.print(
        f"a feature takes {books['cached_bytes']:,} bytes of a broker's books, {books['held_bytes']:,} while it is "
        f"held; an object {master['object_bytes']:,} of the master's; an idle client "
        f"{master['idle_ms_per_s_and_client']} ms of a core each second; "
        f"hashing: {found['broker']['hash_gb_per_core_s']} GB/s and core"
    )


def _show_simulation(console: Console, found: dict[str, Any]) -> None:
    made = table(
        "Fleets: shares of requests in %, and what they ask", ">machines", ">brokers", ">skew", ">cache GiB",
        ">tier GiB", ">reuse", ">local", ">tier", ">made", ">stored", ">objects", ">lookups/s", ">MB/s in", ">MB/s out",
    )  # fmt: skip
    for each in found["lines"]:
        made.add_row(
            *(f"{each[n]:g}" for n in ("machines", "brokers", "skew", "cache_gib", "tier_gib", "reuse")),
            *(f"{100 * each[n]:.1f}" for n in ("local", "tier", "made", "stored")),
            f"{each['objects']:,}",
            *(
                tables.number(each[n])
                for n in ("tier_lookups_per_s", "machine_in_mb_per_s", "machine_out_mb_per_s")
            ),
        )
    console.print(made)
    made = table(
        "Computed and drawn: % of requests",
        ">machines",
        ">skew",
        ">reuse",
        ">local",
        ">drawn",
        ">tier",
        ">drawn",
    )
    for each in found["checks"]:
        shares = ("local_computed", "local_drawn", "tier_computed", "tier_drawn")
        made.add_row(
            *(f"{each[n]:g}" for n in ("machines", "skew", "reuse")),
            *(f"{100 * each[n]:.2f}" for n in shares),
        )
    console.print(made)
    made = table(
        "Several masters: the busiest against the mean",
        ">masters",
        ">namespaces",
        ">keys",
        ">moved by one more",
    )
    for each in found["sharding"]:
        made.add_row(*(f"{each[n]:g}" for n in ("masters", "by_namespace", "by_key", "moved")))
    console.print(made)


def main() -> None:
    asked = frame.asked(__doc__, SECTIONS)
    found = run(asked.sections, QUICK if asked.quick else Plan())
    show(found)
    if asked.file is not None:
        if "costs" not in asked.sections and asked.file.exists():  # what was measured stays, and where
            found = found | json.loads(asked.file.read_text()) | {"simulation": found["simulation"]}
        frame.write(asked.file, found)


if __name__ == "__main__":
    main()
