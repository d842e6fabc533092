"""What a processor put out for one picture, taken apart for the broker and put together again.

A *head* has everything but large tensors: the fields and how vLLM batches them, small tensors, and how the prompt is
changed. It is kept as bytes, without running any code from them. Large tensors are one feature of several parts, and
travel as a reference in a field of their own. vLLM's own encoder writes the fields; prompt updates are plain lists
here, and those that are more than that (a target that only code can find) are not shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import mmbroker

from . import settings

#: The field of an item whose large tensors are in the broker.
REFERENCE: Final = "mmbroker"
#: Tensors of fewer bytes stay in the head.
LARGE: Final = 1024

Update = tuple[str, list[int], list[tuple[int, int]], list[tuple[bool, int]] | None]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fields`: an item without its large tensors, by vLLM's encoder; `large`: their fields, in order; `updates`: mode,
    target, tokens and which of them are embedded, the last two as runs."""

    fields: bytes
    large: list[str]
    updates: list[Update]


class Carried(MultiModalKwargsItem):  # type: ignore[misc]
    """An item some of which is in the broker, held as long as this lives. `again` makes the whole item anew."""

    again: Callable[[], MultiModalKwargsItem]

    def keep(self, claim: Claim, again: Callable[[], MultiModalKwargsItem]) -> Carried:
        self.claim, self.again = claim, again
        return self


class Claim:
    """A hold that ends with the last item that needs it."""

    def __init__(self, held: Any) -> None:
        self.ref = held.ref
        weakref.finalize(self, held.drop)


@dataclass
class Apart:
    """An item taken apart."""

    head: bytes
    tensors: list[torch.Tensor]


def engine_for_items(vllm_config: Any) -> str:
    """To whom items go: to all replicas, since nobody knows which one will serve a request."""
    return f"{settings.engine_name(vllm_config)}/items"


def apart(item: MultiModalKwargsItem, updates: Sequence[ResolvedPromptUpdate]) -> Apart | None:
    """None: it cannot be shared."""
    plain = [_plain(update) for update in updates]
    small: dict[str, Any] = {}
    large: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, elem in item.items():
        data = elem.data
        if isinstance(data, torch.Tensor) and data.nbytes >= LARGE:
            if data.device.type != "cpu" or data.layout != torch.strided:
                return None
            large.append(name)
            tensors.append(data)
            elem = MultiModalFieldElem(data=None, field=elem.field)
        small[name] = elem
    told = [update for update in plain if update is not None]
    if REFERENCE in item or len(told) != len(plain):
        return None
    try:
        (fields,) = MsgpackEncoder(size_threshold=1 << 62).encode(MultiModalKwargsItem(small))
    except (
        TypeError,
        ValueError,
    ):  # a field of a kind that vLLM itself could not send, or one that is too large
        return None
    return Apart(msgspec.msgpack.encode(Head(bytes(fields), large, told)), tensors)


def read_head(data: bytes) -> Head:
    """Raises `msgspec.MsgspecError` for what is no head."""
    return msgspec.msgpack.decode(data, type=Head)


def updates_of(head: Head, modality: str) -> list[ResolvedPromptUpdate]:
    return [_resolved(update, modality) for update in head.updates]


def bare(head: Head, fields: frozenset[str]) -> Carried | None:
    """The item as nothing but `fields`, those that its place in the prompt follows from. None: it has others."""
    item = _fields(head)
    if not fields or not fields <= item.keys() or fields & set(head.large):
        return None
    return Carried({name: item[name] for name in fields})


def referring(head: Head, reference: mmbroker.Reference) -> Carried:
    """The item with a reference in place of its large tensors."""
    item = _fields(head)
    told = msgspec.msgpack.encode((reference.to_wire(), head.large))
    field = MultiModalBatchedField(keep_on_cpu=True)
    packed = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    return Carried({**item, REFERENCE: MultiModalFieldElem(data=packed, field=field)})


def whole(item: MultiModalKwargsItem, table: mmbroker.FeatureTable) -> MultiModalKwargsItem:
    """The item with its tensors, from a rank's table. Raises `FeatureError`."""
    told = item[REFERENCE].data
    reference, large = msgspec.msgpack.decode(bytes(told.numpy()))
    with table.take(reference) as use:
        tensors = use.tensors
    fields = {name: elem for name, elem in item.items() if name != REFERENCE}
    for name, tensor in zip(large, tensors, strict=True):
        fields[name] = MultiModalFieldElem(data=tensor, field=fields[name].field)
    return MultiModalKwargsItem(fields)


def _fields(head: Head) -> MultiModalKwargsItem:
    item: MultiModalKwargsItem = MsgpackDecoder(MultiModalKwargsItem).decode(head.fields)
    return item


def _plain(update: ResolvedPromptUpdate) -> Update | None:
    target, content = update.target, update.content
    if not isinstance(target, list):
        return None
    mask = None
    if content.is_embed is not None:
        mask = [(bool(value), count) for value, count in _runs(content.is_embed(content.full).tolist())]
    return update.mode.value, list(target), _runs(content.full), mask


def _resolved(update: Update, modality: str) -> ResolvedPromptUpdate:
    mode, target, runs, mask = update
    full = [token for token, count in runs for _ in range(count)]
    is_embed = None
    if mask is not None:
        embedded = torch.tensor([value for value, count in mask for _ in range(count)], dtype=torch.bool)

        def is_embed(tokens: list[int]) -> torch.Tensor:
            if tokens != full:
                raise ValueError("these are not the tokens that this prompt update was made for")
            return embedded

    return ResolvedPromptUpdate(modality, 0, UpdateMode(mode), target, PromptUpdateDetails(full, is_embed))


def _runs(values: Sequence[Any]) -> list[tuple[Any, int]]:
    return [(value, sum(1 for _ in run)) for value, run in groupby(values)]
