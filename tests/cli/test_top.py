"""`mmbroker top` on a real terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import PATIENCE, BrokerProcess, RawClient, eventually

from .test_cli import create, mmbroker, one_sentence, put

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process with a terminal of its own, 80 by 40."""

    def __init__(self, broker: BrokerProcess, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        environ = {**os.environ, "MMBROKER_DIR": str(broker.root), "TERM": "xterm"}
        environ.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmbroker", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
        )
        self.theirs = theirs
        self.seen = ""

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def until(self, text: str) -> str:
        """Everything that was shown since the last call, up to this text."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            readable, _, _ = select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{text!r} was not shown: {self.seen[-2000:]}"
            self.seen += ESCAPE.sub("", os.read(self.ours, 1 << 16).decode("utf-8", "replace"))
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def busy(start_broker: StartBroker) -> Iterator[BrokerProcess]:
    """A broker with a lagging rank, two workers, and a call that waits."""
    broker = start_broker(host_mib=8, lagging_after=0.001, stuck_after=0.001)
    with (
        RawClient(broker.directory, name="worker-a") as a,
        RawClient(broker.directory, name="worker-b") as b,
        RawClient(broker.directory, name="a-rank") as rank,
    ):
        rank.call(m.Attach("engine-a", 0, 1))
        put(a, "x", 2048, "engine-a")
        rank.notice(m.Granted)
        for name in ("y", "z"):
            put(b, name, 16)
        create(b, "open", 4)
        b.call(m.Tally({"sglang_fallback_full": 1234}))
        b.post(m.Create([m.Item(Key.caller("large"), tensor_form("uint8", (7 << 20,), "image"))]), timeout=60)
        eventually(
            lambda: broker.status()["waiting"] and not broker.status()["health"]["ok"], "something stuck"
        )
        yield broker


def test_one_screen_for_scripts(busy: BrokerProcess) -> None:
    result = mmbroker("top", "--once", MMBROKER_DIR=str(busy.root))
    assert (result.returncode, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    for expected in (
        f"mmbroker cpu  process {busy.pid}",
        "work does not get on",
        "has not acknowledged feature",
        "2.04 MiB used + 0 B cached of 8 MiB",
        "lease to seal",
        "Waiting: 1 for room",
        "1,234 full",
        "engine-a",
        "silent for",
        "worker-a",
        "worker-b",
    ):
        assert expected in result.stdout, (expected, result.stdout)


def clients(shown: str) -> list[str]:
    return re.findall(r"worker-[ab]", shown)


@pytest.mark.parametrize(
    ("sort", "first"), [("bytes", "worker-a"), ("holds", "worker-b"), ("name", "worker-a")]
)
def test_clients_are_sorted(busy: BrokerProcess, sort: str, first: str) -> None:
    result = mmbroker("top", "--once", "--sort", sort, MMBROKER_DIR=str(busy.root))
    listed = result.stdout.partition("Clients")[2]
    assert clients(listed)[0] == first


def test_keys_sort_and_quit(busy: BrokerProcess) -> None:
    terminal = Terminal(busy, "top", "--interval", "30")
    try:
        terminal.until("now by held")
        assert clients(terminal.until("a-rank"))[-2:] == ["worker-a", "worker-b"]
        terminal.press("s")
        terminal.until("now by holds")
        assert clients(terminal.until("a-rank"))[-2:] == ["worker-b", "worker-a"]
        terminal.press("S")
        terminal.until("now by held")
        terminal.press("q")
        assert terminal.process.wait(PATIENCE) == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


def test_a_broker_that_comes_back_is_shown_again(start_broker: StartBroker) -> None:
    broker = start_broker()
    terminal = Terminal(broker, "top", "--interval", "0.1")
    try:
        terminal.until(f"process {broker.pid}")
        broker.stop()
        terminal.until("no connection to the broker")
        again = start_broker()
        terminal.until(f"process {again.pid}")
        terminal.press("q")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()


def test_without_a_terminal(broker: BrokerProcess) -> None:
    result = mmbroker("top", MMBROKER_DIR=str(broker.root))
    assert result.returncode == 2 and "--once" in result.stderr


def test_no_broker_there(broker_root: Path) -> None:
    result = mmbroker("top", "--once", MMBROKER_DIR=str(broker_root))
    assert result.returncode == 3 and "mmbroker start" in one_sentence(result)
