"""One bench for both drivers: host memory, streams that can be stopped, graph captures, and other processes."""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any

from mmbroker.cuda import Driver
from mmbroker.cuda.fake import FakeDriver
from tests.kit import PATIENCE, eventually

MIB = 1 << 20


class Host:
    """Host memory of this process, whole pages. `close` needs all views gone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    def close(self) -> None:
        del self._anchor
        self.view.release()
        self._map.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Rig:
    """A driver, one GPU of it, and what tests do with them. The calling thread has a context."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self.driver = driver
        self.uuid = uuid
        #: How far the free memory may move by itself: a real driver keeps tables of its own.
        self.slack = 0 if driver.kind == "fake" else 16 * MIB
        driver.use(uuid, create=True)
        # Kept, because to unpin memory may wait for streams that a test has stopped.
        self._scratch = Host(8 * MIB)
        driver.pin(self._scratch.address, self._scratch.nbytes)
        self._aside, self._done = driver.stream(), driver.event()

    def close(self) -> None:
        self.driver.destroy_event(self._done)
        self.driver.destroy_stream(self._aside)
        self.driver.unpin(self._scratch.address)
        self._scratch.close()

    @property
    def fake(self) -> FakeDriver:
        assert isinstance(self.driver, FakeDriver)
        return self.driver

    # --- streams ----------------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, high_priority: bool = False) -> Iterator[int]:
        stream = self.driver.stream(high_priority)
        try:
            yield stream
        finally:
            self.driver.destroy_stream(stream)

    @contextmanager
    def torchs_stream(self) -> Iterator[Any]:
        """As torch's object: one that it has made."""
        if not isinstance(self.driver, FakeDriver):
            import torch

            yield torch.cuda.Stream(self.device)  # its own never go
            return
        with self.stream() as stream:
            self.fake.torchs.add(stream)
            try:
                yield SimpleNamespace(cuda_stream=stream)
            finally:
                self.fake.torchs.remove(stream)

    @contextmanager
    def event(self) -> Iterator[int]:
        event = self.driver.event()
        try:
            yield event
        finally:
            self.driver.destroy_event(event)

    def finish(self, stream: int) -> None:
        """Wait for everything in a stream."""
        with self.event() as event:
            self.driver.record(event, stream)
            self.driver.synchronize(event)

    @contextmanager
    def blocked(self, stream: int) -> Iterator[None]:
        """What comes into a stream meanwhile stays undone until the end."""
        if isinstance(self.driver, FakeDriver):
            with self.driver.engine.blocked(stream):
                yield
            return
        from cuda.bindings import driver as cuda

        with Host(mmap.PAGESIZE) as flag:
            self.driver.pin(flag.address, flag.nbytes)
            (code,) = cuda.cuStreamWaitValue32(
                stream, flag.address, 1, cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            )
            assert not code, code
            try:
                yield
            finally:
                flag.view[:4] = (1).to_bytes(4, "little")
                self.finish(stream)
                self.driver.unpin(flag.address)

    @contextmanager
    def current(self, stream: int) -> Iterator[None]:
        """A stream as the one on which torch works in this thread."""
        if isinstance(self.driver, FakeDriver):
            with self.driver.current(stream):
                yield
            return
        import torch

        torch.cuda.init()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
            yield

    @contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """Capture a stream into a CUDA graph. Raises at the end if the capture was broken."""
        if isinstance(self.driver, FakeDriver):
            with self.driver.capture(stream):
                yield
            return
        import torch

        work = torch.zeros(16, device=self.device)
        work.add_(1)  # loads the kernel
        outer = torch.cuda.ExternalStream(stream, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=outer):
            work.add_(1)
            yield

    @property
    def device(self) -> str:
        """What torch calls the GPU."""
        if self.driver.kind == "fake":
            return "cpu"
        return f"cuda:{next(d.index for d in self.driver.devices() if d.uuid == self.uuid)}"

    # --- memory -----------------------------------------------------------------------------------------------------

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes from anywhere, as they are now: copied on a stream that waits for nothing."""
        self._move(self._scratch.address, address, nbytes)
        return bytes(self._scratch.view[:nbytes])

    def write(self, address: int, data: bytes) -> None:
        """Bytes to anywhere, at once."""
        self._scratch.view[: len(data)] = data
        self._move(address, self._scratch.address, len(data))

    def _move(self, dst: int, src: int, nbytes: int) -> None:
        assert nbytes <= self._scratch.nbytes
        self.driver.copy(dst, src, nbytes, self._aside)
        self.driver.record(self._done, self._aside)
        self.driver.synchronize(self._done)

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[Host]:
        with Host(nbytes) as host:
            self.driver.pin(host.address, nbytes)
            try:
                yield host
            finally:
                self.driver.unpin(host.address)

    @contextmanager
    def memory(self, nbytes: int, writable: bool = True) -> Iterator[int]:
        """New GPU memory at an address of this process."""
        fd = self.driver.export(self.uuid, nbytes)
        try:
            with self.mapped(fd, nbytes, writable) as address:
                yield address
        finally:
            os.close(fd)

    @contextmanager
    def mapped(self, fd: int, nbytes: int, writable: bool = True) -> Iterator[int]:
        handle = self.driver.import_(fd, nbytes)
        try:
            address = self.driver.map(handle, nbytes, writable)
        finally:
            self.driver.release(handle)
        try:
            yield address
        finally:
            self.driver.unmap(address, nbytes)

    def free_again(self, before: int) -> None:
        """Wait until as much memory is free as before."""
        eventually(
            lambda: self.driver.free(self.uuid) >= before - self.slack,
            f"{before} bytes of GPU memory free again",
        )

    # --- threads and processes --------------------------------------------------------------------------------------

    def thread(self, function: Callable[[], Any]) -> Any:
        """What a function returns in a thread of its own; raises what it raises."""
        result: list[Any] = []
        problem: list[BaseException] = []

        def run() -> None:
            try:
                result.append(function())
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        if problem:
            raise problem[0]
        return result[0]

    def agent(self) -> Agent:
        return Agent(self.uuid)


class Refused(Exception):
    """What another process's driver raised: the class's name, then the error's code."""


