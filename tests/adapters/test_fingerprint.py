"""Fingerprints and derived keys: equal for what is equal, anywhere; different for whatever differs."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.adapters.fingerprint import MAX_DEPTH, canonical, derived_key, fingerprint, versions
from mmbroker.proto.keys import Kind


class Colour(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Bounds:
    low: int
    high: int


@dataclasses.dataclass
class Others:
    low: int
    high: int


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([Colour.RED, Size.ONE])
)
hashable = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4)
        | st.frozensets(hashable, max_size=4)
    ),
    max_leaves=12,
)


def told_apart(value: object) -> object:
    """The value as something whose equality is equality of type and bits, by another way than the one tested."""
    if isinstance(value, enum.Enum):
        return "enum", type(value).__name__, told_apart(value.value)
    if isinstance(value, float):
        return "float", struct.pack("=d", value)
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(told_apart(child) for child in value)
    if isinstance(value, frozenset):
        return "set", frozenset(told_apart(child) for child in value)
    if isinstance(value, dict):
        return "dict", frozenset((told_apart(key), told_apart(child)) for key, child in value.items())
    return type(value).__name__, value


@given(values, values)
def test_two_values_share_their_bytes_only_if_they_are_one(a: object, b: object) -> None:
    assert (canonical(a) == canonical(b)) == (told_apart(a) == told_apart(b))


@given(values)
def test_a_value_never_begins_another(a: object) -> None:
    """So the concatenations within a list or a mapping can be read in one way only."""
    assert canonical([a, None]) != canonical([a]) + b"n"
    assert canonical([[a], []]) != canonical([[], [a]])


@given(st.dictionaries(st.text(max_size=8), values, min_size=2, max_size=6), st.randoms())
def test_order_of_insertion_does_not_count(parts: dict[str, object], random: object) -> None:
    names = list(parts)
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = {name: parts[name] for name in names}
    assert fingerprint(config=parts) == fingerprint(config=shuffled)
    assert fingerprint(a=1, b=parts) == fingerprint(b=shuffled, a=1)


def test_values_that_python_calls_equal_or_alike_differ() -> None:
    alike: list[object] = [
        1, 1.0, True, "1", b"1", Size.ONE, [1], (1,), {1}, {1: 1}, {"1": 1}, {1: 1.0}, Colour.RED, "red", 0.0, -0.0, 0,
        False, None, "", b"", [], (), {}, frozenset(), [[]], [None], math.nan, -math.nan, math.inf, 2**64, -(2**64),
        Bounds(1, 2), Others(1, 2), Bounds(2, 1), {"low": 1, "high": 2}, "\ud800", "\ufffd", "é", "e\u0301",
    ]  # fmt: skip
    assert len({fingerprint(part=value) for value in alike}) == len(alike)
    assert len({fingerprint(part=1), fingerprint(trap=1), fingerprint(part=1, trap=None)}) == 3


def test_what_has_no_canonical_form_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"parts\['config'\]\['hook'\]\[1\] is of type object"):
        fingerprint(config={"hook": [1, object()]})
    with pytest.raises(TypeError, match="of type type"):
        fingerprint(config=Bounds)
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
        fingerprint(config=cycle)


@given(st.lists(st.binary(max_size=40), max_size=4), st.lists(st.binary(max_size=40), max_size=4))
def test_contents_are_told_apart_from_their_concatenation(a: list[bytes], b: list[bytes]) -> None:
    mark = fingerprint(model="m")
    assert (derived_key(mark, *a) == derived_key(mark, *b)) == (a == b)


def test_a_derived_key_commits_to_the_fingerprint_and_the_content() -> None:
    one, other = fingerprint(max_pixels=1000), fingerprint(max_pixels=1001)
    key = derived_key(one, b"media")
    assert key.kind is Kind.DERIVED
    assert key == derived_key(one, bytearray(b"media")) == derived_key(one, memoryview(b"media"))
    assert len({key, derived_key(other, b"media"), derived_key(one, b"medium"), derived_key(one)}) == 4
    with pytest.raises(ValueError, match="32 bytes, this one 31"):
        derived_key(one[1:], b"media")


def test_ten_thousand_near_identical_settings_have_as_many_keys() -> None:
    keys = {
        derived_key(fingerprint(config={"min_pixels": low, "max_pixels": high}, detail=detail), picture)
        for low in range(25)
        for high in range(25)
        for detail in ("auto", "high", None, 0)
        for picture in (b"\x00" * 64, b"\x00" * 63, b"\x00" * 63 + b"\x01", b"")
    }
    assert len(keys) == 10_000


_IN_ANOTHER = """
from mmbroker.adapters.fingerprint import derived_key, fingerprint
config = {"sizes": {"a", "b", "c", (1, 2)}, "mean": [0.1, 0.2], "other": {"z": None, "a": True}}
print(derived_key(fingerprint(config=config, name="\u00e9"), b"media" * 1000).value.hex())
"""


def test_every_process_of_every_hash_seed_makes_the_same_key() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(found) == 1


def test_the_encoding_stays_what_it_is() -> None:
    """Another encoding needs another `FORMAT_VERSION`: brokers outlive the programs that made their keys."""
    parts = {
        "none": None,
        "numbers": [1, -2, 0.5, True],
        "text": ("é", b"\x00"),
        "map": {"b": {1}, "a": Bounds(1, 2)},
    }
    assert (
        derived_key(fingerprint(**parts), b"a", b"bc").value.hex()
        == "89aea1d00e1108c6a042598d601f65f0fdd106a9e756fc80a171f76027a82495"
    )


def test_versions_of_what_is_installed() -> None:
    found = versions("msgspec", "a-distribution-that-is-not-there")
    assert found["a-distribution-that-is-not-there"] is None
    assert found["msgspec"] and found["msgspec"][0].isdigit()
