"""The doctor, as a person or a script meets it: what it says where things work, and where they do not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mmbroker import doctor
from mmbroker.check import BROKEN, FINE, NOTE, Check
from mmbroker.cuda.fake_faults import VARIABLE as FAULTS
from mmbroker.cuda.fake_memory import VARIABLE as FAKE
from mmbroker.cuda.fake_memory import Machine, Make
from mmbroker.tier import store
from tests.cli.test_cli import mmbroker
from tests.conftest import StartBroker
from tests.kit import PATIENCE

MIB = 1 << 20
ONE = "GPU-fa4e0000-0000-4000-8000-000000000000"
TWO = "GPU-fa4e1111-0000-4000-8000-000000000001"
GPU = ("driver", "GPUs", "GPU memory", "VMM export", "import", "pinning")
HOST = ("host memory", "namespaces", "pidfd", "memfd", "MADV_POPULATE", "descriptors")
REST = ("instance directory", "broker", "SGLang plugin", "Mooncake")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One fake GPU of 4 GiB."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(tmp_path / "gpus", Make(uuids=(ONE,), total=4096 * MIB, context=500 * MIB))


def examine(
    gpus: Machine | None, root: Path, *args: str, **env: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the checks by name."""
    if gpus is not None:
        env[FAKE] = os.fspath(gpus.directory)
    result = mmbroker("doctor", "--json", *args, MMBROKER_DIR=os.fspath(root), **env)
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert set(told) == {"fine", "checks"}
    assert told["fine"] is (result.returncode == 0)
    for check in told["checks"]:
        assert set(check) == {"name", "state", "found", "advice"}
        assert check["state"] in (FINE, NOTE, BROKEN) and check["found"]
        assert bool(check["advice"]) or check["state"] == FINE, f"no advice: {check}"
    return result.returncode, {check["name"]: check for check in told["checks"]}


def test_everything_works(gpus: Machine, broker_root: Path) -> None:
    code, checks = examine(gpus, broker_root)
    assert tuple(checks) == (*GPU, *HOST, *REST)
    assert {name: checks[name]["state"] for name in GPU} == dict.fromkeys(GPU, FINE)
    assert ONE in checks["GPUs"]["found"] and "4096 MiB" in checks["GPUs"]["found"]
    assert "child process" in checks["import"]["found"] and "memlock" in checks["pinning"]["found"]
    for kind in ("pid", "ipc", "user"):
        assert f"{kind} {os.stat(f'/proc/self/ns/{kind}').st_ino}" in checks["namespaces"]["found"]
    assert checks["broker"]["state"] == NOTE and "mmbroker start" in checks["broker"]["advice"]
    assert code == 0 or [c for c in checks.values() if c["state"] == BROKEN] == [checks["SGLang plugin"]]
    assert gpus.free(ONE) == 4096 * MIB and not gpus.processes(ONE)


@pytest.mark.parametrize(
    ("fault", "broken", "word"),
    [
        ("nvmlDeviceGetMemoryInfo=NVML_ERROR_999", "GPU memory", "utility"),
        ("cuMemCreate=CUDA_ERROR_NOT_SUPPORTED", "VMM export", "cuMemCreate"),
        (
            "cuMemExportToShareableHandle=CUDA_ERROR_NOT_SUPPORTED",
            "VMM export",
            "cuMemExportToShareableHandle",
        ),
        (
            "cuMemImportFromShareableHandle=CUDA_ERROR_NOT_PERMITTED",
            "import",
            "cuMemImportFromShareableHandle",
        ),
        ("cuMemMap=CUDA_ERROR_OUT_OF_MEMORY", "import", "cuMemMap"),
        ("cuDevicePrimaryCtxRetain=CUDA_ERROR_OUT_OF_MEMORY", "import", "cuDevicePrimaryCtxRetain"),
        ("zeros", "import", "not read"),
        ("memlock=100", "pinning", "ulimit -l"),
        ("cuMemHostRegister=CUDA_ERROR_NOT_SUPPORTED", "pinning", "cuMemHostRegister"),
    ],
)
def test_what_is_broken_is_named(
    gpus: Machine, broker_root: Path, fault: str, broken: str, word: str
) -> None:
    code, checks = examine(gpus, broker_root, **{FAULTS: fault})
    assert code == 1
    assert checks[broken]["state"] == BROKEN
    assert word in checks[broken]["found"] + checks[broken]["advice"]
    fine = GPU[: GPU.index(broken)]
    assert {name: checks[name]["state"] for name in fine} == dict.fromkeys(fine, FINE)
    assert gpus.free(ONE) == 4096 * MIB


