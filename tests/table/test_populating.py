"""What a rank maps is populated before it is needed, so that no grant waits for it."""

from __future__ import annotations

import torch

import mmbroker
from tests.kit import BrokerProcess, eventually, resident


def test_an_idle_receiver_populates_the_rest_of_a_segment(broker: BrokerProcess) -> None:
    with mmbroker.connect(broker.directory) as engine, mmbroker.connect(broker.directory) as client:
        table = engine.attach(engine="e", access="readonly")
        with client.put(torch.arange(1000), to="e") as held, table.take(held.ref) as use:
            address = use.tensor.data_ptr()
            size = broker.status()["pool"]["capacity"]  # one segment
            eventually(lambda: resident(address) == size, "the whole segment in place")
