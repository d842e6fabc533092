"""The broker goes and comes back, or only the session does: the table serves what it has, and attaches anew."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import mmbroker
from mmbroker import table as table_module
from mmbroker.proto.errors import BrokerLost, BrokerUnavailable, FeatureMissing
from tests.conftest import StartBroker
from tests.faults.steps import cut
from tests.kit import BrokerProcess, eventually
from tests.rig import same, values

ACCESS = pytest.mark.parametrize("access", ["readonly", "copy"])


@contextmanager
def pair(
    broker: BrokerProcess, access: str
) -> Iterator[tuple[mmbroker.Client, mmbroker.Client, mmbroker.FeatureTable]]:
    with (
        mmbroker.connect(broker.directory, name="producer") as client,
        mmbroker.connect(broker.directory, name="engine") as engine,
    ):
        yield client, engine, engine.attach(engine="a", access=access)


def both(client: mmbroker.Client, engine: mmbroker.Client, connected: bool) -> None:
    eventually(lambda: client.connected == engine.connected == connected, f"connected: {connected}")


@ACCESS
def test_entries_outlive_their_broker(start_broker: StartBroker, access: str) -> None:
    """Requests already sent are served, by reference, through the outage and after it."""
    broker = start_broker()
    with pair(broker, access) as (client, engine, table):
        tensor = values(torch.float32, (40, 50))
        held = client.put(tensor, to="a")
        used = table.take(held.ref)
        broker.kill()
        both(client, engine, False)
        for _ in range(3):
            with table.take(held.ref.to_wire()) as use:
                assert same(use.tensor, tensor)
        with pytest.raises(BrokerLost, match="reconnect"):
            client.put(tensor)
        held.drop()  # of a lost life: nothing
        start_broker()
        both(client, engine, True)
        with client.put(torch.ones(3), to="a") as new:
            with table.take(new.ref) as use:
                assert same(use.tensor, torch.ones(3))
            with table.take(held.ref) as use:
                assert same(use.tensor, tensor)
            assert used.tensor is not None
            used.release()
        eventually(lambda: table.stats()["entries"] == 1, "only the old one")


@ACCESS
def test_an_earlier_lifes_entries_expire(
    start_broker: StartBroker, access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they have expired, what is in use stays until it is released."""
    monkeypatch.setattr(table_module, "_LOST_ENTRIES", 0.0)
    broker = start_broker()
    with pair(broker, access) as (client, engine, table):
        idle = client.put(torch.ones(3), to="a").ref
        busy = client.put(torch.zeros(3), to="a").ref
        use = table.take(busy)
        broker.kill()
        both(client, engine, False)
        start_broker()
        eventually(lambda: table.stats()["entries"] == 0, "expiry")
        assert table.stats()["expired"] == 2
        with pytest.raises(FeatureMissing):
            table.take(idle)
        with pytest.raises(FeatureMissing):
            table.take(busy)
        assert same(use.tensor, torch.zeros(3))
        assert table.stats()["unsettled"] == 1
        use.release()
        eventually(lambda: table.stats()["unsettled"] == 0, "the end of it")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_twenty_restarts(start_broker: StartBroker, how: int) -> None:
    """Five clients that are never made anew."""
    broker = start_broker()
    clients = [mmbroker.connect(broker.directory, name=f"{n}") for n in range(4)]
    engine = mmbroker.connect(broker.directory, name="engine")
    try:
        table = engine.attach(engine="a", access="readonly")
        for n in range(20):
            broker.stop(how)
            broker = start_broker()
            for client in (*clients, engine):
                eventually(lambda client=client: client.connected, "reconnection")  # type: ignore[misc]
            for m, client in enumerate(clients):
                with client.put(torch.tensor([n, m]), to="a") as held, table.take(held.ref) as use:
                    assert use.tensor.tolist() == [n, m]
        assert len({client.stats()["reconnects"] for client in clients}) >= 1
        assert all(client.stats()["reconnects"] >= 20 for client in clients)
    finally:
        for client in (*clients, engine):
            client.close()


@ACCESS
def test_a_lost_session_of_the_same_life(start_broker: StartBroker, access: str) -> None:
    """Its grants stay with the process until the table has let go of them; then their slots are free."""
    broker = start_broker()
    with pair(broker, access) as (client, engine, table):
        first = client.put(torch.ones(3), to="a")
        use = table.take(first.ref)
        engine._link._connection.lifeline.shutdown(socket.SHUT_RDWR)
        eventually(lambda: engine.stats()["reconnects"] == 1 and engine.connected, "a new session")
        with table.take(first.ref) as again:
            assert same(again.tensor, torch.ones(3))
        with client.put(torch.zeros(3), to="a") as second, table.take(second.ref) as again:
            assert same(again.tensor, torch.zeros(3))
        first.drop()
        assert client.lookup("a barrier") is None
        assert broker.status()["holds"] > 0  # the process may still read it
        expiry, session = table._lost[0]
        table._lost[0] = (0.0, session)
        eventually(lambda: table.stats()["entries"] == 0, "expiry")
        assert same(use.tensor, torch.ones(3))
        use.release()
        eventually(lambda: broker.status()["holds"] == 0, "the release of the old session")
        assert expiry > 0


