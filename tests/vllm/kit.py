"""What the tests with the real vLLM share: engines in processes of their own, a probe in them, and their brokers."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mmbroker.demo.model import tiny_model
from tests import kit

#: How long an engine may take to start, and to answer, in seconds.
START, PATIENCE = 400.0, 120.0
#: What vLLM finds out about models in a process of its own, which takes ten seconds: once for all engines.
CACHE = Path(sys.prefix) / "share" / "mmbroker" / "vllm-cache"
#: For engines that have two ranks or replicas: vLLM's CPU platform wants a node of memory for each.
TWO_NODES = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}


@cache
def model() -> Path:
    """A tiny Qwen2.5-VL whose heads are of a size that vLLM's CPU attention has."""
    return tiny_model(head=32)


def transfer(broker: Path | None, role: str = "ec_both", **extra: Any) -> dict[str, Any]:
    """vLLM's argument that asks for the connector."""
    return {
        "ec_connector": "MMBrokerConnector",
        "ec_connector_module_path": "mmbroker.adapters.vllm",
        "ec_role": role,
        "ec_connector_extra_config": {**({} if broker is None else {"broker": str(broker)}), **extra},
    }


def arguments(**more: Any) -> dict[str, Any]:
    """Of a small engine on the CPU."""
    return {
        "model": str(model()),
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "limit_mm_per_prompt": {"image": 4, "video": 0},
        "dtype": "float32",
        "seed": 0,
        **more,
    }


class Probe:
    """Counts of what vLLM did, in all processes that were started with its environment."""

    def __init__(self, scratch: Path) -> None:
        self.directory = scratch / "probe"
        self.directory.mkdir()
        self.site = scratch / "site"
        metadata = self.site / "mmbroker_probe-0.dist-info"
        metadata.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("probe.py"), self.site / "mmbroker_probe.py")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mmbroker-probe\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nmmbroker_probe = mmbroker_probe:register\n"
        )

    def count(self, name: str) -> int:
        path = self.directory / name
        return path.stat().st_size if path.exists() else 0

    def counts(self) -> dict[str, int]:
        return {name: self.count(name) for name in ("processed", "encoded")}

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        order = self.directory / name
        order.touch()
        try:
            yield
        finally:
            order.unlink()

    @contextmanager
    def change(self) -> Iterator[dict[str, int]]:
        """What the counts change by while this lasts; filled at its end."""
        before, changed = self.counts(), dict[str, int]()
        yield changed
        changed.update({name: value - before[name] for name, value in self.counts().items()})


def environment(scratch: Path, probe: Probe) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(CACHE),
        "TEST_PROBE": str(probe.directory),
        "PYTHONPATH": os.pathsep.join([str(probe.site), str(Path(__file__).parents[2])]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines' workers share the first core
    }


class Program:
    """A process that runs `llm_program`, or another module that speaks as it does."""

    def __init__(self, scratch: Path, probe: Probe, env: dict[str, str] | None = None, **more: Any) -> None:
        self.log = scratch / f"{len(list(scratch.glob('*.log')))}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.llm_program"],
                env={**environment(scratch, probe), **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._send(arguments(**more))

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def answer(self, patience: float = PATIENCE) -> Any:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], patience)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"no answer from vLLM: {self.text()[-6000:]}"
        return json.loads(line)

    def ready(self) -> Program:
        assert self.answer(START) == "ready"
        return self

    def post(self, *prompts: Sequence[Any]) -> None:
        self._send(prompts)

    def ask(self, *prompts: Sequence[Any]) -> list[Any]:
        """For each prompt, the answer's tokens and how likely they were; None if it failed."""
        self.post(*prompts)
        found: list[Any] = self.answer()
        return found

    def forget(self) -> None:
        self._send("forget")
        assert self.answer() is True

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self, word: str) -> list[str]:
        return [line for line in self.text().splitlines() if word in line]

    def hang_up(self) -> None:
        """Have it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        assert self.process.stdout is not None
        self.hang_up()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def kill(self) -> None:
        """With all its processes: they are a group of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def program(scratch: Path, probe: Probe, env: dict[str, str], **more: Any) -> Iterator[Program]:
    """One that has started."""
    engine = Program(scratch, probe, env, **more)
    try:
        yield engine.ready()
    finally:
        engine.close()


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory with a short path, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="mmvllm-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running_broker(root: Path, **settings: Any) -> Iterator[kit.BrokerProcess]:
    """A broker of 256 MiB unless told otherwise, ended at the end."""
    broker = kit.BrokerProcess(root, {"host_mib": 256, **settings}, [], {})
    try:
        yield broker.wait_ready()
    finally:
        if broker.process.poll() is None:
            broker.stop()
        broker.clean_up()


def tally(status: dict[str, Any], role: str) -> dict[str, int]:
    """The adapter's counters of all sessions whose names end with `role`, summed."""
    total: dict[str, int] = {}
    for session in status["sessions"]:
        if session["name"].endswith(role):
            for name, value in session["tally"].items():
                if name.startswith("vllm_"):
                    total[name[5:]] = total.get(name[5:], 0) + value
    return total
