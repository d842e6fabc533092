"""Reports of kinds D, J and N: two sides that came to differ, failures that spread, and errors that said too much."""

from __future__ import annotations

import re
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
import zmq

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import (
    BrokerError,
    DigestConflict,
    FeatureError,
    FeatureMissing,
    NoSuchEngine,
    PoolFull,
)
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, RawClient, eventually
from tests.rig import Rig, same, values

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.mark.balanced
def test_a_request_takes_back_only_what_it_brought(broker: BrokerProcess) -> None:
    """D2. A batch fails at its last item: what others have, and what was there before, stays."""
    with mmbroker.connect(broker.directory) as first, mmbroker.connect(broker.directory) as second:
        held = first.put(values(torch.uint8, (100,), 1))
        first.put(values(torch.uint8, (100,), 2)).drop()  # cached
        taken = first.put(torch.zeros(3), key="taken")
        keys = [mmbroker.digest(values(torch.uint8, (100,), n)) for n in (1, 2, 3)]
        batch = [values(torch.uint8, (100,), n) for n in (1, 2, 3)]
        with pytest.raises(DigestConflict):
            second.put_many([*batch, torch.zeros(4)], keys=[*keys, "taken"])
        found = second.lookup_many([*keys, "taken"])
        assert [one is not None for one in found] == [True, True, False, True]
        for one in (held, taken, *found):
            if one is not None:
                one.drop()


def test_a_request_does_not_evict_what_it_has_itself(start_broker: StartBroker) -> None:
    """D4. Of ten units, six are cached: six more at once are too many, and nothing goes for them; four and six fit."""
    broker = start_broker(host_mib=40, segment_mib=4)
    units = [values(torch.uint8, (4 * MIB,), n) for n in range(12)]
    with mmbroker.connect(broker.directory) as client:
        for one in client.put_many(units[:6]):
            one.drop()
        with pytest.raises(PoolFull, match="larger than the arena"):
            client.put_many(units)
        assert client.lookup("a barrier") is None
        assert broker.status()["features_idle"] == 6
        written = client.stats()["bytes_written"]
        held = client.put_many([*units[2:6], *units[6:]])
        assert client.stats()["bytes_written"] == written + 6 * 4 * MIB
        for one in held:
            one.drop()


def test_an_engine_that_forgot_everything(readonly: Rig) -> None:
    """D5. It closes its table and attaches anew, and no producer is told: what is put again arrives again."""
    feature = values(torch.uint8, (5000,), 5)
    with mmbroker.connect(readonly.broker.directory, name="sleeper") as engine:
        asleep = engine.attach(engine="sleeper", access="readonly")
        old = readonly.client.put(feature, to="sleeper")
        asleep.close()
        table = engine.attach(engine="sleeper", access="readonly")
        with pytest.raises(FeatureMissing):
            table.take(old.ref)
        with readonly.client.put(feature, to="sleeper") as again, table.take(again.ref) as use:
            assert same(use.tensor, feature)
        old.drop()


def test_an_engine_forgets_while_features_are_on_their_way(broker: BrokerProcess) -> None:
    """D6. Each put ends well or by an error; what it gave is read right or is not there; nothing is left over."""
    with (
        mmbroker.connect(broker.directory) as client,
        mmbroker.connect(broker.directory, name="engine") as engine,
    ):
        table = engine.attach(engine="a", access="readonly")
        ended: list[tuple[int, mmbroker.Held | None]] = []
        start = threading.Barrier(6)

        def put(seed: int) -> None:
            start.wait()
            for n in range(10):
                feature = values(torch.uint8, (100,), 100 * seed + n)
                try:
                    ended.append((100 * seed + n, client.put(feature, to="a")))
                except (NoSuchEngine, FeatureError):
                    ended.append((0, None))

        threads = [threading.Thread(target=put, args=(n,)) for n in range(1, 6)]
        for thread in threads:
            thread.start()
        start.wait()
        for _ in range(5):
            table.close()
            table = engine.attach(engine="a", access="readonly")
        for thread in threads:
            thread.join()
        assert len(ended) == 50
        for seed, held in ended:
            if held is not None:
                try:
                    with table.take(held.ref) as use:
                        assert same(use.tensor, values(torch.uint8, (100,), seed))
                except FeatureMissing:
                    pass  # granted before it forgot
                held.drop()
        eventually(lambda: not broker.status()["holds"], "nothing left")