class Agent:
    """Another process with a driver of its own, which does what it is told (`agent.py`)."""

    def __init__(self, uuid: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cuda.agent", str(theirs.fileno()), uuid],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.pid = self.process.pid
        self._socket = ours
        self._socket.settimeout(3 * PATIENCE)

    def __call__(self, verb: str, *arguments: Any, fd: int | None = None) -> Any:
        """What a method of the agent returns. Raises `Refused`, and EOFError if the process is gone."""
        try:
            send(self._socket, [verb, *arguments], fd)
            answer, _ = receive(self._socket)
        except ConnectionError:
            raise EOFError from None
        if isinstance(answer, dict):
            raise Refused(answer["error"], answer["code"], answer["message"])
        return answer[0]

    def export(self, nbytes: int) -> int:
        """A descriptor of memory that the other process exported."""
        send(self._socket, ["export", nbytes])
        answer, fd = receive(self._socket)
        assert fd is not None, answer
        return fd

    def end(self) -> int:
        """Let it exit; its exit code."""
        self._socket.close()
        return self.process.wait(3 * PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(3 * PATIENCE)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self.process.wait(3 * PATIENCE)
        finally:
            self.kill()


def send(connection: socket.socket, message: Any, fd: int | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    connection.sendmsg([json.dumps(message).encode()], rights)


def receive(connection: socket.socket) -> tuple[Any, int | None]:
    """A message, and the descriptor that came with it. Raises EOFError."""
    data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(4))
    if not data:
        raise EOFError
    fds = [fd for _, _, block in ancillary for fd in array.array("i", block)]
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(data), fds[0] if fds else None
