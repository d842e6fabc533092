"""Writers that wait for each other: derived keys are waited for as long as it takes, but never in a circle."""

from __future__ import annotations

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind

from .shell import Peer, Shell, item
from .world import kinds


def derived(name: int | str) -> m.Item:
    return item(name, kind=Kind.DERIVED)


def write_and_wait(writers: list[Peer], timeout: float = 60.0) -> list[int]:
    """Each holds a lease on a key of its own, and asks for the next one's."""
    for number, peer in enumerate(writers):
        peer.lease(derived(number))
    return [peer.create(derived((n + 1) % len(writers)), timeout=timeout) for n, peer in enumerate(writers)]


@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_circle_of_writers_opens_after_a_quarter_second(length: int) -> None:
    shell = Shell()
    writers = [shell.client() for _ in range(length)]
    seqs = write_and_wait(writers)
    shell.advance(0.24)
    assert not any(seq in peer.answers for peer, seq in zip(writers, seqs, strict=True))
    shell.advance(0.02)
    answered = [seq in peer.answers for peer, seq in zip(writers, seqs, strict=True)]
    assert answered == [False] * (length - 1) + [True], "whoever closed the circle need not wait"
    assert kinds(writers[-1], seqs[-1]) == ["Leased"]


def test_all_writers_in_a_circle_get_what_they_asked_for() -> None:
    shell = Shell()
    one, two = shell.client(), shell.client()
    (x,), (y,) = one.lease(derived("x")), two.lease(derived("y"))
    ones, twos = one.create(derived("y"), timeout=60.0), two.create(derived("x"), timeout=60.0)
    shell.advance(0.25)
    answer = two.answers[twos]
    assert isinstance(answer, m.Created)
    two.seal([y, *(result for result in answer.results if isinstance(result, m.Leased))])
    assert kinds(one, ones) == ["Hit"]
    sealed = one.answers[one.seal([x])]
    assert isinstance(sealed, m.Sealed), "the later seal is no failure"


def test_a_chain_of_writers_is_no_circle() -> None:
    shell = Shell()
    writers = [shell.client() for _ in range(3)]
    for number, peer in enumerate(writers):
        peer.lease(derived(number))
    seqs = [writers[n].create(derived(n + 1), timeout=60.0) for n in range(2)]
    shell.advance(30.0)
    assert not any(seq in peer.answers for peer, seq in zip(writers, seqs, strict=False))


def test_two_threads_of_one_client_are_no_circle() -> None:
    shell = Shell()
    peer = shell.client()
    leases = peer.lease(derived("x"))
    seq = peer.create(derived("x"), timeout=60.0)
    shell.advance(30.0)
    assert seq not in peer.answers
    peer.seal(leases)
    assert kinds(peer, seq) == ["Hit"]


def test_a_circle_that_a_handover_closes() -> None:
    """Three waits for two's key; when two gives up, one gets it, who waits for three."""
    shell = Shell()
    one, two, three = (shell.client() for _ in range(3))
    (x,) = two.lease(derived("x"))
    three.lease(derived("y"))
    ones = one.create(derived("x"), timeout=60.0)
    threes = three.create(derived("x"), timeout=60.0)
    waits = one.create(derived("y"), timeout=60.0)
    two.abort(x)
    assert kinds(one, ones) == ["Leased"]
    shell.advance(0.25)
    assert threes in three.answers or waits in one.answers


@pytest.mark.parametrize("ends", ["writer waits no more", "waiter writes no more"])
def test_a_circle_that_has_opened_is_none(ends: str) -> None:
    """Whoever closed it waits on for the writer, as long as it takes, and does not write the same beside it."""
    shell = Shell()
    one, two = shell.client(), shell.client()
    (x,), leased = one.lease(derived("x")), two.lease(derived("y"))
    one.create(derived("y"), timeout=0.1 if ends == "writer waits no more" else 60.0)
    twos = two.create(derived("x"), timeout=60.0)
    if ends == "waiter writes no more":
        two.seal(leased)
    shell.advance(30.0)
    assert twos not in two.answers
    one.seal([x])
    assert kinds(two, twos) == ["Hit"]


def test_who_waited_for_a_key_in_between_keeps_its_place() -> None:
    """One waits for its engine's budget; another writes its key meanwhile, and gives up."""
    shell = Shell()
    shell.engine("engine")
    shell.engine("other")
    peer, busy = shell.client(), shell.client()
    (held,) = busy.put(item("held", 8), to="engine")
    first = peer.create(item("x", 8), to="engine")
    second = peer.create(item("y", 8), to="engine")
    (lease,) = busy.lease(item("x", 1), to="other")
    shell.advance(0.1)
    busy.abort(lease)
    busy.drop(held)
    assert kinds(peer, first) == ["Leased"]
    assert second not in peer.answers
