"""Servers to be measured: SGLang with one transport each, and a broker beside it where the transport needs one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.processes import Broker, Workshop

from . import loop_probe

#: The flags that make the transports, beside those that all servers have.
TRANSPORTS: Final = {
    "cpu": "--mm-feature-transport cpu",
    "cuda_ipc": "--mm-feature-transport cuda_ipc",  # its handle cache is on unless a variable says otherwise
    "broker": "--mm-transport broker",  # features made for the CPU
    "broker-gpu": "--mm-transport broker --mm-feature-transport cuda_ipc",  # features that stay on the GPU
    # Features that workers without a CUDA context make.
    "broker-cpu": "--mm-transport broker --mm-broker-preprocess cpu --tokenizer-worker-num 8",
}
#: MiB of a broker's host arena beside a GPU: what 64 requests with eight pictures of 640x480 have in flight, and more.
HOST_MIB: Final = 6144
#: On a GPU with a model of 3 billion parameters: the kernels that need nothing but Triton.
GPU_FLAGS: Final = (
    "--load-format dummy --host 127.0.0.1 --attention-backend triton --mm-attention-backend triton_attn "
    "--sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.5 --cuda-graph-max-bs 64"
)
#: Bytes of what an arena is filled with at first.
_PIECE: Final = 16 << 20
#: For SGLang's own figures of waiting.
METRICS: Final = "--enable-metrics"


@dataclass
class Running:
    """A server that answers. `engine`: its process, None where it is somebody else's."""

    url: str
    model: str
    engine: Any = None
    broker: Broker | None = None
    #: Where the loop's counts are.
    loops: Path | None = None

    def pids(self) -> list[int]:
        """Of the server and all that it started."""
        return [process.pid for process in self.engine.processes()] if self.engine is not None else []


@dataclass(frozen=True)
class Maker:
    """How servers are started. `gpu`: the broker's, empty: everything on the CPU, with its tiny model.

    `measure`: have the plugin count what their processes do. `broker`: settings and their values; `NAME:SETTING` is for
    the transport of that name alone.
    """

    shop: Workshop
    model: Path
    gpu: str
    flags: str = ""
    broker: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    logs: Path | None = None
    measure: bool = False

    def transports(self) -> dict[str, str]:
        return {**TRANSPORTS, **dict(self.extra)}

    @contextmanager
    def start(self, transport: str, patience: float) -> Iterator[Running]:
        """A server that is ready; afterwards neither it nor its broker is there. Raises `EngineFailed`."""
        with ExitStack() as stack:
            broker = stack.enter_context(self.beside(transport)) if self.needs_broker(transport) else None
            server = self.begin(stack, transport, broker)
            server.engine.wait_ready(patience)
            if broker is not None and self.gpu:
                _fill(broker)
            yield server

    def needs_broker(self, transport: str) -> bool:
        return "--mm-transport" in shlex.split(self.transports()[transport])

    def beside(self, transport: str) -> Broker:
        """A broker for servers of this kind. Also a context manager."""
        settings: dict[str, object] = {"host_mib": 512}
        if self.gpu:
            settings = {"gpu": self.gpu, "host_mib": HOST_MIB}
        for name, value in self.broker:
            whose, _, setting = name.rpartition(":")
            if whose in ("", transport):
                settings[setting] = value
        return self.shop.broker(**settings)

    def begin(self, stack: ExitStack, transport: str, broker: Broker | None, name: str = "") -> Running:
        """A server that is not ready yet; `stack` ends it and keeps its log, under `name` or its transport's."""
        from mmbroker.demo.engine import CPU_ARGUMENTS, CPU_ENVIRONMENT, PATIENT, Engine

        own = shlex.split(self.transports()[transport])
        place = Path(self.shop.place("e"))
        loops, site = place / "loops", place / "site"
        loops.mkdir(parents=True)
        loop_probe.install(site)
        environment = {
            loop_probe.VARIABLE: str(loops),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        }
        if self.gpu:
            base: tuple[str, ...] = tuple(shlex.split(GPU_FLAGS))
            surroundings = dict(PATIENT)
        else:
            base, surroundings = CPU_ARGUMENTS, dict(CPU_ENVIRONMENT)
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        if broker is not None:
            own += ["--mm-broker", broker.path]
        engine = Engine(
            self.model,
            place,
            [METRICS, *own, *shlex.split(self.flags)],
            environment,
            measure=self.measure,
            base=base,
            surroundings=surroundings,
        )
        logs = [engine.log] + ([Path(f"{broker.path}.log")] if broker is not None else [])
        stack.callback(self._keep_logs, logs, name or transport)
        stack.callback(engine.stop)
        return Running(f"http://127.0.0.1:{engine.port}", str(self.model), engine, broker, loops)

    def _keep_logs(self, logs: list[Path], name: str) -> None:
        """Their ends, as one file."""
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            ends = [log.read_bytes()[-(1 << 20) :] for log in logs if log.exists()]
            (self.logs / f"{name}.log").write_bytes(b"\n---\n".join(ends))


def _fill(broker: Broker) -> None:
    """Have the host arena grow to its limit and fill up, as it is after a minute of traffic: no figure is of growth."""
    import torch

    import mmbroker

    limit = broker.status()["pool"]["limit"]
    stuff = torch.empty(_PIECE, dtype=torch.uint8)
    with mmbroker.connect(broker.path, name="fill", timeout=30.0) as client:
        for number in range(limit // _PIECE):
            stuff[:8] = torch.tensor([number], dtype=torch.int64).view(torch.uint8)
            client.put(stuff, key=f"fill {number}").drop()
