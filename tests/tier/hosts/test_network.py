"""The network between the hosts does what tests of faults rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.kit import Leaks, Puppet, eventually

from .network import ROOT, Network

_SPEAK = """
import socket
ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ours.bind(({address!r}, 5000))
ours.settimeout(20)
def hear(last):
    heard = []
    while last not in heard:
        heard.append(int(ours.recv(100)))
    return heard
"""


class Pair:
    """Two hosts of three that speak in datagrams, each of which is a number."""

    def __init__(self) -> None:
        self.network = Network(["a", "b", "c"])
        self.speaker, self.hearer = (Puppet(self.network.prefix[name]) for name in "ab")
        for name, one in (("a", self.speaker), ("b", self.hearer)):
            one(_SPEAK.format(address=self.network.address[name]))

    def say(self, *numbers: int) -> None:
        where = (self.network.address["b"], 5000)
        self.speaker(f"for n in {list(numbers)}:\n    ours.sendto(b'%d' % n, {where!r})")

    def hear(self, last: int) -> list[int]:
        """What has arrived, until that one."""
        heard: list[int] = self.hearer(f"result = hear({last})")
        return heard

    def close(self) -> None:
        self.speaker.kill()
        self.hearer.kill()
        self.network.close()


@pytest.fixture(scope="module")
def made() -> Iterator[Pair]:
    before = Leaks()
    pair = Pair()
    yield pair
    pair.close()
    before.check()


@pytest.fixture
def pair(made: Pair) -> Iterator[Pair]:
    yield made
    made.network.heal()


def test_what_is_said_arrives_where_it_should_and_is_counted(pair: Pair) -> None:
    before = pair.network.counts()
    pair.say(1, 2, 3)
    assert pair.hear(3) == [1, 2, 3]
    after = pair.network.counts()
    assert {line: after[line][0] - before[line][0] for line in after if after[line] != before[line]} == {
        ("a", "b"): 3
    }


def test_a_cut_line_carries_nothing_until_it_is_healed(pair: Pair) -> None:
    pair.network.cut("a")
    pair.say(4)
    pair.network.heal()
    pair.network.cut("c")
    pair.say(5)
    assert pair.hear(5) == [5]


def test_a_seed_chooses_what_is_lost(pair: Pair) -> None:
    heard = []
    for seed in (1, 1, 2):
        pair.network.seed(seed)
        pair.network.set(("a", "b"), loss=0.3)
        pair.say(*range(100, 200))
        pair.network.heal()
        pair.say(6)
        heard.append(pair.hear(6))
    assert heard[0] == heard[1] != heard[2] and 50 < len(heard[0]) < 90


def test_what_is_late_comes_later(pair: Pair) -> None:
    pair.network.set(("a", "b"), delay=0.2)
    started = time.monotonic()
    pair.say(7)
    assert pair.hear(7) == [7] and time.monotonic() - started >= 0.2


def test_a_line_is_cut_when_so_much_has_passed(pair: Pair) -> None:
    pair.network.trip("a", "b", 2 * 43)  # two datagrams of one digit, with their headers
    pair.say(1, 2, 3)
    assert pair.network.answer() is True
    pair.say(4)
    pair.network.heal()
    pair.say(5)
    assert pair.hear(5) == [1, 2, 5]


def test_whoever_waits_for_frames_is_told(pair: Pair) -> None:
    pair.network.watch("a", "b", 3)
    pair.say(1, 2, 3)
    assert pair.network.answer() is True
    assert pair.hear(3) == [1, 2, 3]


def test_nothing_leads_out(pair: Pair) -> None:
    code = """
    import os
    try:
        ours.sendto(b"0", ("192.0.2.1", 9))
    except OSError as error:
        result = [os.strerror(error.errno), sorted(name for _, name in socket.if_nameindex())]
    """
    assert pair.speaker(code) == ["Network is unreachable", ["eth0", "lo"]]


def test_hosts_end_with_whoever_made_them() -> None:
    """However it ends."""
    code = """
    import subprocess, sys
    from tests.tier.hosts.network import Network
    network = Network(["a", "b"])
    inside = subprocess.Popen(
        [*network.prefix["a"], "sh", "-c", "echo is up; exec sleep 1000"], stdout=subprocess.PIPE
    )
    inside.stdout.readline()  # not before that is it bound to its room's end
    print(inside.pid, *(room.pid for room in network._rooms.values()), flush=True)
    sys.stdin.read()
    """
    script = "\n".join(line[4:] for line in code.splitlines())
    owner = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        pids = list(map(int, owner.stdout.readline().split()))
        owner.send_signal(signal.SIGKILL)
    assert len(pids) == 3
    for pid in pids:
        eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"the end of {pid}")
