"""The broker's death, and many features in any order: no wrong bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

import mmbroker
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.gpu.test_table import block
from tests.kit import eventually
from tests.rig import same, values


def test_the_broker_is_killed(bench: Bench) -> None:
    """What was granted stays right; the next broker's segments have the same numbers, and are others."""
    table = bench.attach()
    old = [block(0.5, seed=i) for i in range(6)]
    held = [bench.client.put(feature, to="a") for feature in old]
    use = table.take(held[0].ref)
    kept = use.tensor
    engine = table._link
    session = engine.session
    bench.broker.kill()
    for one, feature in zip(held, old, strict=True):
        assert bench.reads(table, one, feature)
    bench.start()
    eventually(lambda: engine.connected and engine.session != session, "the engine is back")
    eventually(lambda: bench.client.connected, "the producer is back")
    assert table.path == "device"
    new = [block(0.5, seed=100 + i) for i in range(6)]
    again = [bench.client.put(feature, to="a") for feature in new]
    assert {one.ref.hold for one in held} & {one.ref.hold for one in again}
    for one, feature in zip([*held, *again], [*old, *new], strict=True):
        assert bench.reads(table, one, feature)
    assert same(kept.cpu(), old[0])
    use.release()
    table.take(held[1].ref).park()  # has no session to tell it to
    for one in again:
        one.drop()
    eventually(lambda: bench.broker.status()["holds"] == 0, "the new ones settled")
    for one, feature in zip(held, old, strict=True):
        bench.reads(table, one, feature)
    assert bench.broker.status()["counters"].get("unknown_holds", 0) == 0


def test_many_features_in_any_order(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    """Two engines, a small device arena, parks and takes again, releases in random order, streams that lag."""
    bench = make_bench(driven, device_mib=8, segment_mib=4, host_mib=64, device_linger=0.05)
    tables = {name: bench.attach(name) for name in ("a", "b")}
    chance = random.Random(7)
    held: list[tuple[str, mmbroker.Held, torch.Tensor]] = []
    uses: list[tuple[mmbroker.Use, torch.Tensor]] = []
    wrong = there = 0
    with driven.stream() as stream:
        for i in range(3000):
            feature = values(torch.uint8, (chance.randrange(1, 400_000),), seed=i % 900)
            engine = chance.choice("ab")
            held.append((engine, bench.client.put(feature, to=engine), feature))
            for _ in range(2):
                name, one, wanted = chance.choice(held)
                uses.append((tables[name].take(one.ref), wanted))
            while len(uses) > 12:
                use, wanted = uses.pop(chance.randrange(len(uses)))
                there += bench.on_device(use.tensor)
                wrong += not same(use.tensor.cpu(), wanted)
                leave = use.park if chance.random() < 0.3 else use.release
                leave(chance.choice([None, stream]))
            while len(held) > 24:
                held.pop(chance.randrange(len(held)))[1].drop()
    for use, wanted in uses:
        wrong += not same(use.tensor.cpu(), wanted)
        use.release()
    for _, one, _ in held:
        one.drop()
    assert wrong == 0
    assert there > 300
    bench.settled(*tables.values())
    status = bench.broker.status()
    assert status["holds"] == status["leases"] == 0
    assert status["device"]["loading"] == status["device"]["wanting"] == 0
    assert sum(table.stats()["load_failures"] for table in tables.values()) == 0
    assert bench.count("parked") and bench.count("offers")