def test_a_lost_producer_gives_its_slots_back_when_it_writes_no_more(start_broker: StartBroker) -> None:
    broker = start_broker()
    with mmbroker.connect(broker.directory) as client:
        lease = client.get_or_create("k", (100,), "float32").lease
        assert lease is not None
        tensor = lease.tensor
        client._link._connection.lifeline.shutdown(socket.SHUT_RDWR)
        eventually(lambda: client.stats()["reconnects"] == 1 and client.connected, "a new session")
        assert client.lookup("a barrier") is None
        assert broker.status()["quarantined"] == 4096
        with pytest.raises(mmbroker.LeaseBroken):
            lease.seal()
        lease.abort()
        assert client.lookup("a barrier") is None
        assert broker.status()["quarantined"] == 4096  # the tensor is still there
        tensor.fill_(1)
        del tensor
        eventually(lambda: broker.status()["quarantined"] == 0, "the release of the old session")


def test_what_ends_while_there_is_no_session_is_told_to_the_next(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker cannot be reached for a while, and the client has nothing left of its old session meanwhile."""
    broker = start_broker()
    with mmbroker.connect(broker.directory) as client:
        lease = client.get_or_create("k", (100,), "float32").lease
        assert lease is not None
        tensor = lease.tensor
        link, chores, done = client._link, client._link.chores, []

        def refuse(deadline: float) -> NoReturn:
            raise BrokerUnavailable("not now")

        def count(now: float) -> float:
            done.append(now)
            return chores(now)

        with monkeypatch.context() as patched:
            patched.setattr(link, "_connect", refuse)
            patched.setattr(link, "chores", count)
            link._connection.lifeline.shutdown(socket.SHUT_RDWR)
            eventually(lambda: not client.connected, "the loss")
            eventually(lambda: broker.status()["quarantined"] == 4096, "the end of the session")
            del tensor
            lease.abort()
            before = len(done)
            eventually(lambda: len(done) > before + 2, "chores without a session")
        eventually(lambda: client.connected, "a new session")
        eventually(lambda: broker.status()["quarantined"] == 0, "the release of the old session")


def test_calls_in_flight_fail_with_the_session(start_broker: StartBroker) -> None:
    import threading

    broker = start_broker()
    with mmbroker.connect(broker.directory) as client, mmbroker.connect(broker.directory) as other:
        lease = other.get_or_create("k", (1,), "uint8").lease
        assert lease is not None
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                client.get_or_create("k", (1,), "uint8", timeout=60)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=wait) for _ in range(5)]
        for thread in threads:
            thread.start()
        eventually(lambda: broker.status()["waiting_count"] == 5, "waiting calls")
        broker.kill()
        for thread in threads:
            thread.join()
        assert [type(error) for error in errors] == [BrokerLost] * 5
        assert len(set(map(id, errors))) == 5


def test_a_stopped_broker(start_broker: StartBroker) -> None:
    """Calls fail at their deadline, and work again when it goes on."""
    broker = start_broker()
    with mmbroker.connect(broker.directory) as client:
        broker.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(mmbroker.DeadlineExceeded, match="stopped or overloaded"):
                client.lookup("k", timeout=0.05)
            with pytest.raises(mmbroker.ConnectTimeout):
                mmbroker.connect(broker.directory, timeout=0.05)
        finally:
            broker.process.send_signal(signal.SIGCONT)
        assert client.lookup("k", timeout=20) is None


def test_a_tensor_outlives_everything(start_broker: StartBroker) -> None:
    """Table, clients and broker go; the memory is unmapped when the tensor goes."""

    def mapped(address: int) -> bool:
        ranges = (line.split(" ")[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)

    broker = start_broker()
    tensor = values(torch.float32, (300, 400))
    with mmbroker.connect(broker.directory) as client, mmbroker.connect(broker.directory) as engine:
        table = engine.attach(engine="a", access="readonly")
        use = table.take(client.put(tensor, to="a").ref)
        kept = use.tensor
    broker.stop()
    del use, table, engine, client
    gc.collect()
    assert same(kept, tensor)
    address = kept.data_ptr()
    assert mapped(address)
    del kept
    gc.collect()
    eventually(lambda: not mapped(address), "the end of the map")


def test_a_control_connection_that_is_cut(start_broker: StartBroker) -> None:
    """ZeroMQ would wait for a peer that never comes; the client ends the session, and has a new one."""
    with pair(start_broker(), "readonly") as (client, engine, table):
        for times in range(1, 4):
            assert cut("control") >= 2  # ZeroMQ may be about to close one of an earlier session
            for one in (client, engine):
                eventually(
                    lambda one=one, n=times: one.stats()["reconnects"] == n and one.connected,  # type: ignore[misc]
                    "a new session",
                )
            with client.put(torch.tensor([times]), to="a") as held, table.take(held.ref) as use:
                assert use.tensor.tolist() == [times]
