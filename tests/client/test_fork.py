"""A forked child: its parent's client is of no use to it, and it keeps nothing of the parent's alive."""

from __future__ import annotations

import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import ClientForked
from tests.client.peer import Peer
from tests.conftest import StartBroker
from tests.faults.steps import cut
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import Rig

# Forking beside threads is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def in_child(check: Callable[[], None]) -> None:
    """Run a check in a forked child; its failure fails the test."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that hangs ends
        try:
            check()
            os.write(write, b"fine")
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    assert said == "fine", said


@pytest.mark.parametrize(
    "call",
    [
        lambda rig, held, lease: rig.client.put(torch.ones(1)),
        lambda rig, held, lease: rig.client.put_many([torch.ones(1)]),
        lambda rig, held, lease: rig.client.put_list([torch.ones(1)]),
        lambda rig, held, lease: rig.client.lookup("k"),
        lambda rig, held, lease: rig.client.lookup_many(["k"]),
        lambda rig, held, lease: rig.client.get_or_create("k", (1,), torch.uint8),
        lambda rig, held, lease: rig.client.attach(engine="b"),
        lambda rig, held, lease: rig.table.take(held.ref),
        lambda rig, held, lease: rig.table.take(held.ref.to_wire()),
        lambda rig, held, lease: rig.table.take({"mmbroker": 1}),
        lambda rig, held, lease: rig.table.close(),
        lambda rig, held, lease: held.drop(),
        lambda rig, held, lease: lease.seal(),
    ],
)
def test_every_call_says_that_it_was_forked(readonly: Rig, call: Callable[..., object]) -> None:
    held = readonly.client.put(torch.ones(3), to="a")
    lease = readonly.client.get_or_create("leased", (1,), torch.uint8).lease
    assert lease is not None

    def check() -> None:
        with pytest.raises(ClientForked, match="anew"):
            call(readonly, held, lease)

    in_child(check)
    lease.abort()
    with held, readonly.table.take(held.ref) as use:  # the parent notices nothing
        assert torch.equal(use.tensor, torch.ones(3))


def test_closing_in_a_child_does_nothing(readonly: Rig) -> None:
    in_child(readonly.client.close)
    assert readonly.client.lookup("k") is None
    assert readonly.broker.status()["sessions"][0]["name"] == "producer"


def test_a_child_may_connect_and_hash_for_itself(readonly: Rig) -> None:
    tensor = torch.arange(1 << 20)
    digest = mmbroker.digest(tensor)  # makes the hashing threads, which the child has not

    def check() -> None:
        assert mmbroker.digest(tensor) == digest
        with mmbroker.connect(readonly.broker.directory) as client, client.put(tensor) as held:
            assert held.digest == digest

    in_child(check)


def test_a_child_keeps_no_map_and_no_lifeline(readonly: Rig) -> None:
    held = readonly.client.put(torch.ones(3), to="a")

    def maps() -> list[str]:
        return re.findall("memfd:.*", Path("/proc/self/maps").read_text())

    fd = readonly.client._link._connection.lifeline.fileno()
    assert maps()
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")

    def check() -> None:
        assert not maps()
        assert not Path(f"/proc/self/fd/{fd}").exists()
        assert not cut("lifeline") and not cut("control"), "a connection of the parent's"

    in_child(check)
    held.drop()


def test_a_child_keeps_no_memory_that_was_never_mapped(no_leaks: None) -> None:
    """A segment's descriptor has come, and nothing has named it yet: in a child, it would keep the memory."""
    peer = Peer(lambda peer, call: peer.segment(1, 1 << 20))
    try:
        with mmbroker.connect(peer.directory) as client:
            client._link.cast(m.Lookup([]))
            eventually(lambda: client._link.connection._segments, "the descriptor")
            (fd, _) = client._link.connection.descriptor(1)
            assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:peer")

            def check() -> None:
                links = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir() if one.exists()]
                assert not [link for link in links if "memfd:peer" in link]
                assert not Path(f"/proc/self/fd/{fd}").exists()

            in_child(check)
            assert os.fstat(fd).st_size == 1 << 20  # the parent keeps it
            peer.handler = lambda peer, call: m.Found([])
    finally:
        peer.close()


@pytest.fixture
def children() -> Iterator[list[int]]:
    found: list[int] = []
    yield found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def test_a_child_does_not_keep_its_parents_session(
    start_broker: StartBroker, puppet: Callable[..., Puppet], children: list[int]
) -> None:
    """The parent is killed, and its forked child lives on: the session is over, its lease is reclaimed."""
    broker = start_broker()
    parent = puppet()
    code = f"""
import mmbroker, os, signal, torch
client = mmbroker.connect({str(broker.directory)!r}, name="parent")
lease = client.get_or_create("k", (5,), torch.uint8).lease
result = os.fork() or (os.setsid(), os.closerange(0, 3), signal.pause())
"""
    children.append(int(parent(code)))
    assert broker.status()["leases"] == 1
    parent.kill()
    eventually(lambda: broker.status()["leases"] == 0, "the lease's end")
    # The session that asked before may be there for a moment yet.
    eventually(lambda: [s["name"] for s in broker.status()["sessions"]] == ["status"], "the session's end")
    os.kill(children[0], 0)


def test_forking_while_others_call(broker: BrokerProcess) -> None:
    """Whatever lock a thread holds at the fork, the child does not wait for it."""
    with mmbroker.connect(broker.directory) as client:
        stop = threading.Event()

        def work() -> None:
            n = 0
            while not stop.is_set():
                n += 1
                client.put(torch.tensor(n)).drop()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()

        large = torch.ones(1 << 20)  # made here: torch's own threads do not survive a fork

        def check() -> None:
            with pytest.raises(ClientForked):
                client.lookup("k")
            mmbroker.digest(large)

        for _ in range(20):
            in_child(check)
        stop.set()
        for thread in threads:
            thread.join()
