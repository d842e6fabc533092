"""The bench of fleets in its quickest form, and its simulation: what is computed is what is drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import demand, fleet
from bench.fleet import Fleet

BENCH = Path(__file__).resolve().parents[2] / "bench" / "scale.py"
SMALL = Fleet(2, cache=100, tier=800, pictures=20_000, delay=0.0)


@pytest.mark.parametrize("skew", [0.7, 1.0, 1.2])
def test_popularity_is_zipfs(skew: float) -> None:
    """Grouped ranks weigh what they weigh one by one."""
    share, count = fleet.popularity(50_000, skew)
    assert count.sum() == 50_000 and len(count) < 5000
    alone = np.arange(1, 50_001) ** -skew
    alone /= alone.sum()
    ends = count.cumsum().astype(int)
    np.testing.assert_allclose((share * count).cumsum(), alone.cumsum()[ends - 1], atol=1e-5)


@pytest.mark.parametrize(
    "one",
    [SMALL, replace(SMALL, skew=1.2), replace(SMALL, tier=0), replace(SMALL, reuse=1, skew=1.1)],
    ids=["small", "skewed", "no tier", "reuse"],
)
def test_what_is_computed_is_what_is_drawn(one: Fleet) -> None:
    requests = 200_000
    drawn = fleet.drawn(one, requests, seed=3)
    steady = fleet.steady(replace(one, after=0.75 * requests / one.requests))
    for name in ("local", "tier", "made", "stored"):
        assert getattr(steady, name) == pytest.approx(getattr(drawn, name), abs=0.012), name
    assert drawn == fleet.drawn(one, requests, seed=3)


def test_more_of_everything_answers_more() -> None:
    shares = [fleet.steady(replace(SMALL, machines=machines)) for machines in (1, 10, 100, 1000)]
    assert [x.local for x in shares] == pytest.approx([shares[0].local] * 4)
    assert sorted(x.tier for x in shares) == [x.tier for x in shares]
    assert fleet.steady(replace(SMALL, cache=400)).local > shares[0].local
    assert fleet.steady(replace(SMALL, tier=4000)).tier > shares[0].tier
    everything = fleet.steady(replace(SMALL, cache=1e6, tier=1e6, once=0.0, delay=0.0, after=1e12))
    assert everything.local == pytest.approx(1.0, abs=1e-6)
    late = fleet.steady(replace(SMALL, machines=1000, delay=60.0))
    assert late.tier < shares[-1].tier, "what is under way elsewhere is made twice"


def test_load_is_of_the_shares() -> None:
    shares = fleet.Shares(local=0.5, tier=0.3, made=0.2, stored=0.1, objects=1.0)
    load = shares.load(Fleet(10, brokers=4, rate=5.0, gpus=8), nbytes=1_000_000)
    assert load == pytest.approx(
        {
            "tier_lookups_per_s": 200.0,
            "tier_gets_per_s": 120.0,
            "tier_puts_per_s": 40.0,
            "broker_lookups_per_s": 10.0,
            "machine_in_mb_per_s": 12.0,
            "machine_out_mb_per_s": 4.0,
        }
    )


def test_a_ring_divides_keys_and_moves_few() -> None:
    found = fleet.sharding(masters=4, points=256, namespaces=1000, skew=1.0, rounds=5, seed=1)
    assert 1.0 <= found["by_key"] < 1.3 < 2.0 * found["by_namespace"]
    assert found["moved"] == pytest.approx(1 / 5, abs=0.05)
    places, whose = fleet.ring(4, 256, seed=1)
    keys = np.array([0.0, places[0], places[-1], 0.999999])
    assert list(fleet.owner(places, whose, keys)[:3]) == [whose[0], whose[0], whose[-1]]
    assert fleet.owner(places, whose, np.array([1.0]))[0] == whose[0], "the ring closes"


def test_demand_is_load_times_costs() -> None:
    costs = [
        {"kind": "miss", "calls": 1, "per_core_second": 100},
        {"kind": "get", "calls": 2, "per_core_second": 50},
        {"kind": "put", "calls": 2, "per_core_second": 10},
    ]
    lookups = [{"kind": "promised", "per_core_second": 10}, {"kind": "granted", "per_core_second": 40}]
    master = {"lines": costs, "idle_ms_per_s_and_client": 1.0}
    found = {"costs": {"master": master, "broker": {"lookups": lookups}}}
    line = {
        "machines": 4, "brokers": 2, "tier_lookups_per_s": 30.0, "tier_gets_per_s": 10.0, "tier_puts_per_s": 5.0,
        "broker_lookups_per_s": 8.0, "machine_in_mb_per_s": 96.0, "machine_out_mb_per_s": 192.0,
    }  # fmt: skip
    assert demand.master_calls(found, line) == 20 + 2 * 2 * 10 + 2 * 5
    assert demand.master_cores(found, line) == pytest.approx(0.2 + 0.4 + 0.5 + 4 * 2 * 0.001)
    assert demand.broker_cores(found, line) == pytest.approx(0.8 + 0.2)
    assert demand.network_gbit_s(line) == pytest.approx(8 * 0.288 * 3 / 4)
    hit = {"mb": 9.6, "cpu_ms": {"asking mover": 9.6, "storing mover": 4.8}, "put_cpu_ms": 19.2}
    cores = demand.mover_cores(found, {"hits": {"lines": [hit]}}, line)
    assert cores == pytest.approx(48 * 0.0015 + 96 * 0.002), "of each of two movers"


@pytest.mark.mooncake
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.long
def test_every_figure_is_there(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    command = [sys.executable, str(BENCH), "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    broker, master = found["costs"]["broker"], found["costs"]["master"]
    assert broker["books"]["cached_bytes"] < broker["books"]["held_bytes"]
    assert broker["hash_gb_per_core_s"] > 0
    assert {line["kind"] for line in broker["lookups"]} == {"absent", "here", "granted", "promised"}
    assert {line["kind"] for line in master["lines"]} == {"probe", "miss", "get", "put"}
    for line in (*broker["lookups"], *master["lines"]):
        assert line["per_second"] > 0 and line["per_core_second"] > 0
    calls = {line["kind"]: line["calls"] for line in master["lines"]}
    assert calls["get"] > calls["miss"] >= 1 and calls["put"] >= 2
    assert master["object_bytes"] > master["name_bytes"]
    simulation = found["simulation"]
    assert {line["of"] for line in simulation["lines"]} == {"machines", "memory", "brokers", "reuse"}
    for line in simulation["lines"]:
        assert line["local"] + line["tier"] + line["made"] == pytest.approx(1.0, abs=1e-3)
    assert len(simulation["checks"]) == 4 and simulation["sharding"]
    assert "Fleets" in done.stdout and "master" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
