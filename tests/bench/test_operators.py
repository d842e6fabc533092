"""The bench of what looking costs, in its quickest form: every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "operators.py"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.long
def test_every_figure_is_there(tmp_path: Path) -> None:
    file = tmp_path / "operators.json"
    command = [sys.executable, str(BENCH), "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    watched = [line["watched_by"] for line in found["lines"]]
    assert watched == ["no page offered", "nobody", "top", "page", "metrics", "everybody"]
    assert all(line["features_per_s"] > 0 and line["busy_percent_of_a_core"] > 0 for line in found["lines"])
    assert found["features"] > 0 and found["holds"] > 0
    assert "everybody" in done.stdout
