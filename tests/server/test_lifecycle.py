"""From start to end: what a broker needs, what it leaves behind, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from mmbroker.proto import messages as m
from tests.conftest import StartBroker
from tests.kit import PATIENCE, BrokerProcess, Leaks, Puppet, RawClient, eventually
from tests.server.items import an_item, lease_one

MIB = 1 << 20

StartPuppet = Callable[..., Puppet]

signals = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


# --- what it needs --------------------------------------------------------------------------------------------------


def test_ready_line(start_broker: StartBroker) -> None:
    broker = start_broker(host_mib=64)
    assert broker.ready == (
        f"mmbroker is ready at {broker.directory} (process {broker.pid}, host arena up to 64 MiB)\n"
    )
    assert broker.stop() == 0
    assert (broker.output(), broker.log()) == ("", "")


def test_small_and_without_torch(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        leased = lease_one(client, 3 * MIB)
        client.segment(leased.segment, writable=True)
        status = broker.status()
        assert status["daemon"]["rss"] < 60 * MIB
        assert "torch" not in mapped(broker.pid)
        assert "memfd" not in mapped(broker.pid)  # it owns the memory, and never looks at it
        client.cast(m.Abort([leased.lease]))


def test_status_tells_about_the_daemon(broker: BrokerProcess) -> None:
    daemon = broker.status()["daemon"]
    assert daemon["pid"] == broker.pid
    assert daemon["directory"] == str(broker.directory)
    assert daemon["uptime"] >= 0 and daemon["loop_lag_worst"] >= daemon["loop_lag"] >= 0
    assert daemon["descriptors"] == pytest.approx(len(os.listdir(f"/proc/{broker.pid}/fd")), abs=4)
    assert (daemon["outboxes"], daemon["counters"]) == (0, {})
    assert daemon["memory_headroom"] > 0 and daemon["memory_limit"]


def test_a_small_shm_mount_is_no_limit(start_broker: StartBroker) -> None:
    """Memory of a memfd does not count against ``/dev/shm``."""
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
    broker = start_broker(prefix=["unshare", "-m", "sh", "-c", f'{mount} "$0" "$@"'], segment_mib=8)
    with RawClient(broker.directory) as client:
        for _ in range(4):
            lease_one(client, 8 * MIB)


# --- one broker a directory -----------------------------------------------------------------------------------------


def test_a_second_broker_is_refused(broker: BrokerProcess, start_broker: StartBroker) -> None:
    second = start_broker(wait=False)
    assert second.wait() == 1
    assert second.log().count("\n") == 1
    assert f"a broker (process {broker.pid}) already runs at {broker.directory}" in second.log()
    other = start_broker(name="other")
    assert other.status()["daemon"]["instance"] == "other"
    assert broker.status()["daemon"]["pid"] == broker.pid


def test_a_killed_brokers_directory_is_used_again(start_broker: StartBroker) -> None:
    first = start_broker()
    other = start_broker(name="other")
    first.kill()
    assert first.directory.is_dir()
    second = start_broker()
    assert second.status()["daemon"]["pid"] == second.pid
    assert other.status()["daemon"]["pid"] == other.pid


def test_nothing_survives_a_killed_group(start_broker: StartBroker, puppet: StartPuppet) -> None:
    """Memory ends with the last process that has it: nothing is named anywhere, nothing needs sweeping."""
    before = Leaks()
    broker = start_broker()
    client = puppet()
    client(f"c = RawClient(Path({str(broker.directory)!r})); from tests.server.items import lease_one")
    client("lease_one(c, 1 << 20); c.segment(1, True)")
    assert not before.shared_memory_left()
    broker.kill()
    client.kill()
    assert not before.shared_memory_left()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "n" * 90}, "107"),
        ({"name": "a/b"}, "name in the settings file"),
        ({"http": "10.0.0.1:1"}, "http in the settings file"),
        ({"host_mib": 0}, "host_mib in the settings file"),
    ],
)
def test_a_start_that_fails(start_broker: StartBroker, settings: dict[str, Any], message: str) -> None:
    broker = start_broker(wait=False, **settings)
    assert broker.wait() == 1
    assert message in broker.log() and broker.log().count("\n") == 1
    assert broker.output() == ""


def test_a_start_that_fails_late(start_broker: StartBroker, broker_root: Path) -> None:
    """What was made before an error is removed again: here, the control socket cannot be bound."""
    code = (
        "import sys, mmbroker.control as c\n"
        "def broken(self): raise RuntimeError('late')\n"
        "c.Control.listen = broken\n"
        "from mmbroker.cli import main\n"
        "main(sys.argv[3:])\n"
    )
    broker = start_broker(wait=False, prefix=["sh", "-c", f'exec "$0" -c "{code}" "$@"'])
    assert broker.wait() == 1
    assert "RuntimeError: late" in broker.log()
    assert list(broker_root.iterdir()) == []


# --- how it ends ----------------------------------------------------------------------------------------------------


@signals
def test_signals_leave_nothing(start_broker: StartBroker, broker_root: Path, signum: int) -> None:
    broker = start_broker()
    with RawClient(broker.directory) as client:
        leased = lease_one(client, MIB)
        client.call(m.Seal([m.Sealing(leased.lease)]))
        assert broker.stop(signum) == 0
        assert client.ended()
    assert broker.log() == ""
    assert list(broker_root.iterdir()) == []


def test_nohup(start_broker: StartBroker) -> None:
    broker = start_broker(prefix=["nohup"])
    broker.process.send_signal(signal.SIGHUP)
    assert not broker.status()["draining"]
    assert broker.stop() == 0


def test_shutdown_is_answered_then_done(start_broker: StartBroker, broker_root: Path) -> None:
    broker = start_broker()
    with RawClient(broker.directory) as client:
        assert client.call(m.Shutdown()) == m.Done()
        assert client.ended()
    assert broker.wait() == 0
    assert list(broker_root.iterdir()) == []


@signals
def test_open_leases_are_waited_for(start_broker: StartBroker, signum: int) -> None:
    """While it drains: no new leases, no new clients; whoever is writing may finish."""
    broker = start_broker()
    with RawClient(broker.directory) as writer, RawClient(broker.directory) as other:
        leased = lease_one(writer, MIB)
        broker.process.send_signal(signum)
        eventually(lambda: other.call(m.Status()).status["draining"], "draining")
        refused = other.call(m.Create([an_item(MIB)]))
        assert isinstance(refused, m.Failed) and refused.error == "BrokerLost"
        late = RawClient(broker.directory)
        assert late.refused is not None and late.refused.error == "BrokerUnavailable"
        sealed = writer.call(m.Seal([m.Sealing(leased.lease)]))
        assert isinstance(sealed, m.Sealed)
        assert writer.ended()
    assert broker.wait() == 0


def test_a_second_signal_ends_it_at_once(start_broker: StartBroker, broker_root: Path) -> None:
    """It waits neither for open leases nor for a seal that nobody acknowledges, which would be answered first."""
    broker = start_broker()
    with RawClient(broker.directory) as client, RawClient(broker.directory) as rank:
        rank.call(m.Attach("e", 0, 1))
        leased = lease_one(client, MIB)
        client.segment(leased.segment, writable=True)
        client.post(m.Seal([m.Sealing(leased.lease)], to="e"), timeout=2.0)
        rank.notice(m.Granted)
        broker.process.send_signal(signal.SIGTERM)
        eventually(lambda: rank.call(m.Status()).status["draining"], "draining")
        broker.process.send_signal(signal.SIGTERM)
        poller = zmq.Poller()
        poller.register(client.control, zmq.POLLIN)
        poller.register(client.lifeline, zmq.POLLIN)
        assert [what for what, _ in poller.poll(PATIENCE * 1000)] == [client.lifeline.fileno()]
        assert client.ended()
    assert broker.wait() == 0
    assert list(broker_root.iterdir()) == []


def test_an_answer_to_a_stopped_client_does_not_delay_the_end(
    start_broker: StartBroker, puppet: StartPuppet
) -> None:
    broker = start_broker()
    client = puppet()
    client(f"c = RawClient(Path({str(broker.directory)!r})); c.call(m.Status())")
    client.stop()
    assert broker.stop() == 0


def test_broken_books_end_it(start_broker: StartBroker, broker_root: Path) -> None:
    """An exception out of the state machine is the end, with a traceback; clients see the lifeline end."""
    code = (
        "import sys, mmbroker.state as s\n"
        "def broken(*a): raise AssertionError('books')\n"
        "s.Broker._tally = broken\n"
        "from mmbroker.cli import main\n"
        "main(sys.argv[3:])\n"
    )
    broker = start_broker(prefix=["sh", "-c", f'exec "$0" -c "{code}" "$@"'])
    with RawClient(broker.directory) as client:
        client.cast(m.Tally({"a": 1}))
        assert client.ended()
    assert broker.wait() == 1
    assert "AssertionError: books" in broker.log() and "Traceback" in broker.log()
    assert list(broker_root.iterdir()) == []


def test_ends_while_memory_is_being_made(start_broker: StartBroker) -> None:
    """A segment that is half made when the signal comes is given back like any other."""
    broker = start_broker(host_mib=512, segment_mib=512)
    with RawClient(broker.directory) as client:
        client.post(m.Create([an_item(MIB)]))
        eventually(lambda: client.call(m.Status()).status["pool"]["capacity"], "growth")
        broker.process.send_signal(signal.SIGTERM)
        broker.process.send_signal(signal.SIGTERM)
        assert client.ended()
    assert broker.wait() == 0


def test_nothing_listens_but_the_directory(broker: BrokerProcess) -> None:
    """Sockets of the broker, as the kernel lists them: two listen, in the instance directory, and none has a port."""
    inodes = set()
    for fd in os.listdir(f"/proc/{broker.pid}/fd"):
        target = os.readlink(f"/proc/{broker.pid}/fd/{fd}")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {fields[7] for fields in unix if fields[6] in inodes and len(fields) > 7}
    assert named == {str(broker.directory / name) for name in ("lifeline.sock", "control.sock")}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        assert not inodes & {line.split()[9] for line in lines}


def test_a_client_that_connects_and_leaves_at_once(broker: BrokerProcess) -> None:
    for _ in range(100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(str(broker.directory / "lifeline.sock"))
    for _ in range(50):
        RawClient(broker.directory).close()
    status = broker.status()
    assert len(status["sessions"]) == 1 and not status["ghosts"]
    before = status["daemon"]["descriptors"]
    for _ in range(50):
        RawClient(broker.directory).close()
    eventually(lambda: broker.status()["daemon"]["descriptors"] <= before, "descriptors given back")
