"""A client that is closed while other threads are at it: they hear of it at once, and nothing is taken from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import tensors
from mmbroker.proto.errors import BrokerUnavailable
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

    thread = threading.Thread(target=run)
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
