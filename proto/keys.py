"""Keys: what a feature is found by.

A key is a kind and 32 bytes; the session adds the namespace. Kinds never match each other.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

KEY_BYTES = 32


class Kind(enum.IntEnum):
    """Where a key's 32 bytes come from."""

    CONTENT = 0  # the feature's own bytes and form (`mmbroker.proto.digest`)
    DERIVED = 1  # the media's bytes and everything that shapes the preprocessor's output
    CALLER = 2  # given by the caller


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A kind and 32 bytes."""

    kind: Kind
    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(self.value)}")

    @classmethod
    def content(cls, digest: bytes) -> Key:
        """The 32 bytes of `mmbroker.digest`."""
        return cls(Kind.CONTENT, bytes(digest))

    @classmethod
    def derived(cls, value: bytes) -> Key:
        """32 bytes that commit to everything that shapes the feature, such as a hash of the media, the model and all
        settings: of these only may a tier fetch what another machine has made."""
        return cls(Kind.DERIVED, value)

    @classmethod
    def caller(cls, name: bytes | str) -> Key:
        """A caller's own name; anything that is not 32 bytes already is hashed to 32."""
        raw = name.encode() if isinstance(name, str) else bytes(name)
        if isinstance(name, str) or len(raw) != KEY_BYTES:
            raw = hashlib.sha256(b"mmbroker caller key\0" + raw).digest()
        return cls(Kind.CALLER, raw)


class Digest(bytes):
    """The 32 bytes of a content key: plain bytes that remember which kind of key they are."""

    __slots__ = ()


def as_key(key: Key | bytes | str) -> Key:
    """A `Key` as it is, a `Digest` as a content key, any other bytes or text as a caller key."""
    if isinstance(key, Key):
        return key
    if isinstance(key, Digest):
        return Key.content(key)
    return Key.caller(key)
