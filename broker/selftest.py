"""`mmbroker bench`: what this machine makes of the broker, beside what this machine can do at all.

A broker of its own, an engine's rank in a process of its own, and this process as the producer. Each figure has a limit
of the same machine next to it, measured in the same minute: a slow machine is no slow broker.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from mmbroker.proto.errors import BrokerError

#: How long a process of the test may take to start or to answer, in seconds.
_PATIENCE: Final = 30.0
_ENGINE: Final = "selftest"
_SHAPE: Final = (2048, 1176)  # of float32: 9.6 MB, a picture of some 1.6 megapixels for Qwen2.5-VL
_LARGE: Final = _SHAPE[0] * _SHAPE[1] * 4
_BATCH: Final = 8


class Plan(NamedTuple):
    """How often each thing is done."""

    trips: int = 5000
    puts: int = 60
    smalls: int = 1000
    takes: int = 20
    batches: int = 15


QUICK: Final = Plan(trips=50, puts=3, smalls=10, takes=2, batches=1)


class Line(NamedTuple):
    """A figure, this machine's own limit, and how they compare, in words. Times in seconds, rates in bytes a second."""

    name: str
    unit: str
    value: float
    limit: float
    of: str
    verdict: str
    fine: bool


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; the lines, and a verdict."""
    try:
        import torch
    except ImportError:
        raise BrokerError("`mmbroker bench` needs torch: pip install 'mmbroker[client]'") from None
    import mmbroker

    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    say("this machine's own limits")
    limits = _limits(torch, plan)
    with _broker() as path, mmbroker.connect(path, name="selftest/worker") as client, _rank(path) as rank:
        say("round trips")
        trips = _times(lambda: client.lookup("nothing has this key"), plan.trips)
        say("small features")
        small = torch.zeros(1024)
        smalls = _times(_putting(client, small), plan.smalls)
        say("large features")
        large = torch.zeros(_SHAPE)
        puts = _times(_putting(client, large), plan.puts)
        again = _times(_putting(client, large, fresh=False), plan.puts)
        say("look-ups")
        takes = _takes(client, rank, large, plan.takes)
        say("bandwidth")
        rate = _bandwidth(client, torch, plan.batches)
    both = limits["hash"] + limits["copy"]
    trip = statistics.median(trips)
    lines = [
        _line("round trip", "s", trip, limits["trip"], "one by bare socket", 40),
        _line("put 4 KB", "s", statistics.median(smalls), trip, "a round trip to the broker", 8),
        _line("put 9.6 MB", "s", statistics.median(puts), both, "hashing and copying it", 2),
        _line("put 9.6 MB again", "s", statistics.median(again), limits["hash"], "hashing it", 2),
        _line("look-up", "s", statistics.median(takes), 20e-6, "a fiftieth of a millisecond", 1),
        _line("eight at a time", "B/s", rate, _LARGE / both, "hashing and copying in one thread", 1.5),
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(busy, 2),
        "limits": {**limits, "put": both},
        "lines": [line._asdict() for line in lines],
        "verdict": _verdict(lines, busy),
    }


def _line(name: str, unit: str, value: float, limit: float, of: str, allowed: float) -> Line:
    """`allowed`: how many times the limit's time is still fine; for a rate, how far below the limit's rate."""
    times = value / limit if unit == "s" else limit / value
    fine = times <= allowed
    if unit == "s":
        how = f"{times:.3g} times {of}" if times >= 1 else f"within {of}"
    else:
        how = f"{1 / times:.3g} times {of}"
    return Line(name, unit, value, limit, of, how if fine else f"slow: {how}", fine)


def _verdict(lines: list[Line], load: float) -> str:
    slow = [line.name for line in lines if not line.fine]
    if not slow:
        return (
            "Good: the broker costs about what the bytes cost on this machine, and a look-up next to nothing."
        )
    if load > 0.5:
        return (
            f"Inconclusive: this machine was busy before the test began ({load:.1f} processes wait for each core). "
            f"Slow were: {', '.join(slow)}. Run it again on a quiet machine."
        )
    return (
        f"Slower than this machine allows: {', '.join(slow)}. See `mmbroker doctor`, and what else runs here."
    )


# --- the machine ----------------------------------------------------------------------------------------------------


def _limits(torch: Any, plan: Plan) -> dict[str, float]:
    """Seconds: to hash and to copy a large feature in one thread, and for a round trip between two processes."""
    source, target = torch.ones(_SHAPE), torch.zeros(_SHAPE)
    data = source.numpy().data
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copies = _times(lambda: target.copy_(source), plan.puts)
    finally:
        torch.set_num_threads(threads)
    hashes = _times(lambda: hashlib.sha256(data), plan.puts)
    return {
        "hash": statistics.median(hashes),
        "copy": statistics.median(copies),
        "trip": statistics.median(_socket_trips(plan.trips)),
    }


def _socket_trips(count: int) -> list[float]:
    """Round trips of 64 bytes between this process and a child that sends back what it gets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    echo = (
        "import socket, sys\n"
        "line = socket.socket(fileno=int(sys.argv[1]))\n"
        "while data := line.recv(64):\n"
        "    line.send(data)\n"
    )
    with ours:
        child = subprocess.Popen(
            [sys.executable, "-c", echo, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.settimeout(_PATIENCE)

        def trip() -> None:
            ours.send(bytes(64))
            ours.recv(64)

        try:
            trip()
            times = _times(trip, count)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            child.wait(_PATIENCE)
    return times


def _times(act: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
    return found


# --- the broker -----------------------------------------------------------------------------------------------------


def _putting(client: Any, tensor: Any, fresh: bool = True) -> Callable[[], None]:
    """Puts a tensor to the engine, each time with new content unless told otherwise; the hold ends at once."""
    number = 0
    kept = client.put(tensor, to=_ENGINE)

    def put() -> None:
        nonlocal number
        if fresh:
            number += 1
            tensor.view(-1)[0] = number
        client.put(tensor, to=_ENGINE).drop()

    put()
    kept.drop()
    return put


def _takes(client: Any, rank: _Rank, tensor: Any, batches: int) -> list[float]:
    found: list[float] = []
    for _ in range(batches):
        with client.put(tensor, to=_ENGINE) as held:
            found += rank.takes(held.ref.to_wire())
    return found


def _bandwidth(client: Any, torch: Any, batches: int) -> float:
    """Bytes a second, of new features in batches of eight."""
    tensors = [torch.zeros(_SHAPE) for _ in range(_BATCH)]
    number = 0

    def batch() -> None:
        nonlocal number
        for tensor in tensors:
            number += 1
            tensor.view(-1)[:2] = torch.tensor([number, -1.0])
        for held in client.put_many(tensors, to=_ENGINE):
            held.drop()

    batch()
    return _BATCH * _LARGE / statistics.median(_times(batch, batches))


@contextmanager
def _broker() -> Iterator[Path]:
    """A broker of its own; its instance directory."""
    with tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as root:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MMBROKER_")}
        command = [
            sys.executable,
            "-m",
            "mmbroker",
            "start",
            "--cpu",
            "--name",
            "selftest",
            "--host-mib",
            "512",
        ]
        with subprocess.Popen(
            command,
            env={**environ, "MMBROKER_DIR": root},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                if not _line_of(process.stdout):
                    process.kill()
                    raise BrokerError(
                        f"the test's broker did not start: {process.stderr.read().decode().strip()}"
                    )
                yield Path(root, "selftest")
            finally:
                process.terminate()


def _line_of(stream: IO[bytes]) -> bytes:
    readable, _, _ = select.select([stream], [], [], _PATIENCE)
    return stream.readline() if readable else b""


# --- the rank, a process of its own ---------------------------------------------------------------------------------


class _Rank:
    """This side of the rank's process: orders and answers are msgpack, each after its length."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def takes(self, reference: dict[str, Any]) -> list[float]:
        """How long each of some takes took, in seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, reference)
        times: list[float] = _receive(self._process.stdout)
        return times


@contextmanager
def _rank(path: Path) -> Iterator[_Rank]:
    command = [sys.executable, "-m", "mmbroker.selftest", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        guard = threading.Timer(_PATIENCE, process.kill)
        guard.start()
        ready = _receive(process.stdout)
        guard.cancel()
        if ready is None:
            raise BrokerError("the test's engine did not start: its message is above")
        try:
            yield _Rank(process)
        finally:
            process.stdin.close()


def _send(stream: IO[bytes], value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """None at the end."""
    head = stream.read(4)
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "big"))) if len(head) == 4 else None


def _serve(path: str) -> None:
    """The rank: takes what it is told to, a few hundred times."""
    import mmbroker

    with mmbroker.connect(path, name="selftest/scheduler") as client:
        table = client.attach(engine=_ENGINE, access="readonly")
        orders, answers = sys.stdin.buffer, sys.stdout.buffer
        _send(answers, True)
        while (reference := _receive(orders)) is not None:
            _send(answers, _times(lambda: table.take(reference).release(), 200))


if __name__ == "__main__":
    _serve(sys.argv[1])