def test_a_full_gpu_is_a_note(gpus: Machine, broker_root: Path) -> None:
    fd = gpus.create(ONE, 2048 * MIB)
    try:
        _, checks = examine(gpus, broker_root)
    finally:
        os.close(fd)
    assert checks["GPU memory"]["state"] == NOTE
    assert "--device-headroom-mib" in checks["GPU memory"]["advice"]
    assert "2048 of 4096 MiB" in checks["GPU memory"]["found"]
    assert checks["import"]["state"] == FINE


def test_two_gpus_are_tried_each(tmp_path: Path, broker_root: Path) -> None:
    two = Machine(tmp_path / "two", Make(uuids=(ONE, TWO), total=4096 * MIB))
    _, checks = examine(two, broker_root, CUDA_VISIBLE_DEVICES="1,0")
    assert {"import (0)", "import (1)", "pinning (0)", "pinning (1)"} <= set(checks)
    assert checks["GPUs"]["found"].index(TWO) < checks["GPUs"]["found"].index(ONE)


def test_without_a_gpu_there_are_only_notes(gpus: Machine, broker_root: Path) -> None:
    _, hidden = examine(gpus, broker_root, CUDA_VISIBLE_DEVICES="")
    assert hidden["GPUs"]["state"] == NOTE and "CUDA_VISIBLE_DEVICES=" in hidden["GPUs"]["found"]
    assert "import" not in hidden
    _, checks = examine(gpus, broker_root, **{FAULTS: "cuInit=CUDA_ERROR_NO_DEVICE"})
    there = any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/dxg"))
    assert checks["driver"]["state"] == (BROKEN if there else NOTE)
    assert tuple(checks) == ("driver", *HOST, *REST)


def test_a_living_broker(start_broker: StartBroker) -> None:
    broker = start_broker()
    _, checks = examine(None, broker.root)
    assert checks["broker"]["state"] == FINE
    assert f"version {metadata.version('mmbroker')}" in checks["broker"]["found"]
    assert str(broker.pid) in checks["broker"]["found"]
    _, others = examine(None, broker.root, "--name", "other")
    assert others["broker"]["state"] == NOTE and "other" in others["broker"]["found"]
    assert broker.status()["sessions"] is not None


def test_a_socket_that_does_not_answer(broker_root: Path, start_broker: StartBroker) -> None:
    broker = start_broker()
    os.rename(broker.directory / "lifeline.sock", broker.directory / "away")
    code, checks = examine(None, broker_root)
    os.rename(broker.directory / "away", broker.directory / "lifeline.sock")
    assert code == 1 and checks["broker"]["state"] == BROKEN


