"""Load: many producers and engines on one small arena, for a while, with every byte checked.

A producer's thread puts features of 1 byte to 8 MiB, sends references to an engine over a socket of their own, and
drops each hold when the engine says that it has read it, as a request would. `Load` starts the processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mmbroker
from mmbroker.proto.errors import BrokerError, FeatureMissing, StaleReference

from .zygote import Child, Zygote, readable

MIB = 1 << 20
LARGEST = 8 * MIB
#: Features that a producer's thread has with engines at once.
WINDOW = 3
#: How long a put may wait for room, in seconds, unless told otherwise; what then has none counts as a fallback.
WAIT = 30.0
#: What is counted where nothing goes wrong.
FINE = {"features", "right", "longest_put_ms", "longest_overtaken"}
#: How long a request takes that goes another way, because there is no broker, in seconds.
_ELSEWHERE = 0.005
_MESSAGE = 1 << 16
_M_MMAP_THRESHOLD = -3


def size_of(chance: random.Random) -> int:
    """1 byte to 8 MiB, every order of magnitude, the small ones more often."""
    return int(LARGEST ** (chance.random() ** 3))


def pattern(seed: int, nbytes: int) -> torch.Tensor:
    """Bytes that tell which feature they belong to, and where in it they are."""
    words = torch.arange(seed & 0xFFFFFF, (seed & 0xFFFFFF) + nbytes // 8 + 1, dtype=torch.int64)
    return (words * -7046029254386353131 ^ seed).view(torch.uint8)[:nbytes]


class Counts:
    """Counters of one process, for several threads. Those that begin with ``longest`` are maxima."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Counter[str] = Counter()

    def add(self, *names: str, **values: int) -> None:
        """One more of each of `names`, and what the `values` say."""
        with self._lock:
            merge(self._found, {**dict.fromkeys(names, 1), **values})

    def __getitem__(self, name: str) -> int:
        return self._found[name]

    def so_far(self) -> dict[str, int]:
        with self._lock:
            return dict(self._found)


def merge(total: Counter[str], counts: dict[str, int]) -> None:
    for name, value in counts.items():
        total[name] = max(total[name], value) if name.startswith("longest") else total[name] + value


# --- in the processes -----------------------------------------------------------------------------------------------


