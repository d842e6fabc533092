"""The control socket: nonsense gets an error, strangers get nothing, slow readers hold nobody up."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mmbroker.control import OUTBOX_BYTES, OUTBOX_MESSAGES
from mmbroker.proto import messages as m
from mmbroker.proto.reference import PROTOCOL_VERSION
from tests.kit import BrokerProcess, Puppet, RawClient, dealer, eventually
from tests.server.items import an_item, lease_one

MIB = 1 << 20

StartPuppet = Callable[..., Puppet]


def plain(client: RawClient, **changes: Any) -> dict[str, Any]:
    """A good call as plain data, to be spoilt."""
    call: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "boot": client.welcome.boot,
        "session": client.welcome.session,
        "seq": 7,
        "timeout": 1.0,
        "body": {"t": "status"},
    }
    return {**call, **changes}


def counters(client: RawClient) -> dict[str, int]:
    report = client.call(m.Status())
    assert isinstance(report, m.Report)
    found: dict[str, int] = report.status["daemon"]["counters"]
    return found


# --- nonsense -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"body": {"t": "obey"}}, "InvalidMessage"),
        ({"body": {"t": "status", "features": "all"}}, "InvalidMessage"),
        ({"body": {"t": "status", "more": 1}}, "InvalidMessage"),
        ({"body": None}, "InvalidMessage"),
        ({"more": 1}, "InvalidMessage"),
        ({"timeout": "soon"}, "InvalidMessage"),
        ({"boot": b"short"}, "InvalidMessage"),
        ({"v": PROTOCOL_VERSION + 1}, "VersionMismatch"),
        ({"v": PROTOCOL_VERSION + 1, "body": {"t": "of the future"}}, "VersionMismatch"),
        ({"body": {"t": "abort", "leases": [0] * (m.MAX_MESSAGE + 1)}}, "InvalidMessage"),
    ],
)
def test_nonsense_is_answered_by_name(broker: BrokerProcess, changes: dict[str, Any], error: str) -> None:
    with RawClient(broker.directory) as client, RawClient(broker.directory) as other:
        leased = lease_one(other, MIB)
        client.send(msgspec.msgpack.encode(plain(client, **changes)))
        failed = client.answer(7)
        assert isinstance(failed, m.Failed) and failed.error == error
        assert isinstance(client.call(m.Status()), m.Report)
        assert isinstance(other.call(m.Seal([m.Sealing(leased.lease)])), m.Sealed)
        assert counters(client)["undecodable_messages"] == 1
        assert other.notices == []
    assert broker.log().count("a client sent nonsense") == 1


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", b"GET / HTTP/1.1", os.urandom(1000), b"\x91" * 100_000]
)
def test_bytes_without_a_number_are_answered_under_zero(broker: BrokerProcess, data: bytes) -> None:
    with RawClient(broker.directory) as client:
        client.send(data)
        failed = client.answer(0)
        assert isinstance(failed, m.Failed) and failed.error == "InvalidMessage"
        assert isinstance(client.call(m.Status()), m.Report)


@pytest.mark.parametrize("frames", [[b"", b""], [b"a"] * 5])
def test_several_frames(broker: BrokerProcess, frames: list[bytes]) -> None:
    with RawClient(broker.directory) as client:
        assert client.control is not None
        client.control.send_multipart(frames)
        failed = client.answer(0)
        assert isinstance(failed, m.Failed) and "one frame" in failed.message
        assert isinstance(client.call(m.Status()), m.Report)


def test_a_flood_of_nonsense_is_logged_once(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        for _ in range(2000):
            client.send(b"\xc1")
        assert counters(client)["undecodable_messages"] == 2000
    assert broker.log().count("\n") == 1


def test_a_message_that_zeromq_cuts_off(broker: BrokerProcess) -> None:
    """Far too long: the connection goes with it, and nobody else notices."""
    with RawClient(broker.directory) as client, RawClient(broker.directory) as other:
        client.send(bytes(64 * MIB))
        for _ in range(20):
            assert isinstance(other.call(m.Status()), m.Report)
        assert broker.status()["daemon"]["rss"] < 60 * MIB


@pytest.mark.parametrize("seq", [-1, 1 << 63, (1 << 64) - 1])
def test_numbers_out_of_range(broker: BrokerProcess, seq: int) -> None:
    with RawClient(broker.directory) as client:
        client.send(msgspec.msgpack.encode(plain(client, seq=seq)))
        message = client.receive()
        assert isinstance(message, m.Answer) and isinstance(message.body, m.Failed)
        assert isinstance(client.call(m.Status()), m.Report)


# --- strangers ------------------------------------------------------------------------------------------------------


def test_the_envelope_must_fit_the_sender(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client, RawClient(broker.directory) as other:
        leased = lease_one(other, MIB)
        for envelope in (
            {"session": other.welcome.session},
            {"session": 0},
            {"boot": bytes(16)},
        ):
            failed = client.call(m.Status(), **envelope)
            assert isinstance(failed, m.Failed) and failed.error == "UnknownSession"
            client.post(m.Abort([leased.lease]), seq=0, **envelope)
        assert counters(client)["stray_calls"] == 6
        assert isinstance(other.call(m.Seal([m.Sealing(leased.lease)])), m.Sealed)


def test_another_sessions_numbers_mean_nothing(broker: BrokerProcess) -> None:
    """Leases and holds are looked up among the sender's own."""
    with RawClient(broker.directory) as client, RawClient(broker.directory) as other:
        leased = lease_one(other, MIB)
        client.cast(m.Abort([leased.lease]))
        failed = client.call(m.Seal([m.Sealing(leased.lease)]))
        assert isinstance(failed, m.Failed) and failed.error == "LeaseClosed"
        assert isinstance(other.call(m.Seal([m.Sealing(leased.lease)])), m.Sealed)


