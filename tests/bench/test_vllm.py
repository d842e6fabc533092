"""The bench of vLLM: its part that needs no vLLM gives its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "vllm.py"


def test_the_scheduler_half_alone(tmp_path: Path) -> None:
    file = tmp_path / "vllm.json"
    command = [sys.executable, str(BENCH), "--step", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [line["step"] for line in found["step"]] == ["decode", "first sights", "loaded and ended"]
    assert all(0 < line["p50"] <= line["p99"] for line in found["step"])
    assert "decode" in done.stdout
