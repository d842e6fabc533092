"""A machine with a broker, a worker, an engine and a mover, all but the broker in this process."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mmbroker
from mmbroker.link import Link
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import Evict
from mmbroker.tier.breaker import Breaker
from mmbroker.tier.desk import Terms
from mmbroker.tier.mover import Mover, Options
from mmbroker.tier.policy import Policy
from mmbroker.tier.store import Store
from tests.kit import BrokerProcess, RawClient, eventually

#: Long enough for a busy machine: what a test waits for comes at once, or this is too long for it.
WAIT = 2.0


def key(name: str) -> Key:
    return Key.derived(hashlib.sha256(name.encode()).digest())


@contextmanager
def a_broker(**settings: Any) -> Iterator[BrokerProcess]:
    """A broker in a directory of its own."""
    root = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
    process = BrokerProcess(root, {"host_mib": 64, "segment_mib": 4, **settings}, [], {})
    try:
        yield process.wait_ready()
    finally:
        process.kill()
        process.clean_up()
        shutil.rmtree(root)


def evict(broker: BrokerProcess) -> None:
    """Drop what it has."""
    with RawClient(broker.directory, name="evict") as client:
        client.call(Evict(1000))


@dataclass
class Machine:
    """`now` is what the mover takes for the time of day."""

    broker: BrokerProcess
    worker: mmbroker.Client
    engine: mmbroker.Client
    table: mmbroker.FeatureTable
    mover: Mover
    clock: dict[str, float] = field(default_factory=dict)

    def make(self, name: str, value: torch.Tensor | list[torch.Tensor], **more: Any) -> None:
        """As a worker that finds nothing, makes it, puts it, and is done with it."""
        (promise,) = self.worker.get_or_promise([key(name)])
        assert isinstance(promise, mmbroker.Promise), promise
        put = self.worker.put_list if isinstance(value, list) else self.worker.put
        put(value, key=promise, **more).drop()  # type: ignore[operator]

    def ask(self, name: str) -> list[torch.Tensor] | None:
        """What a worker is given and its engine computes with; None: it has to make it itself."""
        (got,) = self.worker.get_or_promise([key(name)], to="a")
        if not isinstance(got, mmbroker.Held):
            assert got is not None
            got.drop()
            return None
        with got, self.table.take(got.ref) as use:
            tensors = use.tensor if isinstance(use.tensor, list) else [use.tensor]
            return [tensor.clone() for tensor in tensors]

    def forget(self) -> None:
        """Drop what the broker has."""
        eventually(lambda: not self.status()["holds"], "nothing held")
        evict(self.broker)

    def status(self) -> dict[str, Any]:
        return self.broker.status()

    def tier(self) -> dict[str, Any]:
        """The broker's word on the tier."""
        (found,) = self.status()["movers"]
        return dict(found)

    def count(self, name: str) -> int:
        return self.mover.desk.stats().get(f"tier_{name}", 0)

    def balanced(self) -> None:
        """Nothing is left of anything."""

        def nothing() -> bool:
            status = self.status()
            return not (status["leases"] or status["holds"] or status["movers"][0]["sought"])

        eventually(nothing, "books in balance")


@contextmanager
def machine(
    broker: BrokerProcess,
    store: Store,
    *,
    wait: float = WAIT,
    most: int = 64,
    policy: Policy | None = None,
    namespace: str = "",
    pause: tuple[float, float] = (0.01, 0.05),
    health: float = 60.0,
) -> Iterator[Machine]:
    policy = policy or Policy()
    options = Options(Terms(wait, most, policy.reuse), policy, namespace=namespace, health=health)
    clock = {"now": 1000.0}
    with (
        mmbroker.connect(broker.directory, name="worker") as worker,
        mmbroker.connect(broker.directory, name="engine") as engine,
    ):
        table = engine.attach(engine="a", access="readonly")
        mover = Mover(
            Link(broker.directory, "tier"), store, options, lambda: clock["now"], Breaker(pause=pause)
        )
        try:
            yield Machine(broker, worker, engine, table, mover, clock)
        finally:
            mover.close()
            table.close()
