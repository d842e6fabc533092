"""What stands in for SGLang's questions to the GPU (`adapters.sglang.counting`) does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pictures", [1, 100])
@pytest.mark.usefixtures("no_waiting")
def test_pictures_are_found_and_counted_without_a_wait(
    pictures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmbroker.adapters.sglang import counting, uses

    monkeypatch.setattr(uses, "late", lambda item: item)
    prompt = [n for picture in range(pictures) for n in (1, *[1000 + picture] * 5, 2)]
    ids = torch.tensor(prompt, device="cuda")
    placeholders = torch.tensor([1000 + picture for picture in range(pictures)], device="cuda")
    rows = torch.arange(5 * pictures, device="cuda", dtype=torch.float32)[:, None].expand(-1, 4)
    embeds = torch.zeros(len(prompt), 4, device="cuda")

    def unasked(*args: Any) -> Any:
        raise AssertionError("SGLang's own way was taken")

    def embedding_and_mask(
        embedding_items: Any, prefix_length: Any, extend_length: Any, items_offset_list: Any
    ) -> tuple[Any, Any]:
        found = counting.mask(unasked, ids, placeholders)
        return counting.adjust(unasked, rows, found, None), found

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    embedding, found = counting.count_ahead(
        embedding_and_mask,
        embedding_items=[SimpleNamespace()] * pictures,
        prefix_length=[0],
        extend_length=[len(prompt)],
        items_offset_list=[[(7 * picture + 1, 7 * picture + 5) for picture in range(pictures)]],
    )
    embeds.masked_scatter_(found.expand_as(embeds), embedding)
    torch.cuda.set_sync_debug_mode("default")
    wanted = iter(range(5 * pictures))
    assert embeds[:, 0].tolist() == [float(next(wanted)) if token >= 1000 else 0.0 for token in prompt]