def test_three_producers_and_four_engines_have_one_copy(broker: BrokerProcess) -> None:
    """D12. Whoever puts a content, and whoever it is for."""
    producers = [mmbroker.connect(broker.directory, name=f"p{n}") for n in range(3)]
    engines = [mmbroker.connect(broker.directory, name=f"e{n}") for n in range(4)]
    try:
        tables = {
            f"e{n}": engine.attach(engine=f"e{n}", access="readonly") for n, engine in enumerate(engines)
        }
        contents = [values(torch.uint8, (3000,), n) for n in range(5)]
        for producer, (name, table), content in product(producers, tables.items(), contents):
            with producer.put(content, to=name) as held, table.take(held.ref) as use:
                assert same(use.tensor, content)
        status = broker.status()
        assert status["features"] == 5
        assert (status["counters"]["leases"], status["counters"]["hits"]) == (5, 55)
    finally:
        for client in (*producers, *engines):
            client.close()


#: Calls that ask for what is not there, with a hold, a lease and a session that nobody has.
UNAVAILABLE: list[m.Body] = [
    m.Create([m.Item(Key.caller("k"), Form("uint8", (8,), 8))], tier="device"),
    m.Create([m.Item(Key.caller("k"), Form("uint8", (8,), 8))], tier="tape"),
    m.Create([m.Item(Key.caller("k"), Form("uint8", (8,), 8))], to="nobody"),
    m.Create([m.Item(Key.caller("k"), Form("uint8", (8,), 9))]),
    m.Lookup([Key.caller("k")], to="nobody"),
    m.Seal([m.Sealing(77)]),
    m.Seal([m.Sealing(77)], to="nobody"),
    m.Attach("", 0, 1),
    m.Attach("e", 4, 2),
    m.Attach("e", 0, 1, access="all"),
    m.Detach(),
    m.Released(77),
    m.Abort([77]),
    m.Drop([77]),
    m.Unpin([77]),
    m.Ack([77]),
    m.Settle([77]),
    m.Kept([77]),
    m.Loaded([77]),
    m.Park([77]),
    m.Want([77]),
    m.Tally({"x" * 1000: 1}),
]


def test_parts_that_are_not_there_answer(broker: BrokerProcess) -> None:
    """J3. A broker without a GPU, an engine or a feature: every kind of call is answered."""
    with RawClient(broker.directory) as client:
        for body in UNAVAILABLE:
            assert isinstance(client.call(body), m.Failed | m.Done), body
        assert isinstance(client.call(m.Status()), m.Report)


def test_errors_do_not_tell_where_memory_is(broker: BrokerProcess) -> None:
    """N6. No name, descriptor, path or address that anybody could use."""
    told: list[str] = []
    with RawClient(broker.directory) as client:
        for body in UNAVAILABLE:
            reply = client.call(body)
            if isinstance(reply, m.Failed):
                told.append(reply.message)
        client.send(b"nonsense")
        told.append(client.receive().body.message)  # type: ignore[union-attr]
    with pytest.raises(BrokerError) as full, mmbroker.connect(broker.directory) as own:
        own.put(torch.zeros(1 << 25), timeout=0.1)
    told.append(str(full.value))
    assert len(told) > 10
    for text in told:
        assert not re.search(r"memfd|/proc|/tmp|/dev/shm|0x[0-9a-f]+|\bfd\b|\bsegment \d", text), text


def test_the_sockets_library_is_a_safe_one() -> None:
    """N8. Its parser has been repaired since, and nothing here can be reached from another machine."""
    assert zmq.zmq_version_info() >= (4, 3, 2)
    sources = [path for folder in ("broker", "proto", "adapters") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 50
    assert not [path for path in sources if "tcp://" in path.read_text()]
