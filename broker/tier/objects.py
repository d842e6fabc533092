"""What a feature is in the store: one object, a header and then the bytes as they lie in a slot.

The header has a place of fixed size, so that it is read before anything is known of the feature, and so that the bytes
after it go from network to slot in one piece. It holds the feature's key and form, what was sealed beside it, what it
costs to make, when it was stored and for how long, and the tree hash of the bytes; and it has a digest of its own. All
of it is checked before a feature is sealed: whatever does not fit is `Altered`.

That proves that nothing was changed by accident on the way. It is no signature: whoever may write to the store may
write what he likes.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final
from urllib.parse import quote

import msgspec

from mmbroker.proto.errors import InvalidMessage
from mmbroker.proto.form import Form, check_form
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import MAX_EXTRA

#: The place of a header, in bytes; the feature's own bytes follow at this offset.
HEADER: Final = 8192
#: Version of what is described here, and the first part of every name.
FORMAT: Final = "mmb1"
_FRAME: Final = struct.Struct("<8sI32s")  # magic, length of the body, SHA-256 of the body
_MAGIC: Final = b"mmbtier1"


class Altered(Exception):
    """An object is not what was stored. The message says in what."""


class TooLarge(Exception):
    """A header does not fit into its place: the feature has too many parts."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cost`: microseconds to make it again; `digest`: `proto.digest.tree_hash` of the bytes; `made`: seconds since the
    epoch; `ttl`: for how many seconds from then on it may be served, None: for ever."""

    key: Key
    form: Form
    extra: bytes
    cost: int | None
    digest: bytes
    made: float
    ttl: float | None = None

    def expired(self, now: float) -> bool:
        """`now`: seconds since the epoch."""
        return self.ttl is not None and now >= self.made + self.ttl


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def name_of(namespace: str, key: Key) -> str:
    """The object's name in the store."""
    return f"{prefix_of(namespace)}{key.kind.name.lower()}/{key.value.hex()}"


def prefix_of(namespace: str) -> str:
    """What the names of all objects of a namespace begin with, and no others."""
    return f"{FORMAT}/{quote(namespace, safe='')}/"


def encode(header: Header) -> bytes:
    """`HEADER` bytes. Raises `TooLarge`."""
    body = _encoder.encode(header)
    if _FRAME.size + len(body) > HEADER:
        raise TooLarge(
            f"the header of a feature of {len(header.form.parts or ())} parts takes {len(body)} bytes, and has "
            f"{HEADER - _FRAME.size}"
        )
    return (_FRAME.pack(_MAGIC, len(body), hashlib.sha256(body).digest()) + body).ljust(HEADER, b"\0")


def decode(data: bytes | memoryview, key: Key) -> Header:
    """The header of the object that is stored for `key`. Raises `Altered`."""
    if len(data) != HEADER:
        raise Altered(f"a header of {len(data)} bytes, not {HEADER}")
    magic, length, digest = _FRAME.unpack_from(data)
    if magic != _MAGIC or length > HEADER - _FRAME.size:
        raise Altered("no header of this version")
    body = bytes(data[_FRAME.size : _FRAME.size + length])
    if hashlib.sha256(body).digest() != digest:
        raise Altered("the header is not the one that was stored")
    try:
        header = _decoder.decode(body)
        check_form(header.form)
    except (msgspec.MsgspecError, InvalidMessage, ValueError, OverflowError, RecursionError) as error:
        raise Altered(f"the header makes no sense: {error}") from None
    if header.key != key:
        raise Altered("the object was stored under another key")
    if len(header.extra) > MAX_EXTRA or (header.cost is not None and header.cost < 0):
        raise Altered("what was stored beside the feature exceeds its limits")
    return header
