"""The demo does what it says, and would notice if it did not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import mmbroker.demo
from mmbroker.demo import pictures, report
from mmbroker.demo.engine import Answer, Engine, EngineFailed
from mmbroker.demo.report import Run
from mmbroker.proto.errors import BrokerError

COUNTERS = {
    "tokenizer": {"features": 3, "bytes": 1 << 20, "fallback_full": 0},
    "scheduler-0": {
        "items": 2,
        "takes": 2,
        "inputs_ns": 2000,
        "misses": 0,
        "hash_calls": 0,
        "shm_read_calls": 0,
    },
    "scheduler-1": {
        "items": 1,
        "takes": 1,
        "inputs_ns": 1000,
        "misses": 0,
        "hash_calls": 0,
        "shm_read_calls": 0,
    },
}
STATUS = {"leases": 0, "holds": 0, "counters": {"seals": 2, "hits": 1}, "pool": {"used": 1 << 20}}
BROKERED = Run([Answer(("a",), 9, 0.1), Answer(("b",), 9, 0.1)], COUNTERS, {"counters": {}}, STATUS)
OWN = replace(
    BROKERED,
    counters={
        "scheduler-0": {
            "items": 3,
            "hash_calls": 3,
            "inputs_ns": 6000,
            "shm_open_ns": 2000,
            "shm_read_ns": 1000,
        }
    },
)


def changed(role: str, **counts: int) -> Run:
    return replace(BROKERED, counters={**COUNTERS, role: {**COUNTERS[role], **counts}})


def test_nothing_is_wrong_with_a_good_run() -> None:
    assert report.problems(OWN, BROKERED) == []
    assert (OWN.scheduler_ns, BROKERED.scheduler_ns) == (3000, 1000)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(BROKERED, answers=[BROKERED.answers[0], Answer(("c",), 9, 0.1)]), "1 answers differ"),
        (changed("tokenizer", features=2), "2 were put"),
        (changed("scheduler-1", takes=0), "2 taken"),
        (changed("tokenizer", fallback_full=1), "1 features went SGLang's own way"),
        (changed("scheduler-0", hash_calls=1), "1 hash_calls"),
        (changed("scheduler-1", shm_read_calls=2), "2 shm_read_calls"),
        (changed("scheduler-0", misses=1), "1 misses"),
        (replace(BROKERED, after={**STATUS, "holds": 4}), "4 holds are left"),
    ],
)
def test_what_is_not_as_it_should_be_is_found(run: Run, said: str) -> None:
    assert said in " ".join(report.problems(OWN, run))


def test_pictures_are_the_same_every_time() -> None:
    one, same, other = (pictures.generated(seed, 40, 30) for seed in (1, 1, 2))
    assert one.size == (40, 30)
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert {photo.size for photo in pictures.photographs().values()} == {(640, 427)}


def test_the_workload_has_many_sizes_and_repeats() -> None:
    requests = [request for group in mmbroker.demo.workload() for request in group]
    sent = Counter(url for urls, _ in requests for url in urls)
    assert len(requests) >= 36
    assert len(sent) >= 25
    assert sum(sent.values()) - len(sent) >= 20


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmbroker.demo, "_NEEDED", {"absent_module": "absent-package", "os": "os"})
    with pytest.raises(BrokerError, match=r"needs absent-package in this environment.*make demo"):
        mmbroker.demo.run()


def engines_of_demos() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("MMBROKER_MEASURE", "").startswith("/tmp/mmd-"):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.sglang
def test_an_engine_that_does_not_start_says_why(tmp_path: Path, no_leaks: None) -> None:
    engine = Engine(tmp_path / "no-model", tmp_path, ["--no-such-flag"])
    with pytest.raises(EngineFailed, match=r"SGLang ended(?s:.*)no-such-flag"):
        engine.wait_ready()


@pytest.mark.sglang
def test_the_demo(no_leaks: None, tmp_path: Path) -> None:
    directories, engines = set(Path("/tmp").glob("mmd-*")), engines_of_demos()
    environment = {
        **os.environ,
        "MMBROKER_TRANSPORT": "broker",
        "MMBROKER_NAME": "another",
    }  # which must not matter
    result = subprocess.run(
        [sys.executable, "-m", "mmbroker", "demo", "--keep", tmp_path / "kept"],
        env={**environment, "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("DEMO OK")
    assert "scheduler thread, per feature" in result.stdout
    assert "40 of 40" in result.stdout
    assert set(Path("/tmp").glob("mmd-*")) <= directories
    assert engines_of_demos() <= engines
    assert {path.name for path in (tmp_path / "kept").iterdir()} >= {"own-sglang.log", "mmb-sglang.log"}
