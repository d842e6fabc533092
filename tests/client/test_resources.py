"""What a client has open, mapped and running: bounded while it works, nothing when it ends."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmbroker
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import Rig, a_rig, same, values


def memory() -> dict[str, int]:
    """Sizes of this process, in KiB."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kib) for name, kib in re.findall(r"(Vm\w+):\s+(\d+) kB", text)}


def mapped() -> int:
    """Bytes of segments in this process's address space."""
    found = re.findall(r"^(\w+)-(\w+) .*memfd:", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in found)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("mmbroker-rec"))


@pytest.mark.parametrize("access", ["readonly", "copy"])
def test_connecting_many_times(broker: BrokerProcess, access: str) -> None:
    """Memory, maps, descriptors and threads stay flat over cycles of connect, attach, use and close."""
    tensor = values(torch.uint8, (100_000,))

    def cycle() -> None:
        with mmbroker.connect(broker.directory) as client, mmbroker.connect(broker.directory) as engine:
            table = engine.attach(engine="e", access=access)
            with client.put(tensor, to="e") as held, table.take(held.ref) as use:
                assert same(use.tensor, tensor)

    for _ in range(20):
        cycle()
    gc.collect()
    before, count = memory(), len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        cycle()
    gc.collect()
    assert threads() == []
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= count, "closed descriptors")
    assert memory()["VmRSS"] - before["VmRSS"] < 4 << 10
    assert memory()["VmSize"] - before["VmSize"] < 64 << 10  # ZeroMQ's and malloc's arenas come and go


def test_segments_are_unmapped_when_they_retire() -> None:
    """Each round needs a segment of its own; the broker gives them back, and so does the client."""
    before = mapped()
    with a_rig("readonly", host_mib=40, segment_mib=4) as rig:

        def cycle(seed: int) -> None:
            tensor = values(torch.uint8, (30 << 20,), seed=seed)
            with rig.client.put(tensor, to="a") as held, rig.table.take(held.ref) as use:
                assert use.tensor[seed] == tensor[seed]
            rig.settled()

        for seed in range(8):
            cycle(seed)
            eventually(lambda: mapped() - before <= 2 * (34 << 20), "one segment, mapped by both clients")
    eventually(lambda: mapped() <= before, "nothing mapped")


def test_few_descriptors_for_many_features(puppet: Callable[..., Puppet], broker: BrokerProcess) -> None:
    """10,000 features, 1,000 held at a time, in a process that may open 64 files."""
    client = puppet(prefix=["prlimit", "--nofile=64:64"])
    client(f"""
import mmbroker, os, torch
client = mmbroker.connect({str(broker.directory)!r})
engine = mmbroker.connect({str(broker.directory)!r})
table = engine.attach(engine="e", access="readonly")
""")
    counts = client("""
counts = set()
for n in range(10):
    held = []
    for k in range(0, 1000, 50):
        held += client.put_many([torch.tensor([n * 1000 + k + i]) for i in range(50)], to="e")
    for i, one in enumerate(held):
        with table.take(one.ref) as use:
            assert int(use.tensor) == n * 1000 + i
        one.drop()
    counts.add(len(os.listdir("/proc/self/fd")))
result = sorted(counts)
""")
    assert counts[-1] < 48
    assert counts[-1] - counts[0] <= 1


def test_running_out_of_descriptors(broker: BrokerProcess, puppet: Callable[..., Puppet]) -> None:
    """The segment's descriptor cannot be received: an error that names the limit, and a client that recovers."""
    client = puppet()
    client(f"""
import mmbroker, os, resource, threading, torch
client = mmbroker.connect({str(broker.directory)!r})
""")
    message = client("""
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limit[1]))
fillers = []
try:
    while True:
        fillers.append(os.dup(0))
except OSError:
    pass
try:
    client.put(torch.ones(10))
except mmbroker.BrokerError as error:
    result = f"{type(error).__name__}: {error}"
for fd in fillers:
    os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
""")
    assert re.match(r"BrokerLost: .*limit of \d+ open files.*ulimit -n", message), message
    assert (
        client("""
pause = threading.Event()
for _ in range(10_000):
    if client.connected:
        break
    pause.wait(0.002)
result = client.put(torch.ones(10)).ref.nbytes
""")
        == 40
    )


def test_running_out_of_address_space(broker: BrokerProcess, puppet: Callable[..., Puppet]) -> None:
    """A segment that cannot be mapped: named, the lease is given back, and it works once there is room."""
    client = puppet()
    message = client(f"""
import mmbroker, re, resource, torch
client = mmbroker.connect({str(broker.directory)!r})
limit = resource.getrlimit(resource.RLIMIT_AS)
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20), limit[1]))
try:
    client.put(torch.ones(10))
except mmbroker.BrokerError as error:
    result = str(error)
resource.setrlimit(resource.RLIMIT_AS, limit)
""")
    assert "cannot be mapped" in message
    eventually(lambda: broker.status()["leases"] == 0, "the lease's return")
    assert client("result = client.put(torch.ones(10)).ref.nbytes") == 40


