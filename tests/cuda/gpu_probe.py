"""What the real driver can do on this machine, and what each call costs: a script for a machine with a GPU, one minute.

    python tests/cuda/gpu_probe.py [--only driver|loop] [--json FILE]

Every part says what it found; a part that fails says why, and the others go on. Times are microseconds, p50 and p99.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, os.fspath(ROOT))

from mmbroker.cuda import Driver, DriverError, open_driver  # noqa: E402
from tests.cuda.loop_probe import print_lines  # noqa: E402

MIB = 1 << 20
SEGMENT = 64 * MIB
found: dict[str, Any] = {}


def say(name: str, value: Any) -> None:
    found[name] = value
    print(f"{name:58} {value}", flush=True)


def timed(name: str, call: Callable[[], Any], count: int = 2000, warm: int = 50) -> None:
    """Times of single calls."""
    for _ in range(warm):
        call()
    clock, times = time.perf_counter_ns, []
    for _ in range(count):
        before = clock()
        call()
        times.append(clock() - before)
    times.sort()
    p50, p99, most = (times[min(count - 1, at)] / 1000 for at in (count // 2, count * 99 // 100, count - 1))
    say(name, f"p50 {p50:9.2f}   p99 {p99:9.2f}   most {most:10.2f}")


def once(name: str, call: Callable[[], Any]) -> Any:
    before = time.perf_counter_ns()
    value = call()
    say(name, f"{(time.perf_counter_ns() - before) / 1000:.1f} us")
    return value


def part(function: Callable[..., None], *arguments: Any) -> None:
    print(f"\n-- {function.__doc__}", flush=True)
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        found.setdefault("failed parts", []).append(function.__name__)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE // 1024


def without_context() -> None:
    """Without a context: what the broker does"""
    from mmbroker.cuda.nvml import Nvml

    before = resident()
    driver = once("cuInit and devices", open_driver)
    say("resident KiB, before and after", f"{before} {resident()}")
    say("devices", driver.devices())
    uuid = driver.devices()[0].uuid
    once("nvmlInit", Nvml)
    say("existing (nvmlDeviceGetCount_v2, ...GetUUID, ...GetName)", driver.existing())
    free = driver.free(uuid)
    timed("free (nvmlDeviceGetMemoryInfo)", lambda: driver.free(uuid), 300)
    say("granularity", driver.granularity(uuid))
    fd = once("export of 64 MiB, the first", lambda: driver.export(uuid, SEGMENT))
    say("memory taken by it, MiB", (free - driver.free(uuid)) / MIB)
    say(
        "processes (nvmlDeviceGetComputeRunningProcesses_v3)",
        f"{driver.processes(uuid)}, this one is {os.getpid()}",
    )
    os.close(fd)
    say("memory taken after the descriptor was closed, MiB", (free - driver.free(uuid)) / MIB)
    timed("export of 64 MiB and close", lambda: os.close(driver.export(uuid, SEGMENT)), 50, 3)
    say("context", driver.context(uuid))
    say("threads", len(os.listdir("/proc/self/task")))
    readable, writable = os.pipe()
    for name, bad in (("a pipe", readable), ("a memfd", os.memfd_create("nothing"))):
        try:
            say(f"import of {name}", driver.import_(bad, SEGMENT))
        except DriverError as error:
            say(f"import of {name}", f"{type(error).__name__}: {error}")
    os.close(writable)
    try:
        driver.use(uuid)
    except DriverError as error:
        say("use without a context", f"{type(error).__name__}: {error}")


def segments(driver: Driver, uuid: str) -> None:
    """Segments: import, two maps, an exporter that is killed"""
    import torch

    from tests.cuda.rig import Rig

    free = driver.free(uuid)
    once("use, creating a context", lambda: driver.use(uuid, create=True))
    say("memory taken by the context, MiB", (free - driver.free(uuid)) / MIB)
    rig = Rig(driver, uuid)
    fd = driver.export(uuid, SEGMENT)
    handle = driver.import_(fd, SEGMENT)
    timed("import and release", lambda: driver.release(driver.import_(fd, SEGMENT)), 50, 3)
    for writable in (True, False):
        timed(
            f"map and unmap, writable={writable}",
            lambda writable=writable: driver.unmap(driver.map(handle, SEGMENT, writable), SEGMENT),
            50,
            3,
        )
    writer, reader = driver.map(handle, SEGMENT, True), driver.map(handle, SEGMENT, False)
    right = 0
    for number in range(400):
        data = os.urandom(4096)
        rig.write(writer + number * 8192, data)
        right += rig.read(reader + number * 8192, 4096) == data
    say("written through one map, read through the other", f"{right} of 400 right")
    try:
        driver.copy(reader, writer, 4096, 0)
        say("copy into the read-only map", "NOT REFUSED")
    except DriverError as error:
        say("copy into the read-only map", f"{type(error).__name__}: {error}")
    timed("tensor over an address", lambda: driver.tensor(reader, torch.uint8, (MIB,), uuid, None), 1000)
    driver.unmap(writer, SEGMENT)
    driver.unmap(reader, SEGMENT)
    driver.release(handle)
    os.close(fd)
    with rig.agent() as exporter:
        fd = exporter.export(SEGMENT)
        with rig.mapped(fd, SEGMENT) as address:
            os.close(fd)
            data = os.urandom(MIB)
            rig.write(address, data)
            exporter.kill()
            say("exporter killed: bytes right", rig.read(address, MIB) == data)
            rig.write(address + SEGMENT - MIB, data)
            say("exporter killed: still writable", rig.read(address + SEGMENT - MIB, MIB) == data)
    say("memory taken after all let go, beside the context, MiB", (free - driver.free(uuid)) / MIB)
    rig.close()


class Segment:
    """A host segment as the broker makes it, mapped here."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("probe")
        once(f"fallocate {nbytes // MIB} MiB", lambda: os.posix_fallocate(self.fd, 0, nbytes))
        self.map = mmap.mmap(self.fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.view = memoryview(self.map)


def pinning(driver: Driver, uuid: str) -> None:
    """Pinning in pieces, and copies across pieces"""
    from cuda.bindings import driver as cuda

    piece, pieces = 64 * MIB, 4
    host = Segment(pieces * piece)
    for number in range(pieces):
        once(
            f"pin 64 MiB, piece {number}",
            lambda number=number: driver.pin(host.address + number * piece, piece),
        )
    fd = driver.export(uuid, SEGMENT)
    handle = driver.import_(fd, SEGMENT)
    slot, stream = driver.map(handle, SEGMENT, True), driver.stream()
    (code,) = cuda.cuMemcpyAsync(slot, host.address + piece - MIB, 2 * MIB, stream)
    say("one copy from two pinned pieces, not cut, H2D", code.name)
    (code,) = cuda.cuMemcpyAsync(host.address + piece - MIB, slot, 2 * MIB, stream)
    say("one copy into two pinned pieces, not cut, D2H", code.name)
    driver.copy(slot, host.address + piece - MIB, 2 * MIB, stream)
    once("synchronize", lambda: cuda.cuStreamSynchronize(stream))
    driver.unpin(host.address + 3 * piece)
    (code,) = cuda.cuMemcpyAsync(slot, host.address + 3 * piece - MIB, 2 * MIB, stream)
    say("one copy from a pinned and an unpinned piece, not cut", code.name)
    cuda.cuStreamSynchronize(stream)
    for number in range(3):
        once(
            f"unpin 64 MiB, piece {number}", lambda number=number: driver.unpin(host.address + number * piece)
        )
    for size in (1, 4, 16):
        timed(
            f"pin and unpin {size} MiB",
            lambda size=size: (driver.pin(host.address, size * MIB), driver.unpin(host.address)),
            20,
            2,
        )
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, MIB, mmap.PROT_READ, mmap.MAP_SHARED, host.fd, ctypes.c_long(0))
    for name, flags in (("PORTABLE", 1), ("PORTABLE and READ_ONLY", 1 | 8)):
        (code,) = cuda.cuMemHostRegister(address, MIB, flags)
        say(f"pin of a read-only map, {name}", code.name)
        if not code:
            cuda.cuMemHostUnregister(address)
    driver.destroy_stream(stream)
    driver.unmap(slot, SEGMENT)
    driver.release(handle)
    os.close(fd)


