"""References: what travels inside the engine's own request in place of a tensor."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .errors import InvalidMessage, VersionMismatch, plain
from .form import Part

#: Version of the wire: messages and references. A peer of another version is refused by name.
PROTOCOL_VERSION: Final = 1
BOOT_BYTES: Final = 16
#: The field by which a dict is known to be a reference; its value is the protocol version.
MARK: Final = "mmbroker"


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names one hold on one feature. It points at nothing by itself: a table compares it with its entry.

    `hold`, `feature` and `generation` are 64-bit numbers that are never reused within one life of the broker (`boot`,
    16 bytes). `digest` is the 32 bytes of the feature's key. `shape` counts elements, `nbytes` bytes. Equal references
    are equal and hash alike; pickling one is safe anywhere.
    """

    boot: bytes
    hold: int
    feature: int
    generation: int
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parts: tuple[Part, ...] | None = None

    def to_wire(self) -> dict[str, Any]:
        """A dict of msgpack-native values; `from_wire` is its inverse."""
        wire: dict[str, Any] = {
            MARK: PROTOCOL_VERSION,
            "boot": self.boot,
            "hold": self.hold,
            "feature": self.feature,
            "generation": self.generation,
            "digest": self.digest,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
        }
        if self.parts is not None:
            wire["parts"] = [[p.dtype, list(p.shape), p.offset] for p in self.parts]
        return wire

    @staticmethod
    def from_wire(wire: object) -> Reference:
        """Raises `InvalidMessage` for what is no reference, `VersionMismatch` for another version's."""
        if not is_reference(wire):
            raise InvalidMessage(f"not a reference: {type(wire).__name__} without the field {MARK!r}")
        fields = dict(wire)  # type: ignore[call-overload]
        version = fields.pop(MARK)
        if type(version) is not int or version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the reference has protocol version {plain(repr(version))}, this side speaks {PROTOCOL_VERSION}: "
                "install the same mmbroker everywhere"
            )
        try:
            ref = msgspec.convert(fields, Reference, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise InvalidMessage(f"not a reference: {plain(error)}") from None
        if len(ref.boot) != BOOT_BYTES or len(ref.digest) != 32:
            raise InvalidMessage("not a reference: boot has 16 bytes and digest 32")
        return ref


def is_reference(value: object) -> bool:
    """Is this a reference on the wire? Looks at the mark only."""
    return isinstance(value, dict) and MARK in value
