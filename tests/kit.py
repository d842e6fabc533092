"""What tests share: real brokers as processes, a bare client for the wire, and the search for leaks."""

from __future__ import annotations

import array
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from mmbroker.proto import messages as m
from mmbroker.proto.reference import PROTOCOL_VERSION

#: How long anything that must happen may take, in seconds; only failing tests wait so long.
PATIENCE = 20.0


def eventually(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
    """The condition's first true value. Only for what has no event to wait for, such as the kernel's books."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        pause.wait(0.002)
    return value


class BrokerProcess:
    """A broker in its own process. Settings are those of the settings file; `directory` is its instance directory."""

    def __init__(self, root: Path, settings: dict[str, Any], prefix: list[str], env: dict[str, str]) -> None:
        self.root = root
        self.name = str(settings.get("name", "cpu"))
        self.directory = root / self.name
        self.environ = {**os.environ, "MMBROKER_DIR": str(root), **env}
        self._scratch = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
        self._scratch.chmod(0o755)  # a broker of another user reads its settings
        config = self._scratch / "settings.toml"
        settings = {"log_level": "warning", **settings}  # most tests want to see trouble only
        lines = [f"{key} = {_toml(value)}\n" for key, value in settings.items() if value is not None]
        config.write_text("".join(lines))
        kind = [] if settings.get("gpu") else ["--cpu"]
        command = [*prefix, sys.executable, "-m", "mmbroker", "start", *kind, "--config", str(config)]
        with open(self._scratch / "log", "wb") as log:
            self.process = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        self.pid = self.process.pid
        self.ready = ""

    def wait_ready(self) -> BrokerProcess:
        """Until it has printed its line, which is kept as `ready`."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        self.ready = self.process.stdout.readline().decode() if readable else ""
        assert self.ready, f"the broker did not start: {self.log()}"
        return self

    def log(self) -> str:
        """What it has written to stderr so far."""
        return (self._scratch / "log").read_text()

    def output(self) -> str:
        """What it has written to stdout after the ready line; for a broker that has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal, and wait; SIGKILL after the patience is over."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.wait()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def status(self, features: int = 0) -> dict[str, Any]:
        """The broker's own report."""
        with RawClient(self.directory, name="status") as client:
            body = client.call(m.Status(features))
        assert isinstance(body, m.Report), body
        return body.status

    def clean_up(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self._scratch)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


class RawClient:
    """The wire and nothing else: no reconnecting, no retries, no threads. For one test's thread."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "raw",
        namespace: str | None = None,
        hello: m.Hello | bytes | None = None,
        control: bool = True,
    ) -> None:
        self.directory = directory
        self.segments: dict[
            tuple[int, bool], tuple[int, int]
        ] = {}  # (segment, writable) -> (descriptor, nbytes)
        self.notices: list[m.Notice] = []
        self.answers: dict[int, m.Reply] = {}
        self.seq = 0
        self.lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline.settimeout(PATIENCE)
        self.control: zmq.Socket[bytes] | None = None
        self.welcome: m.Welcome
        self.refused: m.Refused | None = None
        try:
            self.lifeline.connect(str(directory / "lifeline.sock"))
            first = m.Hello(PROTOCOL_VERSION, name, namespace) if hello is None else hello
            with suppress(BrokenPipeError):  # refused before it spoke; the reason can still be read
                self.lifeline.send(first if isinstance(first, bytes) else m.encode(first))
            answer = m.decode_lifeline(self.lifeline.recv(m.MAX_MESSAGE))
            if isinstance(answer, m.Refused):
                self.refused = answer
                self.lifeline.close()
                return
            assert isinstance(answer, m.Welcome), answer
            self.welcome = answer
            if control:
                self.control = dealer(directory / answer.control, answer.routing)
        except BaseException:
            self.close()
            raise

    def send(self, data: bytes) -> None:
        assert self.control is not None
        self.control.send(data)

    def post(self, body: m.Body, timeout: float = 5.0, seq: int | None = None, **envelope: Any) -> int:
        """Send a call without waiting; its seq."""
        if seq is None:
            self.seq += 1
            seq = self.seq
        fields = {
            "v": PROTOCOL_VERSION,
            "boot": self.welcome.boot,
            "session": self.welcome.session,
            **envelope,
        }
        self.send(m.encode(m.Call(seq=seq, timeout=timeout, body=body, **fields)))
        return seq

    def cast(self, body: m.Body) -> None:
        self.post(body, seq=0)

    def call(self, body: m.Body, timeout: float = 5.0, **envelope: Any) -> m.Reply:
        """The answer to one call; notices that come first are kept in `notices`."""
        return self.answer(self.post(body, timeout, **envelope))

    def answer(self, seq: int) -> m.Reply:
        while seq not in self.answers:
            self.receive()
        return self.answers.pop(seq)

    def receive(self, timeout: float = PATIENCE) -> m.Downlink:
        """The next control message, which is also filed."""
        assert self.control is not None
        assert self.control.poll(int(timeout * 1000)), f"no message within {timeout} s"
        message = m.decode_downlink(self.control.recv())
        if isinstance(message, m.Answer):
            self.answers[message.seq] = message.body
        else:
            self.notices.append(message)
        return message

    def notice(self, kind: type[Any]) -> Any:
        """The next notice of a kind."""
        while not (found := [notice for notice in self.notices if isinstance(notice, kind)]):
            self.receive()
        self.notices.remove(found[0])
        return found[0]

    def segment(self, segment: int, writable: bool) -> tuple[int, int]:
        """Descriptor and size of a segment that the broker has sent, or will."""
        while (segment, writable) not in self.segments:
            self.segment_next()
        return self.segments[segment, writable]

    def segment_next(self) -> m.SegmentFd:
        """Fetch the next descriptor."""
        data, ancillary, _, _ = self.lifeline.recvmsg(1 << 16, socket.CMSG_SPACE(4))
        assert data, "the lifeline ended"
        message = m.decode_lifeline(data)
        assert isinstance(message, m.SegmentFd), message
        (descriptor,) = array.array("i", ancillary[0][2])
        self.segments[message.segment, message.writable] = (descriptor, message.nbytes)
        return message

    def next_of_either(self) -> None:
        """Take whatever comes first, a control message or a descriptor."""
        poller = zmq.Poller()
        poller.register(self.control, zmq.POLLIN)
        poller.register(self.lifeline, zmq.POLLIN)
        ready = dict(poller.poll(PATIENCE * 1000))
        assert ready, f"nothing within {PATIENCE} s"
        if self.control in ready:
            self.receive()
        else:
            self.segment_next()

    def ended(self) -> bool:
        """Wait for the lifeline's end."""
        while True:
            try:
                data, ancillary, _, _ = self.lifeline.recvmsg(m.MAX_MESSAGE, socket.CMSG_SPACE(4))
            except ConnectionResetError:
                return True
            for _, _, fds in ancillary:
                os.close(array.array("i", fds)[0])
            if not data:
                return True

    def close(self) -> None:
        self.lifeline.close()
        if self.control is not None:
            self.control.close(linger=0)
        for descriptor, _ in self.segments.values():
            os.close(descriptor)
        self.segments.clear()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def dealer(path: Path, routing: bytes, watched: bool = False) -> zmq.Socket[bytes]:
    """A client's control socket. `watched`: its monitor is there before it connects, so that no event is missed."""
    control = zmq.Context.instance().socket(zmq.DEALER)
    control.setsockopt(zmq.ROUTING_ID, routing)
    control.setsockopt(zmq.RECONNECT_IVL, -1)
    control.setsockopt(zmq.IMMEDIATE, 1)
    control.setsockopt(zmq.LINGER, 0)
    control.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
    if watched:
        control.get_monitor_socket()
    control.connect(f"ipc://{path}")
    return control


class Puppet:
    """A process of its own that runs the statements it is called with; see `tests.puppet`."""

    def __init__(self, prefix: list[str] | None = None, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-m", "tests.puppet"],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def post(self, code: str) -> None:
        """Start running statements."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What the statements that were posted left in `result`."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if readable else ""
        assert line, "the puppet did not answer"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def __call__(self, code: str) -> Any:
        self.post(code)
        return self.answer()

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def stop(self) -> None:
        """Stop it with SIGSTOP, and wait until it stands still."""
        self.signal(signal.SIGSTOP)
        eventually(
            lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "a stop"
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


# --- leaks ----------------------------------------------------------------------------------------------------------


def descriptors() -> Counter[str]:
    """What this process has open, by kind."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own
        found[target.partition(":[")[0] if ":[" in target and "anon_inode" not in target else target] += 1
    return found


def children() -> set[int]:
    """Processes whose parent is this one."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except OSError:
            continue  # the thread has ended
    return found


#: What other programs that run beside the tests leave in ``/dev/shm``: we name nothing there.
STRANGERS = ("sem.loky-", "sgl", "psm_", "multi_tokenizer_args_")


def in_use(path: str) -> bool:
    """Does any process on this machine map or hold this file?"""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if path in Path(f"/proc/{pid}/maps").read_text():
                return True
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}") == path:
                        return True
    return False


class Leaks:
    """Compares what this process has after a test with what it had before."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = descriptors()
        self.children = children()
        self.shared_memory = set(os.listdir("/dev/shm"))

    def found(self) -> str:
        gc.collect()
        problems = [f"descriptors: {more}" for more in [descriptors() - self.descriptors] if more]
        problems += [f"processes: {more}" for more in [children() - self.children] if more]
        if left := self.shared_memory_left():
            problems.append(f"/dev/shm: {left}")
        return "; ".join(problems)

    def shared_memory_left(self) -> set[str]:
        """New names in ``/dev/shm`` that nobody uses: what is in use is somebody else's."""
        new = {name for name in os.listdir("/dev/shm") if not name.startswith(STRANGERS)} - self.shared_memory
        return {name for name in new if not in_use(f"/dev/shm/{name}")}

    def check(self) -> None:
        """Fail unless everything is given back, soon: a ZeroMQ socket is closed by a thread of its own."""
        end = time.monotonic() + 5.0
        while (problem := self.found()) and time.monotonic() < end:
            threading.Event().wait(0.005)
        assert not problem, f"left behind by this test: {problem}"


def resident(address: int) -> int:
    """Bytes of the map around `address` that this process's page tables have."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            start, end = (int(n, 16) for n in line.split(" ")[0].split("-"))
            found = start <= address < end
        elif found and name == "Rss":
            return int(rest.split()[0]) << 10
    return 0
