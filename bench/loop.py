"""What a scheduler-like loop loses while features arrive beside it.

The loop does short torch operations and Python work on a core of its own; everything else, the receiver threads of its
own process too, is on one other core. Every variant gets messages of the same request at the same rate from the same
process, opens them, reads the feature's bytes once and ends its use. In the comparison the tensors were there before.
Rounds are short and come in pairs, comparison and variant, in alternating order; a slowdown is the median of the
pairs' ratios, so that a machine's slow minutes fall on both sides. A step's time is split into time on the core, time
spent waiting (for the interpreter's lock), and time ready but without the core: the last is somebody else's doing.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from . import stats, ways
from .peers import END, Scheduler, Source
from .processes import Board, Workshop, pin

#: Different features in turn; holds that may be under way at once.
FEATURES, WINDOW = 32, 32
#: Requests that the Python work keeps books for.
RUNNING = 640


class _Running:
    """What the loop's Python work keeps of one request."""

    __slots__ = ("last", "length", "pages")

    def __init__(self, length: int) -> None:
        self.length = length
        self.last = 0
        self.pages = list(range(8))


class Work:
    """One step of the loop: about half of it short torch operations, half Python."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._state = torch.rand(64, 128, generator=generator)
        self._weights = torch.rand(128, 128, generator=generator) / 64
        self._requests = [_Running(n) for n in range(RUNNING)]

    def step(self) -> None:
        x = self._state
        for _ in range(4):
            x = torch.relu(x @ self._weights)
            x = x / (x.sum(dim=1, keepdim=True) + 1.0)
        budget = 0
        tokens = x.argmax(dim=1).tolist()
        for number, request in enumerate(self._requests):
            request.length = request.length % 4096 + 1
            request.last = tokens[number % 64]
            if request.length % 16 == 0:
                request.pages = [*request.pages[1:], request.length]
            budget += request.length + len(request.pages)
        self._requests.sort(key=lambda request: request.length)


def _accounts() -> tuple[int, int, int]:
    """Of this thread, in nanoseconds: now, time on a core, and time ready but without one."""
    with open("/proc/thread-self/schedstat") as file:
        running, ready, _ = map(int, file.read().split())
    return time.perf_counter_ns(), running, ready


class LoopScheduler(Scheduler):
    """Runs the loop for a while and counts."""

    work: type[Work] = Work

    def run(self, way: str, seconds: float) -> dict[str, float]:
        """From the first arrival on, for so long. Then stops the source and lets the rest of the round in."""
        opener, clock, board, inbox = self.opener(way), time.perf_counter_ns, self.board.numbers, self.inbox()
        receive, step, dontwait = inbox.recv, self.work().step, 0x40  # MSG_DONTWAIT
        released = iterations = arrivals = start = 0
        ends: list[int] = []
        before = end = 0
        began = closed = (0, 0, 0)
        ended = False
        while not ended:
            step()
            for _ in range(WINDOW):  # where opening is slower than arrivals are, there is always one more
                try:
                    message = receive(1 << 17, dontwait)
                except BlockingIOError:
                    break
                if message == END:
                    ended = True
                    break
                opened = opener.open(message)
                while opened:
                    tensor, _, use = opened.pop(0)
                    tensor.sum()
                    del tensor
                    opener.close(use)
                    del use
                released += 1
                board[Board.RELEASED] = released
            now = clock()
            if not start:
                if released:  # the window opens behind the first arrival
                    start, end, arrivals = now, now + int(seconds * 1e9), released
                    began = _accounts()
            elif not board[Board.STOP]:
                iterations += 1
                ends.append(now - before)
                if now >= end and released > arrivals:
                    board[Board.STOP] = 1
                    arrivals, closed = released - arrivals, _accounts()
            before = now
        took, running, ready = (after - first for first, after in zip(began, closed, strict=True))
        return {
            "us": took / iterations / 1000,
            "cpu_us": running / iterations / 1000,
            "no_core_us": ready / iterations / 1000,
            "waited_us": max(0, took - running - ready) / iterations / 1000,
            "per_second": iterations / took * 1e9,
            "gap_ms": max(ends) / 1e6,
            "iteration_us_p99": stats.percentile(ends, 99) / 1000,
            "rate": arrivals / took * 1e9,
        }


def measure(
    shop: Workshop,
    loads: list[tuple[float, float]],
    seconds: float,
    pairs: int,
    sglang: bool,
    say: Any,
) -> list[dict[str, Any]]:
    """For each load (MB, arrivals a second): one line for the comparison and one for each variant."""
    cores = sorted(os.sched_getaffinity(0))
    own, other = cores[0], cores[1 % len(cores)]
    lines: list[dict[str, Any]] = []
    place, board_path = shop.place("loop"), shop.place("board")
    board = Board(board_path)
    # Each of two engines may have half of the arena under way; only what is used is ever allocated.
    most = round(2.2 * WINDOW * sum({mb for mb, _ in loads}) + 64)
    with (
        shop.broker(host_mib=most) as broker,
        shop.worker("scheduler").make(LoopScheduler, broker.path, place, board_path, sglang) as scheduler,
        shop.worker("source").make(Source, broker.path, place, board_path, sglang) as source,
    ):

        def round_of(way: str, rate: float) -> dict[str, float]:
            board.numbers[Board.RELEASED] = board.numbers[Board.STOP] = 0
            scheduler.start("run", way, seconds)
            fed = source.call("feed", way, rate, WINDOW)
            return {**scheduler.result(), "blocked": fed["blocked"]}

        pin(broker.pid, [other])
        scheduler.call("isolate", own, other)
        source.call("isolate", other)
        loaded = 0.0
        variants = ways.variants(sglang)
        for mb, rate in loads:
            if mb != loaded:
                for side in (scheduler, source):
                    side.call("load", mb, FEATURES)
                loaded = mb
            bare: list[dict[str, float]] = []
            found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {way: [] for way in variants}
            for way in (ways.PRIVATE, *variants):
                round_of(way, rate)  # warm every path
            for number in range(pairs):
                say(f"loop: {mb} MB, {rate:g}/s, round {number + 1} of {pairs}")
                for way, pair in found.items():
                    first, second = (ways.PRIVATE, way) if number % 2 else (way, ways.PRIVATE)
                    rounds = {first: round_of(first, rate), second: round_of(second, rate)}
                    pair.append((rounds[ways.PRIVATE], rounds[way]))
                    bare.append(rounds[ways.PRIVATE])
            lines.append(_line(mb, rate, ways.PRIVATE, [(one, one) for one in bare]))
            lines += [_line(mb, rate, way, pair) for way, pair in found.items()]
    board.close()
    return lines


def _line(
    mb: float,
    rate: float,
    way: str,
    pairs: list[tuple[dict[str, float], dict[str, float]]],
    together: int = 1,
) -> dict[str, Any]:
    """`together`: features of a request, of which `rate` come a second in all."""
    own = [variant for _, variant in pairs]

    def middle(name: str, digits: int) -> float:
        return round(statistics.median(one[name] for one in own), digits)

    slowdown = stats.spread([100 * (variant["us"] / bare["us"] - 1) for bare, variant in pairs])
    return {
        "mb": mb,
        "asked_per_second": rate,
        "together": together,
        "transport": way,
        "reached_per_second": round(together * middle("rate", 2), 1),
        "iteration_us": middle("us", 1),
        "iterations_per_second": middle("per_second", 1),
        "iteration_us_p99": middle("iteration_us_p99", 1),
        "cpu_us": middle("cpu_us", 1),
        "waited_us": middle("waited_us", 1),
        "no_core_us": middle("no_core_us", 1),
        "slowdown_percent": slowdown["median"],
        "slowdown_percent_low": slowdown["low"],
        "slowdown_percent_high": slowdown["high"],
        "gap_ms": middle("gap_ms", 2),
        "gap_ms_worst": round(max(one["gap_ms"] for one in own), 2),
        "window_full_percent": round(100 * statistics.median(one["blocked"] for one in own), 1),
        "rounds": len(own),
    }
