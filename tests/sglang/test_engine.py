"""`sglang.Engine` in somebody's own program: no command line, the switch is in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mmbroker.adapters.sglang import measure
from mmbroker.demo.engine import CPU_ENVIRONMENT
from mmbroker.demo.model import tiny_model
from tests.kit import eventually

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), *kit.ONCE]

PROGRAM = Path(__file__).with_name("engine_program.py")


def run(scratch: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the program found."""
    results = scratch / "results.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tiny_model())],
        env={**os.environ, **CPU_ENVIRONMENT, "TMPDIR": str(scratch), "RESULTS": str(results), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def test_an_engine_object_uses_the_broker_only_when_asked() -> None:
    with kit.scratch() as directory:
        own = run(directory, {})
        assert own["hooks"] == [
            f"sglang.srt.server_args.ServerArgs.{name}" for name in ("add_cli_args", "from_cli_args")
        ]
        measured = directory / "measure"
        measured.mkdir()
        with kit.running_broker(directory) as broker:
            asked = {
                "MMBROKER_TRANSPORT": "broker",
                "MMBROKER_PATH": str(broker.directory),
                "MMBROKER_MEASURE": str(measured),
            }
            through = run(directory, asked)
            eventually(lambda: kit.balanced(broker.status()), "holds and grants come to nothing")
            assert not broker.status()["engines"], "the engine is gone, and leaves nothing"
        counts = measure.read(measured)
    for form in ("picture", "batch", "processed", "embedded"):
        assert through[form] == own[form], form
    assert through["transport"] == "cpu"
    pictures = 5
    assert counts["tokenizer"]["features"] == counts["scheduler-0"]["takes"] == pictures
    assert not kit.fallbacks(counts["tokenizer"])
    assert not counts["scheduler-0"]["hash_calls"] and not counts["scheduler-0"]["shm_open_calls"]
