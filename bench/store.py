"""Mooncake's master, on loopback: its operations a second, what an object costs its memory, what idle clients cost it.

Its processor time is what counts: clients share the machine with it here, and would not elsewhere.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmbroker.mapping import Mapping
from mmbroker.proto.keys import Key
from mmbroker.tier import objects
from mmbroker.tier.objects import HEADER
from mmbroker.tier.store import MooncakeStore

from .costs import WORKERS
from .operators import cpu_s
from .processes import PATIENCE, Workshop

#: The build that is measured.
PACKAGE = "mooncake-transfer-engine-non-cuda"
#: Objects of this many bytes are put where their bytes do not matter.
SMALL = 64
NAMESPACE = "uid-1000"
#: What is asked of the master, by name.
ASKED = {
    "is it there": "probe",
    "a get that misses": "miss",
    "a get of a header": "get",
    "a put": "put",
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

        self._port, metrics = free_port(), free_port()
        self._metrics = f"127.0.0.1:{metrics}"
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._port,
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics,
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

    def calls(self) -> int:
        """Calls that it has answered so far."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{self._metrics}/metrics", timeout=PATIENCE) as answer:
            told = answer.read().decode()
        return sum(
            int(float(number))
            for number in re.findall(r"^\w+_requests_total ([\d.e+]+)$", told, re.MULTILINE)
        )

    def resident(self) -> int:
        """Bytes of memory that it has in use."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End it without a chance to say so."""
        self._process.kill()
        self._process.wait()

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


class Client:
    """A client as a mover is one, which lends the store `mib` of memory; one thread that asks as fast as it is
    answered."""

    def __init__(self, master: str, mib: int, number: int = 0) -> None:
        silence()
        self._store = MooncakeStore(master, "127.0.0.1", mib << 20)
        self._room = Mapping.private(HEADER)
        self._store.register(self._room.address, HEADER)
        self._draw = random.Random(number)
        self._mine: list[str] = []

    def fill(self, count: int) -> None:
        """Put so many small objects more."""
        for _ in range(count):
            self._put()

    def ask(self, kind: str, seconds: float) -> int:
        """Ask for so long; how often that was."""
        store, address, absent = self._store, self._room.address, [self._name() for _ in range(4096)]
        larger = self._put(HEADER)
        each: dict[str, Callable[[int], object]] = {
            "probe": lambda n: store.probe(),
            "miss": lambda n: store.read(absent[n % len(absent)], 0, address, HEADER),
            "get": lambda n: store.read(larger, 0, address, HEADER),
            "put": lambda n: self._put(),
        }
        end, done = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            each[kind](done)
            done += 1
        return done

    def _put(self, nbytes: int = SMALL) -> str:
        name = self._name()
        self._store.write(name, [(self._room.address, nbytes)])
        return name

    def _name(self) -> str:
        return objects.name_of(NAMESPACE, Key.derived(self._draw.randbytes(32)))

    def close(self) -> None:
        self._store.close()


class Idle:
    """Clients that ask for nothing, and lend no memory."""

    def __init__(self, master: str, many: int) -> None:
        self._clients = [Client(master, 0) for _ in range(many)]

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._clients)) as pool:  # each takes seconds
            for _ in pool.map(Client.close, self._clients):
                pass


def silence() -> None:
    """What the store says goes to standard error, a line for each event, whatever its settings. A worker fails by what
    it raises, and has nothing else to say."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def measure(
    shop: Workshop,
    seconds: float,
    count: int,
    idle_clients: int,
    idle_seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Operations a second of all clients, and of one core's time of the master; what an object costs it, and what
    clients that ask for nothing."""
    with Master(shop.place("master")) as master:
        workers = [shop.worker(name) for name in WORKERS]
        made = [worker.make(Client, master.address, 256, n) for n, worker in enumerate(workers)]
        say("master: memory of an object")
        made[0].call("fill", count // 10)
        before = master.resident()
        made[0].call("fill", count)
        object_bytes = (master.resident() - before) / count
        for client in made[1:]:
            client.call("fill", count // 10)
        lines = []
        for name, kind in ASKED.items():
            say(f"master: {name}")
            calls, busy, start = master.calls(), cpu_s(master.pid), time.perf_counter()
            for client in made:
                client.start("ask", kind, seconds)
            asked = sum(client.result() for client in made)
            took, busy = time.perf_counter() - start, cpu_s(master.pid) - busy
            lines.append(
                {
                    "what": name,
                    "kind": kind,
                    "calls": round((master.calls() - calls) / asked, 1),
                    "clients": len(made),
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
        "objects": count,
        "object_bytes": round(object_bytes),
        "name_bytes": len(objects.name_of(NAMESPACE, Key.derived(bytes(32)))),
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
