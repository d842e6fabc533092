"""What the tests with the real SGLang share: pictures, requests, and one server with its broker and its counters."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import math
import os
import shutil
import socket
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sglang.version import __version__ as VERSION

from mmbroker.adapters.sglang import measure
from mmbroker.demo import pictures
from mmbroker.demo.engine import CPU_ENVIRONMENT, Engine
from mmbroker.demo.model import tiny_model
from tests import kit

NEWEST = VERSION == "0.5.23"
#: For the longest: in the short run they have the newest release only; `make test-long` has them with the older, too.
ONCE = [] if NEWEST else [pytest.mark.long]


def binding(arguments: Sequence[str]) -> str:
    """Which cores which rank may use. Without it SGLang wants a NUMA node for each; the older counts only TP ranks."""
    sizes = {"--tp-size"} if not NEWEST else {"--tp-size", "--pp-size", "--dp-size"}
    ranks = math.prod(int(size) for flag, size in pairwise(arguments) if flag in sizes)
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return ",".join(map(str, cores))


def schedule_batch() -> Any:
    """SGLang's module of this name. Importing SGLang warns of much that a machine without a GPU lacks."""
    os.environ.update(CPU_ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers import schedule_batch as module

    return module


def url(picture: Any) -> str:
    """A picture as a data URL."""
    data = io.BytesIO()
    picture.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def album() -> list[str]:
    """Two photographs, and sixteen generated pictures of different sizes."""
    found = [url(picture) for picture in pictures.photographs().values()]
    return found + [
        url(pictures.generated(seed, 112 + 28 * (seed % 5), 84 + 28 * (seed % 4))) for seed in range(16)
    ]


class Scene:
    """One engine with its counters; the broker is whoever's directory it was given."""

    def __init__(
        self,
        scratch: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        broker: kit.BrokerProcess | None = None,
        path: Path | None = None,
        model: Path | None = None,
    ) -> None:
        self.scratch = scratch
        self.measured = scratch / "measure"
        self.faults = scratch / "faults"
        self.measured.mkdir()
        self.broker = broker
        where = broker.directory if broker is not None else path
        asked = ("--mm-transport", "broker", "--mm-broker", str(where)) if where is not None else ()
        self.engine = Engine(
            model or tiny_model(),
            scratch,
            (*asked, *arguments),
            {
                "SGLANG_CPU_OMP_THREADS_BIND": binding(arguments),
                "MMBROKER_MEASURE": str(self.measured),
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(self._install_faults()), os.environ.get("PYTHONPATH")])
                ),
                "TEST_FAULTS": str(self.faults),
                **(environment or {}),
            },
        )

    def _install_faults(self) -> Path:
        site = self.scratch / "site"
        metadata = site / "mmbroker_faults-0.dist-info"
        metadata.mkdir(parents=True)
        self.faults.mkdir()
        shutil.copy(Path(__file__).with_name("faults.py"), site / "mmbroker_faults.py")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mmbroker-faults\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nfaults = mmbroker_faults:register\n"
        )
        return site

    @contextmanager
    def broken(self, rank: int) -> Iterator[None]:
        """While this lasts, rank `rank` cannot take anything."""
        order = self.faults / f"take-{rank}"
        order.touch()
        try:
            yield
        finally:
            order.unlink()

    def made(self) -> tuple[int, int]:
        """How many pictures were decoded, and preprocessed, in all processes of the engine."""

        def count(name: str) -> int:
            file = self.faults / name
            return file.stat().st_size if file.exists() else 0

        return count("decoded"), count("preprocessed")

    def counts(self) -> dict[str, dict[str, int]]:
        """All counters, by role."""
        return measure.read(self.measured)

    def total(self, role: str) -> dict[str, int]:
        """The counters of all roles that begin with `role`, summed."""
        total = dict.fromkeys(measure.NAMES, 0)
        for name, counts in self.counts().items():
            if name.startswith(role):
                for key, value in counts.items():
                    total[key] += value
        return total

    @contextmanager
    def change(self, role: str) -> Iterator[dict[str, int]]:
        """What the counters of `role` change by while this lasts; filled at its end."""
        before = self.total(role)
        changed: dict[str, int] = {}
        yield changed
        changed.update(
            {name: value - before[name] for name, value in self.total(role).items() if value != before[name]}
        )

    def status(self) -> dict[str, Any]:
        """The broker's own report."""
        assert self.broker is not None
        return self.broker.status()

    def at_rest(self) -> None:
        """No hold, no lease, no grant is left once all requests are over."""
        kit.eventually(lambda: balanced(self.status()), "holds and grants come to nothing")

    @contextmanager
    def request(self, urls: Sequence[str], *, stream: bool = False, **more: Any) -> Iterator[socket.socket]:
        """A chat request that is sent and not waited for; its client goes away at the end."""
        body = json.dumps({**chat(urls), "stream": stream, **more}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.engine.port), kit.PATIENCE) as connection:
            connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            yield connection

    @contextmanager
    def stream(self, urls: Sequence[str], **more: Any) -> Iterator[Iterator[str]]:
        """The lines of a streamed answer, as they come."""
        with self.request(urls, stream=True, **more) as connection, connection.makefile("r") as lines:
            yield (line for line in lines if line.startswith("data:"))


def chat(urls: Sequence[str]) -> dict[str, Any]:
    """The body of a chat request with pictures."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": "Describe the image"})
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "ignore_eos": True,
    }


def post(engine: Engine, path: str, body: Mapping[str, Any]) -> str:
    """A request with a JSON body; the answer as text."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: bytes = response.read()
    return answer.decode()


def metrics(engine: Engine) -> dict[str, float]:
    """SGLang's own metrics: by name, summed over labels."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/metrics", timeout=30) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def conversation(engine: Engine, after_each_turn: Callable[[], None] = lambda: None) -> list[str]:
    """The turns of one session, a picture in each."""
    session = json.loads(post(engine, "/open_session", {"capacity_of_str_len": 10_000}))
    texts: list[str] = []
    before = None
    for picture in album()[:SESSION]:
        body = {
            "text": "<|vision_start|><|image_pad|><|vision_end|>What is in this picture?",
            "image_data": [picture],
            "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
            "session_params": {"id": session, "rid": before},
        }
        answer = json.loads(post(engine, "/generate", body))
        texts.append(answer["text"])
        before = answer["meta_info"]["id"]
        after_each_turn()
    post(engine, "/close_session", {"session_id": session})
    return texts


def balanced(status: dict[str, Any]) -> bool:
    """No lease, no hold, and every rank has settled every grant."""
    return not status["holds"] and not status["leases"] and not any(s["grants"] for s in status["sessions"])


def at_rest(broker: kit.BrokerProcess) -> None:
    """Nothing is held, promised or waited for, once all requests are over."""

    def resting() -> bool:
        status = broker.status()
        return balanced(status) and not status["promises"] and not status["waiting_count"]

    kit.eventually(resting, "nothing is held, promised or waited for")


def fallbacks(counts: Mapping[str, int]) -> dict[str, int]:
    """The fallbacks among counters, by reason."""
    return {name: value for name, value in counts.items() if name.startswith("fallback_") and value}


def workload(engine: Engine, sessions: bool = True) -> dict[str, Any]:
    """The same requests in the same order, whatever the transport: their texts, by name."""
    urls = album()
    texts: dict[str, Any] = {}
    for index in range(4):
        texts[f"one-{index}"] = engine.ask([urls[index]], tokens=8).texts
    texts["again"] = engine.ask([urls[0]], "What is in this picture?", tokens=8).texts
    texts["eight"] = engine.ask(urls[2:10], tokens=8).texts
    texts["plain"] = engine.ask([], "What is in this picture?", tokens=8).texts
    if sessions:
        texts["session"] = tuple(conversation(engine))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        pairs = [urls[2 * index : 2 * index + 2] for index in range(8)]
        for index, answer in enumerate(pool.map(lambda pair: engine.ask(pair, tokens=6), pairs)):
            texts[f"many-{index}"] = answer.texts
    return texts


#: Pictures in `workload`, without its session.
PICTURES = 4 + 1 + 8 + 16
#: Requests with pictures in it, without its session.
REQUESTS = 4 + 1 + 1 + 8
#: Turns of a session, each with a picture. SGLang 0.5.17 dies of the second turn after one with pictures.
SESSION = 2 if NEWEST else 1
#: The server's own warm-up sends one picture.
WARM_UP = 1


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory with a short path, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="mmsgl-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def running_broker(root: Path, **settings: Any) -> Iterator[kit.BrokerProcess]:
    """A broker of 256 MiB unless told otherwise, ended at the end."""
    broker = kit.BrokerProcess(root, {"host_mib": 256, **settings}, [], {})
    try:
        yield broker.wait_ready()
    finally:
        broker.stop()
        broker.clean_up()


@contextmanager
def running_scene(
    arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[Scene]:
    """A broker and an engine that uses it."""
    with scratch() as directory, running_broker(directory, **settings) as broker:
        scene = Scene(directory, arguments, environment, broker)
        with scene.engine:
            yield scene
