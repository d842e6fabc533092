"""How sessions end: with the connection or with the process, whichever comes first; and what goes on until then."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmbroker import doctor
from mmbroker.check import FINE
from mmbroker.proto import messages as m
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, RawClient, eventually
from tests.server.items import an_item, lease_one

MIB = 1 << 20

StartPuppet = Callable[..., Puppet]


def client_of(broker: BrokerProcess, puppet: StartPuppet, name: str = "puppet") -> Puppet:
    client = puppet()
    client(
        f"from tests.server.items import lease_one, an_item\n"
        f"path = Path({str(broker.directory)!r}); c = RawClient(path, name={name!r})"
    )
    return client


def others(status: dict[str, Any], kind: str = "sessions") -> list[dict[str, Any]]:
    return [session for session in status[kind] if session["name"] != "status"]


@pytest.mark.balanced
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_writer_dies(broker: BrokerProcess, puppet: StartPuppet, signum: int) -> None:
    client = client_of(broker, puppet)
    client("lease_one(c, 1 << 20)")
    assert broker.status()["leases"] == 1
    client.signal(signum)
    client.process.wait()
    status = eventually(lambda: (s := broker.status()) and not others(s) and s, "the session's end")
    assert (status["leases"], status["pool"]["used"], status["ghosts"]) == (0, 0, [])


@pytest.mark.balanced
def test_a_writer_closes_but_lives(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """It may still write to its slot, so the slot is not reused before the process is gone."""
    client = client_of(broker, puppet)
    client("lease_one(c, 1 << 20); c.close()")
    status = eventually(lambda: (s := broker.status()) and s["ghosts"] and s, "a ghost")
    assert (status["leases"], status["quarantined"]) == (0, MIB)
    client.kill()
    status = eventually(lambda: (s := broker.status()) and not s["ghosts"] and s, "the process's end")
    assert (status["quarantined"], status["pool"]["used"]) == (0, 0)


def test_it_says_that_it_let_go(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """A client that reconnects and has released what it had of its old session is no ghost any more."""
    client = client_of(broker, puppet)
    before = broker.status()["daemon"]["descriptors"]
    for _ in range(40):
        client("old = c.welcome.session; lease_one(c, 1 << 20); c.close(); c = RawClient(path)")
        assert client("result = type(c.call(m.Released(old))).__name__") == "Done"
    status = broker.status()
    assert (status["ghosts"], status["pool"]["used"]) == ([], 0)
    assert status["daemon"]["descriptors"] <= before + 4  # two of one segment, two of one session


def test_too_many_ghosts_of_one_process(broker: BrokerProcess, puppet: StartPuppet) -> None:
    client = client_of(broker, puppet)
    code = (
        "lease_one(c, 1); c.close(); c = RawClient(path)\n"
        "result = c.refused and [c.refused.error, c.refused.message]"
    )
    for _ in range(15):
        assert client(code) is None
    error, message = eventually(lambda: client(code), "a refusal")
    assert error == "QuotaExceeded"
    assert f"process {client.pid} still has features of 16 sessions" in message
    with RawClient(broker.directory) as other:
        assert isinstance(other.call(m.Status()), m.Report)
    client.kill()
    eventually(lambda: not broker.status()["ghosts"], "the process's end")


@pytest.mark.balanced
def test_a_forked_child_does_not_keep_the_session(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """The child has the lifeline, so it stays open when the client dies: the pidfd tells."""
    client = client_of(broker, puppet)
    child = client(
        "import os, signal\n"
        "lease_one(c, 1 << 20)\n"
        "result = os.fork()\n"
        "if not result:\n"
        "    os.dup2(os.open('/dev/null', os.O_RDWR), 1)\n"
        "    signal.pause()\n"
    )
    try:
        assert broker.status()["leases"] == 1
        client.kill()
        status = eventually(lambda: (s := broker.status()) and not others(s) and s, "the session's end")
        assert (status["leases"], status["ghosts"], status["pool"]["used"]) == (0, [], 0)
        assert os.readlink(f"/proc/{child}/exe")  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_childs_end_is_not_the_sessions(broker: BrokerProcess, puppet: StartPuppet) -> None:
    client = client_of(broker, puppet)
    client("import os\npid = os.fork()\nif not pid:\n    c.lifeline.close(); os._exit(0)\nos.waitpid(pid, 0)")
    assert client("result = type(c.call(m.Status())).__name__") == "Report"
    assert len(others(broker.status())) == 1


@pytest.mark.balanced
def test_a_stopped_client_keeps_what_it_has(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """It holds nobody up, it is not reaped, and it goes on where it was."""
    client = client_of(broker, puppet)
    client("leased = lease_one(c, 1 << 20)")
    client.stop()
    with RawClient(broker.directory) as other:
        for _ in range(50):
            leased = lease_one(other, MIB)
            assert isinstance(other.call(m.Seal([m.Sealing(leased.lease)])), m.Sealed)
    assert broker.status()["leases"] == 1
    client.signal(signal.SIGCONT)
    assert client("result = type(c.call(m.Seal([m.Sealing(leased.lease)]))).__name__") == "Sealed"
    client.kill()


@pytest.mark.balanced
def test_a_stopped_rank_is_named(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """One of eight ranks stands still: seals to its engine fail by name at their deadline, others go on."""
    ranks = [RawClient(broker.directory, name=f"rank-{rank}") for rank in range(7)]
    stopped = client_of(broker, puppet, "rank-7")
    try:
        for rank, client in enumerate(ranks):
            client.call(m.Attach("engine-a", rank, 8))
        assert stopped("result = c.call(m.Attach('engine-a', 7, 8)).complete")
        ranks[0].call(m.Detach())
        assert ranks[0].call(m.Attach("engine-a", 0, 8)) == m.Attached(True)
        stopped.stop()
        with (
            RawClient(broker.directory, name="producer") as producer,
            RawClient(broker.directory) as bystander,
        ):
            leased = lease_one(producer, MIB)
            # Long enough for the status below to see the grant before it is over.
            call = producer.post(m.Seal([m.Sealing(leased.lease)], to="engine-a"), timeout=4)
            for client in ranks:
                (grant,) = client.notice(m.Granted).grants
                client.cast(m.Ack([grant.ref.hold]))
            assert isinstance(bystander.call(m.Create([an_item(MIB)])), m.Created)
            engine = eventually(
                lambda: next((e for e in broker.status()["engines"] if e["ranks"][7]["unacked"]), None),
                "a grant",
            )
            assert engine["ranks"][7]["pid"] == stopped.pid
            assert engine["ranks"][7]["unacked_feature"] == grant.ref.feature
            failed = producer.answer(call)
            assert isinstance(failed, m.Failed) and failed.error == "EngineLagging"
            assert f"rank 7 (pid {stopped.pid})" in failed.message
            for client in ranks:
                assert client.notice(m.Dismissed).holds == [grant.ref.hold]
                client.cast(m.Settle([grant.ref.hold]))
        stopped.signal(signal.SIGCONT)
        assert stopped(
            "(g,) = c.notice(m.Granted).grants; assert c.notice(m.Dismissed).holds == [g.ref.hold]\n"
            "c.cast(m.Ack([g.ref.hold])); c.cast(m.Settle([g.ref.hold])); result = g.ref.feature"
        )
    finally:
        for client in ranks:
            client.close()


def test_untraceable_clients_are_told_apart(start_broker: StartBroker, puppet: StartPuppet) -> None:
    """Where the kernel gives no pidfd, `status` says so, and a slot that was being written is never reused."""
    code = (
        "import sys, mmbroker.lifeline as l\n"
        "l._pidfd = lambda *a: -1\n"
        "from mmbroker.cli import main\n"
        "main(sys.argv[3:])\n"
    )
    broker = start_broker(prefix=["sh", "-c", f'exec "$0" -c "{code}" "$@"'])
    client = client_of(broker, puppet)
    client("lease_one(c, 1 << 20)")
    assert [s["traceable"] for s in others(broker.status())] == [False]
    client.kill()
    status = eventually(lambda: (s := broker.status()) and not others(s) and s, "the session's end")
    assert status["counters"]["slots_abandoned"] == 1
    assert status["leases"] == 0


#: As in a container of its own.
CONTAINED = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGTERM"]


def inside(process: subprocess.Popen[Any]) -> int:
    """Its only child, as it is seen from here."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


