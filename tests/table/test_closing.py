"""A table that is closed while features are on their way to it: each is answered, and none is left over."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.proto.errors import BrokerLost, FeatureError
from mmbroker.proto.messages import Attach, Body, Detach, Reply
from tests.kit import BrokerProcess, eventually


@pytest.mark.parametrize("others", [0, 1])
def test_granted_before_the_broker_knows(
    broker: BrokerProcess, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is over for us, and still attached for the broker: it is told at once that the feature has no entry."""
    with mmbroker.connect(broker.directory) as client, mmbroker.connect(broker.directory) as engine:
        table = engine.attach(engine="a", access="readonly")
        held = [client.put(torch.full((9,), n), to="a") for n in range(others)]
        uses = [table.take(one.ref) for one in held]  # such a table is not forgotten yet
        call = engine._link.call
        seen: list[Body] = []

        def late(body: Body, *args: Any) -> Reply:
            if isinstance(body, Detach):
                for _ in range(2):  # the receiver thread has done its chores
                    engine._link.run(lambda: None, 20)
                with pytest.raises(FeatureError, match="closed"):
                    client.put(torch.zeros(7), to="a", timeout=20)
                seen.append(body)
            return call(body, *args)

        with monkeypatch.context() as patched:
            patched.setattr(engine._link, "call", late)
            table.close()
        assert len(seen) == 1
        eventually(lambda: broker.status()["holds"] == others, "nothing of the refused one")
        again = engine.attach(engine="a", access="readonly")
        with client.put(torch.zeros(7), to="a") as ours, again.take(ours.ref) as use:
            assert use.tensor.tolist() == [0.0] * 7
        for one in (*uses, *held):
            one.__exit__(None, None, None)
        eventually(lambda: not broker.status()["holds"], "nothing left")


def test_released_after_it_was_closed(broker: BrokerProcess) -> None:
    """And then the client is closed, at once: all is given back, though the producer still holds it."""
    with mmbroker.connect(broker.directory) as client:
        for n in range(3):
            engine = mmbroker.connect(broker.directory)
            table = engine.attach(engine="a", access="readonly")
            held = client.put(torch.full((9,), n), to="a")
            use = table.take(held.ref)
            table.close()
            use.release()
            engine.close()
            assert table.stats()["unsettled"] == 0
            held.drop()
        assert broker.status()["ghosts"] == []


@pytest.mark.parametrize("when", ["amid", "after"])
def test_closed_while_it_is_attached_anew(
    broker: BrokerProcess, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no session that the caller could tell it; the broker knows nevertheless, as soon as there is one."""
    with mmbroker.connect(broker.directory) as engine:
        table = engine.attach(engine="a", access="readonly")
        done = threading.Event()

        def close() -> None:
            with pytest.raises(BrokerLost):
                table.close()
            done.set()

        def closing(after: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                result = after(*args)
                if not table.attached or (args and not isinstance(args[0], Attach)):
                    return result
                thread = threading.Thread(target=close)
                thread.start()
                thread.join()
                return result

            return call

        if when == "amid":
            monkeypatch.setattr(engine._link, "call", closing(engine._link.call))
        else:
            monkeypatch.setattr(table, "_tell_kept", closing(table._tell_kept))
        engine._link._connection.lifeline.shutdown(socket.SHUT_RDWR)
        assert done.wait(20)
        eventually(lambda: engine.connected, "a new session")
        eventually(lambda: not broker.status()["engines"], "no rank")
        again = engine.attach(engine="a", access="readonly")
        again.close()


def test_closed_in_no_time(broker: BrokerProcess) -> None:
    """The caller has no time left to tell the broker."""
    with mmbroker.connect(broker.directory) as engine:
        table = engine.attach(engine="a")
        with pytest.raises(mmbroker.DeadlineExceeded):
            table.close(-1)
        engine.attach(engine="a").close()
