"""The GPU's bench in its quickest form, on a fake GPU: every figure is there. What it is, is not a test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmbroker.cuda.fake_memory import VARIABLE, Machine, Make
from tests.bench.test_transport import figures

BENCH = Path(__file__).resolve().parents[2] / "bench" / "gpu.py"
SECTIONS = {"memory", "rows", "bandwidth", "latency", "loop", "growth", "killed", "storm"}
MIB = 1 << 20


def run(tmp_path: Path, *args: str) -> tuple[subprocess.CompletedProcess[str], Machine, Path]:
    machine = Machine(tmp_path / "gpus", Make(total=1024 * MIB, context=64 * MIB))
    file = tmp_path / "results" / "gpu.json"
    command = [sys.executable, str(BENCH), "--quick", "--json", str(file), *args]
    env = {**os.environ, VARIABLE: os.fspath(machine.directory)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    return done, machine, file


@pytest.mark.usefixtures("no_leaks")
def test_every_figure_is_there(tmp_path: Path) -> None:
    done, machine, file = run(tmp_path, "--without-sglang")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["failed"] == {}
    assert set(found) >= SECTIONS | {"date", "machine", "versions", "gpu", "goals"}
    assert found["gpu"]["driver"] == "fake"
    assert all(line["p50"] > 0 and not line["not_on_device"] for line in found["rows"])
    assert {(line["way"], line["load"]) for line in found["rows"]} == {("broker", False), ("broker", True)}
    assert "cuda_ipc, handle cache" in found["left_out"]["ways"] and found["left_out"]["why"]
    assert all(line["arena"] > 0 and line["plain"] > 0 for line in found["bandwidth"])
    assert {"there", "growing"} < set(found["latency"])
    assert {line["transport"] for line in found["loop"]} == {
        "alone",
        "beside an idle thread",
        "beside arrivals",
    }
    assert [line["loads"] > 0 for line in found["growth"]] == [False, True, True]
    memory = found["memory"]
    assert memory["broker_idle"] == memory["cpu_worker"] == memory["cpu_worker_has_context"] == 0
    assert memory["broker_with_one_segment"] == -memory["after_it_ended"] == 64
    assert found["killed"]["reads"] > 0
    assert (
        found["killed"]["wrong_at_once"] == found["killed"]["wrong_later"] == found["killed"]["refused"] == 0
    )
    storm = found["storm"]
    assert storm["features"] == 160 and storm["wrong"] == 0
    assert storm["reads"] >= storm["takes"] >= 160
    assert storm["device_capacity_mib_after"] == storm["reserve_mib"]
    assert list(figures(found["goals"]))
    for title in (
        "The scheduler thread",
        "Host to device",
        "Seal to loaded",
        "GPU memory",
        "left out",
        "Goals",
    ):
        assert title in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert machine.free(machine.existing[0].uuid) == 1024 * MIB


@pytest.mark.usefixtures("no_leaks")
def test_a_section_that_fails_is_named(tmp_path: Path) -> None:
    os.environ["MMBROKER_FAKE_CUDA_FAULTS"] = "cuMemImportFromShareableHandle=CUDA_ERROR_NOT_PERMITTED"
    try:
        done, _, file = run(tmp_path, "--only", "latency", "--only", "memory")
    finally:
        del os.environ["MMBROKER_FAKE_CUDA_FAULTS"]
    assert done.returncode == 1
    found = json.loads(file.read_text())
    assert "mmbroker doctor" in found["failed"]["latency"]
    assert "FAILED: latency" in done.stdout
