"""Content digests: SHA-256 over a canonical header and a tree hash of the bytes.

The header (format version, modality, dtype, shape, size, list structure) is length-prefixed and little-endian.
The bytes, in C order, are hashed in chunks of 1 MiB, so that a thread pool can share the work (hashlib releases the
GIL), and then over the chunks' digests. Leaves, root, lists and headers start with different prefix bytes, so that no
input of one level can be read as an input of another. Bytes are hashed, never converted values.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from .form import Form
from .keys import Digest

FORMAT_VERSION: Final = 1
CHUNK: Final = 1 << 20

_LEAF, _ROOT, _LIST, _HEADER = b"\x00", b"\x01", b"\x02", b"\x03"

#: Something like the built-in `map`; the client passes a thread pool's.
Mapper = Callable[[Callable[[memoryview], bytes], Iterable[memoryview]], Iterable[bytes]]


def _leaf(chunk: memoryview) -> bytes:
    h = hashlib.sha256(_LEAF)
    h.update(chunk)
    return h.digest()


def tree_hash(data: memoryview, mapper: Mapper = map) -> bytes:
    """32 bytes for a contiguous buffer of bytes (format ``B``)."""
    chunks = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    root = hashlib.sha256(_ROOT + struct.pack("<QQ", len(data), len(chunks)))
    for digest in mapper(_leaf, chunks):
        root.update(digest)
    return root.digest()


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def _tensor_header(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    return _text(dtype) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<Q", nbytes)


def content_digest(form: Form, tensors: Sequence[memoryview], mapper: Mapper = map) -> Digest:
    """Digest of a feature: its form, and its tensors' bytes in C order (one buffer, or one for each part)."""
    h = hashlib.sha256(_HEADER + struct.pack("<I", FORMAT_VERSION) + _text(form.modality))
    if form.parts is None:
        h.update(_tensor_header(form.dtype, form.shape, len(tensors[0])))
        h.update(tree_hash(tensors[0], mapper))
    else:
        h.update(_LIST + struct.pack("<I", len(form.parts)))
        for part, data in zip(form.parts, tensors, strict=True):
            h.update(_tensor_header(part.dtype, part.shape, len(data)))
            h.update(tree_hash(data, mapper))
    return Digest(h.digest())
