"""Processes in milliseconds: a process that has imported everything forks one for each request.

Run as ``python -m tests.faults.zygote FD``. A request is one JSON message on the socket FD, together with the child's
end of a socket of its own; see `Zygote.spawn`. The zygote has one thread and no connection, so its children begin as if
they had been started; the kernel takes them away when they end, and `Child.pidfd` tells when.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from tests.kit import PATIENCE

_LONGEST = 1 << 20
_PR_SET_THP_DISABLE = 41


class Lost(Exception):
    """The process is gone."""


class Child:
    """A process that a zygote made. It does what it is asked, and may report that it `tripped` over a step."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel = channel
        self.trips: deque[dict[str, Any]] = deque()
        self._answers: deque[dict[str, Any]] = deque()

    def post(self, verb: str, **arguments: Any) -> None:
        try:
            self.channel.send(json.dumps([verb, arguments]).encode())
        except OSError:
            raise Lost(verb) from None

    def receive(self) -> None:
        """Take one message in. Raises `Lost`."""
        try:
            data = self.channel.recv(_LONGEST)
        except OSError:
            data = b""
        if not data:
            raise Lost(f"process {self.pid}")
        message = json.loads(data)
        (self.trips if "step" in message else self._answers).append(message)

    def answered(self) -> dict[str, Any] | None:
        """The next answer, if it has come."""
        return self._answers.popleft() if self._answers else None

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer. Raises `Lost`."""
        while (answer := self.answered()) is None:
            assert readable([self.channel], 3 * PATIENCE), f"process {self.pid} did not answer"
            self.receive()
        return answer

    def ask(self, verb: str, **arguments: Any) -> Any:
        """What it answers. Raises `Lost`; an error of the child's fails the test."""
        self.post(verb, **arguments)
        answer = self.answer()
        assert "result" in answer, answer
        return answer["result"]

    @property
    def stopped(self) -> bool:
        return state(self.pid) == "T"

    @property
    def alive(self) -> bool:
        return not readable([self.pidfd], 0)

    def signal(self, signum: int) -> None:
        signal.pidfd_send_signal(self.pidfd, signum)

    def wait(self) -> None:
        """Until it is gone."""
        assert readable([self.pidfd]), f"process {self.pid} does not end"

    def end(self) -> None:
        """Kill it, if it still lives, and forget it. Idempotent."""
        if self.channel.fileno() < 0:
            return
        if self.alive:
            self.signal(signal.SIGKILL)
        self.wait()
        self.channel.close()
        os.close(self.pidfd)


def readable(things: list[Any], timeout: float = PATIENCE) -> list[Any]:
    """Which of these sockets and descriptors are readable, soon."""
    poll = select.poll()
    by_fd = {thing if isinstance(thing, int) else thing.fileno(): thing for thing in things}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(timeout * 1000)]


class Zygote:
    """Makes processes of one kind: brokers, which have no torch, or clients, which do."""

    def __init__(self, kind: str, log: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno()), kind],
                cwd=Path(__file__).parents[2],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def spawn(self, environ: dict[str, str] | None = None, **order: Any) -> Child:
        """A process that runs the kind's `main(channel, **order)`, with these variables in its environment."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [json.dumps([environ or {}, order]).encode()], [theirs.fileno()])
        assert readable([self._socket], 3 * PATIENCE), "the zygote does not answer"
        return Child(int(self._socket.recv(32)), ours)

    def close(self) -> None:
        self._socket.close()
        self.process.kill()  # it has nothing to give back
        self.process.wait()


def main() -> None:
    faulthandler.enable()
    # Memory is compared: a kernel that gives huge pages unasked adds 2 MiB now and then to what nobody has used.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    orders = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[2] == "broker":
        from .daemon import main as run
    else:
        from .actors import main as run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(orders, _LONGEST, 1)
        if not data:
            return
        environ, order = json.loads(data)
        pid = os.fork()
        if pid:
            os.close(fds[0])
            orders.send(str(pid).encode())
            continue
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os.environ.update(environ)
            run(socket.socket(fileno=fds[0]), **order)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def state(pid: int) -> str:
    """The kernel's letter for what a process does; Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


if __name__ == "__main__":
    main()
