"""Tensors that the receiver thread makes before they are taken."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mmbroker.entry import Built, Entry
from tests.gpu.bench import Bench
from tests.gpu.test_table import block
from tests.kit import PATIENCE, eventually
from tests.rig import same


def test_a_tensor_is_made_ahead_of_its_take(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the receiver thread, once; for a second use the scheduler makes another."""
    table = bench.attach()
    makers: list[str] = []
    make = bench.driver.tensor

    def made(*args: Any) -> torch.Tensor:
        makers.append(threading.current_thread().name)
        return make(*args)

    monkeypatch.setattr(bench.driver, "tensor", made)
    receiver, here = "mmbroker-receiver", threading.current_thread().name
    feature = block(0.5, seed=1)
    with bench.client.put(feature, to="a") as held:
        eventually(lambda: table._entries[held.ref.boot, held.ref.hold].ready, "a tensor, made ahead")
        with table.take(held.ref) as use:
            assert same(use.tensor.cpu(), feature)
            assert makers == [receiver]
            with table.take(held.ref) as another:
                assert same(another.tensor.cpu(), feature)
        assert makers == [receiver, here]
    bench.settled(table)


def test_an_entry_is_over_while_its_tensor_is_made_ahead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread that closes the table: it does not see that tensor, which must not keep the memory in use."""
    table = bench.attach()
    build = Entry.build
    reached = threading.Event()

    def over(entry: Entry) -> Built:
        built = build(entry)
        table._withdraw([entry.key])
        reached.set()
        return built

    monkeypatch.setattr(Entry, "build", over)
    held = bench.client.put(block(0.5), to="a")
    assert reached.wait(PATIENCE)
    bench.settled(table)
    held.drop()
