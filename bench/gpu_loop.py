"""The scheduler-like loop beside an idle thread, beside features that arrive, and beside arenas that grow.

The comparison is a rank that has nothing to receive: its receiver thread is idle, and the loop opens as many messages
whose tensors were on the device before. The loop alone is in a process that never had a second Python thread.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch

import mmbroker

from . import stats, ways
from .gpu_peers import PATIENCE, Engine, Feeder, device, uuid
from .loop import WINDOW, LoopScheduler, Work, _line
from .peers import Source, engine_of
from .processes import Board, Remote, Workshop

ALONE, IDLE, ARRIVING = "alone", "beside an idle thread", "beside arrivals"
FEATURES = 32


class GpuWork(Work):
    """The loop's step with short kernels, as a scheduler's has."""

    def __init__(self) -> None:
        super().__init__()
        self._batch = torch.rand(64, 128, device=device())

    def step(self) -> None:
        super().step()
        x = self._batch
        for _ in range(4):
            x = torch.relu(x * 0.5 + 1.0)


class GpuLoop(LoopScheduler):
    """The loop with a table whose features are on the device, or with private tensors there alone."""

    work = GpuWork

    def __init__(self, broker: str | None, place: str, board: str) -> None:
        torch.set_num_threads(1)
        self.board = Board(board)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(place)
        self._listener.listen(1)
        self._inbox: socket.socket | None = None
        self._clients, self._tables, self._openers = [], [], {}
        torch.zeros(1, device=device())
        if broker is not None:
            client = mmbroker.connect(broker, name="bench-loop", timeout=PATIENCE)
            table = client.attach(
                engine=engine_of(ways.READONLY), device=uuid(), access="readonly", timeout=PATIENCE
            )
            self._clients.append(client)
            self._tables.append(table)
            self._openers[ways.READONLY] = ways.BrokerOpener(table)

    def load(self, mb: float, count: int) -> None:
        super().load(mb, count)
        self._openers[ways.PRIVATE] = ways.PrivateOpener(
            [x.to(device()) for x in ways.tensors(mb, count, seed=1)]
        )


class StepEngine(Engine):
    """The loop's steps alone, one by one."""

    def steps(self, seconds: float) -> list[int]:
        """Nanoseconds of each step."""
        clock, step, times = time.perf_counter_ns, GpuWork().step, []
        end = clock() + int(seconds * 1e9)
        while (started := clock()) < end:
            step()
            times.append(clock() - started)
        return times


class _Bench:
    """One scheduler process with the source that feeds it."""

    def __init__(self, shop: Workshop, name: str, broker: str, attached: bool) -> None:
        place, path = shop.place(name), shop.place("board")
        self.board = Board(path)
        self.scheduler: Remote = shop.worker(f"loop-{name}").make(
            GpuLoop, broker if attached else None, place, path
        )
        self.source: Remote = shop.worker(f"source-{name}").make(Source, broker, place, path, False)

    def load(self, mb: float) -> None:
        for side in (self.scheduler, self.source):
            side.call("load", mb, FEATURES)

    def round(self, way: str, rate: float, together: int, seconds: float) -> dict[str, float]:
        self.board.numbers[Board.RELEASED] = self.board.numbers[Board.STOP] = 0
        self.scheduler.start("run", way, seconds)
        fed = self.source.call("feed", way, rate / together, WINDOW, 0, together)
        return {**self.scheduler.result(), "blocked": fed["blocked"]}

    def close(self) -> None:
        for side in (self.source, self.scheduler):
            side.call("close")
        self.board.close()


def measure(
    shop: Workshop,
    loads: tuple[tuple[float, float, int], ...],
    seconds: float,
    rounds: int,
    settings: dict[str, Any],
    say: Any,
) -> list[dict[str, Any]]:
    """For each load (MB, features a second, how many come together, as the pictures of a request do) a line for the
    loop alone, beside an idle thread, beside arrivals."""
    lines: list[dict[str, Any]] = []
    arena = round(2.2 * FEATURES * sum({mb for mb, _, _ in loads}) + 128)
    with shop.broker(gpu=uuid(), host_mib=arena, device_mib=arena, **settings) as broker:
        alone, attached = (
            _Bench(shop, name, broker.path, name == "attached") for name in ("bare", "attached")
        )
        loaded = 0.0
        for mb, rate, together in loads:
            if mb != loaded:
                for bench in (alone, attached):
                    bench.load(mb)
                loaded = mb
            variants = {
                ALONE: (alone, ways.PRIVATE),
                IDLE: (attached, ways.PRIVATE),
                ARRIVING: (attached, ways.READONLY),
            }
            for bench, way in variants.values():
                bench.round(way, rate, together, seconds / 4)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
            for number in range(rounds):
                say(f"loop: {mb:g} MB, {rate:g}/s by {together}, round {number + 1} of {rounds}")
                for name in variants if number % 2 else reversed(variants):
                    bench, way = variants[name]
                    found[name].append(bench.round(way, rate, together, seconds))
            for name in variants:
                lines.append(
                    _line(mb, rate, name, list(zip(found[IDLE], found[name], strict=True)), together)
                )
        for bench in (alone, attached):
            bench.close()
    return lines


def growth(
    shop: Workshop, mb: float, count: int, rate: float, settings: dict[str, Any], say: Any
) -> list[dict[str, Any]]:
    """The loop's steps while nothing happens, while new features arrive, and while arenas grow for them."""
    lines = []
    arena = round(count * mb * 1.1 + 256)
    for what, more in (
        ("nothing arrives", {}),
        ("segments are there", {"device_reserve_mib": arena}),
        ("arenas grow", {}),
    ):
        say(f"growth: {what}")
        with (
            shop.broker(gpu=uuid(), host_mib=arena, device_mib=arena, **settings, **more) as broker,
            shop.worker("engine").make(StepEngine, broker.path, "engine") as engine,
            shop.worker("feeder").make(Feeder, broker.path) as feeder,
        ):
            if (
                more
            ):  # host segments are there once they were filled; what is dropped is evicted for what comes
                feeder.call("put", mb, "engine", count)
                feeder.call("drop")
                engine.call("emptied")
            engine.call("steps", 0.05)
            before = engine.call("figures")
            engine.start("steps", count / rate)
            if what != "nothing arrives":
                feeder.call("put", mb, "engine", count, rate)
            times = engine.result()
            after = engine.call("figures")
            lines.append(
                {
                    "what": what,
                    "mb": mb,
                    "per_second": rate if what != "nothing arrives" else 0,
                    **stats.us(times),
                    "worst_us": round(max(times) / 1000, 1),
                    **{name: after[name] - before[name] for name in ("imports", "loads")},
                }
            )
    return lines
