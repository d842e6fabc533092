"""Reports of kind L: what a tensor's memory may be like."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch

import mmbroker
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import same, values


@pytest.mark.balanced
@pytest.mark.parametrize("access", ["copy", "readonly"])
def test_a_model_that_writes_into_its_input(
    broker: BrokerProcess, puppet: Callable[..., Puppet], access: str
) -> None:
    """L6. It has a copy of its own to write to; if it asked for shared memory, it ends before it spoils anything."""
    tensor = values(torch.float32, (60, 70))
    writer = puppet()
    writer("import mmbroker, torch")
    writer(f"client = mmbroker.connect({str(broker.directory)!r}, name='writer')")
    writer(f"table = client.attach(engine='w', access={access!r})")
    with (
        mmbroker.connect(broker.directory) as producer,
        mmbroker.connect(broker.directory) as engine,
    ):
        table = engine.attach(engine="e", access="readonly")
        held, other = producer.put(tensor, to="w"), producer.put(tensor, to="e")
        assert held.ref.feature == other.ref.feature
        use = table.take(other.ref)
        writer.post(f"table.take({held.ref.to_wire()!r}).tensor.fill_(7)\nresult = True")
        if access == "copy":
            assert writer.answer()
        else:
            assert writer.process.wait(20) == -signal.SIGSEGV
            eventually(lambda: [e["engine"] for e in broker.status()["engines"]] == ["e"], "the writer's end")
        assert same(use.tensor, tensor)
        use.release()
        other.drop()
        with producer.put(tensor, to="e") as again, table.take(again.ref) as use:
            assert same(use.tensor, tensor)
