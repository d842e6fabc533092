"""Descriptors travel before the messages that need them, also to a client that does not fetch them for a while."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mmbroker.proto import messages as m
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, RawClient, eventually
from tests.server.items import an_item, lease_one

MIB = 1 << 20

#: More than a lifeline holds: the kernel charges each message to the sender, a few hundred at most.
MANY = 320


def status(client: RawClient) -> dict[str, Any]:
    report = client.call(m.Status())
    assert isinstance(report, m.Report)
    return report.status


@pytest.fixture
def large(start_broker: StartBroker) -> BrokerProcess:
    """A broker of many small segments."""
    return start_broker(host_mib=MANY + 16, segment_mib=1, segment_linger=0.05, pending_per_session=2 * MANY)


def fill(client: RawClient, other: RawClient) -> list[int]:
    """Ask for more segments than the lifeline holds; some of the answers must wait behind descriptors."""
    calls = [client.post(m.Create([an_item(MIB)]), timeout=60.0) for _ in range(MANY)]
    eventually(lambda: status(other)["leases"] == MANY, "all leases")
    assert status(other)["daemon"]["outboxes"] > 0
    return calls


def test_a_full_lifeline(large: BrokerProcess) -> None:
    with RawClient(large.directory) as client, RawClient(large.directory) as other:
        calls = fill(client, other)
        for _ in range(20):
            assert lease_one(other, 4096).segment
        for seq in calls:
            while seq not in client.answers:
                client.next_of_either()
            reply = client.answers.pop(seq)
            assert isinstance(reply, m.Created)
            (leased,) = reply.results
            assert isinstance(leased, m.Leased)
            if (leased.segment, True) not in client.segments:
                client.lifeline.setblocking(False)  # it must be there already
                client.segment(leased.segment, writable=True)
                client.lifeline.setblocking(True)
        assert status(other)["daemon"]["outboxes"] == 0


def test_a_full_lifeline_that_is_cut(large: BrokerProcess) -> None:
    with RawClient(large.directory) as client, RawClient(large.directory) as other:
        fill(client, other)
        client.close()
        found = eventually(
            lambda: (s := status(other)) and len(s["sessions"]) == 1 and s, "the session's end"
        )
        assert (found["leases"], found["daemon"]["outboxes"]) == (0, 0)
        assert found["quarantined"] == MANY * MIB  # this process lives, and got some of the descriptors


def test_segments_that_go_while_they_wait(large: BrokerProcess) -> None:
    """A descriptor that was never fetched may be discarded: it is skipped, and what comes after it is not lost."""
    with RawClient(large.directory) as client, RawClient(large.directory) as other:
        calls = fill(client, other)
        client.cast(m.Abort(list(range(1, MANY + 1))))
        eventually(lambda: status(other)["pool"]["capacity"] < 8 * MIB, "empty segments given back")
        while not all(seq in client.answers for seq in calls):
            client.next_of_either()
        assert 0 < len(client.segments) < MANY
        leased = lease_one(client, 4096)
        client.segment(leased.segment, writable=True)


def test_each_segment_once_and_each_kind_by_itself(broker: BrokerProcess) -> None:
    with RawClient(broker.directory, name="rank") as rank, RawClient(broker.directory) as producer:
        rank.call(m.Attach("e", 0, 1))
        for number in range(3):
            leased = lease_one(producer, 4096)
            call = producer.post(m.Seal([m.Sealing(leased.lease)], to="e"))
            (grant,) = rank.notice(m.Granted).grants
            rank.cast(m.Ack([grant.ref.hold]))
            assert isinstance(producer.answer(call), m.Sealed)
            assert (grant.segment, grant.offset) == (leased.segment, leased.offset) == (1, number * 4096)
        writing, size = producer.segment(1, writable=True)
        reading, same = rank.segment(1, writable=False)
        assert size == same == 4 * MIB
        os.pwrite(writing, b"bytes", 0)
        assert os.pread(reading, 5, 0) == b"bytes"
        with pytest.raises(OSError):
            os.pwrite(reading, b"x", 0)
        for client in (rank, producer):
            client.lifeline.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.lifeline.recv(1)
