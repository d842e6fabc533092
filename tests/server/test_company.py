"""Dismissals travel with grants: one message, and one turn of the receiver's, for both."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mmbroker.control import _DISMISSALS
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Key
from tests.kit import BrokerProcess, RawClient, eventually
from tests.server.items import an_item

MIB = 1 << 20


@pytest.fixture
def rank(broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(broker.directory, name="rank") as client:
        assert client.call(m.Attach("e", 0, 1)) == m.Attached(True)
        yield client


@pytest.fixture
def producer(broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(broker.directory, name="producer") as client:
        yield client


def put(producer: RawClient, key: bytes, nbytes: int = 4096) -> None:
    created = producer.call(m.Create([an_item(nbytes, key)]))
    assert isinstance(created, m.Created)
    (leased,) = created.results
    assert isinstance(leased, m.Leased)
    sealed = producer.call(m.Seal([m.Sealing(leased.lease)]))
    assert isinstance(sealed, m.Sealed)
    producer.cast(m.Drop([sealed.refs[0].hold]))


def ask_for(producer: RawClient, key: bytes) -> int:
    """Ask for a hold that the rank is granted; the seq."""
    return producer.post(m.Lookup([Key.caller(key)], "e"))


def hold(producer: RawClient, rank: RawClient, key: bytes) -> int:
    """A hold that the rank has acknowledged."""
    seq = ask_for(producer, key)
    (grant,) = rank.notice(m.Granted).grants
    rank.cast(m.Ack([grant.ref.hold]))
    assert isinstance(producer.answer(seq), m.Found)
    number: int = grant.ref.hold
    return number


def test_a_dismissal_travels_with_the_next_grant(producer: RawClient, rank: RawClient) -> None:
    """They are sent in one go, so they are handled in one go, mostly; either way each is told once."""
    put(producer, b"x" * 32)
    together = 0
    for _ in range(50):
        first = hold(producer, rank, b"x" * 32)
        producer.cast(m.Drop([first]))
        seq = ask_for(producer, b"x" * 32)
        granted = rank.notice(m.Granted)
        together += granted.dismissed == [first]
        dismissed = granted.dismissed or rank.notice(m.Dismissed).holds
        assert dismissed == [first]
        (grant,) = granted.grants
        rank.cast(m.Ack([grant.ref.hold], settled=dismissed))
        assert isinstance(producer.answer(seq), m.Found)
        producer.cast(m.Drop([grant.ref.hold]))
        rank.cast(m.Settle(rank.notice(m.Dismissed).holds))
    assert together > 25


def test_a_dismissal_goes_alone_when_nothing_else_is_to_be_said(producer: RawClient, rank: RawClient) -> None:
    put(producer, b"x" * 32)
    number = hold(producer, rank, b"x" * 32)
    producer.cast(m.Drop([number]))
    assert rank.notice(m.Dismissed).holds == [number]


@pytest.mark.parametrize("count", [_DISMISSALS, _DISMISSALS + 1, 3 * _DISMISSALS])
def test_many_dismissals(producer: RawClient, rank: RawClient, count: int) -> None:
    """None is lost or told twice, and no message is longer than a client reads."""
    put(producer, b"x" * 32)
    numbers = [hold(producer, rank, b"x" * 32) for _ in range(count)]
    for number in numbers:
        producer.cast(m.Drop([number]))
    seq = ask_for(producer, b"x" * 32)
    told: list[int] = []
    acked: list[int] = []
    while len(told) < count or not acked:
        rank.receive()
        for notice in rank.notices:
            if isinstance(notice, m.Granted):
                told += notice.dismissed
                acked += [grant.ref.hold for grant in notice.grants]
                rank.cast(m.Ack(acked))
            else:
                told += notice.holds
        rank.notices.clear()
    assert told == numbers
    assert isinstance(producer.answer(seq), m.Found)


def test_very_many_dismissals_go_at_once(producer: RawClient, rank: RawClient) -> None:
    """Nor are they added to a grant's message, which has a limit."""
    put(producer, b"x" * 32)
    numbers = [hold(producer, rank, b"x" * 32) for _ in range(_DISMISSALS + 1)]
    producer.cast(m.Drop(numbers))
    seq = ask_for(producer, b"x" * 32)
    assert rank.notice(m.Dismissed).holds == numbers
    granted = rank.notice(m.Granted)
    assert granted.dismissed == []
    rank.cast(m.Ack([granted.grants[0].ref.hold]))
    assert isinstance(producer.answer(seq), m.Found)


#: Runs a command's arguments with a broker whose dismissals would wait for an hour.
PATIENT = """
import sys
import mmbroker.control
mmbroker.control._COMPANY = 3600.0
mmbroker.control._HURRY = 0.25  # long enough for some more to come
sys.argv = ["mmbroker", *sys.argv[4:]]
from mmbroker.cli import main
main()
"""


