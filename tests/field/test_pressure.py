"""Reports of kind K: too much at once, and nobody who says where it is."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import InvalidMessage, PoolFull, QuotaExceeded
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, RawClient, eventually
from tests.rig import Rig, values
from tests.server.items import an_item, lease_one

MIB = 1 << 20


@pytest.mark.balanced
def test_more_than_there_is_room_for_waits_and_is_served_in_order(start_broker: StartBroker) -> None:
    """K1. Four producers want thirty times the arena at once, and the consumer takes one after the other."""
    broker = start_broker(host_mib=8, segment_mib=4)
    producers, each = 4, 60
    served: list[tuple[int, int]] = []
    room = threading.Semaphore(0)
    lock = threading.Lock()
    with (
        mmbroker.connect(broker.directory, name="burst", timeout=60) as client,
        mmbroker.connect(broker.directory, name="engine") as engine,
    ):
        table = engine.attach(engine="a", access="readonly")

        def produce(who: int) -> None:
            for n in range(each):
                tensor = torch.full((MIB,), n, dtype=torch.uint8)
                held = client.put(tensor, to="a", key=f"{who} {n}")
                with lock:
                    served.append((who, n))
                room.acquire()  # the consumer's pace
                with table.take(held.ref) as use:
                    assert use.tensor[-1] == n
                held.drop()

        threads = [threading.Thread(target=produce, args=(who,)) for who in range(producers)]
        for thread in threads:
            thread.start()
        for _ in range(producers * each):
            room.release()
        for thread in threads:
            thread.join()
        assert len(served) == producers * each
        for who in range(producers):
            assert [n for one, n in served if one == who] == list(range(each)), "each in its own order"
        assert broker.status()["pool"]["capacity"] <= 8 * MIB
    assert broker.status()["daemon"]["rss"] < 100 * MIB


def test_what_waits_for_a_stopped_consumer_costs_no_memory(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    """K2. A thousand features are granted to a rank that stands still: their bytes are in no message."""
    rank = puppet()
    rank(f"c = RawClient(Path({str(broker.directory)!r}), name='rank'); c.call(m.Attach('e', 0, 1))")
    with RawClient(broker.directory, name="producer") as producer:
        lease_one(producer, 32 * 1024)
        rank.stop()
        before = broker.status()["daemon"]["rss"]
        for _ in range(10):
            created = producer.call(m.Create([an_item(32 * 1024) for _ in range(100)], "e"))
            assert isinstance(created, m.Created)
            sealings = [m.Sealing(r.lease) for r in created.results if isinstance(r, m.Leased)]
            assert len(sealings) == 100
            producer.post(m.Seal(sealings, "e"), timeout=60.0)
        status = eventually(
            lambda: (s := broker.status())["engines"][0]["ranks"][0]["unacked"] == 1000 and s,
            "a thousand grants",
        )
        assert status["engines"][0]["in_flight"] == 1000 * 32 * 1024
        assert status["daemon"]["rss"] - before < 10 * MIB
    rank.kill()


def test_impossible_sizes_are_refused_by_their_number(readonly: Rig) -> None:
    """K4. Nothing is allocated, however often it is asked for."""
    before = readonly.broker.status()["pool"]["capacity"]
    with pytest.raises(PoolFull) as caught:
        readonly.client.get_or_create("huge", (12_000, 12_000, 3), torch.float32)
    assert caught.value.requested == 1_728_000_000
    assert caught.value.requested > caught.value.limit == 64 * MIB
    for shape in ((1 << 40, 1 << 40), (1 << 62, 4, 4), (1 << 50, 0)):
        with pytest.raises(InvalidMessage, match="the limit for one feature, and for one axis"):
            readonly.client.get_or_create("overflow", shape, torch.float32)
    assert readonly.broker.status()["pool"]["capacity"] == before


def test_who_passes_a_reference_on_maps_nothing(broker: BrokerProcess, puppet: Callable[..., Puppet]) -> None:
    """K5. Of four stages only the third opens the feature; the others have its reference, and a session even."""
    stages = [puppet() for _ in range(4)]
    for n, stage in enumerate(stages):
        stage("import pickle; from mmbroker.link import Link")
        stage(f"link = Link({str(broker.directory)!r}, name='stage-{n}')")
    stages[2]("import mmbroker, torch")
    stages[2](f"client = mmbroker.connect({str(broker.directory)!r}, name='stage-2')")
    stages[2]("table = client.attach(engine='c', access='readonly')")
    tensor = values(torch.float32, (1000, 300))
    with mmbroker.connect(broker.directory, name="producer") as producer:
        held = producer.put(tensor, to="c")
        travelling = pickle.dumps({"mm": held.ref.to_wire()})
        for n, stage in enumerate(stages):
            code = f"request = pickle.loads(bytes.fromhex({travelling.hex()!r}))\n"
            if n == 2:
                code += (
                    "use = table.take(request['mm'])\nstats = table.stats()\nresult = stats['bytes_copied']"
                )
                assert stage(code) == 0
                assert stage("result = mmbroker.digest(use.tensor).hex()") == held.digest.hex()
            travelling = bytes.fromhex(stage(code + "\nresult = pickle.dumps(request).hex()"))
        mapped = ["memfd:mmbroker" in Path(f"/proc/{stage.pid}/maps").read_text() for stage in stages]
        assert mapped == [False, False, True, False]
        stages[2]("use.release(); del use")
        held.drop()


def test_lack_of_room_is_said_where_it_is(start_broker: StartBroker) -> None:
    """K6. At each layer: which limit, how much was asked for, how much is free, who has the most."""
    broker = start_broker(host_mib=8, segment_mib=8, client_budget_mib=7, features_per_namespace=20)
    with (
        mmbroker.connect(broker.directory, name="holder") as holder,
        mmbroker.connect(broker.directory, name="asker") as asker,
    ):
        held = holder.put(torch.zeros(6 * MIB, dtype=torch.uint8))
        with pytest.raises(PoolFull) as full:
            asker.put(torch.zeros(3 * MIB, dtype=torch.uint8), timeout=0.1)
        for words in (
            f"{3 * MIB} bytes requested, {2 * MIB} free of a limit of {8 * MIB}",
            f"largest gap {2 * MIB} bytes",
            f"most bytes are with client 'holder' (pid {os.getpid()}) {6 * MIB}",
            "drop holds, or raise --host-mib",
        ):
            assert words in str(full.value)
        assert (full.value.requested, full.value.free, full.value.limit) == (3 * MIB, 2 * MIB, 8 * MIB)
        with pytest.raises(
            QuotaExceeded, match=f"client 'holder' has 1 features of {6 * MIB} bytes of its budget"
        ):
            holder.put(torch.zeros(2 * MIB, dtype=torch.uint8), timeout=0.1)
        with pytest.raises(QuotaExceeded, match="raise the setting `features_per_namespace`"):
            asker.put_many([torch.zeros(0)] * 21)
        with pytest.raises(PoolFull, match="larger than the arena"):
            asker.put(torch.zeros(9 * MIB, dtype=torch.uint8))
        held.drop()