def produce(
    channel: socket.socket,
    path: str,
    root: str,
    name: str,
    namespace: str,
    engines: list[str],
    threads: int,
    seed: int,
    count: int,
    wait: float,
    size: int = 0,
) -> None:
    """Put `count` features a thread (0: until told to end), to engines in turn."""
    client = mmbroker.connect(path, name=name, namespace=namespace, timeout=WAIT)
    counts = Counts()
    stop = threading.Event()
    workers = [
        threading.Thread(
            target=_produce,
            args=(
                client,
                root,
                f"{name}-{n}",
                engines,
                f"{seed}/{name}/{n}",
                count,
                wait,
                size,
                counts,
                stop,
            ),
        )
        for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    _report(channel, counts, workers, stop)
    client.close()


class _Requests:
    """A producer's features that engines have yet to read. Answers come at any time, also while a put waits."""

    def __init__(self, address: str, counts: Counts, wait: float) -> None:
        self.address = address
        self.mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.mail.bind(address)
        self._counts, self._wait = counts, wait
        self._held: dict[int, mmbroker.Held] = {}
        self._room = threading.Semaphore(WINDOW)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def begin(self) -> None:
        """Wait until there may be one more."""
        assert self._room.acquire(timeout=2 * self._wait), "no answer from an engine"

    def cancel(self) -> None:
        self._room.release()

    def send(self, hold: mmbroker.Held, engine: str, seed: int, nbytes: int) -> None:
        self._held[hold.ref.hold] = hold
        wire = {k: v.hex() if isinstance(v, bytes) else v for k, v in hold.ref.to_wire().items()}
        self.mail.sendto(json.dumps([self.address, wire, seed, nbytes]).encode(), engine)

    def _listen(self) -> None:
        while letter := self.mail.recv(_MESSAGE):
            hold, verdict = json.loads(letter)
            self._held.pop(hold).drop()
            self._counts.add("features", verdict)
            self._room.release()

    def close(self) -> None:
        """Wait for all answers."""
        for _ in range(WINDOW):
            self.begin()
        self.mail.shutdown(socket.SHUT_RD)
        self._thread.join()
        self.mail.close()


def _produce(
    client: mmbroker.Client,
    root: str,
    name: str,
    engines: list[str],
    seed: str,
    count: int,
    wait: float,
    size: int,
    counts: Counts,
    stop: threading.Event,
) -> None:
    chance = random.Random(seed)
    requests = _Requests(f"{root}/{name}", counts, wait)
    recent: list[tuple[int, int]] = []
    number = 0
    try:
        while (number < count or not count) and not stop.is_set():
            number += 1
            if recent and chance.random() < 0.1:
                feature = chance.choice(recent)  # once more: it may still be there
            else:
                feature = (chance.getrandbits(48), size or size_of(chance))
                recent = [*recent[-4:], feature]
            engine = engines[number % len(engines)]
            tensor = pattern(*feature)
            key = None if chance.random() < 0.25 else f"{feature[0]}"
            requests.begin()
            began, finished = time.monotonic(), counts["features"]
            try:
                hold = client.put(tensor, to=engine, key=key, timeout=wait)
            except BrokerError as error:
                counts.add("features", f"fell back: {type(error).__name__}")
                requests.cancel()
                if not client.connected:
                    stop.wait(_ELSEWHERE)
                continue
            counts.add(
                longest_put_ms=int((time.monotonic() - began) * 1000),
                longest_overtaken=counts["features"] - finished,
            )
            requests.send(hold, f"{root}/{engine}", *feature)
        requests.close()
    except BaseException as error:
        counts.add(f"broke: {type(error).__name__}: {error}")
        raise


def consume(channel: socket.socket, path: str, root: str, name: str, namespace: str, access: str) -> None:
    """Be an engine: read what references come, check every byte, say so."""
    client = mmbroker.connect(path, name=name, namespace=namespace, timeout=WAIT)
    table = client.attach(engine=name, access=access)
    mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mail.bind(f"{root}/{name}")
    counts = Counts()
    reader = threading.Thread(target=_consume, args=(table, mail, counts))
    reader.start()
    _report(channel, counts, [reader], threading.Event(), over=lambda: mail.shutdown(socket.SHUT_RD))
    table.close()
    client.close()


def _consume(table: mmbroker.FeatureTable, mail: socket.socket, counts: Counts) -> None:
    while letter := mail.recv(_MESSAGE):
        back, wire, seed, nbytes = json.loads(letter)
        ref = {k: bytes.fromhex(v) if k in ("boot", "digest") else v for k, v in wire.items()}
        try:
            with table.take(ref) as use:
                verdict = "right" if torch.equal(use.tensor, pattern(seed, nbytes)) else "wrong"
        except (FeatureMissing, StaleReference):
            verdict = "missing"
        counts.add("features")
        mail.sendto(json.dumps([ref["hold"], verdict]).encode(), back)


def _report(
    channel: socket.socket,
    counts: Counts,
    workers: list[threading.Thread],
    stop: threading.Event,
    over: Callable[[], None] = lambda: None,
) -> None:
    """Answer questions about the counts, until told to end."""
    while data := channel.recv(_MESSAGE):
        verb, _ = json.loads(data)
        if verb == "end":
            stop.set()
            over()
            for worker in workers:
                worker.join()
        elif verb == "join":
            for worker in workers:
                worker.join()
        channel.send(json.dumps({"result": counts.so_far()}).encode())
        if verb == "end":
            return


# --- whoever starts them --------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """A process's own memory, without what it shares with others, in bytes: the least and the most of some time."""

    least: int
    most: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        (kib,) = [line.split()[1] for line in rollup.splitlines() if line.startswith("Anonymous:")]
        return cls(int(kib) << 10, int(kib) << 10)

    def beside(self, other: Memory | None) -> Memory:
        """Both together."""
        if other is None:
            return self
        return Memory(min(self.least, other.least), max(self.most, other.most))


class Load:
    """Producers and engines for a broker at `path`."""

    def __init__(self, clients: Zygote, path: Path, seed: int, wait: float = WAIT) -> None:
        self.clients, self.path, self.seed, self.wait = clients, path, seed, wait
        self.root = Path(tempfile.mkdtemp(prefix="mml-", dir="/tmp"))
        self.engines: dict[str, Child] = {}
        self.producers: dict[str, Child] = {}

    def engine(self, name: str, namespace: str = "load", access: str = "readonly") -> Child:
        common = {"path": str(self.path), "root": str(self.root), "name": name, "namespace": namespace}
        child = self.clients.spawn(part="consume", access=access, **common)
        child.ask("counts")  # it is attached
        self.engines[name] = child
        return child

    def producer(
        self,
        name: str,
        engines: list[str],
        *,
        namespace: str = "load",
        threads: int = 2,
        count: int = 0,
        size: int = 0,
    ) -> Child:
        common = {"path": str(self.path), "root": str(self.root), "name": name, "namespace": namespace}
        child = self.clients.spawn(
            part="produce",
            engines=engines,
            threads=threads,
            seed=self.seed,
            count=count,
            wait=self.wait,
            size=size,
            **common,
        )
        self.producers[name] = child
        return child

    def counts(self) -> Counter[str]:
        """Of all producers, so far."""
        total: Counter[str] = Counter()
        for child in self.producers.values():
            merge(total, child.ask("counts"))
        return total

    def finish(self, verb: str = "join", timeout: float = 600.0) -> Counter[str]:
        """Wait until all producers are done (or, with ``end``, tell them to be); the sums of what they counted."""
        total: Counter[str] = Counter()
        for child in self.producers.values():
            child.post(verb)
        for child in self.producers.values():
            assert readable([child.channel], timeout), "a producer does not come to its end"
            merge(total, child.answer()["result"])
        return total

    def close(self) -> None:
        for child in (*self.producers.values(), *self.engines.values()):
            child.end()
        shutil.rmtree(self.root)


def part(channel: socket.socket, part: str, **arguments: Any) -> None:
    torch.set_num_threads(1)
    # glibc keeps large buffers once it has freed one of their size: then they would hide what really stays.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    {"produce": produce, "consume": consume}[part](channel, **arguments)
    os._exit(0)
