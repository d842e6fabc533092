"""What a fleet asks of each part: the shares of a simulation times the costs that were measured. Pure.

`found` is a result of `bench/scale.py`, `tier` one of `bench/tier.py`, `line` a fleet of the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Found = Mapping[str, Any]

#: The one part that all machines share.
MASTER = "the master, for the whole fleet"


def fleet(found: Found, of: str, **given: float) -> dict[str, Any]:
    """The line of the simulation that has these properties; by default those that stand for all."""
    assumed = found["simulation"]["assumed"]
    wanted = {"skew": assumed["skew"], **given}
    return next(
        line
        for line in found["simulation"]["lines"]
        if line["of"] == of and all(line[name] == value for name, value in wanted.items())
    )


def largest(found: Found) -> dict[str, Any]:
    return fleet(found, "machines", machines=max(line["machines"] for line in found["simulation"]["lines"]))


def _core(found: Found, part: str, kind: str) -> float:
    """Seconds of a core for one of what was measured."""
    lines = found["costs"][part]["lookups" if part == "broker" else "lines"]
    return float(1 / next(line["per_core_second"] for line in lines if line["kind"] == kind))


def master_cores(found: Found, line: Found) -> float:
    """Cores that the master needs."""
    idle = found["costs"]["master"]["idle_ms_per_s_and_client"] / 1000
    asked = sum(number * _core(found, "master", kind) for kind, number in _of_the_master(line).items())
    return asked + max(0.0, idle) * line["machines"] * line["brokers"]


def master_calls(found: Found, line: Found) -> float:
    """Calls a second that the master gets."""
    calls = {each["kind"]: each["calls"] for each in found["costs"]["master"]["lines"]}
    return float(sum(number * calls[kind] for kind, number in _of_the_master(line).items()))


def _of_the_master(line: Found) -> dict[str, float]:
    """What is asked of it in a second. What is found is read twice: its header, and its bytes."""
    gets, puts = line["tier_gets_per_s"], line["tier_puts_per_s"]
    return {"miss": line["tier_lookups_per_s"] - gets, "get": 2 * gets, "put": puts}


def network_gbit_s(line: Found) -> float:
    """Of a machine, in each direction: what it gets and stores, and as much for the others. Any machine's memory may
    have an object, also the one that asks."""
    elsewhere = 1 - 1 / line["machines"]
    return float(8 * (line["machine_in_mb_per_s"] + line["machine_out_mb_per_s"]) * elsewhere / 1000)


def broker_cores(found: Found, line: Found) -> float:
    """Each request asks for a promise, and is granted a feature."""
    each = _core(found, "broker", "promised") + _core(found, "broker", "granted")
    return float(line["broker_lookups_per_s"]) * each


def mover_cores(found: Found, tier: Found, line: Found) -> float:
    """What it gets, verifies and stores, and what it gives to others from memory that it lends."""
    told = next(each for each in tier["hits"]["lines"] if each["mb"] == 9.6)
    per_mb = {name: ms / 1000 / told["mb"] for name, ms in told["cpu_ms"].items()}
    gets, puts = (line[f"machine_{way}_mb_per_s"] / line["brokers"] for way in ("in", "out"))
    return float(
        gets * (per_mb["asking mover"] + per_mb["storing mover"])
        + puts * told["put_cpu_ms"] / 1000 / told["mb"]
    )


def parts(found: Found, tier: Found, line: Found) -> list[tuple[str, float, float, str]]:
    """Each part: what one has, what is asked of it, in which unit."""
    assumed = found["simulation"]["assumed"]
    return [
        ("a machine's network, each direction", assumed["network_gbit_s"], network_gbit_s(line), "Gbit/s"),
        ("a mover, which may use more than one", 1.0, mover_cores(found, tier, line), "core"),
        ("a broker's only thread", 1.0, broker_cores(found, line), "core"),
        (MASTER, assumed["master_threads"], master_cores(found, line), "cores"),
    ]


def fullest(found: Found, tier: Found, line: Found) -> list[tuple[str, float, float, str]]:
    """The same, the fullest part first."""
    return sorted(parts(found, tier, line), key=lambda part: -part[2] / part[1])
