"""The processes of a measurement: brokers, and workers that do as they are told. All end with the bench.

A worker is a fresh interpreter that makes objects and calls their methods; every process except this one is a child
of its own parent, so nothing is shared but what is passed by a path: a socket, or a `Board`.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import mmap
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: How long anything but a measurement may take, in seconds.
PATIENCE = 60.0


class Workshop:
    """One run's directory and processes. A context manager: afterwards there is neither."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mmb-bench-", dir="/tmp"))  # short: sockets live in it
        self._brokers: list[Broker] = []
        self._workers: dict[str, Worker] = {}
        self._numbers = itertools.count(1)  # several threads may draw from it

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for worker in self._workers.values():
                worker.close()
            for broker in self._brokers:
                broker.close()
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def broker(self, **settings: object) -> Broker:
        """A broker of its own; `settings` by the names of the settings file. Also a context manager."""
        broker = Broker(self.path, f"b{next(self._numbers)}", settings)
        self._brokers.append(broker)
        return broker

    def worker(self, name: str) -> Worker:
        """The worker of that name, started when it is first asked for."""
        if name not in self._workers:
            self._workers[name] = Worker(name)
        return self._workers[name]

    def place(self, name: str) -> str:
        """A path of this run that was not given out before."""
        return str(self.path / f"{name}{next(self._numbers)}")


class Broker:
    """A broker process; `path` is its instance directory."""

    def __init__(self, root: Path, name: str, settings: dict[str, object]) -> None:
        self.path = str(root / name)
        given = {f"MMBROKER_{key.upper()}": str(value) for key, value in settings.items()}
        self._environ = {**os.environ, **given, "MMBROKER_DIR": str(root), "MMBROKER_NAME": name}
        command = [sys.executable, "-m", "mmbroker", "start"]
        with open(root / f"{name}.log", "w+b") as log:
            self._process = subprocess.Popen(
                command if "gpu" in settings else [*command, "--cpu"],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
            if not (ready and self._process.stdout.readline()):
                self.close()
                log.seek(0)
                raise RuntimeError(f"the broker did not start: {log.read().decode().strip()}")
        self.pid = self._process.pid

    def counters(self) -> dict[str, int]:
        """What the broker has counted since its start."""
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def status(self) -> dict[str, Any]:
        """The broker's whole report."""
        command = [sys.executable, "-m", "mmbroker", "status", "--json"]
        shown = subprocess.run(
            command, env=self._environ, stdout=subprocess.PIPE, check=True, timeout=PATIENCE
        )
        told: dict[str, Any] = json.loads(shown.stdout)
        return told

    def evict(self) -> None:
        """Drop every feature that nobody holds."""
        command = [sys.executable, "-m", "mmbroker", "evict"]
        subprocess.run(command, env=self._environ, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE)

    def kill(self) -> None:
        """End it without a chance to say so."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        end_process(self._process)


def end_process(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, and see that it does. Idempotent."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Worker:
    """A fresh Python process. `make` an object in it, and call its methods."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.link, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or 0
        self._made = 0

    def make(self, cls: type[Any], *args: Any) -> Remote:
        """An object of a class of this package, in the worker. Its class needs `close`."""
        self._made += 1
        remote = Remote(self, self._made)
        self.link.send((self._made, "", (cls, args)))
        remote.result()
        return remote

    def close(self) -> None:
        if self._process.is_alive():
            try:
                self.link.send(None)
                self._process.join(PATIENCE)
            except OSError:
                pass
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.link.close()


class Remote:
    """An object in a worker. One call at a time and worker."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker = worker
        self._number = number

    def start(self, method: str, *args: Any) -> None:
        """Begin a call; `result` waits for it."""
        self.worker.link.send((self._number, method, args))

    def result(self) -> Any:
        try:
            fine, value = self.worker.link.recv()
        except EOFError:
            raise RuntimeError(f"the worker {self.worker.name} died") from None
        if not fine:
            raise RuntimeError(f"in the worker {self.worker.name}:\n{value}")
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.call("close")


def results(asked: Iterable[Remote], beside: Iterable[Remote] = ()) -> list[Any]:
    """The results of all that were asked. If one fails, every failure is told, of those beside them too: the first to
    be seen may be the consequence of another."""
    found, failures = [], []
    for remote in asked:
        try:
            found.append(remote.result())
        except RuntimeError as error:
            failures.append(str(error))
    if failures:
        for remote in beside:
            try:
                if remote.worker.link.poll(PATIENCE):
                    remote.result()
            except RuntimeError as error:
                failures.append(str(error))
        raise RuntimeError("\n".join(failures))
    return found


def _serve(link: Connection) -> None:
    """A worker's life. Ctrl-C is the parent's business, which then ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    objects: dict[int, Any] = {}
    while True:
        try:
            order = link.recv()
        except EOFError:  # the parent is gone
            return
        if order is None:
            return
        number, method, args = order
        try:
            value = None
            if not method:
                cls, arguments = args
                objects[number] = cls(*arguments)
            else:
                value = getattr(objects[number], method)(*args)
                if method == "close":
                    del objects[number]
            link.send((True, value))
        except Exception:
            link.send((False, traceback.format_exc()))


class Board:
    """A few 64-bit numbers that processes share by a path: read and written without a system call."""

    #: Arrivals that the scheduler has released, for the source that feeds it; and a request to stop.
    RELEASED, STOP = 0, 1
    SIZE = 8

    def __init__(self, path: str) -> None:
        with open(path, "a+b") as file:
            file.truncate(8 * self.SIZE)
            self._map = mmap.mmap(file.fileno(), 8 * self.SIZE)
        self.numbers = memoryview(self._map).cast("Q")

    def close(self) -> None:
        self.numbers.release()
        self._map.close()


def pin(pid: int, cores: Iterable[int]) -> None:
    """Keep every thread of a process on these cores; threads to come follow the thread that makes them."""
    cores = list(cores)
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile
