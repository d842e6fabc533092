"""Two servers that get the same traffic together, on one broker or with one each."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.processes import Broker

from . import bodies
from .servers import Maker, Running

ENGINES: Final = 2
#: Transport and number of brokers.
ARRANGEMENTS: Final[dict[str, tuple[str, int]]] = {
    "shared": ("broker", 1),
    "alone": ("broker", ENGINES),
    "cuda_ipc": ("cuda_ipc", 0),
    "shared-gpu": ("broker-gpu", 1),
    "alone-gpu": ("broker-gpu", ENGINES),
    "cpu": ("cpu", 0),
}


@dataclass(frozen=True)
class Traffic:
    """`requests` to each engine, `in_flight` of them at a time, with so many pictures each. `layers`: of each half of
    the model, 0: all it has. The rest are the brokers' limits."""

    requests: int
    in_flight: int
    images: int
    size: tuple[int, int]
    tokens: int
    layers: int
    host_mib: int
    device_mib: int

    def shape(self) -> dict[str, Any]:
        return {**asdict(self), "size": list(self.size)}


@dataclass
class Pair:
    """Two servers of one arrangement, and their brokers. Since `began`, seconds until both were ready, and warm."""

    name: str
    servers: list[Running]
    brokers: list[Broker]
    began: float
    ready_s: float = 0.0
    warm_s: float = 0.0

    def pids(self) -> list[int]:
        return [pid for server in self.servers for pid in server.pids()]

    def engines(self) -> list[Any]:
        return [server.engine for server in self.servers]


def begin(stack: ExitStack, maker: Maker, name: str) -> Pair:
    """Servers that are not ready yet; `stack` ends them."""
    transport, count = ARRANGEMENTS[name]
    brokers = [stack.enter_context(maker.beside(transport)) for _ in range(count)]
    servers: list[Running] = []

    def end() -> None:
        """All at once: each takes seconds."""
        with ThreadPoolExecutor(ENGINES) as pool:
            list(pool.map(lambda server: server.engine.stop(), servers))

    began = time.monotonic()
    for index in range(ENGINES):
        broker = brokers[index % count] if brokers else None
        servers.append(maker.begin(stack, transport, broker, f"{name}-{index + 1}"))
    stack.callback(end)
    return Pair(name, servers, brokers, began)


# --- what is sent ---------------------------------------------------------------------------------------------------


def pictures(traffic: Traffic, first: int, requests: int) -> list[list[str]]:
    """Data URLs of so many requests; request `first` is the first one. No two have a picture in common."""

    def url(number: int) -> str:
        return "data:image/jpeg;base64," + bodies.picture(1, number, *traffic.size)

    numbers = range(first * traffic.images, (first + requests) * traffic.images)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # compressing gives up the GIL
        urls = list(pool.map(url, numbers))
    return [urls[start : start + traffic.images] for start in range(0, len(urls), traffic.images)]


def send(
    servers: Sequence[Any], requests: Sequence[Sequence[str]], in_flight: int, tokens: int, patience: float
) -> tuple[float, list[str]]:
    """Each request to all servers at once, and the next when all have answered: seconds, and what went wrong."""
    started = time.perf_counter()

    def one(server: Any, urls: Sequence[str]) -> str:
        left = started + patience - time.perf_counter()
        if left <= 0:
            return f"not sent within {patience:g} s"
        try:
            server.ask(urls, tokens=tokens, timeout=left)
        except (OSError, ValueError, KeyError) as error:  # a refusal, a connection, an answer that is none
            detail = error.read().decode(errors="replace")[:300] if hasattr(error, "read") else ""
            return f"{type(error).__name__}: {error} {detail}".strip()
        return ""

    with ThreadPoolExecutor(len(servers) * in_flight) as asking, ThreadPoolExecutor(in_flight) as together:

        def both(urls: Sequence[str]) -> list[str]:
            return [asked.result() for asked in [asking.submit(one, server, urls) for server in servers]]

        told = [error for errors in together.map(both, requests) for error in errors]
    return time.perf_counter() - started, [error for error in told if error]


def shallow(model: Path, layers: int, into: Path) -> Path:
    """The same model with so many layers in each half: every feature and every prompt is as large, and little else."""
    shutil.copytree(model, into, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", "config.json"))
    config = json.loads((model / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = min(layers, part["num_hidden_layers"])
        if "layer_types" in part:
            part["layer_types"] = part["layer_types"][:layers]
    vision = config["vision_config"]
    vision["depth"] = min(layers, vision["depth"])
    full = [index for index in vision.get("fullatt_block_indexes", ()) if index < vision["depth"]]
    vision["fullatt_block_indexes"] = full or [vision["depth"] - 1]
    (into / "config.json").write_text(json.dumps(config, indent=1))
    return into
