"""A real Mooncake master on loopback, where Mooncake and what it needs are installed."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.kit import PATIENCE, BrokerProcess, eventually

HOST = "127.0.0.1"


@cache
def installed() -> bool:
    """Tried in a process of its own: the library keeps threads, and shared libraries may be missing."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    return not subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True).returncode


def master_program() -> Path:
    """`mooncake_master`, which comes with the library."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "mooncake_master"


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def reachable(port: int, host: str = HOST, seconds: float = PATIENCE) -> bool:
    """Does anybody accept a connection there?"""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True


class Master:
    """`address` is what movers are told. It can be ended, and started again at the same place."""

    def __init__(self) -> None:
        self.port, self._metrics = free_ports(2)
        self.address = f"{HOST}:{self.port}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                master_program(),
                f"--rpc_address={HOST}",
                f"--rpc_port={self.port}",
                f"--metrics_host={HOST}",
                f"--metrics_port={self._metrics}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: reachable(self.port), "the master listens")
        return process

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def a_master() -> Iterator[Master]:
    master = Master()
    try:
        yield master
    finally:
        master.kill()


class MoverProcess:
    """`mmbroker tier` beside a broker; `ready` is its line, empty if it has ended instead."""

    def __init__(self, broker: BrokerProcess, master: str, *options: str) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
        command = [sys.executable, "-m", "mmbroker", "tier", "--master", master, "--address", HOST, *options]
        with open(self._scratch / "log", "wb") as log:
            self.process = subprocess.Popen(
                command, env=broker.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 2 * PATIENCE)
        assert readable, f"neither ready nor ended: {self.errors()}"
        self.ready = self.process.stdout.readline().decode()

    def errors(self) -> str:
        """What it has written to stderr so far."""
        return (self._scratch / "log").read_text()

    def stop(self) -> int:
        """End it as an operator does; its exit code. `clean_up` follows."""
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self._scratch)


def listeners(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = os.readlink(f"/proc/{pid}/fd/{fd}")
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports
