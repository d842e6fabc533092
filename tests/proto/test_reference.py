"""References: what travels in the engine's request, and what is not taken for one."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.proto import PROTOCOL_VERSION, Reference, is_reference
from mmbroker.proto.errors import BrokerError, InvalidMessage, VersionMismatch
from mmbroker.proto.form import Part
from mmbroker.proto.reference import MARK

from .samples import BOOT, DIGEST, REF, REF_PARTS

NATIVE = (dict, list, str, bytes, int)


def leaves_are_native(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and leaves_are_native(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(leaves_are_native, value))
    return type(value) in NATIVE


@pytest.mark.parametrize("ref", [REF, REF_PARTS], ids=["one tensor", "a list"])
def test_a_reference_crosses_both_of_the_engines_channels(ref: Reference) -> None:
    wire = ref.to_wire()
    assert is_reference(wire) and leaves_are_native(wire)
    for arrived in (
        wire,
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire)),
        pickle.loads(pickle.dumps(wire)),
    ):
        back = Reference.from_wire(arrived)
        assert back == ref and hash(back) == hash(ref)
    assert pickle.loads(pickle.dumps(ref)) == ref


def test_a_reference_is_small() -> None:
    assert len(msgspec.msgpack.encode(REF.to_wire())) < 200


def test_from_wire_leaves_its_argument_alone() -> None:
    """Copies of an engine's item share the dict."""
    wire = REF.to_wire()
    Reference.from_wire(wire)
    assert wire == REF.to_wire()


@pytest.mark.parametrize("value", [None, 0, "x", b"x", [], {}, {"boot": BOOT}, {"shape": [1]}, REF], ids=repr)
def test_other_things_are_no_references(value: object) -> None:
    assert not is_reference(value)
    with pytest.raises(InvalidMessage, match=type(value).__name__):
        Reference.from_wire(value)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -1, "1", 1.0, True, None, [1], b"1"])
def test_another_version_is_named(version: object) -> None:
    with pytest.raises(VersionMismatch, match="version"):
        Reference.from_wire({**REF.to_wire(), MARK: version, "new": "field"})


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {5: 1},
        {b"hold": 1},
        {"hold": "7"},
        {"hold": 7.0},
        {"hold": True},
        {"hold": None},
        {"boot": "AAECAwQFBgcICQoLDA0ODw=="},  # its base64
        {"boot": BOOT[:15]},
        {"boot": BOOT + b"!"},
        {"digest": DIGEST[:8]},
        {"digest": DIGEST.hex()},
        {"shape": None},
        {"shape": "12"},
        {"shape": [1.5]},
        {"dtype": 3},
        {"parts": 1},
        {"parts": [["float32", [1]]]},
        {"parts": [["float32", [1], 0, "more"]]},
        {"parts": [{"dtype": "float32", "shape": [1], "offset": 0}]},
    ],
    ids=repr,
)
def test_forged_fields_are_refused(change: dict[Any, object]) -> None:
    with pytest.raises(InvalidMessage, match="not a reference"):
        Reference.from_wire({**REF.to_wire(), **change})


@pytest.mark.parametrize("name", [n for n in REF.to_wire() if n != MARK])
def test_every_field_is_needed(name: str) -> None:
    with pytest.raises(InvalidMessage, match=name):
        Reference.from_wire({k: v for k, v in REF.to_wire().items() if k != name})


numbers = st.integers(0, (1 << 63) - 1)
shapes = st.lists(st.integers(0, 1 << 48), max_size=5).map(tuple)
references = st.builds(
    Reference,
    st.binary(min_size=16, max_size=16),
    numbers,
    numbers,
    numbers,
    st.binary(min_size=32, max_size=32),
    st.text(),
    shapes,
    numbers,
    st.none() | st.lists(st.builds(Part, st.text(), shapes, numbers), max_size=3).map(tuple),
)


@given(references)
def test_round_trips(ref: Reference) -> None:
    assert Reference.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(ref.to_wire()))) == ref


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_in_any_field_is_read_or_refused(data: st.DataObject) -> None:
    wire = REF_PARTS.to_wire()
    wire[data.draw(st.sampled_from([*wire, "extra"]))] = data.draw(anything)
    try:
        assert isinstance(Reference.from_wire(wire), Reference)
    except BrokerError as refusal:
        assert type(refusal) in (InvalidMessage, VersionMismatch)