SHORT = """
import gc, mmbroker, os, signal, sys, torch, traceback

def work(end):
    client = mmbroker.connect(sys.argv[1], name="short")
    found = client.lookup(mmbroker.digest(torch.arange(1000)))
    client.put(torch.ones(3))
    table = client.attach(engine="short")
    use = table.take(client.put(torch.ones(4), to="short").ref)
    assert use.tensor[0] == 1
    match end:
        case "close": client.close()
        case "exception": raise RuntimeError("the last line")
        case "_exit": os._exit(0)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)

for _ in range(6):
    pid = os.fork()
    if pid == 0:
        work(sys.argv[2])
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == {"exception": 1, "kill": -signal.SIGKILL}.get(sys.argv[2], 0), status
"""


@pytest.mark.parametrize("end", ["close", "return", "exception", "_exit", "kill"])
def test_short_lived_clients(broker: BrokerProcess, end: str) -> None:
    """They come and go in every way; others notice nothing, and nobody warns."""
    with mmbroker.connect(broker.directory) as client, mmbroker.connect(broker.directory) as engine:
        table = engine.attach(engine="e", access="readonly")
        held = client.put(torch.arange(1000), to="e")
        command = [sys.executable, "-W", "error", "-c", SHORT, str(broker.directory), end]
        done = subprocess.run(command, capture_output=True, text=True)
        said = [
            line for line in done.stderr.splitlines() if line and not line.startswith(("  ", "Traceback"))
        ]
        assert (done.returncode, said) == (
            0,
            ["RuntimeError: the last line"] * 6 if end == "exception" else [],
        )
        with table.take(held.ref) as use:
            assert torch.equal(use.tensor, torch.arange(1000))
        eventually(
            lambda: {s["name"] for s in broker.status()["sessions"]} == {"client", "status"}, "ended sessions"
        )


@pytest.mark.parametrize(
    "fault",
    [
        "mmbroker.connection.Connection._shake_hands",
        "mmbroker.connection.Connection._open_control",
        "mmbroker.connection.socket.socket",
        "mmbroker.receiver.os.eventfd",
        "mmbroker.receiver.threading.Thread.start",
    ],
)
def test_connecting_fails_at_every_step(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, fault: str, no_leaks: None
) -> None:
    """The error is the one that happened, and nothing stays open (the fixture looks)."""

    class Fault(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise Fault

    with monkeypatch.context() as patched:
        patched.setattr(fault, fail)
        with pytest.raises(Fault):
            mmbroker.connect(broker.directory)
    assert threads() == []
    mmbroker.connect(broker.directory).close()


class Dropping:
    """An object that is in a cycle, and calls the client when the collector finds it."""

    def __init__(self, held: mmbroker.Held, use: mmbroker.Use, lease: mmbroker.Lease | None) -> None:
        self.held, self.use, self.lease, self.me = held, use, lease, self

    def __del__(self) -> None:
        self.use.release()
        self.held.drop()
        if self.lease is not None:
            self.lease.abort()
        gc.collect()


@pytest.fixture
def alarms() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Run something in a signal handler of the main thread, every few milliseconds."""
    before = signal.getsignal(signal.SIGALRM)

    def start(call: Callable[[], Any]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: call())
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_finalisers_and_signal_handlers(
    rig: Rig, alarms: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drops, releases and aborts wherever the collector or a signal finds the thread: no lock is waited for."""
    spare = [rig.client.put(torch.tensor([n]), to="a") for n in range(2000)]

    def interrupt() -> None:
        if spare:
            spare.pop().drop()
        gc.collect(0)

    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in range(150):
                held = rig.client.put(torch.tensor([seed, n]), to="a")
                use = rig.table.take(held.ref)
                assert use.tensor.tolist() == [seed, n]
                lease = rig.client.get_or_create(f"{seed} {n}", (10,), torch.uint8).lease
                Dropping(held, use, lease)
        except BaseException as error:
            errors.append(error)

    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for worker in workers:
            worker.start()
        alarms(interrupt)
        work(99)
        for worker in workers:
            worker.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.set_threshold(*thresholds)
    assert not errors
    for one in spare:
        one.drop()
    gc.collect()
    rig.settled()
    assert rig.client.stats()["open_leases"] == 0
    assert rig.client.lookup("a barrier") is None
    assert (rig.broker.status()["leases"], rig.broker.status()["holds"]) == (0, 0)


def test_the_limit_on_locked_memory_does_not_matter(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    client = puppet(prefix=["prlimit", "--memlock=65536:65536"])
    code = f"""
import mmbroker, torch
client = mmbroker.connect({str(broker.directory)!r})
result = client.put(torch.ones(10 << 20)).ref.nbytes
"""
    assert client(code) == 40 << 20
