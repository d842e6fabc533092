"""The real Mooncake Store on loopback: the store itself, and two machines that share it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import mmbroker
from tests.kit import BrokerProcess, eventually
from tests.rig import same, values
from tests.tier.mooncake import HOST, Master, MoverProcess, a_master, free_ports, listeners, reachable
from tests.tier.scene import a_broker, evict, key

pytestmark = pytest.mark.mooncake

PICTURE = values(torch.float32, (100, 3000))


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with a_master() as process:
        yield process


@pytest.fixture(scope="module")
def machines(master: Master) -> Iterator[list[tuple[BrokerProcess, MoverProcess]]]:
    """Two, each with a broker and a mover that lends the store some memory."""
    options = ("--store-mib", "32", "--wait-ms", "2000", "--store-namespace", "shared")
    with a_broker() as one, a_broker() as other:
        movers = [MoverProcess(broker, master.address, *options) for broker in (one, other)]
        try:
            assert all("shared" in mover.ready for mover in movers), movers[0].errors()
            yield list(zip((one, other), movers, strict=True))
            assert [mover.stop() for mover in movers] == [0, 0]
        finally:
            for mover in movers:
                mover.clean_up()


def counted(broker: BrokerProcess, name: str) -> int:
    """By the mover of a broker."""
    (mover,) = (session for session in broker.status()["sessions"] if session["name"] == "tier")
    return int(mover["tally"].get(f"tier_{name}", 0))


def share(one: BrokerProcess, other: BrokerProcess, name: str, value: torch.Tensor) -> mmbroker.Held:
    """Make it on one machine, and ask for it on the other until the first has stored it."""
    with mmbroker.connect(one.directory, name="worker") as worker:
        worker.put(value, key=key(name), extra=b"beside", cost=30_000).drop()
    with (
        mmbroker.connect(other.directory, name="engine") as engine,
        mmbroker.connect(other.directory, name="worker") as worker,
    ):
        table = engine.attach(engine="a", access="readonly")
        held = eventually(lambda: worker.lookup(key(name), to="a"), "it is there, too")
        with held, table.take(held.ref) as use:
            assert same(use.tensor, value) and held.extra == b"beside"
        table.close()
        return held


def test_two_machines_share_what_one_has_made(machines: list[tuple[BrokerProcess, MoverProcess]]) -> None:
    (one, _), (other, _) = machines
    share(one, other, "picture", PICTURE)
    share(other, one, "another", PICTURE + 1)
    share(one, other, "empty", torch.empty(0, 5))
    eventually(lambda: counted(one, "puts") + counted(other, "puts") == 3, "no more is stored")


def test_they_listen_on_one_address(machines: list[tuple[BrokerProcess, MoverProcess]]) -> None:
    _, mover = machines[0]
    ports = listeners(mover.process.pid)
    assert ports
    for port in ports:
        assert reachable(port), "others are served"
        # The kernel drops what comes for another address, also of this machine: nobody ever answers.
        assert not reachable(port, "127.0.0.2", 0.2)


def test_the_masters_restart(master: Master, machines: list[tuple[BrokerProcess, MoverProcess]]) -> None:
    """It has forgotten everything; what is made from then on is shared as before."""
    (one, _), (other, _) = machines
    share(one, other, "before", PICTURE)
    master.restart()
    with mmbroker.connect(one.directory, name="worker") as worker:

        def stored() -> bool:
            worker.put(PICTURE, key=key("after"), cost=30_000).drop()
            evict(other)
            with mmbroker.connect(other.directory, name="asker") as asker:
                held = asker.lookup(key("after"))
                if held is None:
                    evict(one)  # so that it is made, and told of, again
                    return False
                held.drop()
                return True

        eventually(stored, "service returns by itself", 60)


def test_a_namespace_is_removed(master: Master, machines: list[tuple[BrokerProcess, MoverProcess]]) -> None:
    (one, _), (other, _) = machines
    share(one, other, "to be removed", PICTURE)
    command = [sys.executable, "-m", "mmbroker", "tier", "remove", "--master", master.address]
    run = subprocess.run(
        [*command, "--address", HOST, "--store-namespace", "shared"], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.startswith("removed "), run.stderr
    assert not run.stdout.startswith("removed 0")
    evict(other)
    with mmbroker.connect(other.directory, name="asker") as asker:
        assert asker.lookup(key("to be removed")) is None


@pytest.mark.parametrize(
    ("master_at", "address", "says"),
    [
        (f"{HOST}:{{free}}", HOST, "no Mooncake master of this version answers at"),
        (f"{HOST}:{{mute}}", HOST, "no Mooncake master of this version answers at"),
        ("{master}", "192.0.2.1", "192.0.2.1 is no address of this machine"),
        ("{master}", "localhost", "'localhost' is no IPv4 address"),
    ],
    ids=["nobody", "somebody else", "another machine's address", "a name"],
)
def test_what_is_wrong_is_said_in_one_sentence(
    master: Master,
    machines: list[tuple[BrokerProcess, MoverProcess]],
    master_at: str,
    address: str,
    says: str,
) -> None:
    broker, _ = machines[0]
    with socket.create_server((HOST, 0)) as mute:
        place = master_at.format(free=free_ports(1)[0], mute=mute.getsockname()[1], master=master.address)
        command = [sys.executable, "-m", "mmbroker", "tier", "--master", place, "--address", address]
        run = subprocess.run(
            [*command, "--namespace", "other"], env=broker.environ, capture_output=True, text=True, timeout=60
        )
    assert run.returncode == 1 and not run.stdout
    assert [line for line in run.stderr.splitlines() if line.startswith("mmbroker: ")], run.stderr
    assert says in run.stderr
    assert broker.status()["health"]["ok"]
