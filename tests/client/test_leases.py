"""Leases: writing a feature in place, and giving the slot back by every way out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import handles
from mmbroker.proto.errors import LeaseBroken, LeaseClosed
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, eventually
from tests.rig import DTYPES, Rig, same, values

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[mmbroker.Client]:
    with mmbroker.connect(broker.directory) as client:
        yield client


def lease(client: mmbroker.Client, key: str = "k", shape: tuple[int, ...] = (4, 6)) -> mmbroker.Lease:
    made = client.get_or_create(key, shape, torch.float32).lease
    assert made is not None
    return made


def leases(broker: BrokerProcess) -> int:
    return int(broker.status()["leases"])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)], ids=str)
def test_a_feature_written_in_place(rig: Rig, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, shape)
    key = f"{dtype} {shape}"
    out = rig.client.get_or_create(key, shape, dtype, to="a")
    assert out.held is None
    assert isinstance(out, mmbroker.Lease)
    with out.lease as mine:
        assert (mine.tensor.dtype, mine.tensor.shape) == (dtype, shape)
        mine.tensor.copy_(tensor)
        held = mine.seal()
    assert mine.held is held
    with rig.table.take(held.ref) as use:
        assert same(use.tensor, tensor)
    hit = rig.client.get_or_create(key, list(shape), str(dtype)[6:], to="a")
    assert isinstance(hit, mmbroker.Hit)
    assert hit.lease is None
    with hit.held as again, rig.table.take(again.ref) as use:
        assert same(use.tensor, tensor)
    held.drop()


def test_an_error_inside_aborts(client: mmbroker.Client, broker: BrokerProcess) -> None:
    with pytest.raises(ZeroDivisionError), lease(client) as mine:
        mine.tensor.fill_(1)
        raise ZeroDivisionError
    eventually(lambda: not leases(broker), "no lease")
    assert client.lookup("k") is None
    lease(client).seal()  # the key is free again


def test_leaving_without_a_seal_aborts(client: mmbroker.Client, broker: BrokerProcess) -> None:
    with lease(client) as mine:
        pass
    eventually(lambda: not leases(broker), "no lease")
    for _ in range(2):
        mine.abort()
        with pytest.raises(LeaseClosed):
            mine.seal()
        with pytest.raises(LeaseClosed):
            _ = mine.tensor


def test_a_sealed_lease_is_closed(client: mmbroker.Client) -> None:
    with lease(client) as mine:
        mine.seal()
        with pytest.raises(LeaseClosed):
            mine.seal()
        with pytest.raises(LeaseClosed):
            _ = mine.tensor
        mine.abort()
    assert client.lookup("k") is not None


def test_a_lost_lease_is_given_back(client: mmbroker.Client, broker: BrokerProcess) -> None:
    lease(client)
    gc.collect()
    eventually(lambda: not leases(broker), "no lease")


def test_a_slot_is_not_reused_while_its_tensor_lives(client: mmbroker.Client, broker: BrokerProcess) -> None:
    mine = lease(client)
    tensor = mine.tensor
    mine.abort()
    del mine
    gc.collect()
    assert client.lookup("a barrier") is None
    assert leases(broker) == 1
    del tensor
    eventually(lambda: not leases(broker), "the abort")


@pytest.mark.parametrize("keep", ["tensor", "view", "storage"])
def test_a_sealed_slot_stays_while_its_tensor_lives(
    client: mmbroker.Client, broker: BrokerProcess, keep: str
) -> None:
    with lease(client) as mine:
        mine.tensor.fill_(3)
        ways = {"tensor": lambda t: t, "view": lambda t: t[0], "storage": lambda t: t.untyped_storage()}
        kept = ways[keep](mine.tensor)
        held = mine.seal()
    assert broker.status()["writer_pins"] == 1
    assert client.stats()["retained"] == 1
    held.drop()
    assert client.lookup("a barrier") is None
    assert broker.status()["features_idle"] == 0  # not to be evicted
    del kept
    eventually(lambda: not broker.status()["writer_pins"], "the pin's end")
    assert broker.status()["features_idle"] == 1
    assert client.stats()["retained"] == 0


def test_leases_end_with_their_session(start_broker: StartBroker) -> None:
    broker = start_broker()
    with mmbroker.connect(broker.directory) as client:
        mine, written = lease(client), lease(client, "other")
        written.tensor.fill_(1)
        broker.kill()
        eventually(lambda: not client.connected, "the loss")
        for one in (mine, written):
            with pytest.raises(LeaseBroken):
                one.seal()
        with pytest.raises(LeaseBroken):
            _ = mine.tensor
        start_broker()
        eventually(lambda: client.connected, "a new session")
        others = [lease(client, f"new {n}") for n in range(3)]  # with the same numbers as the old ones
        with pytest.raises(LeaseBroken):
            mine.seal()
        mine.abort()
        written.abort()
        del mine, written
        for one in others:
            one.seal()


def test_the_broker_may_take_leases_back(client: mmbroker.Client) -> None:
    mine, other = lease(client), lease(client, "other")
    client._link.on_broken([mine.number])
    with pytest.raises(LeaseBroken):
        mine.seal()
    other.seal()


def test_the_second_writer_of_a_key(broker: BrokerProcess) -> None:
    """A caller's key is waited for as long as the deadline allows; then the writer's seal makes it a hit."""
    import threading

    with mmbroker.connect(broker.directory) as first, mmbroker.connect(broker.directory) as second:
        mine = lease(first)
        mine.tensor.fill_(5)
        with pytest.raises(mmbroker.DeadlineExceeded):
            second.get_or_create("k", (4, 6), torch.float32, timeout=0.1)
        found: list[object] = []
        waiting = threading.Thread(
            target=lambda: found.append(second.get_or_create("k", (4, 6), torch.float32, timeout=30))
        )
        waiting.start()
        eventually(lambda: broker.status()["waiting_count"], "a waiting call")
        mine.seal()
        waiting.join()
        assert isinstance(found[0], mmbroker.Hit)


def test_a_lease_that_is_closed_while_its_tensor_is_made(
    client: mmbroker.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread that closes the client: the slot is given back then, and must not be written."""
    mine = lease(client)
    export = handles.export

    def late(*args: Any) -> Any:
        mine.abort()
        return export(*args)

    monkeypatch.setattr(handles, "export", late)
    with pytest.raises(LeaseClosed):
        _ = mine.tensor
