"""The bench in its quickest form: every figure is there. What the figures are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "transport.py"
TRANSPORTS = {"broker, readonly", "broker, copy", "sglang", "sglang, hash given"}
COMPARISON = "private tensors"
#: Figures that may be zero or less: differences, shares, and counts of what should not be.
SIGNED = ("slowdown_percent", "window_full_percent", "waited_us", "no_core_us", "load_before", "lookup")


def figures(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with the way to it."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from figures(one, f"{path}.{key}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from figures(one, f"{path}[{number}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


@pytest.mark.sglang
def test_every_figure_is_there(tmp_path: Path, no_leaks: None) -> None:
    file = tmp_path / "results" / "transport.json"
    command = [sys.executable, str(BENCH), "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    found = json.loads(file.read_text())
    assert {"date", "machine", "versions", "rows", "take", "producer", "round_trips"} <= set(found)
    assert {"throughput", "loop", "memory", "goals"} <= set(found)
    bad = [path for path, n in figures(found) if n <= 0 and not path.rpartition(".")[2].startswith(SIGNED)]
    assert not bad, f"figures that are not positive: {bad}"

    sizes = {row["mb"] for row in found["rows"]}
    assert len(sizes) > 1
    assert {(row["mb"], row["transport"]) for row in found["rows"]} == {
        (mb, transport) for mb in sizes for transport in (COMPARISON, *TRANSPORTS)
    }
    for row in found["rows"]:
        assert {"scheduler_us_p50", "scheduler_us_p99", "first_read_us_p50", "end_us_p50", "n"} <= set(row)
        assert ("producer_us_p50" in row) == (row["transport"] in TRANSPORTS)
    assert {kind for access in found["take"].values() for kind in access} == {
        "take_release",
        "take_tensor_release",
    }
    assert {line["batch"] for line in found["producer"]["lines"]} == {1, 8}
    assert found["producer"]["hash_threads"] >= 1
    assert found["round_trips"]["put_many_of_8"]["round_trips"] == 2
    for place in (found["round_trips"], found["round_trips"]["while_growing"]):
        assert {"p50", "p99"} <= set(place["control"]) & set(place["bare_zeromq"]) & set(
            place["seal_to_answer"]
        )
    assert {(line["kind"], line["producers"]) for line in found["throughput"]} == {
        (kind, producers) for kind in ("new", "hit") for producers in (1, 2)
    }
    for load in {(line["mb"], line["asked_per_second"]) for line in found["loop"]}:
        lines = [line for line in found["loop"] if (line["mb"], line["asked_per_second"]) == load]
        assert {line["transport"] for line in lines} == {COMPARISON, *TRANSPORTS}
        assert all(
            {"iteration_us", "slowdown_percent", "gap_ms", "reached_per_second"} <= set(x) for x in lines
        )
    processes = {line["process"] for line in found["memory"]["processes"]}
    assert {"broker, idle", "producer, readonly", "engine's rank, copy"} <= processes

    for title in ("The scheduler thread", "The producer", "Messages", "A scheduler-like loop", "Memory"):
        assert title in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.usefixtures("no_leaks")
def test_a_section_alone(tmp_path: Path) -> None:
    file = tmp_path / "round_trips.json"
    command = [sys.executable, str(BENCH), "--quick", "--only", "round_trips", "--json", str(file)]
    done = subprocess.run([*command, "--without-sglang"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert "round_trips" in found
    assert not {"rows", "producer", "throughput", "loop", "memory"} & set(found)