def bandwidth(driver: Driver, uuid: str) -> None:
    """Copies from a pinned memfd into a mapped segment"""
    import torch

    host = Segment(SEGMENT)
    driver.pin(host.address, SEGMENT)
    fd = driver.export(uuid, SEGMENT)
    handle = driver.import_(fd, SEGMENT)
    slot, stream, event = driver.map(handle, SEGMENT, True), driver.stream(True), driver.event()
    plain = torch.empty(SEGMENT, dtype=torch.uint8, pin_memory=True)
    for mb in (0.6, 2.4, 8, 9.6, 38, 64):
        nbytes = int(mb * 1e6) if mb != 64 else SEGMENT
        for name, dst, src in (
            ("H2D, segment", slot, host.address),
            ("H2D, plain pinned memory", slot, plain.data_ptr()),
            ("D2H, segment", host.address, slot),
        ):
            times = []
            for _ in range(12):
                before = time.perf_counter_ns()
                driver.copy(dst, src, nbytes, stream)
                driver.record(event, stream)
                driver.synchronize(event)
                times.append(time.perf_counter_ns() - before)
            took = sorted(times)[len(times) // 2]
            say(f"{name}, {mb} MB: GB/s and us to completion", f"{nbytes / took:7.2f} {took / 1000:9.1f}")
    before = time.perf_counter_ns()
    for _ in range(50):
        driver.copy(slot, host.address, 8 * MIB, stream)
    driver.record(event, stream)
    enqueued = time.perf_counter_ns()
    driver.synchronize(event)
    took = time.perf_counter_ns() - before
    say(
        "H2D, 50 x 8 MiB in a row: GB/s, us to enqueue one",
        f"{50 * 8 * MIB / took:.2f} {(enqueued - before) / 5e4:.2f}",
    )
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.unpin(host.address)
    driver.unmap(slot, SEGMENT)
    driver.release(handle)
    os.close(fd)


def hot_calls(driver: Driver, uuid: str) -> None:
    """The calls of the scheduler and the loader: alone, beside a busy Python thread, beside pinning and mapping"""
    from cuda.bindings import driver as cuda

    host = Segment(2 * SEGMENT)
    driver.pin(host.address, MIB)
    fd = driver.export(uuid, SEGMENT)
    handle = driver.import_(fd, SEGMENT)
    slot, stream, event = driver.map(handle, SEGMENT, True), driver.stream(), driver.event()
    plain = ctypes.CDLL("libcuda.so.1")
    query = plain.cuEventQuery
    query.argtypes = [ctypes.c_void_p]
    wrapped_event, wrapped_stream = cuda.CUevent(event), cuda.CUstream(stream)
    calls: dict[str, Callable[[], Any]] = {
        "query": lambda: driver.query(event),
        "query, ctypes that gives the GIL up": lambda: query(event),
        "query, cuda.bindings": lambda: cuda.cuEventQuery(wrapped_event),
        "record": lambda: driver.record(event, stream),
        "record, cuda.bindings": lambda: cuda.cuEventRecord(wrapped_event, wrapped_stream),
        "wait": lambda: driver.wait(stream, event),
        "wait, cuda.bindings": lambda: cuda.cuStreamWaitEvent(wrapped_stream, wrapped_event, 0),
        "copy of 4 KiB": lambda: driver.copy(slot, host.address, 4096, stream),
        "current_stream": driver.current_stream(uuid),
        "capturing": lambda: driver.capturing(stream),
        "relaxed_capture": driver.relaxed_capture,
        "record and query and wait": lambda: (
            driver.record(event, stream),
            driver.query(event),
            driver.wait(stream, event),
        ),
    }
    for name, call in calls.items():
        timed(name, call)
        driver.synchronize(event)
    timed("event and destroy_event", lambda: driver.destroy_event(driver.event()), 500)
    timed("stream and destroy_stream", lambda: driver.destroy_stream(driver.stream()), 100)
    end = threading.Event()

    def spin() -> None:
        while not end.is_set():
            sum(range(1000))

    def pin() -> None:
        driver.use(uuid)
        while not end.is_set():
            driver.pin(host.address + SEGMENT, SEGMENT)
            driver.unpin(host.address + SEGMENT)

    def map_() -> None:
        driver.use(uuid)
        while not end.is_set():
            driver.unmap(driver.map(handle, SEGMENT, True), SEGMENT)

    def load() -> None:
        driver.use(uuid)
        own, done = driver.stream(True), driver.event()
        while not end.wait(0.001):
            driver.copy(slot, host.address, MIB, own)
            driver.record(done, own)
            driver.query(done)
        driver.synchronize(done)
        driver.destroy_event(done)
        driver.destroy_stream(own)

    for beside, function in (
        ("spinning Python", spin),
        ("pinning", pin),
        ("mapping", map_),
        ("1000 loads/s", load),
    ):
        end.clear()
        thread = threading.Thread(target=function)
        thread.start()
        try:
            for name in ("query", "query, ctypes that gives the GIL up", "record", "wait"):
                timed(f"{name}; beside: {beside}", calls[name], 300 if function is spin else 2000)
                driver.synchronize(event)
        finally:
            end.set()
            thread.join()
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.unpin(host.address)
    driver.unmap(slot, SEGMENT)
    driver.release(handle)
    os.close(fd)


def capture_states(driver: Driver, uuid: str) -> None:
    """What a receiver can see of a capture in another thread"""
    import torch

    own = driver.stream()
    state = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    answers: dict[str, Any] = {}

    def look(stream: int) -> None:
        driver.use(uuid)
        driver.relaxed_capture()
        for name, which in (
            ("the captured stream", stream),
            ("the default stream", 0),
            ("a stream of its own", own),
        ):
            try:
                answers[name] = driver.capturing(which)
            except DriverError as error:
                answers[name] = error.code

    with torch.cuda.graph(graph):
        state.add_(1)
        thread = threading.Thread(target=look, args=(driver.current_stream(uuid)(),))
        thread.start()
        thread.join()
    say("capturing(), asked from another thread", answers)
    driver.destroy_stream(own)


def loops() -> None:
    """A scheduler-like loop beside idle threads (loop_probe.py says how to read it)"""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // 4)
    sets = [",".join(map(str, cores[at : at + share])) for at in range(0, 4 * share, share)]
    plans: list[tuple[str, list[str], dict[str, str], str]] = [
        ("gpu", ["--gpu"], {}, sets[0]),
        ("cpu", [], {}, sets[1]),
        (
            "cpu, 1 torch thread",
            ["--threads", "1"],
            {"OMP_NUM_THREADS": "1"},
            sets[2] if len(sets) > 2 else sets[0],
        ),
        ("cpu, 1 malloc arena", [], {"MALLOC_ARENA_MAX": "1"}, sets[3] if len(sets) > 3 else sets[0]),
    ]
    alone = ("gpu, 1 arena, 1 torch thread", ["--gpu", "--threads", "1"], {"MALLOC_ARENA_MAX": "1"}, sets[0])
    lines: list[dict[str, Any]] = []
    for group in (plans, [alone]):
        running = []
        for label, flags, variables, own in group:
            command = [sys.executable, "-m", "tests.cuda.loop_probe", "--json", "--label", label, *flags]
            command += ["--seconds", "0.06", "--rounds", "3", "--cores", own]
            running.append(
                subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE)
            )
        for (label, *_), process in zip(group, running, strict=True):
            output, _ = process.communicate()
            if process.returncode:
                print(f"{label}: exit code {process.returncode}")
                continue
            each = json.loads(output)
            lines += each
            print(f"\n{label}")
            print_lines(each)
    found["loops"] = lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("driver", "loop"))
    parser.add_argument("--json")
    options = parser.parse_args()
    start = time.monotonic()
    say("python", platform.python_version())
    say("cores", len(os.sched_getaffinity(0)))
    for package in ("torch", "cuda-bindings", "nvidia-ml-py"):
        try:
            say(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            say(package, "missing")
    if options.only != "loop":
        part(without_context)
        driver = open_driver()
        uuid = driver.devices()[0].uuid
        part(segments, driver, uuid)
        for function in (pinning, bandwidth, hot_calls, capture_states):
            part(function, driver, uuid)
    if options.only != "driver":
        part(loops)
    say("seconds", round(time.monotonic() - start, 1))
    if options.json:
        Path(options.json).write_text(json.dumps(found, default=str, indent=1))


if __name__ == "__main__":
    main()
