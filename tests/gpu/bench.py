"""A broker with a GPU, and clients of it in this process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

import mmbroker
from tests.conftest import StartBroker
from tests.cuda.rig import Rig as Driven
from tests.kit import BrokerProcess, eventually
from tests.rig import same

SETTINGS = {"name": "gpu", "gpu": "0", "device_headroom_mib": 0, "device_mib": 32, "segment_mib": 4}


class Bench:
    def __init__(
        self, driven: Driven, start: StartBroker, stack: ExitStack, settings: dict[str, Any]
    ) -> None:
        self.driven = driven
        self.driver = driven.driver
        self._start, self._stack, self._settings = start, stack, {**SETTINGS, **settings}
        self.tables: list[mmbroker.FeatureTable] = []
        self.broker = self.start()
        self.client = self.connect("producer")

    def start(self) -> BrokerProcess:
        """A broker with the bench's settings; `broker` afterwards."""
        self.broker = self._start(**self._settings)
        return self.broker

    def connect(self, name: str, **options: Any) -> mmbroker.Client:
        return self._stack.enter_context(mmbroker.connect(self.broker.directory, name=name, **options))

    def attach(
        self, engine: str = "a", device: str = "cuda:0", access: str = "readonly", **options: Any
    ) -> mmbroker.FeatureTable:
        """The only rank of an engine, in a client of that name."""
        table = self.connect(engine).attach(engine=engine, device=device, access=access, **options)
        self.tables.append(table)
        return table

    def rank(self, engine: str = "a") -> dict[str, Any]:
        """What the broker's status says about an engine's only rank."""
        (found,) = [one for one in self.broker.status()["engines"] if one["engine"] == engine]
        rank = found["ranks"][0]
        assert isinstance(rank, dict)
        return rank

    def told(self, client: str) -> dict[str, int]:
        """The counters that a client has told the broker."""
        (session,) = [one for one in self.broker.status()["sessions"] if one["name"] == client]
        return dict(session["tally"])

    def count(self, counter: str) -> int:
        return int(self.broker.status()["counters"].get(counter, 0))

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are in the GPU's memory that the broker gave."""
        if self.driver.kind == "fake":
            return self.driven.fake.space.find(tensor.data_ptr()) is not None
        return tensor.is_cuda

    def device_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same on the GPU."""
        return tensor.to(self.driven.device)

    def reads(self, table: mmbroker.FeatureTable, held: mmbroker.Held, wanted: torch.Tensor) -> bool:
        """Take, compare every bit, release. Returns whether the bytes were on the device."""
        with table.take(held.ref) as use:
            there = self.on_device(use.tensor)
            assert same(use.tensor.cpu(), wanted)
        return there

    def read_on_device(self, table: mmbroker.FeatureTable, held: mmbroker.Held, wanted: torch.Tensor) -> None:
        """As `reads`, until the bytes are on the device."""
        eventually(lambda: self.reads(table, held, wanted), "a feature on the device")

    def settled(self, *tables: mmbroker.FeatureTable) -> None:
        """Wait until tables have nothing left."""
        eventually(
            lambda: all(not (t.stats()["entries"] or t.stats()["unsettled"]) for t in tables), "empty tables"
        )
