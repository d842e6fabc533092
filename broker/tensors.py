"""Torch tensors as forms and bytes, and back.

A tensor's bytes are its elements in C order, with conjugate and negative bits resolved. They are hashed and copied as
they are: no value is ever converted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from mmbroker.proto.digest import content_digest
from mmbroker.proto.dtypes import ITEMSIZE, TYPESTR
from mmbroker.proto.form import Form, list_form, tensor_form
from mmbroker.proto.keys import Digest
from mmbroker.proto.reference import Reference

from . import hashing

_BY_NAME: Final = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
_NAMES: Final = {dtype: name for name, dtype in _BY_NAME.items()}

#: What torch makes from numpy.
_NUMPY: Final = {_BY_NAME[name]: np.dtype(typestr) for name, typestr in TYPESTR.items()}

#: dtype and shape of each tensor of a feature, and where its bytes begin.
Layout = tuple[tuple[torch.dtype, tuple[int, ...], int, int], ...]


def dtype_name(dtype: object) -> str:
    """Our name of a torch dtype, or of a name; raises `TypeError` for what mmbroker does not carry."""
    name = dtype if isinstance(dtype, str) else _NAMES.get(dtype)
    if name not in _BY_NAME:
        raise TypeError(f"dtype {dtype} is not one that mmbroker carries: {', '.join(_BY_NAME)}")
    return str(name)


class Source:
    """A feature on its way into a slot. Raises `TypeError` unless it is made of tensors."""

    def __init__(self, tensors: list[torch.Tensor], form: Form) -> None:
        self.tensors = tensors
        self.form = form
        self._on_host = tensors  # as it is copied to a slot on the host

    @classmethod
    def one(cls, tensor: object, modality: str) -> Source:
        """One tensor."""
        plain = _plain(tensor)
        return cls([plain], tensor_form(dtype_name(plain.dtype), plain.shape, modality))

    @classmethod
    def many(cls, tensors: Sequence[object], modality: str) -> Source:
        """Several tensors as one feature."""
        plain = [_plain(tensor) for tensor in tensors]
        return cls(plain, list_form([(dtype_name(t.dtype), t.shape) for t in plain], modality))

    def digest(self) -> Digest:
        """The content key. A tensor that is not contiguous, or not on the CPU, is copied first, once."""
        self._on_host = [t.cpu().contiguous().resolve_conj().resolve_neg() for t in self.tensors]
        return content_digest(self.form, [_bytes_of(t) for t in self._on_host], hashing.pool.map)

    def write(self, slot: memoryview) -> None:
        """Copy into a slot of the form's size, without the GIL."""
        targets = build(layout(self.form), slot)
        for tensor, target in zip(self._on_host, targets, strict=True):
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                # Not torch's own copy, whose threads would wait for each other beside our hashing: 15 times slower.
                ctypes.memmove(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            else:
                target.copy_(tensor)


def _plain(tensor: object) -> torch.Tensor:
    """The tensor without its history; raises unless it has elements somewhere."""
    if not isinstance(tensor, torch.Tensor):
        hint = ": make it one with `torch.as_tensor`" if hasattr(tensor, "__array__") else ""
        raise TypeError(
            f"a feature is a torch.Tensor, not a {type(tensor).__module__}.{type(tensor).__qualname__}{hint}"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"a feature is a dense tensor, not one of layout {tensor.layout} and dtype {tensor.dtype}"
        )
    if tensor.is_meta:
        raise TypeError("a feature has elements: this tensor is on the meta device")
    return tensor.detach()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def layout(of: Form | Reference) -> Layout:
    """What `build` needs to know about a feature, computed once."""
    if of.parts is None:
        return (_lay(of.dtype, of.shape, 0),)
    return tuple(_lay(part.dtype, part.shape, part.offset) for part in of.parts)


@lru_cache(4096)  # features of one size come again and again
def _lay(dtype: str, shape: tuple[int, ...], offset: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    elements = 1
    for n in shape:
        elements *= n
    return _BY_NAME[dtype_name(dtype)], shape, elements, offset


def build(layout: Layout, memory: memoryview) -> list[torch.Tensor]:
    """Tensors over `memory`, which they keep alive. Nothing is copied."""
    return [
        torch.frombuffer(memory, dtype=dtype, count=elements, offset=offset).view(shape)
        if elements
        else torch.empty(shape, dtype=dtype)
        for dtype, shape, elements, offset in layout
    ]


def export(
    layout: Layout, memory: memoryview
) -> tuple[list[torch.Tensor], np.ndarray[Any, Any] | memoryview]:
    """As `build`, with an object that lives as long as any of the tensors, and only then.

    One tensor comes by way of numpy where numpy knows its dtype: that takes a quarter of the time, and keeps the
    interpreter's lock throughout, so that it need not be waited for again.
    """
    if len(layout) == 1:
        dtype, shape, elements, offset = layout[0]
        if elements and (known := _NUMPY.get(dtype)) is not None:
            array: np.ndarray[Any, Any] = np.ndarray(shape, known, memory, offset)
            return [torch.from_numpy(array)], array
    exporter = memory[:]
    return build(layout, exporter), exporter


# --- digests --------------------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor | Sequence[torch.Tensor], modality: str = "image") -> Digest:
    """The 32 bytes by which a feature with this content is found: equal in every process and on every device.

    A list of tensors is one feature. Raises `TypeError` for what is no tensor.
    """
    make = Source.many if isinstance(tensor, (list, tuple)) else Source.one
    return make(tensor, modality).digest()  # type: ignore[arg-type]
