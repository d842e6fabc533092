"""Derived keys: what a preprocessor's or an encoder's output is found by before it exists.

A derived key commits to the undecoded bytes of the media, and to a *fingerprint* of everything else that shapes the
output: the serialised configuration of processor and model, library versions, the options of the request. Who makes
one puts in everything that could matter. Something too much costs a miss; something too little gives wrong answers.

Nothing here knows an engine or a tensor library: an adapter turns dtypes, tensors and objects of its own into plain
values first. Equal values give equal bytes in every process, of every hash seed, in every order of insertion.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import metadata
from typing import Final

from mmbroker.proto.keys import Key

#: Changes with the encoding, so that keys of two encodings never meet.
FORMAT_VERSION: Final = 1
FINGERPRINT_BYTES: Final = 32
#: Deepest nesting of a part. What is deeper is taken for a cycle.
MAX_DEPTH: Final = 64

_FINGERPRINT, _KEY = b"mmbroker fingerprint\0", b"mmbroker derived key\0"


def fingerprint(**parts: object) -> bytes:
    """32 bytes for everything but the media that shapes an output, each part under a name.

    Parts are None, bool, int, float, str, bytes, enumeration members, and lists, tuples, sets, mappings and data
    classes of those. They are told apart by type and by bits: 1, 1.0, True and "1" differ, and so do 0.0 and -0.0, a
    list and a tuple. Raises `TypeError` for anything else, by its place.
    """
    h = hashlib.sha256(_FINGERPRINT + _length(FORMAT_VERSION))
    h.update(canonical(parts))
    return h.digest()


def derived_key(fingerprint: bytes, *content: bytes | bytearray | memoryview) -> Key:
    """The key of the output that media with these bytes give under this fingerprint.

    Several `content` are told apart from their concatenation. They are hashed with the GIL released, in a single pass;
    call it in a thread. Raises `ValueError` if `fingerprint` is not 32 bytes.
    """
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, this one {len(fingerprint)}")
    h = hashlib.sha256(_KEY + _length(FORMAT_VERSION) + fingerprint + _length(len(content)))
    for data in content:
        h.update(_length(memoryview(data).nbytes))
        h.update(data)
    return Key.derived(h.digest())


def versions(*packages: str) -> dict[str, str | None]:
    """The installed version of each distribution, None for one that is absent: parts of a fingerprint."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def canonical(value: object) -> bytes:
    """A value as bytes, type first and length before content, so that two values never share them."""
    return _encode(value, "parts", 0)


def _encode(value: object, place: str, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise ValueError(
            f"{place[:200]}... is nested deeper than {MAX_DEPTH}, or holds itself: give plain values"
        )

    def inner(child: object, where: object) -> bytes:
        return _encode(child, f"{place}[{where!r}]", depth + 1)

    match value:
        case None:
            return b"n"
        case Enum():  # before the plain types, that a member may be of as well
            return _some(b"e", [_class(value), inner(value.value, "value")])
        case bool():
            return b"t" if value else b"f"
        case int():
            return _sized(b"i", b"%d" % value)
        case float():
            return b"d" + struct.pack(">d", value)
        case str():
            return _sized(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray() | memoryview():
            return _sized(b"b", bytes(value))
        case list() | tuple():
            tag = b"l" if isinstance(value, list) else b"u"
            return _some(tag, [inner(child, index) for index, child in enumerate(value)])
        case set() | frozenset():
            return _some(b"z", sorted(inner(child, "member") for child in value))
        case Mapping():
            return _some(b"m", sorted(inner(key, "key") + inner(child, key) for key, child in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _some(b"c", [_class(value), inner(fields, "fields")])
    raise TypeError(
        f"{place} is of type {type(value).__qualname__}, which has no canonical form: give plain values"
    )


def _class(value: object) -> bytes:
    return _sized(b"s", f"{type(value).__module__}.{type(value).__qualname__}".encode())


def _length(count: int) -> bytes:
    return struct.pack(">Q", count)


def _sized(tag: bytes, data: bytes) -> bytes:
    return tag + _length(len(data)) + data


def _some(tag: bytes, encoded: Iterable[bytes]) -> bytes:
    children = list(encoded)
    return tag + _length(len(children)) + b"".join(children)
