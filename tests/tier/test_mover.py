"""The mover between a real broker and a store that does what a test wants."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

import mmbroker
from mmbroker.link import Link
from mmbroker.tier.breaker import State
from mmbroker.tier.mover import Mover, Options
from mmbroker.tier.objects import HEADER, name_of
from mmbroker.tier.policy import Policy
from mmbroker.tier.store import Adrift, StoreError, StoreFull
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, eventually
from tests.rig import same, values
from tests.tier.fake import FakeStore
from tests.tier.scene import Machine, a_broker, evict, key, machine

PICTURE = values(torch.float32, (300, 1000))

FEATURES: dict[str, torch.Tensor | list[torch.Tensor]] = {
    "picture": PICTURE,
    "half": values(torch.bfloat16, (1025, 3)),
    "one byte": values(torch.uint8, (1,)),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
    "list": [values(torch.int64, (3, 5)), values(torch.float32, (70000,)), torch.empty(0)],
}


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """One for all that do it no harm. After each test it has nothing."""
    with a_broker() as process:
        yield process
        assert process.stop() == 0, process.log()


@pytest.fixture(autouse=True)
def _nothing_left(broker: BrokerProcess) -> Iterator[None]:
    yield
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("mmbroker-tier")], "no thread"
    )
    eventually(lambda: not (broker.status()["holds"] or broker.status()["leases"]), "books in balance")
    evict(broker)


@pytest.fixture
def here(broker: BrokerProcess, store: FakeStore) -> Iterator[Machine]:
    with machine(broker, store) as made:
        yield made
        made.balanced()


def stored(here: Machine, store: FakeStore, name: str = "picture") -> str:
    """Make a feature, wait until the store has it, and forget it here: its name in the store."""
    here.make(name, FEATURES.get(name, PICTURE), extra=b"beside")
    there = name_of(here.mover.namespace, key(name))
    store.wait(lambda: there in store.objects)
    here.forget()
    return there


def equal(got: list[torch.Tensor] | None, wanted: torch.Tensor | list[torch.Tensor]) -> bool:
    expected = wanted if isinstance(wanted, list) else [wanted]
    return got is not None and all(map(same, got, expected)) and len(got) == len(expected)


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEATURES)
def test_what_was_stored_comes_back(here: Machine, store: FakeStore, kind: str) -> None:
    stored(here, store, kind)
    assert equal(here.ask(kind), FEATURES[kind])
    with here.worker.get_or_promise([key(kind)])[0] as again:  # type: ignore[union-attr]
        assert isinstance(again, mmbroker.Held) and again.extra == b"beside"
    assert (here.count("puts"), here.count("hits")) == (1, 1)


def test_several_keys_at_once(here: Machine, store: FakeStore) -> None:
    for name in "abc":
        stored(here, store, name)
    got = here.worker.get_or_promise([key(name) for name in "abc"])
    assert [type(one) for one in got] == [mmbroker.Held] * 3
    for one in got:
        assert one is not None
        one.drop()


def test_of_several_keys_all_absent_ones_are_due_at_once(here: Machine, store: FakeStore) -> None:
    for name in "ab":
        stored(here, store, name)
    got = here.worker.get_or_promise([key(name) for name in "axby"])
    assert [isinstance(one, mmbroker.Promise) for one in got] == [False, True, False, True]
    for one in got:
        if one is not None:
            one.drop()
    eventually(lambda: here.count("hits") == 2, "the others have come")
    for held in here.worker.lookup_many([key("a"), key("b")]):
        assert held is not None
        held.drop()


def test_a_lookup_finds_it_too(here: Machine, store: FakeStore) -> None:
    stored(here, store)
    held = here.worker.lookup(key("picture"))
    assert held is not None
    held.drop()


def test_a_miss_is_the_askers_to_make(here: Machine, store: FakeStore) -> None:
    assert here.ask("nobody has it") is None
    assert store.calls["read"] == 1 and here.count("misses") == 1
    assert here.tier()["counts"]["absent"] == 1


def test_another_machine_has_it(broker_root: object, start_broker: StartBroker, store: FakeStore) -> None:
    with (
        machine(start_broker(name="a"), store) as one,
        machine(start_broker(name="b"), store) as other,
    ):
        one.make("picture", PICTURE)
        store.wait(lambda: store.objects)
        assert equal(other.ask("picture"), PICTURE)
        assert store.calls["write"] == 1, "what came from the store is not stored again"
        one.balanced()
        other.balanced()


def test_many_ask_and_one_fetches(here: Machine, store: FakeStore) -> None:
    stored(here, store)
    before, reads = here.status()["counters"]["promise_calls"], store.calls["read"]
    with ThreadPoolExecutor(16) as pool, store.stuck("read") as entered:
        asking = [pool.submit(here.worker.get_or_promise, [key("picture")]) for _ in range(16)]
        assert entered.acquire(timeout=20)
        eventually(lambda: here.status()["counters"]["promise_calls"] == before + 16, "all have asked")
    assert store.calls["read"] == reads + 2, "a header and its bytes, once"
    for future in asking:
        (held,) = future.result()
        assert isinstance(held, mmbroker.Held)
        held.drop()


# --- what is not as it was stored -------------------------------------------------------------------------------------


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    "alter",
    [
        lambda data: flip(data, 0),
        lambda data: flip(data, 60),
        lambda data: flip(data, HEADER),
        lambda data: flip(data, len(data) - 1),
        lambda data: flip(data, len(data) // 2),
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: data[:HEADER] + bytes(len(data) - HEADER),
        lambda data: bytes(len(data)),
    ],
    ids=["magic", "header", "first byte", "last byte", "middle", "shorter", "cut", "zeros", "all zeros"],
)
def test_an_altered_object_is_never_served(
    here: Machine, store: FakeStore, alter: Callable[[bytes], bytes]
) -> None:
    there = stored(here, store)
    store.objects[there] = alter(store.objects[there])
    assert here.ask("picture") is None
    eventually(lambda: here.count("altered") == 1, "counted")
    assert there not in store.objects, "it is removed, so that it can be stored anew"
    assert here.mover.state is State.CLOSED
    assert here.count("hits") == 0


def test_an_object_under_another_key_is_never_served(here: Machine, store: FakeStore) -> None:
    there = stored(here, store)
    wrong = name_of(here.mover.namespace, key("other"))
    store.objects[wrong] = store.objects[there]
    assert here.ask("other") is None
    eventually(lambda: here.count("altered") == 1, "counted")
    assert wrong not in store.objects and there in store.objects


def test_an_object_that_is_altered_while_it_is_fetched(here: Machine, store: FakeStore) -> None:
    there = stored(here, store)

    def trouble(call: str, _: str) -> None:
        if store.calls["read"] == 3:  # a miss, the header, the bytes
            store.objects[there] = flip(store.objects[there], HEADER + 5)

    store.trouble = trouble
    assert here.ask("picture") is None
    eventually(lambda: here.count("altered") == 1, "counted")


def test_an_object_that_is_removed_while_it_is_fetched(here: Machine, store: FakeStore) -> None:
    stored(here, store)

    def trouble(call: str, _: str) -> None:
        if store.calls["read"] == 3:
            store.objects.clear()

    store.trouble = trouble
    assert here.ask("picture") is None
    assert here.count("altered") == 0


# --- time and space ---------------------------------------------------------------------------------------------------


def test_an_object_whose_time_is_over_is_not_served(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store, policy=Policy(ttl=3600.0)) as here:
        there = stored(here, store)
        here.clock["now"] += 3599.0
        assert equal(here.ask("picture"), PICTURE)
        here.forget()
        here.clock["now"] += 1.0
        assert here.ask("picture") is None
        eventually(lambda: here.count("expired") == 1, "counted")
        assert there not in store.objects


def test_who_stored_it_removes_it_in_time(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store, policy=Policy(ttl=0.01)) as here:
        here.make("picture", PICTURE)
        store.wait(lambda: store.calls["remove"] == 1 and not store.objects)
        eventually(lambda: here.count("removed") == 1, "counted")


def test_what_is_over_while_the_store_is_left_alone_is_removed_afterwards(
    broker: BrokerProcess, store: FakeStore
) -> None:
    with machine(broker, store, policy=Policy(ttl=0.5)) as here:
        here.make("picture", PICTURE)
        store.wait(lambda: store.objects)
        eventually(lambda: len(here.mover._stored) == 1, "noted")
        store.broken("read", "probe", "remove")
        while here.mover.state is State.CLOSED:
            assert here.ask("another") is None
        eventually(lambda: here.mover._stored.due(time.monotonic()), "over")
        assert not store.calls["remove"], "nothing is asked"
        store.broken()
        eventually(lambda: here.count("removed") == 1, "removed")
        assert not store.objects


def test_a_full_store_is_no_broken_one(here: Machine, store: FakeStore) -> None:
    def full(call: str, _: str) -> None:
        if call == "write":
            raise StoreFull("no room")

    store.trouble = full
    for number in range(5):
        here.make(f"picture {number}", PICTURE)
    eventually(lambda: here.count("full") == 5, "counted")
    assert here.mover.state is State.CLOSED and here.tier()["open"]


def test_a_store_that_stays_full_still_gives_what_it_has(broker: BrokerProcess, store: FakeStore) -> None:
    """It has taken nothing of what it refused: no memory has to rest."""
    with machine(broker, store, most=1) as here:
        there = stored(here, store)

        def full(call: str, _: str) -> None:
            if call == "write":
                raise StoreFull("no room")

        store.trouble = full
        for number in range(6):
            here.make(f"picture {number}", PICTURE)
        eventually(lambda: here.count("full") == 6, "counted")
        assert equal(here.ask("picture"), PICTURE) and there in store.objects
        assert here.mover.state is State.CLOSED


@pytest.mark.parametrize("how", ["evicted", "altered", "expired"])
def test_what_the_store_has_no_more_is_stored_anew(broker: BrokerProcess, store: FakeStore, how: str) -> None:
    with machine(broker, store, policy=Policy(ttl=3600.0)) as here:
        there = stored(here, store)
        if how == "evicted":
            del store.objects[there]
        elif how == "altered":
            store.objects[there] = bytes(len(store.objects[there]))
        else:
            here.clock["now"] += 3600.0
        assert here.ask("picture") is None
        here.balanced()
        assert there not in store.objects
        stored(here, store)
        assert equal(here.ask("picture"), PICTURE)


def test_what_is_cheap_is_stored_when_it_is_reused(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store, policy=Policy(min_cost=1000.0, reuse=2)) as here:
        here.make("dear", PICTURE, cost=5_000)
        here.make("cheap", PICTURE + 1, cost=10)
        store.wait(lambda: len(store.objects) == 1)
        assert name_of(here.mover.namespace, key("dear")) in store.objects
        eventually(lambda: here.count("put_skipped") == 1, "the other is not worth it yet")
        assert here.ask("cheap") is not None
        assert here.ask("cheap") is not None
        store.wait(lambda: len(store.objects) == 2)


def test_what_is_found_while_it_is_stored_is_stored_once(here: Machine, store: FakeStore) -> None:
    with store.stuck("write") as entered:
        here.make("picture", PICTURE)
        assert entered.acquire(timeout=20)
        assert here.ask("picture") is not None
        told = here.tier()["counts"]["fresh"]
        assert told == 2
        here.make("another", PICTURE + 1)
    store.wait(lambda: len(store.objects) == 2)
    assert store.calls["write"] == 2


def test_namespaces_in_the_store(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store, namespace="team-a") as here:
        assert stored(here, store).startswith("mmb1/team-a/derived/")
        assert equal(here.ask("picture"), PICTURE)
        here.forget()
    with machine(broker, store, namespace="team-b") as here:
        assert here.ask("picture") is None


# --- a store in trouble -----------------------------------------------------------------------------------------------


def test_a_broken_store_is_left_alone_and_tried_again(here: Machine, store: FakeStore) -> None:
    stored(here, store)
    store.broken("read", "probe")
    for number in range(3):
        assert here.ask(f"x{number}") is None
    eventually(lambda: not here.tier()["open"], "the broker was told")
    assert here.mover.state is not State.CLOSED and here.count("breaker_opened") == 1
    reads = store.calls["read"]
    assert here.ask("picture") is None
    assert store.calls["read"] == reads, "nothing is asked"
    store.broken()
    eventually(lambda: here.tier()["open"], "it is asked again")
    assert equal(here.ask("picture"), PICTURE)


def test_headers_alone_do_not_speak_for_the_store(
    here: Machine, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that carries what is small and loses what is large: each of its hits would cost whoever asks."""
    monkeypatch.setattr(StoreError, "settles", 0.05)
    for number in range(3):
        stored(here, store, f"picture {number}")
    read = store.read

    def small(name: str, offset: int, address: int, nbytes: int) -> bool:
        if offset:
            raise StoreError("lost")
        return read(name, offset, address, nbytes)

    monkeypatch.setattr(store, "read", small)
    for number in range(3):
        assert here.ask(f"picture {number}") is None
    eventually(lambda: here.count("breaker_opened") == 1, "it is left alone")


