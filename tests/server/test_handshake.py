"""Who gets a session: users, names, numbers, and what happens to those who do not say hello properly."""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mmbroker import door, lifeline
from mmbroker.proto import messages as m
from mmbroker.proto.reference import PROTOCOL_VERSION
from tests.conftest import StartBroker
from tests.kit import PATIENCE, BrokerProcess, Puppet, RawClient, dealer, eventually
from tests.server.items import an_item

StartPuppet = Callable[..., Puppet]

NOBODY = 65534


def as_user(uid: int) -> list[str]:
    return ["setpriv", f"--reuid={uid}", "--clear-groups"]


def knock(broker: BrokerProcess) -> socket.socket:
    """A connection that has said nothing yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(PATIENCE)
    sock.connect(str(broker.directory / "lifeline.sock"))
    return sock


def refusal(sock: socket.socket) -> m.Refused:
    """Why a connection was refused; it must be cut, too."""
    answer = m.decode_lifeline(sock.recv(m.MAX_MESSAGE))
    assert isinstance(answer, m.Refused), answer
    assert sock.recv(1) == b""
    return answer


def reach_in(puppet: StartPuppet, broker: BrokerProcess, uid: int) -> Puppet:
    """A client of another user."""
    client = puppet(prefix=as_user(uid))
    client(f"path = Path({str(broker.directory)!r})")
    return client


# --- users ----------------------------------------------------------------------------------------------------------


def test_another_user_cannot_even_reach_the_sockets(broker: BrokerProcess, puppet: StartPuppet) -> None:
    client = reach_in(puppet, broker, NOBODY)
    with pytest.raises(AssertionError, match="PermissionError"):
        client("RawClient(path)")


def test_an_allowed_user(start_broker: StartBroker, puppet: StartPuppet, broker_root: Path) -> None:
    broker_root.chmod(0o711)
    broker = start_broker(allow_uid=[1000, NOBODY])
    assert broker.log() == ""
    assert stat.S_IMODE(broker.directory.stat().st_mode) == 0o711
    for uid in (1000, NOBODY):
        client = reach_in(puppet, broker, uid)
        code = "c = RawClient(path); result = [c.welcome.namespace, type(c.call(m.Status())).__name__]"
        assert client(code) == [f"uid-{uid}", "Report"]
    with RawClient(broker.directory) as own:
        assert own.welcome.namespace == f"uid-{os.geteuid()}"
    assert {s["uid"] for s in broker.status()["sessions"]} == {1000, NOBODY, 0}


def test_a_directory_that_other_users_cannot_pass(start_broker: StartBroker) -> None:
    """The broker does not change the mode of what it has not made; it says what is in the way."""
    broker = start_broker(allow_uid=[1000])
    assert f"other users may not get through {broker.root}: set MMBROKER_DIR" in broker.log()


def test_a_user_who_is_not_allowed(start_broker: StartBroker, puppet: StartPuppet, broker_root: Path) -> None:
    """Told why, whether or not it has spoken already; logged; and the control socket does not talk to it."""
    broker_root.chmod(0o711)
    broker = start_broker(allow_uid=[1000])
    client = reach_in(puppet, broker, NOBODY)
    for _ in range(20):
        code = "c = RawClient(path); result = [c.refused.error, c.refused.message]"
        assert client(code) == [
            "PermissionDenied",
            f"user {NOBODY} may not use this broker: start it with --allow-uid {NOBODY}",
        ]
    assert f"user {NOBODY} (process {client.pid}) was turned away" in broker.log()
    assert broker.log().count("turned away") == 1
    assert broker.status()["daemon"]["counters"]["peers_denied"] == 20
    client(
        "import zmq; from tests.kit import dealer\n"
        "d = dealer(path / 'control.sock', b'r' * 16, watched=True); monitor = d.get_monitor_socket()"
    )
    client("from zmq.utils.monitor import recv_monitor_message as r\nwhile r(monitor)['event'] != 512: pass")


def test_a_broker_that_is_not_root(start_broker: StartBroker, puppet: StartPuppet, broker_root: Path) -> None:
    """An unprivileged broker serves its own user and root, and no third one."""
    os.chown(broker_root, 1000, -1)
    broker_root.chmod(0o711)
    broker = start_broker(prefix=as_user(1000), allow_uid=[1001])
    with RawClient(broker.directory) as root:
        assert root.welcome.namespace == "uid-0"
    for uid, namespace in ((1000, "uid-1000"), (1001, "uid-1001")):
        assert reach_in(puppet, broker, uid)("c = RawClient(path); result = c.welcome.namespace") == namespace
    assert reach_in(puppet, broker, 1002)("result = RawClient(path).refused.error") == "PermissionDenied"
    stranger = reach_in(puppet, broker, 1001)
    stranger("c = RawClient(path)")
    for call, what in (
        ("Shutdown()", "shut this broker down"),
        ("Drain()", "drain"),
        ("Evict(1)", "evict from"),
    ):
        error, message = stranger(f"f = c.call(m.{call}); result = [f.error, f.message]")
        assert error == "PermissionDenied"
        assert message.startswith(f"only user 1000 and root may {what}")
    with RawClient(broker.directory) as root:
        assert root.call(m.Shutdown()) == m.Done()
    assert broker.wait() == 0
    os.chown(broker_root, 0, -1)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [None, "uid-0", "shared", "Ünïcode", "n" * door.NAME_LIMIT])
def test_namespaces(broker: BrokerProcess, namespace: str | None) -> None:
    with RawClient(broker.directory, namespace=namespace) as client:
        assert client.welcome.namespace == (namespace or "uid-0")


@pytest.mark.parametrize(
    ("name", "namespace", "error"),
    [
        ("raw", "uid-1000", "PermissionDenied"),
        ("raw", "uid-", "PermissionDenied"),
        ("raw", "", "InvalidMessage"),
        ("raw", "n" * (door.NAME_LIMIT + 1), "InvalidMessage"),
        ("raw", "two\nlines", "InvalidMessage"),
        ("", None, "InvalidMessage"),
        ("n" * (door.NAME_LIMIT + 1), None, "InvalidMessage"),
        ("\x1b[2J", None, "InvalidMessage"),
    ],
)
def test_names_that_are_refused(broker: BrokerProcess, name: str, namespace: str | None, error: str) -> None:
    client = RawClient(broker.directory, name=name, namespace=namespace)
    assert client.refused is not None and client.refused.error == error


def test_ids_are_new_each_time(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as one, RawClient(broker.directory) as two:
        assert one.welcome.boot == two.welcome.boot
        assert one.welcome.session != two.welcome.session
        assert one.welcome.routing != two.welcome.routing
        assert (len(one.welcome.boot), len(one.welcome.routing)) == (16, 16)
        assert 0 < one.welcome.session < 1 << 63
        assert (one.welcome.control, one.welcome.instance) == ("control.sock", "cpu")


# --- bad manners ----------------------------------------------------------------------------------------------------

welcome = m.Welcome(PROTOCOL_VERSION, b"b" * 16, 1, b"r" * 16, "c", "n", "i")


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (b"\xc1", "InvalidMessage"),
        (b"GET / HTTP/1.1\r\n\r\n", "InvalidMessage"),
        (msgspec.msgpack.encode({"t": "hello", "v": PROTOCOL_VERSION}), "InvalidMessage"),
        (
            msgspec.msgpack.encode({"t": "hello", "v": PROTOCOL_VERSION, "name": "x", "more": 1}),
            "InvalidMessage",
        ),
        (msgspec.msgpack.encode({"t": "hello", "v": 99, "name": "x", "more": 1}), "VersionMismatch"),
        (m.encode(m.Hello(0, "x")), "VersionMismatch"),
        (m.encode(welcome), "InvalidMessage"),
        (m.encode(m.Hello(PROTOCOL_VERSION, "x" * (1 << 16))), "InvalidMessage"),
    ],
)
def test_a_wrong_first_message(broker: BrokerProcess, first: bytes, error: str) -> None:
    with RawClient(broker.directory) as other:
        with knock(broker) as sock:
            sock.send(first)
            refused = refusal(sock)
            assert refused.error == error
            assert ("has at most 65536 bytes" in refused.message) == (len(first) > 1 << 16)
        assert isinstance(other.call(m.Status()), m.Report)
    assert broker.status()["daemon"]["counters"]["peers_refused"] == 1


def test_talking_after_the_hello_ends_the_session(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client, RawClient(broker.directory) as other:
        client.lifeline.send(m.encode(m.Hello(PROTOCOL_VERSION, "again")))
        assert refusal(client.lifeline).error == "InvalidMessage"
        failed = client.call(m.Status())
        assert isinstance(failed, m.Failed) and failed.error == "UnknownSession"
        assert isinstance(other.call(m.Status()), m.Report)


def test_descriptors_from_a_client_are_not_kept(broker: BrokerProcess) -> None:
    before = broker.status()["daemon"]["descriptors"]
    hello = m.encode(m.Hello(PROTOCOL_VERSION, "giver"))
    with knock(broker) as sock:
        socket.send_fds(sock, [hello], [0] * 100)
        assert isinstance(m.decode_lifeline(sock.recv(m.MAX_MESSAGE)), m.Welcome)
        assert broker.status()["daemon"]["descriptors"] <= before + 2


def test_whoever_says_nothing_is_cut_off(broker: BrokerProcess) -> None:
    with knock(broker) as sock:
        refused = refusal(sock)
        assert refused.error == "InvalidMessage"
        assert f"within {lifeline.HELLO_TIMEOUT} s" in refused.message


def test_silent_connections_are_bounded(broker: BrokerProcess) -> None:
    """The oldest one goes, so that whoever speaks at once always gets in."""
    silent = [knock(broker) for _ in range(lifeline.MOST_GUESTS)]
    try:
        for guest in silent[:3]:
            assert not select.select([guest], [], [], 0)[0]
            with RawClient(broker.directory) as client:
                assert isinstance(client.call(m.Status()), m.Report)
            refused = refusal(guest)
            assert refused.error == "QuotaExceeded"
            assert refused.figures == {"requested": 1, "used": 64, "limit": lifeline.MOST_GUESTS}
            silent.append(knock(broker))
    finally:
        for guest in silent:
            guest.close()


# --- how many -------------------------------------------------------------------------------------------------------


def test_session_limit(start_broker: StartBroker) -> None:
    broker = start_broker(sessions=3)
    clients = [RawClient(broker.directory) for _ in range(3)]
    try:
        refused = RawClient(broker.directory).refused
        assert refused is not None and refused.error == "QuotaExceeded"
        assert refused.figures == {"requested": 1, "used": 3, "limit": 3}
        assert "raise the broker's setting `sessions`" in refused.message
        clients.pop().close()
        clients.append(eventually(lambda: _admitted(broker), "a free place"))
        for client in clients:
            assert isinstance(client.call(m.Status()), m.Report)
    finally:
        for client in clients:
            client.close()


def _admitted(broker: BrokerProcess) -> RawClient | None:
    client = RawClient(broker.directory)
    return client if client.refused is None else None


def test_without_descriptors_the_broker_waits(start_broker: StartBroker) -> None:
    """At the limit on open files nobody new gets in, and everybody else goes on; later it works again."""
    broker = start_broker(prefix=["prlimit", "--nofile=40:40"])
    with RawClient(broker.directory) as client:
        crowd: list[socket.socket] = []
        try:
            # Once there is none left, the daemon cannot even read its own figures.
            while "unreadable" not in daemon(client):
                crowd.append(knock(broker))
            assert isinstance(
                client.call(
                    m.Create(
                        [an_item(1 << 20)],
                    ),
                    timeout=0.0,
                ),
                m.Failed,
            )
        finally:
            for sock in crowd:
                sock.close()
        with RawClient(broker.directory) as late:
            assert isinstance(late.call(m.Status()), m.Report)
        assert daemon(client)["counters"]["accepts_failed"]
        assert "raise the limit on open files" in broker.log()


def daemon(client: RawClient) -> dict[str, Any]:
    report = client.call(m.Status())
    assert isinstance(report, m.Report)
    facts: dict[str, Any] = report.status["daemon"]
    return facts


def test_a_second_connection_cannot_take_a_sessions_place(broker: BrokerProcess) -> None:
    """ZeroMQ lets no second socket take a living one's routing id."""
    with RawClient(broker.directory) as client:
        thief = dealer(broker.directory / "control.sock", client.welcome.routing)
        try:
            thief.setsockopt(zmq.SNDTIMEO, 0)
            for _ in range(5):
                assert isinstance(client.call(m.Status()), m.Report)
            assert not thief.poll(0)
        finally:
            thief.close(linger=0)
