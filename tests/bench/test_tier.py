"""The bench of the tier in its quickest form, with the real Mooncake: every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "tier.py"


@pytest.mark.mooncake
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.long
def test_every_figure_is_there(tmp_path: Path) -> None:
    file = tmp_path / "tier.json"
    command = [sys.executable, str(BENCH), "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())

    lines = found["transfers"]
    assert {(line["way"], line["what"]) for line in lines} == {
        (way, what) for way in ("store", "plain TCP") for what in ("get", "put")
    }
    assert all(line[name] > 0 for line in lines for name in ("ms_p50", "ms_p99", "gb_per_s", "cpu_ms", "n"))
    (line,) = found["hits"]["lines"]
    assert line["fetched"]["p50"] > line["here"]["p50"] > 0
    assert set(line["cpu_ms"]) == {"asking mover", "storing mover", "broker", "master"}
    assert found["hits"]["fetched"] == 2 * line["fetched"]["n"] and not found["hits"]["altered"]
    assert [line["what"] for line in found["misses"]] == [
        "no tier", "the store has not got it", "no tier, later", "the store is left alone",
    ]  # fmt: skip
    assert all(line["p50"] > 0 for line in found["misses"])
    assert (
        found["picture"]["mb"] > 1 and found["picture"]["made_ms"] > 0 and found["picture"]["fetched_ms"] > 0
    )
    assert {goal["what"] for goal in found["goals"]} >= {"features that came altered"}
    for title in ("Between two processes", "A worker's hits", "A worker's misses", "A picture of"):
        assert title in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
