"""The real SGLang as a process: started, waited for, asked, and stopped without a trace."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil

from mmbroker.adapters.sglang.measure import read as read_counters
from mmbroker.adapters.sglang.settings import MEASURE
from mmbroker.proto.errors import BrokerError

#: SGLang on a machine without a GPU: a small cache, and no idle loop that takes a whole core.
CPU_ARGUMENTS: Final = (
    *("--device", "cpu", "--host", "127.0.0.1", "--attention-backend", "torch_native"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none"),
    *("--max-total-tokens", "8192", "--context-length", "4096", "--mem-fraction-static", "0.1"),
    "--sleep-on-idle",
)
#: Tokenizer workers that take longer than that to import SGLang are killed and begin anew, for ever; else it is 10 s.
PATIENT: Final = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
CPU_ENVIRONMENT: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Threads that wait for each other at every operation of a tiny model cost far more than they save, all the more
    # where several servers share the cores; and SGLang binds them to cores on some processors only.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    **PATIENT,
}
_SHARED_MEMORY: Final = "/dev/shm"
#: What the server says once it has answered its own first request.
READY: Final = "The server is fired up and ready to roll!"


class EngineFailed(BrokerError):
    """SGLang did not start, or did not answer."""


@dataclass(frozen=True)
class Answer:
    """`texts`: one for each sample. `seconds`: from the request's start to the whole answer."""

    texts: tuple[str, ...]
    prompt_tokens: int
    seconds: float


class Engine:
    """One server. `scratch`: an existing directory for its log, counters and temporary files, with a short path.

    `measure`: have the plugin count and time what its processes do (`counters`). `base` and `surroundings`: the flags
    and variables of the kind of machine.
    A context manager: waits until the server is ready, and stops it.
    """

    def __init__(
        self,
        model: Path,
        scratch: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        measure: bool = False,
        base: Sequence[str] = CPU_ARGUMENTS,
        surroundings: Mapping[str, str] = CPU_ENVIRONMENT,
    ) -> None:
        self.log = scratch / "sglang.log"
        self._counters = scratch / "counters"
        self._before: dict[str, dict[str, int]] = {}
        measuring = {}
        if measure:
            self._counters.mkdir()
            measuring[MEASURE] = str(self._counters)
        self.port = free_port()
        self._family: set[psutil.Process] = set()
        self._left: set[Path] = set()
        self._tail: deque[str] = deque(maxlen=40)
        self._settled = threading.Event()
        self._ready = False
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
                *("--port", str(self.port), *base, *arguments),
            ],
            env={**os.environ, **surroundings, "TMPDIR": str(scratch), **(environment or {}), **measuring},
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="sglang-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Keep the log. Its end is the end of the last process that could write to it."""
        assert self.process.stdout is not None
        with self.process.stdout as lines, open(self.log, "a") as log:
            for line in lines:
                log.write(line)
                log.flush()
                self._tail.append(line)
                if READY in line:
                    self._ready = True
                    self._settled.set()
        self._settled.set()

    def wait_ready(self, patience: float = 240.0) -> None:
        """Until it has answered its own first request. Raises `EngineFailed` with the end of its log."""
        self._settled.wait(patience)
        if not self._ready:
            why = "ended" if self._settled.is_set() else f"was not ready after {patience:g} s"
            self.stop()
            raise EngineFailed(f"SGLang {why}; the end of its log:\n{''.join(self._tail)}")
        self._before = read_counters(self._counters)
        self._remember()

    def counters(self) -> dict[str, dict[str, int]]:
        """What was counted since it was ready, by role (``tokenizer``, ``scheduler-0``): see the plugin's `measure`."""
        return {
            role: {name: value - self._before.get(role, {}).get(name, 0) for name, value in counts.items()}
            for role, counts in read_counters(self._counters).items()
        }

    def processes(self) -> list[psutil.Process]:
        """The server and all that it started."""
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def ask(
        self,
        pictures: Sequence[str],
        text: str = "Describe the image",
        *,
        tokens: int = 8,
        timeout: float = 120.0,
        **more: Any,
    ) -> Answer:
        """One chat request with pictures as data URLs, decoded greedily. `more` goes into its body as it is."""
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        content.append({"type": "text", "text": text})
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        started = time.perf_counter()
        answer = self.post("/v1/chat/completions", body, timeout)
        return Answer(
            tuple(choice["message"]["content"] for choice in answer["choices"]),
            answer["usage"]["prompt_tokens"],
            time.perf_counter() - started,
        )

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 120.0) -> Any:
        """A request with a JSON body, and its JSON answer. Raises `urllib.error.HTTPError`."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def stop(self, patience: float = 20.0) -> None:
        """End it and everything it started, and remove what it leaves in shared memory. Idempotent.

        By SIGINT, because SGLang looks only every five seconds whether a SIGTERM came.
        """
        self._remember()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self._remember()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        alive = psutil.wait_procs(self._family, patience)[1]
        self._reader.join(patience)
        for path in self._left:
            path.unlink(missing_ok=True)
        if alive or self._reader.is_alive():
            raise EngineFailed(f"processes of SGLang are left: {[process.pid for process in alive]}")

    def _remember(self) -> None:
        """Whose end and whose shared memory has to be seen to."""
        self._family.update(self.processes())
        self._left.update(shared_memory_files(self._family))

    def __enter__(self) -> Engine:
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def shared_memory_files(family: Collection[psutil.Process]) -> set[Path]:
    """Files of shared memory that these processes have open, or that are named after them.

    SGLang and its libraries leave some behind.
    """
    pids = {str(process.pid) for process in family}
    found = {name for name in os.listdir(_SHARED_MEMORY) if pids & set(re.split(r"[-_.]", name))}
    for pid in pids:
        with suppress(OSError):
            maps = Path("/proc", pid, "maps").read_text()
            found.update(re.findall(rf" {_SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE))
    return {Path(_SHARED_MEMORY, name) for name in found}


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
