"""An encoder in a stream of its own, on a real GPU: beside the model, seen by it, and with memory that is its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 4096, 512
#: Cycles for which a stream is busy: about a second.
LONG = 2_000_000_000


class Model:
    """Its encoder gives each item rows of a number of its own; `busy` makes it take long first."""

    def __init__(self) -> None:
        from mmbroker.adapters.sglang.ahead import Ahead
        from mmbroker.adapters.sglang.encoding import Encoder

        self.device = torch.device("cuda", 0)
        self.busy = 0
        self.ahead = Ahead(lambda item: False)
        self.encoder = Encoder(self._encode, self.device)
        self.items: list[Any] = [
            SimpleNamespace(offsets=[(0, ROWS - 1)], number=float(number)) for number in (3, 5)
        ]

    def _encode(self, items: list[Any]) -> torch.Tensor:
        if self.busy:
            torch.cuda._sleep(self.busy)  # type: ignore[no-untyped-call]
        return torch.cat([torch.full((ROWS, WIDTH), item.number, device=self.device) for item in items])

    def right(self, result: torch.Tensor) -> bool:
        wanted = torch.cat([torch.full((ROWS, WIDTH), item.number) for item in self.items])
        return bool(torch.equal(result.cpu(), wanted))


@pytest.fixture
def model() -> Model:
    torch.cuda.synchronize()
    return Model()


def test_it_does_not_wait_for_the_batch_before(model: Model) -> None:
    model.encoder.prepare(model.items, model.ahead)  # the first time it waits, for the weights
    torch.cuda.synchronize()
    before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    before.record()
    model.encoder.prepare(model.items, model.ahead)
    with model.ahead.aside(model.device):
        torch.cuda.current_stream().synchronize()
    assert not before.query(), "the encoder was done only after the batch before"
    assert model.right(model.encoder(model.items))


def test_the_model_waits_for_it(model: Model) -> None:
    model.encoder.prepare(model.items, model.ahead)
    model.busy = LONG
    model.encoder.prepare(model.items, model.ahead)
    assert model.right(model.encoder(model.items))


def test_its_memory_is_not_given_away_before_the_model_has_read_it(model: Model) -> None:
    for _ in range(3):  # the allocator has its blocks after this
        model.encoder.prepare(model.items, model.ahead)
        model.encoder(model.items)
        torch.cuda.synchronize()
    model.encoder.prepare(model.items, model.ahead)
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    result = model.encoder(model.items)
    with model.ahead.aside(model.device):
        others = [torch.full((2 * ROWS, WIDTH), -1.0, device=model.device) for _ in range(4)]
        torch.cuda.current_stream().synchronize()
    assert model.right(result)
    del others


def test_new_weights_are_waited_for(model: Model) -> None:
    model.encoder.prepare(model.items, model.ahead)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    for item in model.items:
        item.number = torch.full((1,), item.number + 1, device=model.device)
    model._encode = lambda items: torch.cat([item.number.expand(ROWS, WIDTH) for item in items])  # type: ignore[method-assign]
    model.encoder._encoder = model._encode
    model.ahead.renew()
    model.encoder.prepare(model.items, model.ahead)
    result = model.encoder(model.items)
    for item, number in zip(model.items, (4.0, 6.0), strict=True):
        item.number = number
    assert model.right(result)
