"""The demonstration: the real SGLang serves the same pictures twice, first its own way, then through a broker.

The rooms: `engine` runs SGLang, `model` makes the tiny model it serves, `pictures` has what is sent, `report` compares.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mmbroker.proto.errors import BrokerError

if TYPE_CHECKING:
    from rich.console import Console

    from .engine import Answer, Engine
    from .report import Run

#: What the demo cannot do without, and where it is.
_NEEDED: Final = {
    "sglang": "sglang",
    "torch": "torch",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "psutil": "psutil",
}
_HOST_MIB: Final = 1024
_SIZES: Final = (
    *((56, 56), (28, 200), (84, 140), (112, 112), (224, 224), (320, 240), (240, 320), (336, 336)),
    *((448, 336), (640, 200), (512, 512), (640, 480)),
)


def run(keep: Path | None = None) -> None:
    """Everything, with progress on standard output; raises `BrokerError` if anything is not as it should be."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise BrokerError(
            f"the demo needs {', '.join(missing)} in this environment; in a checkout, `make demo` sees to that"
        )
    from mmbroker.screen import console

    from . import report
    from .model import tiny_model

    out = console()
    started = time.monotonic()
    out.print("The same pictures through SGLang's own transport, then through a broker")
    with _scratch(keep) as scratch:
        with _step(out, "a tiny Qwen2.5-VL with random weights"):
            model = tiny_model()
        with _step(out, "photographs and generated pictures"):
            requests = workload()
        own = _serve(out, "its own transport", model, scratch / "own", requests, [], None)
        with _broker(out, scratch) as directory:
            arguments = ["--mm-transport", "broker", "--mm-broker", str(directory)]
            brokered = _serve(out, "the broker", model, scratch / "mmb", requests, arguments, directory)
        problems = report.problems(own, brokered)
        report.show(out, requests, own, brokered)
    for problem in problems:
        out.print(f"  not as it should be: {problem}", style="red", soft_wrap=True)
    if problems:
        raise BrokerError("the demo failed")
    out.print(f"DEMO OK ({time.monotonic() - started:.0f} s)")


Request = tuple[Sequence[str], str]


def workload() -> list[list[Request]]:
    """Requests (pictures as data URLs, and a text) in groups; those of one group are sent at the same time."""
    from .pictures import data_url, generated, photographs

    photos = [data_url(photo) for photo in photographs().values()]
    made = [data_url(generated(seed, *size)) for seed, size in enumerate(_SIZES)]
    small = [data_url(generated(100 + seed, 112, 84)) for seed in range(16)]
    alone: list[Request] = [
        *(([photo], text) for text in ("Describe the image", "What is in this picture?") for photo in photos),
        *(([picture], "Describe the image") for picture in made),
        *(([picture], "What is in this picture?") for picture in made[4:8]),
        (photos, "Describe the image in detail."),
        (photos[::-1], "Describe the image in detail."),
        (small[:8], "Describe the image"),
        (small[8:], "Describe the image"),
    ]
    together: list[Request] = [([small[i], made[i + 2]], "Describe the image") for i in range(8)]
    return [*([request] for request in alone), together, together[::-1]]


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    """A directory with a short path, because sockets lie in it. What `keep` gets is copied at the end."""
    directory = Path(tempfile.mkdtemp(prefix="mmd-", dir="/tmp"))
    try:
        yield directory
    finally:
        if keep is not None:
            for log in directory.rglob("*.log"):
                keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, keep / f"{log.parent.name}-{log.name}")
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _step(out: Console, what: str) -> Iterator[None]:
    started = time.monotonic()
    out.print(f"  {what} ...")
    yield
    if (seconds := time.monotonic() - started) >= 1:
        out.print(f"    done after {seconds:.0f} s")


@contextmanager
def _broker(out: Console, scratch: Path) -> Iterator[Path]:
    """A broker in the foreground of a process of its own, as a user starts it."""
    root = scratch / "b"
    with open(scratch / "broker.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmbroker", "start", "--cpu", "--host-mib", str(_HOST_MIB)],
            env={**os.environ, **_nobodys_settings(), "MMBROKER_DIR": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            ready = process.stdout.readline().strip()
            if not ready:
                raise BrokerError(f"the broker did not start: {(scratch / 'broker.log').read_text().strip()}")
            out.print(f"  {ready}", soft_wrap=True)
            yield root / "cpu"
        finally:
            process.terminate()
            try:
                code = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    if code or root.exists():
        raise BrokerError(f"the broker ended with code {code}, or left {root} behind")


def _nobodys_settings() -> dict[str, str]:
    """Whatever is set for brokers and engines here shall not reach the demo's."""
    return {name: "" for name in os.environ if name.startswith("MMBROKER_")}


def _serve(
    out: Console,
    what: str,
    model: Path,
    scratch: Path,
    requests: list[list[Request]],
    arguments: list[str],
    broker: Path | None,
) -> Run:
    """One engine, and all requests sent to it."""
    from mmbroker.reach import report

    from .engine import Engine
    from .report import Run

    scratch.mkdir()
    engine = Engine(model, scratch, arguments, _nobodys_settings(), measure=True)
    try:
        with _step(out, f"SGLang with {what}"):
            engine.wait_ready()
        before = report(broker) if broker else {}
        answers = _send(out, engine, requests)
        counters = engine.counters()
    finally:
        engine.stop()
    return Run(answers, counters, before, report(broker) if broker else {})


def _send(out: Console, engine: Engine, requests: list[list[Request]]) -> list[Answer]:
    answers: list[Answer] = []
    total = sum(map(len, requests))
    with ThreadPoolExecutor(max(map(len, requests))) as pool:
        for group in requests:
            before = len(answers)
            answers += pool.map(lambda request: engine.ask(*request), group)
            if before // 10 != len(answers) // 10 or len(answers) == total:
                out.print(f"    {len(answers)} of {total} requests answered")
    return answers