def test_a_slow_store_is_left_alone(broker: BrokerProcess, store: FakeStore) -> None:
    """It answers right, but far too late: nobody has waited for it."""
    with machine(broker, store, wait=0.02, pause=(60.0, 60.0)) as here:
        with store.stuck("read"):
            for number in count():
                assert here.ask(f"x{number}") is None
                if not here.tier()["open"]:
                    break
            assert here.mover.stuck and here.count("breaker_opened") == 1
            reads = store.calls["read"]
            assert here.ask("another") is None
            assert store.calls["read"] == reads
        eventually(lambda: not here.mover.stuck, "all have come back")
        here.balanced()


def test_what_is_stuck_counts(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store, wait=1.0, most=2, pause=(60.0, 60.0)) as here:
        with store.stuck("read") as entered:
            for number in range(2):
                assert here.ask(f"x{number}") is None
                assert entered.acquire(timeout=20)
            # The broker seeks no more of its own accord; once the mover has said something it does.
            for number in count(2):
                if here.count("busy"):
                    break
                here.mover.desk.tell(True)
                assert here.ask(f"x{number}") is None
            assert store.calls["read"] == 2
        eventually(lambda: not here.mover.stuck, "all have come back")
        here.balanced()


def test_a_read_that_fails_halfway(here: Machine, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot may still be written by the store: it is nobody else's for a while, then it is given back."""
    monkeypatch.setattr(StoreError, "settles", 0.2)
    stored(here, store)

    def trouble(call: str, _: str) -> None:
        if store.calls["read"] == 3:
            raise StoreError("lost")

    store.trouble = trouble
    future = ThreadPoolExecutor(1).submit(here.ask, "picture")
    eventually(lambda: here.mover.desk._late, "it waits")
    assert here.status()["leases"] == 1
    assert future.result() is None
    eventually(lambda: not here.status()["leases"], "it is given back")


def test_a_transfer_that_nobody_can_stop_keeps_its_slot(
    broker: BrokerProcess, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is ever written where it may still write; others that failed are given back all the same."""
    monkeypatch.setattr(StoreError, "settles", 0.05)
    errors = {4: Adrift("still moving"), 6: StoreError("lost")}

    def trouble(call: str, _: str) -> None:
        if call == "read" and store.calls["read"] in errors:
            raise errors[store.calls["read"]]

    with machine(broker, store) as here:
        stored(here, store)
        stored(here, store, "another")
        store.trouble = trouble
        assert here.ask("picture") is None
        assert here.ask("another") is None
        eventually(lambda: here.count("failed") == 2, "both have failed")
        eventually(lambda: here.status()["leases"] == 1, "one is given back")
        assert [when for when, _ in here.mover.desk._late] == [math.inf]
    (ghost,) = (ghost for ghost in broker.status()["ghosts"] if ghost["quarantined"])
    assert ghost["name"] == "tier", "its slot is its own as long as its process lives"


def test_writes_that_fail_open_it_too(here: Machine, store: FakeStore) -> None:
    store.broken("write", "probe")
    for number in range(3):
        here.worker.put(PICTURE, key=key(f"picture {number}")).drop()
    eventually(lambda: not here.tier()["open"], "the broker was told")
    assert here.count("put_failed") == 3


def test_an_idle_store_is_looked_after(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store, health=0.01) as here:
        store.wait(lambda: store.calls["probe"] >= 2)
        assert set(store.calls) <= {"probe"}, "nothing else is asked of it"
        store.broken("probe")
        eventually(lambda: not here.tier()["open"], "it is gone, though nobody has asked")
        store.broken()
        eventually(lambda: here.tier()["open"], "it is back")


# --- ends -------------------------------------------------------------------------------------------------------------


def test_the_brokers_restart(start_broker: StartBroker, store: FakeStore) -> None:
    first = start_broker()
    with machine(first, store) as here:
        stored(here, store)
        first.kill()
        again = start_broker()
        here.broker = again
        eventually(lambda: again.status()["movers"], "the mover is back")
        eventually(lambda: here.worker.connected and here.engine.connected, "all are")
        assert equal(here.ask("picture"), PICTURE)
        here.balanced()


def test_memory_is_registered_as_long_as_it_is_mapped(broker: BrokerProcess, store: FakeStore) -> None:
    with machine(broker, store) as here:
        for number in range(6):
            stored(here, store, f"picture {number}")
        assert len(store.registered) > 1
        here.forget()
    eventually(lambda: len(store.registered) == 1, "the room for headers is left")


def test_the_mover_leaves_while_it_fetches(broker: BrokerProcess, store: FakeStore) -> None:
    with store.stuck("read") as entered, machine(broker, store) as here:
        asking = ThreadPoolExecutor(1).submit(here.ask, "picture")
        assert entered.acquire(timeout=20)
        here.mover.close()
        assert asking.result() is None, "whoever waited goes on at once"
        store.trouble = lambda *_: None
        assert not here.status()["movers"]


def test_there_is_one_for_a_namespace(here: Machine, store: FakeStore) -> None:
    link = Link(here.broker.directory, "second")
    try:
        with pytest.raises(mmbroker.BrokerError, match="tier"):
            Mover(link, store, Options(), lambda: 0.0)
    finally:
        link.close()  # or the tests to come have its thread, too
    assert here.tier()["open"]


def test_no_torch_and_no_store_is_loaded() -> None:
    code = "import sys, mmbroker.tier.mover, mmbroker.tier.command; print({'torch', 'mooncake'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