@pytest.mark.parametrize("contained", ["client", "broker", "both"])
def test_pid_namespaces_of_their_own(start_broker: StartBroker, puppet: StartPuppet, contained: str) -> None:
    """Broker and client see each other under another number, or none. Where the kernel has SO_PEERPIDFD it tells of a
    process's end all the same; elsewhere what a client could touch never comes back, and it is said so."""
    broker = start_broker(prefix=CONTAINED if contained != "client" else [])
    client = puppet(prefix=CONTAINED if contained != "broker" else [])
    client(f"from tests.server.items import lease_one; c = RawClient(Path({str(broker.directory)!r}))")
    client("lease_one(c, 1 << 20)")
    (session,) = others(broker.status())
    assert session["traceable"] == (doctor.pidfd().state == FINE)
    client("c.close()")
    if session["traceable"]:
        eventually(lambda: broker.status()["quarantined"] == MIB, "a ghost")
        os.kill(client.pid if contained == "broker" else inside(client.process), signal.SIGKILL)
        client.process.wait()
        eventually(lambda: broker.status()["pool"]["used"] == 0, "its end")
    else:
        eventually(lambda: broker.status()["counters"].get("slots_abandoned") == 1, "a slot that is lost")
    if contained != "client":
        os.kill(inside(broker.process), signal.SIGTERM)  # the one outside hears no signals
        assert broker.wait() == 0


def test_many_come_and_go(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """Clients that end in every way, while one goes on working."""
    codes = [
        "pass",
        "c.close()",
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "raise SystemExit",
    ]
    with RawClient(broker.directory) as steady:
        for code in codes * 2:
            client = client_of(broker, puppet)
            client("lease_one(c, 1 << 16)")
            client.post(code)
            leased = lease_one(steady, 1 << 16)
            assert isinstance(steady.call(m.Seal([m.Sealing(leased.lease)])), m.Sealed)
            client.kill()
        status = eventually(lambda: (s := broker.status()) and len(others(s)) == 1 and s, "their ends")
        assert (status["leases"], status["holds"], status["ghosts"]) == (0, 10, [])
