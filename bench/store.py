"""Mooncake's master, on loopback: its operations a second, what an object costs its memory, what idle clients cost it.

Its processor time is what counts: clients share the machine with it here, and would not elsewhere.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from .operators import cpu_s
from .processes import PATIENCE, Workshop

#: The build that is measured.
PACKAGE = "mooncake-transfer-engine-non-cuda"
#: Beside its memory of objects, a client has some of its own, for copies in and out.
LOCAL_BYTES = 16 << 20
#: Bytes of an object whose bytes do not matter.
SMALL = 64
BATCH = 64
#: As long as the mover's keys: format, namespace, kind, and 32 bytes in hexadecimal digits.
KEY = "mmb1/uid-1000/derived/{:064x}"
#: What is asked of the master, by name: the operation, and its RPCs.
ASKED = {
    "exists, no": ("absent", 1),
    "exists, yes": ("exists", 1),
    "get, a miss": ("miss", 1),
    "get": ("get", 1),
    "put": ("put", 2),
    "exists, 64 at once": ("batch", 1),
}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Master:
    """A Mooncake master that listens on loopback only. A context manager."""

    def __init__(self, log: str, **flags: object) -> None:
        import mooncake

        self._port = free_port()
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._port,
            "metrics_host": "127.0.0.1",
            "metrics_port": free_port(),
            **flags,
        }
        program = Path(mooncake.__file__).with_name("mooncake_master")
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                [program, *(f"--{name}={value}" for name, value in flags.items())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid
        self.address = f"127.0.0.1:{self._port}"
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
                break
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"the master did not start: {Path(log).read_text()[-2000:]}")
            threading.Event().wait(0.02)

    def resident(self) -> int:
        """Bytes of memory that it has in use."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _silence() -> None:
    """What the store says goes to standard error, a line for each event, whatever its settings. A worker fails by what
    it raises, and has nothing else to say."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


class Idle:
    """Clients that ask for nothing, and give no memory."""

    def __init__(self, master: str, many: int) -> None:
        self._clients = [Client(master, 0) for _ in range(many)]

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._clients)) as pool:  # each takes seconds
            for _ in pool.map(Client.close, self._clients):
                pass


class Client:
    """A client of the store that gives it `mib` of memory; one thread that asks as fast as it is answered."""

    def __init__(self, master: str, mib: int, number: int = 0) -> None:
        _silence()
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        status = self._store.setup("127.0.0.1", "P2PHANDSHAKE", mib << 20, LOCAL_BYTES, "tcp", "", master)
        if status:
            raise RuntimeError(f"the store refused its client: {status}")
        self._draw = random.Random(number)
        self._mine: list[str] = []

    def fill(self, objects: int) -> None:
        """Put so many small objects more."""
        keys = self._new(objects)
        for start in range(0, objects, BATCH):
            some = keys[start : start + BATCH]
            if self._store.put_batch(some, [bytes(SMALL)] * len(some)):
                raise RuntimeError("a put failed: the store is full")
        self._mine += keys

    def ask(self, kind: str, seconds: float) -> int:
        """Ask for so long; how many keys that were."""
        store, absent = self._store, self._new(4096)
        each = {
            "absent": lambda n: store.is_exist(absent[n % len(absent)]),
            "exists": lambda n: store.is_exist(self._mine[n % len(self._mine)]),
            "miss": lambda n: store.get(absent[n % len(absent)]),
            "get": lambda n: store.get(self._mine[n % len(self._mine)]),
            "put": lambda n: self._put(),
            "batch": lambda n: store.batch_is_exist(absent[:BATCH]),
        }[kind]
        end, done = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            each(done)
            done += 1
        return done * (BATCH if kind == "batch" else 1)

    def _put(self) -> None:
        (key,) = self._new(1)
        if self._store.put(key, bytes(SMALL)):
            raise RuntimeError("a put failed: the store is full")

    def _new(self, many: int) -> list[str]:
        return [KEY.format(self._draw.getrandbits(256)) for _ in range(many)]

    def close(self) -> None:
        self._store.close()


def measure(
    shop: Workshop,
    seconds: float,
    clients: int,
    objects: int,
    idle_clients: int,
    idle_seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Operations a second of so many clients, and of one core's time of the master; what an object costs it, and what
    clients that ask for nothing."""
    with Master(shop.place("master")) as master:
        workers = [shop.worker(f"client{n}") for n in range(clients)]
        made = [worker.make(Client, master.address, 256, n) for n, worker in enumerate(workers)]
        say("master: memory of an object")
        made[0].call("fill", objects // 10)
        before = master.resident()
        made[0].call("fill", objects)
        object_bytes = (master.resident() - before) / objects
        for client in made[1:]:
            client.call("fill", objects // 10)
        lines = []
        for name, (kind, calls) in ASKED.items():
            say(f"master: {name}")
            busy, start = cpu_s(master.pid), time.perf_counter()
            for client in made:
                client.start("ask", kind, seconds)
            asked = sum(client.result() for client in made)
            took, busy = time.perf_counter() - start, cpu_s(master.pid) - busy
            lines.append(
                {
                    "what": name,
                    "kind": kind,
                    "calls": calls,
                    "clients": clients,
                    "per_second": round(asked / took),
                    "per_core_second": round(asked / busy),
                }
            )
        for client in made:
            client.call("close")
    with Master(shop.place("master")) as master:
        say("master: idle clients")
        alone = _idle(master, idle_seconds)
        with workers[0].make(Idle, master.address, idle_clients):
            idle = _idle(master, idle_seconds)
    return {
        "objects": objects,
        "object_bytes": round(object_bytes),
        "key_bytes": len(KEY.format(0)),
        "lines": lines,
        "idle_clients": idle_clients,
        "idle_ms_per_s_and_client": round(1000 * (idle - alone) / idle_clients, 4),
        "idle_ms_per_s_without_clients": round(1000 * alone, 4),
    }


def _idle(master: Master, seconds: float) -> float:
    """Share of a core that it takes while nobody asks for anything."""
    busy, start = cpu_s(master.pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(master.pid) - busy) / (time.perf_counter() - start)
