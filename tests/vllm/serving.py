"""`vllm serve` as a process, and chat requests to it."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.kit import eventually

from . import kit
from .llm_program import picture


@cache
def url(seed: int) -> str:
    """A picture as a data URL."""
    data = io.BytesIO()
    picture(seed).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


class Server:
    def __init__(
        self,
        scratch: Path,
        probe: kit.Probe,
        *flags: str,
        transfer: dict[str, Any] | None,
        env: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.told = False  # to end
        self.log = scratch / f"serve-{self.port}.log"
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(kit.model()), "--enforce-eager"),
            *("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--max-num-seqs", "8", "--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"),
            *(() if transfer is None else ("--ec-transfer-config", json.dumps(transfer))),
            *flags,
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**kit.environment(scratch, probe), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self) -> Server:
        def up() -> bool:
            assert self.process.poll() is None, self.text()[-20000:]
            return self.healthy()

        eventually(up, "a server that answers", kit.START)
        return self

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, seeds: Sequence[int]) -> Any:
        """The answer's tokens, and how likely each was."""
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url(s)}} for s in seeds]
        content.append({"type": "text", "text": "Describe the image"})
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
            "logprobs": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=kit.PATIENCE) as answer:
            (choice,) = json.loads(answer.read())["choices"]
        return [(token["token"], round(token["logprob"], 4)) for token in choice["logprobs"]["content"]]

    def hang_up(self) -> None:
        """Have it end by itself."""
        if self.process.poll() is None and not self.told:
            self.told = True
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.hang_up()
        if self.process.poll() is None:
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextmanager
def serving(
    scratch: Path,
    probe: kit.Probe,
    *flags: str,
    transfer: dict[str, Any] | None,
    env: dict[str, str] | None = None,
) -> Iterator[Server]:
    server = Server(scratch, probe, *flags, transfer=transfer, env=env)
    try:
        yield server.ready()
    finally:
        server.close()
