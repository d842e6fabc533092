"""The real SGLang on a GPU, with a broker and without, asked the same: do the texts agree, which way did features go?

    python3 -m bench.gpu_serve_smoke --model PATH --out DIRECTORY [--limit SECONDS] [--servers own,broker,broker-gpu]

Three servers start at once beside one broker: ``own`` (SGLang's own transport, whichever it chooses), ``broker``
(features made on the CPU, or brought there), ``broker-gpu`` (made on the GPU and kept there). Each is sent a dozen
requests, one after another. What is written: one JSON file, and a table. Exit code 0 only if every server answered all
requests, the texts agree, and the ranks of the broker's engines are on the ``device`` path. Where something fails, it
says what it saw: the ends of the logs, the broker's status, the doctor's findings.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from mmbroker.adapters.sglang.measure import read

READY: Final = "The server is fired up and ready to roll!"
FLAGS: Final = (
    *("--load-format", "dummy", "--attention-backend", "triton", "--mm-attention-backend", "triton_attn"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--cuda-graph-max-bs", "8"),
    *("--mem-fraction-static", "0.6", "--max-total-tokens", "65536", "--host", "127.0.0.1"),
)
BROKER: Final = ("--mm-transport", "broker", "--mm-broker")
SIZE: Final = (448, 336)
TOKENS: Final = 16
#: What the last steps may take, in seconds: requests, report, end.
REST: Final = 45.0
#: Words by which a line of a log is worth showing.
TELLING: Final = ("mmbroker", "Error", "error:", "Traceback", "Exception", "killed")


class Server:
    """One SGLang in a group of processes of its own."""

    def __init__(self, name: str, model: str, out: Path, flags: Sequence[str]) -> None:
        self.name = name
        self.log = out / f"{name}.log"
        self.measured = Path(tempfile.mkdtemp(prefix="mmb-"))
        self.port = free_port()
        self.answers: list[str] = []
        self.seconds: list[float] = []
        self.error = ""
        command = (*(sys.executable, "-m", "sglang.launch_server", "--model-path", model), *flags)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env={**os.environ, "MMBROKER_MEASURE": str(self.measured)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, deadline: float) -> bool:
        """Until it is ready; False: it ended, or the time is over."""
        while time.monotonic() < deadline and self.process.poll() is None:
            if READY in self.text():
                return True
            time.sleep(0.5)
        code = self.process.poll()
        self.error = "was not ready in time" if code is None else f"ended with exit code {code}"
        return False

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask_all(self, requests: list[dict[str, Any]], deadline: float) -> None:
        """One after another; what went wrong is in `error`."""
        try:
            for body in requests:
                start = time.monotonic()
                self.answers.append(self._ask(body, deadline - start))
                self.seconds.append(time.monotonic() - start)
        except Exception as error:
            detail = error.read().decode(errors="replace")[:500] if hasattr(error, "read") else ""
            self.error = f"request {len(self.answers)}: {type(error).__name__}: {error} {detail}"

    def _ask(self, body: dict[str, Any], timeout: float) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=max(timeout, 1.0)) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    def end(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.process.wait()

    def telling(self) -> str:
        """The lines of its log that may say what is wrong, and its end."""
        lines = [line[:180] for line in self.text().splitlines()]
        told = [line for line in lines if any(word in line for word in TELLING)][-10:]
        return "\n".join([*told, "... the end:", *lines[-6:]])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def requests() -> list[dict[str, Any]]:
    """Single pictures, several at once, and one again with other words."""
    pictures = [picture(seed) for seed in range(14)]
    sets = (
        [[one] for one in pictures[:8]] + [pictures[8:11], pictures[11:14]] + [[pictures[0]], pictures[8:11]]
    )
    return [
        {
            "model": "m",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        *({"type": "image_url", "image_url": {"url": one}} for one in some),
                        {"type": "text", "text": f"Describe what you see, please ({number})."},
                    ],
                }
            ],
        }
        for number, some in enumerate(sets)
    ]


def picture(seed: int) -> str:
    """A JPEG as a data URL."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (SIZE[1] // 8, SIZE[0] // 8, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(small).resize(SIZE).save(data, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def command(*arguments: str, timeout: float = 20.0) -> str:
    """What one of our commands says."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mmbroker", *arguments], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"`mmbroker {' '.join(arguments)}` did not answer within {timeout:g} s"
    return done.stdout or done.stderr


def start_broker(gpu: str, out: Path, stack: ExitStack) -> Path:
    """A broker, ended with `stack`; its directory. Raises `RuntimeError` with what it said."""
    root = Path(tempfile.mkdtemp(prefix="mmb-"))
    os.environ["MMBROKER_DIR"] = str(root)
    with open(out / "broker.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmbroker", "start", "--gpu", gpu, "--name", "smoke"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    if not line:
        raise RuntimeError(f"the broker did not start: {(out / 'broker.log').read_text()}")
    print(line, end="", flush=True)
    return root / "smoke"


def report(server: Server, status: dict[str, Any]) -> dict[str, Any]:
    """What a server did, in figures."""
    counts = read(server.measured)
    tokenizer, scheduler = (
        {k: v for k, v in counts.get(role, {}).items() if v} for role in ("tokenizer", "scheduler-0")
    )
    names = {session["name"].partition("/")[0] for session in status.get("sessions", ())}
    return {
        "answers": len(server.answers),
        "error": server.error,
        "seconds": [round(one, 3) for one in server.seconds],
        "tokenizer": tokenizer,
        "scheduler": scheduler,
        "on_the_device": scheduler.get("encoded", 0) - scheduler.get("moved", 0),
        "engines_seen": sorted(names),
    }


def paths(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every rank that is attached."""
    return [
        {
            "engine": engine["engine"],
            **{key: rank.get(key) for key in ("rank", "path", "why", "device", "access")},
        }
        for engine in status.get("engines", ())
        for rank in engine["ranks"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--limit", type=float, default=145.0, help="seconds for all of it")
    parser.add_argument("--servers", default="own,broker,broker-gpu")
    parser.add_argument("--flags", help="for the servers, in place of those that suit the GPU machine")
    asked = parser.parse_args()
    start = time.monotonic()
    deadline = start + asked.limit
    asked.out.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    result: dict[str, Any] = {"servers": {}}
    with ExitStack() as stack:
        directory = start_broker(asked.gpu, asked.out, stack)
        flags = {
            "own": (),
            "broker": (*BROKER, str(directory)),
            "broker-gpu": (*BROKER, str(directory), "--mm-feature-transport", "cuda_ipc"),
        }
        base = FLAGS if asked.flags is None else asked.flags.split()
        servers = [
            Server(name, asked.model, asked.out, (*base, *flags[name])) for name in asked.servers.split(",")
        ]
        for server in servers:
            stack.callback(server.end)
        bodies = requests()

        def serve(server: Server) -> None:
            if server.wait(deadline - REST):
                print(f"{server.name}: ready after {time.monotonic() - start:.0f} s", flush=True)
                server.ask_all(bodies, deadline - REST / 2)

        threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(1.5)  # clients tell their counters once a second
        text = command("status", "--json", "--name", "smoke")
        try:
            status = json.loads(text)
        except ValueError:
            status = {}
            problems.append(f"no status: {text}")
        result["paths"], result["counters"] = paths(status), status.get("counters", {})
        result["device"] = status.get("device")
        for server in servers:
            result["servers"][server.name] = report(server, status)
            if server.error:
                problems.append(f"{server.name} {server.error}")
        result["problems"] = problems = [*problems, *judge(servers, result)]
        if problems:
            for server in servers:
                print(f"\n--- {server.name}'s log\n{server.telling()}")
            print(f"\n--- the broker's log\n{(asked.out / 'broker.log').read_text()[-800:]}")
            print(f"\n--- the doctor\n{command('doctor')[:1500]}")
        show(servers, result, time.monotonic() - start)  # last: who sees only the end sees this
    (asked.out / "gpu-serve-smoke.json").write_text(json.dumps(result, indent=1))
    return 1 if problems else 0


def judge(servers: list[Server], result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found: list[str] = []
    first = servers[0]
    for server in servers[1:]:
        differing = [i for i, (a, b) in enumerate(zip(first.answers, server.answers, strict=False)) if a != b]
        if differing:
            i = differing[0]
            found.append(
                f"{server.name} and {first.name} differ in requests {differing}, first: "
                f"{first.answers[i]!r} against {server.answers[i]!r}"
            )
    ours = [server for server in servers if server.name.startswith("broker")]
    on_device = [path for path in result["paths"] if path["path"] == "device"]
    if len(on_device) != len([server for server in ours if server.process.poll() is None]):
        found.append(f"not every rank is on the device path: {result['paths']}")
    for server in ours:
        told = result["servers"][server.name]
        fallbacks = {k: v for k, v in told["tokenizer"].items() if k.startswith("fallback_")}
        if fallbacks:
            found.append(f"{server.name}: features went SGLang's own way: {fallbacks}")
        if server.answers and not told["on_the_device"]:
            found.append(f"{server.name}: no encoder read a feature on the device")
        if server.name == "broker-gpu" and server.answers and not told["tokenizer"].get("put_on_device"):
            found.append(f"{server.name}: no feature was put from the GPU")
    return found


def show(servers: list[Server], result: dict[str, Any], seconds: float) -> None:
    """A table for people."""
    print(f"\n{'server':12} answers features put on GPU encoded on device median s")
    for server in servers:
        told = result["servers"][server.name]
        median = sorted(server.seconds)[len(server.seconds) // 2] if server.seconds else float("nan")
        print(
            f"{server.name:12} {told['answers']:7} {told['tokenizer'].get('features', 0):8} "
            f"{told['tokenizer'].get('put_on_device', 0):10} {told['scheduler'].get('encoded', 0):7} "
            f"{told['on_the_device']:9} {median:8.3f}"
        )
    for path in result["paths"]:
        why = path["why"] or "nothing failed"
        print(f"{path['engine']} rank {path['rank']}: {path['path']} path, access {path['access']}, {why}")
    kept = ("loads", "offers", "parked", "device_full", "device_too_large", "loads_lost", "hits", "misses")
    print("broker:", {name: result["counters"][name] for name in kept if name in result["counters"]})
    print(f"{seconds:.0f} s in all;", "all is well" if not result["problems"] else "PROBLEMS:")
    for problem in result["problems"]:
        print("-", problem)


if __name__ == "__main__":
    sys.exit(main())