@contextmanager
def full(
    start_broker: Callable[..., BrokerProcess], program: str
) -> Iterator[tuple[BrokerProcess, RawClient, RawClient]]:
    """A broker whose arena is full, with a create that waits for room, which it gets in the end; a rank, and a producer
    that has a small feature beside."""
    broker = start_broker(host_mib=8, segment_mib=8, prefix=[sys.executable, "-c", program])
    with RawClient(broker.directory) as rank, RawClient(broker.directory) as producer:
        assert rank.call(m.Attach("e", 0, 1)) == m.Attached(True)
        put(producer, b"big", 6 * MIB)
        put(producer, b"small")
        big = hold(producer, rank, b"big")
        waiting = producer.post(m.Create([an_item(6 * MIB)]), timeout=60.0)
        eventually(lambda: broker.status()["waiting"], "a waiting create")
        yield broker, rank, producer
        producer.cast(m.Drop([big]))
        rank.cast(m.Settle(rank.notice(m.Dismissed).holds))
        assert isinstance(producer.answer(waiting), m.Created)


def test_they_do_not_wait_long_while_somebody_waits_for_room(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    """The arena is full: what ends now is what a create waits for."""
    with full(start_broker, PATIENT) as (_, rank, producer):
        for _ in range(4):
            small = [hold(producer, rank, b"small") for _ in range(8)]
            for number in small:
                producer.cast(m.Drop([number]))
            told = rank.notice(m.Dismissed).holds
            assert told == small, "together, though they ended one by one"
            rank.cast(m.Settle(told))


def test_holds_that_end_in_one_go_while_somebody_waits_for_room(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    """However short the time is that they wait for each other: it may round to none."""
    hurried = PATIENT.replace("_HURRY = 0.25", "_HURRY = 0.0")
    with full(start_broker, hurried) as (broker, rank, producer):
        small = [hold(producer, rank, b"small") for _ in range(20)]
        broker.process.send_signal(signal.SIGSTOP)
        try:
            for number in small:
                producer.cast(m.Drop([number]))
        finally:
            broker.process.send_signal(signal.SIGCONT)
        told: list[int] = []
        while len(told) < len(small):
            told += rank.notice(m.Dismissed).holds
        assert told == small
        rank.cast(m.Settle(told))


def test_they_do_not_travel_with_a_grant_while_somebody_waits_for_room(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    """A rank looks at what it is told alone at once, and at the rest when it is convenient."""
    with full(start_broker, PATIENT) as (_, rank, producer):
        for _ in range(4):
            first = hold(producer, rank, b"small")
            producer.cast(m.Drop([first]))
            seq = ask_for(producer, b"small")
            told = rank.notice(m.Dismissed).holds
            assert told == [first]
            granted = rank.notice(m.Granted)
            assert granted.dismissed == []
            rank.cast(m.Ack([granted.grants[0].ref.hold], settled=told))
            assert isinstance(producer.answer(seq), m.Found)
            producer.cast(m.Drop([granted.grants[0].ref.hold]))
            rank.cast(m.Settle(rank.notice(m.Dismissed).holds))


def test_they_stop_waiting_when_somebody_waits_for_room(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(host_mib=8, segment_mib=8, prefix=[sys.executable, "-c", PATIENT])
    with RawClient(broker.directory) as rank, RawClient(broker.directory) as producer:
        assert rank.call(m.Attach("e", 0, 1)) == m.Attached(True)
        put(producer, b"big", 6 * MIB)
        big = hold(producer, rank, b"big")
        producer.cast(m.Drop([big]))
        waiting = producer.post(m.Create([an_item(6 * MIB)]), timeout=60.0)
        assert rank.notice(m.Dismissed).holds == [big]
        rank.cast(m.Settle([big]))
        assert isinstance(producer.answer(waiting), m.Created)


def test_other_words_keep_their_place(producer: RawClient, rank: RawClient) -> None:
    """What is said after a dismissal is heard after it."""
    put(producer, b"x" * 32)
    number = hold(producer, rank, b"x" * 32)
    heard: list[Any] = []
    for _ in range(20):
        producer.cast(m.Drop([number]))
        assert isinstance(producer.call(m.Status()), m.Report)  # the drop was read before
        seq = rank.post(m.Status())
        while not (heard and isinstance(heard[-1], m.Answer) and heard[-1].seq == seq):
            heard.append(rank.receive())
        assert [type(message) for message in heard] == [m.Dismissed, m.Answer]
        rank.cast(m.Settle([number]))
        heard.clear()
        rank.notices.clear()
        number = hold(producer, rank, b"x" * 32)
