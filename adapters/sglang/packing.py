"""What still travels inside a request, made short.

A pickled tensor costs the scheduler some 30 us, its bytes 4. So a request whose features are in the broker gets an
*envelope*: a plain dict in its first item (msgpack-native, so it crosses either of SGLang's channels) with the small
tensors as bytes, and the padded prompt only as the word that it can be rebuilt. The items keep their references in the
places of their tensors.

The receiver works on shallow copies: what it received may still be relayed to the next pipeline stage.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeGuard

import torch

from mmbroker.adapters.fingerprint import canonical
from mmbroker.proto.dtypes import ITEMSIZE
from mmbroker.proto.reference import is_reference

#: Where the envelope is: a key of the first item's `model_specific_data`.
ENVELOPE: Final = "__mmbroker__"
#: Tensors of the request itself, beside its items. Not every version has all of them.
OUTPUT_TENSORS: Final = (
    "mrope_positions",
    "mrope_position_delta",
    "vision_position_ids",
    "visible_frame_counts",
    "token_type_ids",
)
#: A tensor of an item's `model_specific_data` from this size on is a feature of its own, below it is packed; in bytes.
LARGE: Final = 64 << 10

Packed = list[Any]  # dtype, shape, bytes


def pack(tensor: torch.Tensor) -> Packed:
    """A dense tensor on the CPU as dtype, shape and bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def unpack(packed: Packed) -> torch.Tensor:
    """The tensor again, in memory of its own."""
    dtype, shape, data = packed
    kind: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    # A bytearray, because torch warns of memory that it may not write.
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def packable(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided


def portable(value: object) -> bool:
    """Can a broker carry it? A user's dict, an array or a sparse tensor stays with SGLang."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
        and str(value.dtype).removeprefix("torch.") in ITEMSIZE
    )


def unsealed(output: Any) -> bool:
    """Are there references in a request without an envelope?"""
    return envelope_of(output) is None and any(
        is_reference(place.value) for item in output.mm_items for place in places(item)
    )


#: Of one item: the hold of its feature, the key of what the encoder makes of it, and the reference of that, if it is
#: there already.
Encoded = tuple[int, bytes, dict[str, Any] | None]


def close(output: Any, encoded: Sequence[Encoded] = ()) -> None:
    """Put `output`, a `MultimodalProcessorOutput` with references in it, into its short form."""
    values = {name: getattr(output, name, None) for name in OUTPUT_TENSORS}
    packed = {name: pack(value) for name, value in values.items() if packable(value)}
    small = [
        {key: pack(value) for key, value in item.model_specific_data.items() if packable(value)}
        for item in output.mm_items
    ]
    given = output.padded_input_ids
    rebuilt = given is not None and padded(output, output.mm_items) == list(given)
    # Everything could be packed; only now is anything changed.
    for name in packed:
        setattr(output, name, None)
    for item, gone in zip(output.mm_items, small, strict=True):
        # A new dict, not a shorter one: a processor may have kept the old one for its cache.
        item.model_specific_data = {k: v for k, v in item.model_specific_data.items() if k not in gone}
    if rebuilt:
        output.padded_input_ids = None
    envelope: dict[str, Any] = {"output": packed, "items": small, "padded": rebuilt}
    if encoded:
        envelope["encoded"] = [list(one) for one in encoded]
    output.mm_items[0].model_specific_data[ENVELOPE] = envelope


def beside(item: Any) -> bytes | None:
    """What an encoder finds in an item beside its feature, as bytes; None if some of it has no plain form, or is in the
    broker itself.

    Two pictures may have the same patches, and differ in how these are laid out.
    """
    plain: dict[str, Any] = {}
    for key, value in item.model_specific_data.items():
        if is_reference(value):
            return None
        if key != ENVELOPE:
            if packable(value) and value.nbytes < LARGE:
                value = pack(value)
            plain[key] = value
    try:
        return canonical(plain)
    except (TypeError, ValueError):
        return None


def identity(item: Any, digest: bytes) -> bytes:
    """The 32 bytes by which an engine may take an item for another one: of its feature, and of what is beside it."""
    rest = beside(item) if item.model_specific_data else None
    return digest if rest is None else hashlib.sha256(b"mmbroker item\0" + digest + rest).digest()


def padded(output: Any, items: Sequence[Any]) -> Any:
    """The prompt of a request with its items' identities in their places; None unless all of them have one."""
    return type(output).build_padded_input_ids(output.input_ids, items)


def envelope_of(output: Any) -> dict[str, Any] | None:
    """The envelope of a request, None if it has none: then nothing in it is ours."""
    items = getattr(output, "mm_items", None)
    if not items:
        return None
    data = getattr(items[0], "model_specific_data", None)
    found: dict[str, Any] | None = data.get(ENVELOPE) if data else None
    return found


def open_copy(output: Any, envelope: dict[str, Any]) -> Any:
    """A shallow copy of `output` with its small tensors and its padded prompt back; references stay where they are."""
    opened = copy.copy(output)
    for name, packed in envelope["output"].items():
        setattr(opened, name, unpack(packed))
    opened.mm_items = []
    for item, small in zip(output.mm_items, envelope["items"], strict=True):
        twin = copy.copy(item)
        data = {key: value for key, value in item.model_specific_data.items() if key != ENVELOPE}
        data.update((key, unpack(packed)) for key, packed in small.items())
        twin.model_specific_data = data
        opened.mm_items.append(twin)
    if envelope["padded"]:
        opened.padded_input_ids = padded(opened, opened.mm_items)
    return opened


class Place:
    """One place of an item where a feature may be: a field, or (`extra`) a key of its `model_specific_data`."""

    __slots__ = ("extra", "item", "name")

    def __init__(self, item: Any, name: str, extra: bool = False) -> None:
        self.item = item
        self.name = name
        self.extra = extra

    @property
    def value(self) -> Any:
        return self.item.model_specific_data[self.name] if self.extra else getattr(self.item, self.name)

    @value.setter
    def value(self, value: Any) -> None:
        if self.extra:
            self.item.model_specific_data[self.name] = value
        else:
            setattr(self.item, self.name, value)


def places(item: Any) -> Iterator[Place]:
    """The places of an item that hold something, its feature first."""
    for name in ("feature", "precomputed_embeddings"):
        if getattr(item, name) is not None:
            yield Place(item, name)
    for key in item.model_specific_data:
        if key != ENVELOPE:
            yield Place(item, key, extra=True)
