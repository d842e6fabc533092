"""Reports of kind E: one feature and several ranks, engines or samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.proto.errors import FeatureMissing, PoolFull
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import DTYPES, same, values

RANKS = 4


@contextmanager
def an_engine(broker: BrokerProcess, name: str) -> Iterator[list[mmbroker.FeatureTable]]:
    """The tables of its ranks."""
    with ExitStack() as stack:
        clients = [stack.enter_context(mmbroker.connect(broker.directory)) for _ in range(RANKS)]
        yield [
            client.attach(engine=name, rank=rank, world=RANKS, access="readonly")
            for rank, client in enumerate(clients)
        ]


def settled(tables: list[mmbroker.FeatureTable]) -> None:
    eventually(
        lambda: not any(t.stats()["entries"] or t.stats()["unsettled"] for t in tables), "empty tables"
    )


@pytest.mark.balanced
def test_a_request_is_moved_to_another_engine_before_it_was_read(broker: BrokerProcess) -> None:
    """E3. The first engine's share is cancelled, not waited for; the second one reads what it was granted itself."""
    tensor = values(torch.float16, (70, 80))
    with (
        mmbroker.connect(broker.directory) as router,
        an_engine(broker, "one") as one,
        an_engine(broker, "two") as two,
    ):
        held = router.put(tensor, to="one")
        moved = router.lookup(mmbroker.digest(tensor), to="two")
        assert moved is not None and moved.ref.feature == held.ref.feature
        held.drop()
        settled(one)
        for table in two:
            with pytest.raises(FeatureMissing):
                table.take(held.ref)
            with table.take(moved.ref) as use:
                assert same(use.tensor, tensor)
        assert [t.stats()["takes"] for t in one] == [0] * RANKS
        moved.drop()
        settled(two)
        eventually(lambda: broker.status()["pool"]["held"] == 0, "nothing held")


@pytest.mark.balanced
def test_ranks_read_in_any_order(broker: BrokerProcess, puppet: Callable[..., Puppet]) -> None:
    """E5, E8, E9. Each rank has its own order of items of all shapes: 800 right reads, whoever is first.

    Nobody's order or position decides: whatever is needed to read an item travels with it.
    """
    processes = [puppet() for _ in range(2)]
    for process in processes:
        process.post("import mmbroker\nfrom tests.rig import DTYPES, same, values")
    for first, process in zip((0, 2), processes, strict=True):
        process.answer()
        process(
            f"path, ranks = {str(broker.directory)!r}, ({first}, {first + 1})\n"
            "clients = [mmbroker.connect(path, name=f'rank-{rank}') for rank in ranks]\n"
            f"tables = [client.attach(engine='tp', rank=rank, world={RANKS}, access='readonly')\n"
            "    for rank, client in zip(ranks, clients)]"
        )
    modalities = ["image", "video", "image", "audio"]
    with mmbroker.connect(broker.directory, name="producer") as producer:
        held, expected = [], []
        for n in range(200):
            dtype, shape = n % len(DTYPES), [n % 5 + 1, n % 7 + 1, n % 3][: n % 3 + 1]
            tensor = values(DTYPES[dtype], tuple(shape), seed=n)
            held.append(producer.put(tensor, to="tp", modality=modalities[n % 4]))
            expected.append((held[-1].ref.to_wire(), dtype, shape, n))
        for process in processes:
            process.post(
                f"import random\nexpected, result = {expected!r}, 0\n"
                "for rank, table in zip(ranks, tables):\n"
                "    for wire, dtype, shape, seed in random.Random(rank).sample(expected, len(expected)):\n"
                "        with table.take(wire) as use:\n"
                "            result += same(use.tensor, values(DTYPES[dtype], tuple(shape), seed=seed))"
            )
        assert [process.answer() for process in processes] == [400, 400]
        for one in held:
            one.drop()
        eventually(lambda: broker.status()["pool"]["held"] == 0, "nothing held")
    for process in processes:
        process("for client in clients: client.close()")


@pytest.mark.balanced
def test_a_slow_rank_holds_the_producer_up_and_nothing_else(start_broker: StartBroker) -> None:
    """E6. The arena stays within its limit; a put waits; and memory comes back without another request."""
    broker = start_broker(host_mib=4, segment_mib=1, watermark=0.0)
    pool = broker.status()["pool"]
    with mmbroker.connect(broker.directory) as producer, an_engine(broker, "tp") as (*fast, slow):

        def serve(n: int, timeout: float) -> mmbroker.Use:
            with producer.put(values(torch.uint8, (1 << 19,), seed=n), to="tp", timeout=timeout) as held:
                for table in fast:
                    table.take(held.ref).release()
                return slow.take(held.ref)

        uses: list[mmbroker.Use] = []
        with pytest.raises(PoolFull, match="engine 'tp' has 4194304 bytes in flight"):
            for n in range(100):
                uses.append(serve(n, 10.0 if n < 8 else 0.1))
        assert len(uses) == 8
        assert broker.status()["pool"]["capacity"] == pool["limit"] == 4 << 20

        more: list[Any] = []
        waiting = threading.Thread(target=lambda: more.append(serve(1000, 20.0)))
        waiting.start()
        eventually(lambda: broker.status()["waiting_count"] == 1, "a put that waits")
        uses.pop(0).release()
        waiting.join()
        for n, use in [*enumerate(uses, 1), (1000, more[0])]:
            assert same(use.tensor, values(torch.uint8, (1 << 19,), seed=n))
            use.release()
        uses.clear()
        more.clear()
        del use
        eventually(lambda: broker.status()["pool"]["held"] == 0, "nothing held")
        settled([*fast, slow])
