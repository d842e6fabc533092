"""The form of a feature: everything about a tensor but its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .dtypes import ITEMSIZE
from .errors import InvalidMessage

#: Parts of one feature start at multiples of this, so that every dtype and vector load is aligned.
PART_ALIGNMENT = 256
#: Most dimensions a tensor may have; the number every tensor library can represent.
MAX_RANK = 25
#: Largest feature that the wire can name, in bytes.
MAX_NBYTES = 1 << 48


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a feature that is made of several: `offset` is in bytes from the feature's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """dtype, shape (elements per axis), size in bytes, modality; `parts` for a feature of several tensors.

    A feature with parts has dtype ``list`` and shape ``(number of parts,)``.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    modality: str = "image"
    parts: tuple[Part, ...] | None = None


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a C-ordered tensor; raises `InvalidMessage` for what cannot be a tensor."""
    if dtype not in ITEMSIZE:
        raise InvalidMessage(f"dtype {dtype[:64]!r} is not one that mmbroker carries: {', '.join(ITEMSIZE)}")
    if len(shape) > MAX_RANK:
        raise InvalidMessage(f"a shape of {len(shape)} axes exceeds the limit of {MAX_RANK}", limit=MAX_RANK)
    if any(n < 0 for n in shape):
        raise InvalidMessage(f"shape {tuple(shape)} has a negative axis")
    # An axis is checked for itself, because one of length 0 hides any other in the product.
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    if nbytes > MAX_NBYTES or any(n > MAX_NBYTES for n in shape):
        raise _too_large(f"{dtype} {tuple(shape)}", nbytes)
    return nbytes


def _too_large(what: str, nbytes: int) -> InvalidMessage:
    return InvalidMessage(
        f"{what} makes {nbytes} bytes; the limit for one feature, and for one axis, is {MAX_NBYTES}",
        limit=MAX_NBYTES,
    )


def tensor_form(dtype: str, shape: Sequence[int], modality: str) -> Form:
    """Form of one tensor."""
    return Form(dtype, tuple(shape), size_of(dtype, shape), modality)


def list_form(tensors: Sequence[tuple[str, Sequence[int]]], modality: str) -> Form:
    """Form of several tensors (dtype and shape of each) laid out one after the other."""
    parts: list[Part] = []
    end = 0
    for dtype, shape in tensors:
        offset = -(-end // PART_ALIGNMENT) * PART_ALIGNMENT
        parts.append(Part(dtype, tuple(shape), offset))
        end = offset + size_of(dtype, shape)
    if end > MAX_NBYTES:
        raise _too_large(f"a list of {len(parts)} tensors", end)
    return Form("list", (len(parts),), end, modality, tuple(parts))


def check_form(form: Form) -> None:
    """Raise `InvalidMessage` unless the form's sizes and offsets agree with each other."""
    if len(form.modality) > 64 or not form.modality.isprintable():
        raise InvalidMessage("a modality's name has at most 64 printable characters", limit=64)
    if form.parts is None:
        expected = tensor_form(form.dtype, form.shape, form.modality)
    else:
        expected = list_form([(p.dtype, p.shape) for p in form.parts], form.modality)
    if expected != form:
        raise InvalidMessage(
            f"the form does not add up: {form.dtype[:64]!r} of shape {str(form.shape)[:64]} was declared with "
            f"{form.nbytes} bytes, and makes {expected.nbytes}",
            declared=form.nbytes,
            computed=expected.nbytes,
        )
