"""SGLang 0.5.17's own `embed_mm_inputs`, with and without the hooks that spare it questions to the GPU.

A machine without a GPU cannot wait for one, so the operations are watched that would.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mmbroker.adapters.sglang import counting, uses

from . import kit

pytestmark = pytest.mark.sglang

#: Operations whose result, or whose shape, the host needs before it goes on.
WAITS = {"_local_scalar_dense", "_unique2", "unique_dim", "unique_consecutive", "nonzero", "masked_select"}
WAITS |= {"isin"}  # if it is asked for many things
HOOKS = {
    "get_embedding_and_mask": counting.count_ahead,
    "_get_multimodal_mask": counting.mask,
    "_adjust_embedding_length": counting.adjust,
}
LENGTH, HIDDEN = 3, 4


class Watched(TorchDispatchMode):
    """Which operations ran that would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in WAITS:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


class Batch:
    """Requests with pictures, each of `LENGTH` tokens; the encoder gives a row its number in the whole batch."""

    def __init__(self, module: Any, pictures: int, requests: int = 2, extra: int = 0) -> None:
        self.module = module
        self.extra = extra  # rows more than it should: none or fewer
        batch = kit.schedule_batch()
        self.inputs, self.prompts = [], []
        for request in range(requests):
            items, prompt = [], [7]
            for number in range(pictures):
                item = batch.MultimodalDataItem(
                    modality=batch.Modality.IMAGE,
                    offsets=[(len(prompt), len(prompt) + LENGTH - 1)],
                    feature=torch.zeros(1),
                    model_specific_data={},
                )
                item.set_hash(1 + request * pictures + number)
                item.set_pad_value()
                items.append(item)
                prompt += [item.pad_value] * LENGTH + [8]
            self.inputs.append(SimpleNamespace(mm_items=items))
            self.prompts.append(prompt)

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        rows = torch.cat(
            [torch.arange(LENGTH * len(item.offsets)) + 10 * LENGTH * item.hash for item in items]
        )
        return rows[: len(rows) + self.extra, None].expand(-1, HIDDEN).float()

    def embed(self, first: int, last: int) -> torch.Tensor:
        """What comes of tokens `first` to `last` of each prompt, with one without pictures behind them."""
        self.module.init_mm_embedding_cache(1 << 20)
        ids = torch.tensor([token for prompt in self.prompts for token in prompt[first:last]] + [1, 2, 3])
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(100, HIDDEN)
        result, _ = self.module.embed_mm_inputs(
            mm_inputs_list=self.inputs,
            extend_prefix_lens=[first for _ in self.inputs],
            extend_seq_lens=[len(prompt[first:last]) for prompt in self.prompts],
            input_ids=ids,
            input_embedding=embedding,
            multimodal_model=self,
        )
        return result.detach()  # type: ignore[no-any-return]


@pytest.fixture
def module() -> Any:
    if kit.NEWEST:
        pytest.skip("this release counts on the host by itself")
    kit.schedule_batch()
    from sglang.srt.managers import mm_utils

    return mm_utils


@pytest.fixture
def hooked(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, hook in HOOKS.items():
        monkeypatch.setattr(module, name, partial(hook, getattr(module, name)))
    return module


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "late", lambda item: item)


PARTS = pytest.mark.parametrize(("first", "last"), [(0, 1000), (0, 6), (5, 12), (6, 1000), (8, 9)])


@pytest.mark.parametrize("pictures", [1, 4, 40])
@PARTS
@pytest.mark.usefixtures("ours")
def test_the_result_is_sglangs_own(
    module: Any, monkeypatch: pytest.MonkeyPatch, pictures: int, first: int, last: int
) -> None:
    wanted = Batch(module, pictures).embed(first, last)
    with monkeypatch.context() as patched:
        for name, hook in HOOKS.items():
            patched.setattr(module, name, partial(hook, getattr(module, name)))
        assert torch.equal(Batch(module, pictures).embed(first, last), wanted)


def test_nothing_waits_for_the_gpu(
    module: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with Watched() as before:
        Batch(module, 40).embed(0, 1000)
    assert set(before.waits) == {"_local_scalar_dense", "isin"}
    request.getfixturevalue("hooked")
    with Watched() as foreign:
        Batch(module, 40).embed(0, 1000)
    assert foreign.waits == before.waits, "other transports' items are left alone"
    request.getfixturevalue("ours")
    with Watched() as after:
        Batch(module, 40).embed(0, 1000)
    assert after.waits == []


@pytest.mark.usefixtures("ours")
def test_sglang_sees_to_rows_that_do_not_come_to_the_number(hooked: Any) -> None:
    batch = Batch(hooked, 2, requests=1, extra=-1)
    first, second = batch.inputs[0].mm_items
    first.offsets += second.offsets  # one item in two places: its rows are not told apart before
    batch.inputs[0].mm_items.remove(second)
    batch.prompts[0] = [first.pad_value if token == second.pad_value else token for token in batch.prompts[0]]
    with pytest.raises(RuntimeError, match="Insufficient multimodal embedding length"):
        batch.embed(0, 1000)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(0, 40),
            st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=5),
        ),
        max_size=4,
    )
)
def test_tokens_are_counted_as_they_stand_in_the_prompt(requests: list[Any]) -> None:
    prefixes, extended, offsets, wanted = [], [], [], 0
    for prefix, length, gaps in requests:
        at, spans, prompt = 0, [], [False] * 200
        for gap, tokens in gaps:
            spans.append((at + gap, at + gap + tokens - 1))
            prompt[at + gap : at + gap + tokens] = [True] * tokens
            at += gap + tokens
        prefixes.append(prefix)
        extended.append(length)
        offsets.append(spans)
        wanted += sum(prompt[prefix : prefix + length])
    assert counting.tokens_between(prefixes, extended, offsets) == wanted