@pytest.mark.parametrize("kind", ["long", "file", "nowhere"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    root = {"long": tmp_path / ("d" * 100), "file": tmp_path / "file", "nowhere": Path("/proc/nowhere")}[kind]
    if kind == "file":
        root.write_text("not a directory")
    code, checks = examine(None, root)
    assert code == 1
    assert checks["instance directory"]["state"] == BROKEN
    assert "MMBROKER_DIR" in checks["instance directory"]["found"] + checks["instance directory"]["advice"]


@pytest.mark.parametrize(("limits", "state"), [("ulimit -Sn 256", NOTE), ("ulimit -n 256", BROKEN)])
def test_few_descriptors(broker_root: Path, limits: str, state: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f'{limits}; exec "$0" -m mmbroker doctor --json', sys.executable],
        env={**os.environ, "MMBROKER_DIR": os.fspath(broker_root)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["descriptors"]["state"] == state
    assert "256" in checks["descriptors"]["found"] and "ulimit" in checks["descriptors"]["advice"]


def test_a_person_reads_a_table(gpus: Machine, broker_root: Path) -> None:
    env = {FAKE: os.fspath(gpus.directory), FAULTS: "memlock=100", "MMBROKER_DIR": os.fspath(broker_root)}
    result = mmbroker("doctor", **env)
    assert result.returncode == 1 and result.stderr == ""
    for name in (*GPU, *HOST, *REST):
        assert name in result.stdout
    assert "BROKEN" in result.stdout and "-> raise the limit" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


# --- in this process ------------------------------------------------------------------------------------------------


def test_old_kernels_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(doctor, "_SO_PEERPIDFD", 9999)
    assert doctor.pidfd().state == NOTE and "SO_PEERPIDFD" in doctor.pidfd().found
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert doctor.pidfd().state == NOTE and "neither" in doctor.pidfd().found
    monkeypatch.setattr(doctor, "_POPULATE_READ", 9999)
    assert doctor.populating().state == NOTE


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, state in ((1 << 20, BROKEN), (500 << 20, NOTE), (4 << 30, FINE)):
        monkeypatch.setattr(doctor.memory, "headroom", lambda room=room: (room, "the limit of group /x"))
        assert doctor.host_memory().state == state
        assert "/x" in doctor.host_memory().found


@pytest.mark.parametrize(
    ("version", "seen", "state"),
    [(None, True, NOTE), ("0.5.23", True, FINE), ("0.5.23", False, BROKEN), ("9.9.9", True, BROKEN)],
)
def test_the_plugin(monkeypatch: pytest.MonkeyPatch, version: str | None, seen: bool, state: str) -> None:
    def find(package: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", find)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ["mmbroker"] if seen else [])
    check = doctor.plugin()
    assert check.state == state
    assert (version or "not installed") in check.found
    assert version != "9.9.9" or "0.5.23" in check.advice


@pytest.mark.parametrize(
    ("installed", "loads", "state", "advice"),
    [(False, False, NOTE, "pip install"), (True, False, NOTE, "apt-get install"), (True, True, FINE, "")],
)
def test_what_the_tier_needs(
    monkeypatch: pytest.MonkeyPatch, installed: bool, loads: bool, state: str, advice: str
) -> None:
    def load() -> None:
        if not loads:
            raise store.StoreError("a library is missing")

    monkeypatch.setattr(doctor.util, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(store, "load", load)
    check = doctor.mooncake()
    assert check.state == state
    assert advice in check.advice and bool(check.advice) is bool(advice)
    assert ("a library is missing" in check.found) is (installed and not loads)


def test_a_check_that_fails_by_itself_is_broken() -> None:
    def broken() -> Check:
        raise OSError(5, "Input/output error")

    check = doctor._tried("anything", broken)
    assert check.state == BROKEN and "Input/output error" in check.found
    assert not doctor.passed([check]) and doctor.passed([check._replace(state=NOTE)])


def test_the_doctor_needs_no_torch() -> None:
    code = "import sys, mmbroker.doctor; mmbroker.doctor.examine(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_a_listener_is_no_obstacle(broker_root: Path) -> None:
    """The doctor's own instance directory is beside what is there, and gone afterwards."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(broker_root / "other.sock"))
        _, checks = examine(None, broker_root)
        assert checks["instance directory"]["state"] == FINE
        assert os.listdir(broker_root) == ["other.sock"]
    os.unlink(broker_root / "other.sock")
