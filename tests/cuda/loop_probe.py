"""What a second, idle thread costs a scheduler-like loop, and by what: a script, run by `gpu_probe` and by itself.

The loop is timed alone and beside idle threads of several kinds, in turns, so that a machine's moods fall on all alike.
Beside the time of a step stand what the kernel did for it: time in the kernel, switches, page faults. Whatever slows
Python work and torch alike, and only beside Python threads, is the GIL; what slows torch's allocations also beside a
native thread is malloc's locks; what raises kernel time is the address space (page tables, interrupts to other cores).

    python tests/cuda/loop_probe.py [--gpu] [--seconds 0.1] [--rounds 5] [--cores 0,1] [--threads 1] [--label TEXT]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import select
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Step = Callable[[], None]
_libc = ctypes.CDLL(None)


def python_step() -> Step:
    """Books of a few hundred requests: no torch."""
    books = [{"length": number, "last": 0} for number in range(300)]

    def step() -> None:
        for number, book in enumerate(books):
            book["length"] = book["length"] % 4096 + 1
            book["last"] = number
        sorted(books, key=lambda book: book["length"])

    return step


def cpu_step() -> Step:
    """Short torch operations on the CPU, which allocate."""
    import torch

    state = torch.rand(64, 128)

    def step() -> None:
        x = state
        for _ in range(8):
            x = torch.relu(x * 0.5 + 1.0)
            x = x / (x.sum(dim=1, keepdim=True) + 1.0)
        x.argmax(dim=1).tolist()

    return step


def malloc_step() -> Step:
    """malloc and free alone, of sizes that torch asks for."""
    malloc, free = _libc.malloc, _libc.free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    sizes = [64, 1024, 4096, 32768, 200_000] * 20

    def step() -> None:
        for address in [malloc(size) for size in sizes]:
            free(address)

    return step


def gpu_step() -> Step:
    """Short torch operations on the GPU, an event, a query, a small copy."""
    import torch

    state = torch.rand(64, 128, device="cuda")
    pinned, small = torch.zeros(64, pin_memory=True), torch.zeros(64, device="cuda")
    event = torch.cuda.Event()

    def step() -> None:
        x = state
        for _ in range(4):
            x = torch.relu(x * 0.5 + 1.0)
        small.copy_(pinned, non_blocking=True)
        event.record()
        event.query()

    return step


def mixed_step(*parts: Step) -> Step:
    def step() -> None:
        for part in parts:
            part()

    return step


# --- what is beside the loop ----------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    yield


@contextmanager
def python_thread(wait: Callable[[threading.Event], object]) -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=wait, args=(end,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def poll() -> Any:
    """Blocked in the kernel, without the GIL."""
    readable, writable = os.pipe()
    poller = select.poll()
    poller.register(readable, select.POLLIN)

    @contextmanager
    def beside() -> Iterator[None]:
        thread = threading.Thread(target=poller.poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.write(writable, b"x")
            thread.join()
            os.close(readable)
            os.close(writable)

    return beside()


def lock() -> Any:
    """Blocked in lock.acquire, without the GIL."""
    return python_thread(lambda end: end.wait())


def ticking() -> Any:
    """Awake every 20 ms for a moment, as a receiver that polls."""

    def tick(end: threading.Event) -> None:
        while not end.wait(0.02):
            pass

    return python_thread(tick)


def busy(hz: float) -> Any:
    """Awake `hz` times a second for about 100 microseconds of Python."""

    def work(end: threading.Event) -> None:
        while not end.wait(1 / hz):
            sum(range(3000))

    return python_thread(work)


@contextmanager
def native() -> Iterator[None]:
    """A thread that Python knows nothing of, asleep in the kernel."""
    handle = ctypes.c_ulong()
    assert not _libc.pthread_create(ctypes.byref(handle), None, _libc.pause, None)
    try:
        yield
    finally:
        _libc.pthread_cancel(handle)
        _libc.pthread_join(handle, None)


@contextmanager
def interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


#: Name -> what to enter, in this order.
CONDITIONS: dict[str, list[Callable[[], Any]]] = {
    "alone": [alone],
    "native thread": [native],
    "poll": [poll],
    "lock": [lock],
    "ticking 20 ms": [ticking],
    "busy 200 Hz": [lambda: busy(200)],
    "busy 1000 Hz": [lambda: busy(1000)],
    "busy 1000 Hz, interval 0.1 ms": [lambda: interval(1e-4), lambda: busy(1000)],
    "poll, interval 50 ms": [lambda: interval(0.05), poll],
    "alone, own core": [one_core],
    "poll, own core": [one_core, poll],
    "busy 1000 Hz, own core": [one_core, lambda: busy(1000)],
}


def run(step: Step, seconds: float) -> dict[str, float]:
    """One round: microseconds a step (median and 99th percentile), and what the kernel counted for this thread."""
    clock = time.perf_counter_ns
    before = resource.getrusage(resource.RUSAGE_THREAD)
    times = []
    now = clock()
    end = now + int(seconds * 1e9)
    while now < end:
        step()
        after = clock()
        times.append(after - now)
        now = after
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    times.sort()
    count = len(times)
    return {
        "us": times[count // 2] / 1000,
        "mean_us": sum(times) / count / 1000,
        "p99_us": times[min(count - 1, count * 99 // 100)] / 1000,
        "system_us": (usage.ru_stime - before.ru_stime) * 1e6 / count,
        "waits": (usage.ru_nvcsw - before.ru_nvcsw) / count,
        "preempted": (usage.ru_nivcsw - before.ru_nivcsw) / count,
        "faults": (usage.ru_minflt - before.ru_minflt) / count,
    }


def measure(steps: dict[str, Step], seconds: float, rounds: int) -> list[dict[str, Any]]:
    lines = []
    for kind, step in steps.items():
        first = [run(step, seconds) for _ in range(2)][
            1
        ]  # before this process ever had a second Python thread
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONDITIONS}
        for _ in range(rounds):
            for name, conditions in CONDITIONS.items():
                with ExitStack() as stack:
                    for condition in conditions:
                        stack.enter_context(condition())
                    run(step, seconds / 10)
                    found[name].append(run(step, seconds))
        reference = statistics.median(one["us"] for one in found["alone"])
        for name, each in [("before any thread", [first]), *found.items()]:
            line = {key: round(statistics.median(one[key] for one in each), 3) for key in first}
            percent = round(100 * (line["us"] / reference - 1), 1)
            lines.append({"loop": kind, "beside": name, "percent": percent, **line})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--label", default="default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, set(map(int, options.cores.split(","))))
    # The loops without torch come first: torch's import starts threads of its own.
    lines = measure({"python": python_step(), "malloc": malloc_step()}, options.seconds, options.rounds)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    if options.gpu:
        steps = {"gpu": gpu_step(), "gpu+python": mixed_step(gpu_step(), python_step())}
    else:
        steps = {"cpu": cpu_step(), "cpu+python": mixed_step(cpu_step(), python_step())}
    lines += measure(steps, options.seconds, options.rounds)
    for line in lines:
        line["process"] = options.label
    if options.json:
        print(json.dumps(lines))
    else:
        print_lines(lines)


def print_lines(lines: list[dict[str, Any]]) -> None:
    columns = ("us", "mean_us", "percent", "p99_us", "system_us", "waits", "preempted", "faults")
    print(f"{'loop: beside':42}" + "".join(f"{column:>10}" for column in columns))
    for line in lines:
        name = f"{line['loop']}: {line['beside']}"
        print(f"{name:42}" + "".join(f"{line[column]:10.2f}" for column in columns))


if __name__ == "__main__":
    main()
