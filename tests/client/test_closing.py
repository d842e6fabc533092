"""A client that is closed while other threads are at it: they hear of it at once, and nothing is taken from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import cuda, tensors
from mmbroker.proto import messages as m
from mmbroker.proto.errors import BrokerUnavailable
from mmbroker.proto.reference import Reference
from tests.client.peer import Peer
from tests.conftest import StartBroker
from tests.kit import eventually


def started(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A call in a thread of its own, and what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a test that fails leaves it waiting
    thread.start()
    return thread, errors


@pytest.mark.parametrize("when", ["before", "amid"])
def test_a_put_that_writes(start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its slot is nobody else's while it may still write there; and whoever comes later does not write."""
    broker = start_broker()
    reached, go = threading.Event(), threading.Event()
    writer: type = tensors.Source if when == "amid" else mmbroker.Lease
    write = writer.write

    def late(*args: Any) -> None:
        reached.set()
        assert go.wait(20)
        write(*args)

    client = mmbroker.connect(broker.directory)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write", late)
        thread, errors = started(lambda: client.put(torch.ones(5)))
        assert reached.wait(20)
    client.close()
    eventually(lambda: broker.status()["leases"] == 0, "the session's end")
    assert broker.status()["quarantined"] == (4096 if when == "amid" else 0)
    go.set()
    thread.join()
    assert [type(error) for error in errors] == [BrokerUnavailable]


def test_a_session_that_is_being_introduced(peer: Callable[..., Peer]) -> None:
    """The broker has not answered the attachment to a new session yet: closing does not wait for that."""

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        return m.Attached(True) if peer.sessions == 1 else None

    it = peer(handler)
    client = mmbroker.connect(it.directory, timeout=600)
    client.attach(engine="a")
    it.hang_up()
    eventually(lambda: sum(isinstance(call.body, m.Attach) for call in it.calls) == 2, "a new session")
    thread, errors = started(client.close)
    try:
        thread.join(20)
        assert not thread.is_alive()
    finally:
        it.hang_up()
        thread.join()
    assert not errors


@pytest.mark.parametrize("step", ["the broker's answer", "a chore"])
def test_an_end_of_which_one_step_fails(peer: Callable[..., Peer], step: str) -> None:
    """The broker does not answer that the rank has gone, or the GPU fails: the rest is given back all the same."""

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        match call.body:
            case m.Attach():
                return m.Attached(True)
            case m.Create():
                peer.segment(1, 4096)
                return m.Created([m.Leased(7, 1, 0, 1)])
            case m.Detach() if step == "a chore":
                return m.Done()
            case m.Lookup(keys):
                one = Reference(peer.boot, 3, 1, 1, bytes(32), "uint8", (4,), 4)
                return m.Found([one] * len(keys))
        return None

    it = peer(handler)
    client = mmbroker.connect(it.directory)
    client.attach(engine="a")
    held = client.lookup("known")
    lease = client.get_or_create("k", (4,), torch.uint8).lease
    if step == "a chore":
        client._own._chores = failing  # type: ignore[method-assign]
    client.close()
    bodies = [call.body for call in it.calls]
    gone = next(number for number, body in enumerate(bodies) if isinstance(body, m.Detach))
    assert m.Abort([7]) in bodies[gone:] and m.Drop([3]) in bodies[gone:]
    assert isinstance(bodies[-1], m.Lookup)  # that it has read all that
    assert held is not None and lease is not None and lease.closed


def failing(now: float) -> float:
    raise cuda.DriverError("CUDA_ERROR_UNKNOWN", "cuMemUnmap", "a fault that was ordered")


def test_an_attachment_that_has_not_begun(peer: Callable[..., Peer]) -> None:
    """The receiver thread ends before it gets to it: the caller hears of that, and does not wait for its deadline."""
    hold, go = threading.Event(), threading.Event()
    it = peer(lambda peer, call: m.Found([]))
    client = mmbroker.connect(it.directory)
    link = client._link

    def held(leases: list[int]) -> None:
        hold.set()
        go.wait(20)

    link.on_broken = held
    it.handler = lambda peer, call: peer.tell(m.Broken([1]))
    link.cast(m.Lookup([]))
    assert hold.wait(20)
    it.handler = lambda peer, call: m.Found([])
    attaching, errors = started(lambda: client.attach(engine="a", timeout=600))
    eventually(lambda: link._jobs, "the attachment, waiting")
    closing, _ = started(client.close)
    eventually(lambda: link._closing, "the end")
    go.set()
    closing.join()
    attaching.join(20)
    assert [type(error) for error in errors] == [BrokerUnavailable]