def test_a_routing_id_that_was_never_given(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        stranger = dealer(broker.directory / "control.sock", os.urandom(16))
        try:
            stranger.send(msgspec.msgpack.encode(plain(client)))
            answer = m.decode_downlink(stranger.recv())
            assert isinstance(answer, m.Answer) and isinstance(answer.body, m.Failed)
            assert (answer.seq, answer.body.error) == (7, "UnknownSession")
            stranger.send(b"\xc1")
            answer = m.decode_downlink(stranger.recv())
            assert isinstance(answer, m.Answer) and isinstance(answer.body, m.Failed)
            assert (answer.seq, answer.body.error) == (0, "InvalidMessage")
        finally:
            stranger.close(linger=0)


def test_an_ended_sessions_routing_id(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        client.lifeline.close()
        failed = eventually(
            lambda: isinstance(answer := client.call(m.Status()), m.Failed) and answer, "the session's end"
        )
        assert failed.error == "UnknownSession"


def test_another_boots_calls(start_broker: Callable[..., BrokerProcess]) -> None:
    """A broker that was started again knows nobody; the old control socket does not reach it by itself."""
    first = start_broker()
    with RawClient(first.directory) as client:
        boot = client.welcome.boot
        first.kill()
        start_broker()
        with RawClient(first.directory) as late:
            failed = late.call(m.Status(), boot=boot)
            assert isinstance(failed, m.Failed) and failed.error == "UnknownSession"
        assert client.ended()
        assert client.control is not None and not client.control.poll(0)


# --- slow readers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "features", "bound"), [("m.Detach()", 0, OUTBOX_MESSAGES), ("m.Status(1000)", 300, 0)]
)
def test_whoever_does_not_read_is_ended(
    broker: BrokerProcess, puppet: StartPuppet, call: str, features: int, bound: int
) -> None:
    """Everything is full between it and the broker: it is bounded, by number and by bytes, and nobody else waits."""
    client = puppet()
    client(f"path = Path({str(broker.directory)!r}); c = RawClient(path, name='flood')")
    with RawClient(broker.directory, name="other") as other:
        for _ in range(features):
            leased = lease_one(other, 4096)
            assert isinstance(other.call(m.Seal([m.Sealing(leased.lease)])), m.Sealed)
        client.post(f"while True: c.post({call})")

        def over() -> bool:
            leased = lease_one(other, 4096)
            other.cast(m.Abort([leased.lease]))
            found = counters(other)
            return found.get("sessions_ended", 0) == 1

        eventually(over, "the end of the session that does not read", timeout=60.0)
        (reason,) = re.findall(
            r"was ended: (\d+) messages \((\d+) bytes\) were waiting to be read", broker.log()
        )
        messages, nbytes = map(int, reason)
        if bound:
            assert messages == OUTBOX_MESSAGES + 1
        else:
            assert messages <= OUTBOX_MESSAGES and nbytes > OUTBOX_BYTES
        client.kill()
        report = other.call(m.Status())
        assert isinstance(report, m.Report)
        assert [s["name"] for s in report.status["sessions"]] == ["other"]
        assert report.status["daemon"]["outboxes"] == 0


def test_a_stopped_reader_gets_everything_later(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """Within the bound nothing is lost, and the order is kept, although it sends nothing more that would wake us."""
    client = puppet()
    client(f"path = Path({str(broker.directory)!r}); c = RawClient(path)")
    calls = 8000
    client(f"for _ in range({calls}): c.post(m.Detach())")
    with RawClient(broker.directory) as other:
        handled = eventually(
            lambda: (s := other_status(other))["counters"].get("detach_calls") == calls and s, "calls"
        )
        assert handled["daemon"]["outboxes"] > 0
        client.stop()
        for _ in range(100):
            assert other_status(other)["daemon"]["outboxes"] > 0
        client.signal(signal.SIGCONT)
        read = f"order = [c.receive().seq for _ in range({calls})]; result = order == list(range(1, {calls + 1}))"
        assert client(read)
        assert other_status(other)["daemon"]["outboxes"] == 0


def other_status(client: RawClient) -> dict[str, Any]:
    report = client.call(m.Status())
    assert isinstance(report, m.Report)
    return report.status


def test_a_client_without_a_control_socket_is_ended_when_it_is_needed(broker: BrokerProcess) -> None:
    """Its lifeline is there, but what it must be told cannot reach it."""
    with RawClient(broker.directory, name="rank") as rank, RawClient(broker.directory) as producer:
        assert rank.call(m.Attach("e", 0, 1)) == m.Attached(True)
        assert rank.control is not None
        rank.control.close(linger=0)

        def seal() -> m.Reply:
            leased = lease_one(producer, 4096)
            return producer.call(m.Seal([m.Sealing(leased.lease)], to="e"), timeout=1.0)

        failed = eventually(lambda: isinstance(reply := seal(), m.Failed) and reply, "a failure")
        assert failed.error == "NoSuchEngine"
        assert rank.ended()


# --- one after the other --------------------------------------------------------------------------------------------


def test_a_repeated_call_gets_the_same_answer(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        create = m.Create([an_item(4096)])
        first = client.call(create)
        client.post(create, seq=client.seq)
        assert client.answer(client.seq) == first
        assert broker.status()["leases"] == 1


def test_pipelined_calls_are_answered_in_order(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        seqs = [client.post(m.Detach()) for _ in range(900)]
        assert [message.seq for _ in seqs if isinstance(message := client.receive(), m.Answer)] == seqs


def test_descriptors_come_before_the_messages_that_need_them(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        for _ in range(6):
            leased = lease_one(client, 3 * MIB)
            client.lifeline.setblocking(False)  # it is there already
            client.segment(leased.segment, writable=True)
        assert len(client.segments) == 6


def test_deadlines_are_kept_by_the_brokers_clock(broker: BrokerProcess) -> None:
    """Nobody else sends anything: the one timer must fire by itself."""
    with RawClient(broker.directory) as client:
        for size in (60, 60):
            reply = client.call(m.Create([an_item(size * MIB)]), timeout=0.3)
        assert isinstance(reply, m.Failed) and reply.error == "PoolFull"
