"""Around the encoder: a reference becomes a tensor when the encoder reads it, and is a reference again right after.

What an encoder of this kind has made of an item already, here or in another engine, is given in its place (`outputs`).

SGLang hands the items of a batch to `embed_mm_inputs`, which asks its cache of embeddings first; only what is not in
there goes through the model's encoder. So tensors are put in their places around the encoder alone: what is cached is
never read, and the copy to the CPU that SGLang makes of every tensor on the GPU afterwards finds none. All of this is
in the stream that the model runs in.

Once an item's part of the prompt is computed its feature is not needed on the device. It stays in use, because a
request that is retracted computes it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mmbroker.adapters.span import Span

from . import measure, uses
from .outputs import tokens


def embed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `embed_mm_inputs`."""
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    inputs = call["mm_inputs_list"] or ()
    if not any(uses.late(item) for one in inputs for item in one.mm_items if item is not None):
        return original(*args, **kwargs)
    call["data_embedding_func_mapping"] = _encoders(
        call.get("data_embedding_func_mapping"),
        call.get("multimodal_model"),
        call["input_ids"].device,
        getattr(call["input_embedding"], "embedding_dim", 1),
    )
    result = original(**call)
    for one, prefix, extended in zip(
        inputs, call["extend_prefix_lens"], call["extend_seq_lens"], strict=False
    ):
        _pause(one.mm_items, prefix + extended)
    return result


def count(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `embed_mm_inputs`, where SGLang's own transport serves and is measured: what encoders read."""
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    call["data_embedding_func_mapping"] = _encoders(
        call.get("data_embedding_func_mapping"),
        call.get("multimodal_model"),
        call["input_ids"].device,
        counted=True,
    )
    return original(**call)


class Encoder:
    """A model's encoder, which finds tensors in its items, and runs only for those whose output is not there."""

    def __init__(
        self, encoder: Callable[[Any], Any], device: Any, width: int = 1, counted: bool = False
    ) -> None:
        """`width`: of the model's embeddings."""
        self._encoder = encoder
        self._counted = counted  # all its items, which are none of ours
        self._device = device
        self._width = width
        # SGLang tells by these what else an encoder does by itself.
        self.__self__ = getattr(encoder, "__self__", None)
        self.__name__ = getattr(encoder, "__name__", "")

    def __call__(self, items: Sequence[Any]) -> Any:
        there = {}
        for index, item in enumerate(items):
            output = uses.output(item)
            if output is not None and (tensor := output.read(item, self._device, self._width)) is not None:
                there[index] = tensor
        if not there:
            return self._run(items)
        rest = [item for index, item in enumerate(items) if index not in there]
        made = _split(self._run(rest), rest) if rest else []
        if made is None:
            return self._run(items)  # an encoder whose output cannot be told apart by items
        new = iter(made)
        # A copy in any case, in the stream that the model runs in.
        result = torch.cat([there[index] if index in there else next(new) for index in range(len(items))])
        for index in there:
            output = uses.output(items[index])
            if output is not None:
                output.let_go()
        return result

    def _run(self, items: Sequence[Any]) -> Any:
        """The encoder itself. What it makes is offered to others."""
        if self._counted:
            measure.counters.add("encoded", len(items))
        found = [(item, late) for item in items if (late := uses.late(item)) is not None]
        wanted = any(uses.output(item) is not None for item in items)
        try:
            for item, late in found:
                item.feature = late.read(self._device)
            span = Span(self._device) if wanted else None
            result = self._encoder(items)
        finally:
            for item, late in found:
                item.feature = late.reference
                late.pause()
        if span is not None and (made := _split(result, items)) is not None:
            span.stop()
            ours = [
                (output, item, tensor)
                for item, tensor in zip(items, made, strict=True)
                if (output := uses.output(item)) is not None
            ]
            for output, _, _ in ours:
                output.waits = False
            nbytes = sum(one.nbytes for one in made)
            for output, item, tensor in ours:
                output.offer(item, tensor, span, nbytes)
        return result


def _split(result: Any, items: Sequence[Any]) -> list[torch.Tensor] | None:
    """An encoder's result by item, one row a token; None if it is not of that kind."""
    if not isinstance(result, torch.Tensor):
        return None
    rows = result.reshape(-1, result.shape[-1])
    counts = [tokens(item) for item in items]
    return list(torch.split(rows, counts)) if sum(counts) == rows.shape[0] else None


def _encoders(
    given: dict[Any, Any] | None, model: Any, device: Any, width: int = 1, counted: bool = False
) -> dict[Any, Any]:
    """For each modality the encoder that SGLang would choose, in ours."""
    from sglang.srt.managers import schedule_batch as module

    encoders: dict[Any, Any] = {}
    for modality in module.Modality.all():
        encoder = (given or {}).get(modality) or getattr(model, f"get_{modality.name.lower()}_feature", None)
        if encoder is not None:
            encoders[modality] = Encoder(encoder, device, width, counted)
    return encoders


def _pause(items: Iterable[Any], end: int) -> None:
    """Let go of what lies before `end` in the prompt: it is computed."""
    for item in items:
        late = None if item is None else uses.late(item)
        if late is not None and item.offsets and max(last for _, last in item.offsets) < end:
            late.pause()
