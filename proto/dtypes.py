"""Our own table of dtypes: the names that go into keys and onto the wire, and their sizes.

The names never change, so that a key computed by any version, library or device stays the same key.
"""

from __future__ import annotations

from typing import Final

#: Bytes per element, by name.
ITEMSIZE: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

#: Those that torch and numpy both have, and what numpy writes for them. Named here, because what numpy knows by these
#: names is not the same everywhere: `ml_dtypes`, which engines' libraries import, teaches it bfloat16 and others, which
#: torch refuses.
TYPESTR: Final[dict[str, str]] = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
