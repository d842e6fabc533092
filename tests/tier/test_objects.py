"""What is read from the store is what was stored, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.proto.dtypes import ITEMSIZE
from mmbroker.proto.form import Form, list_form, tensor_form
from mmbroker.proto.keys import Key, Kind
from mmbroker.tier.objects import HEADER, Altered, Header, TooLarge, decode, encode, name_of, prefix_of

SHAPES = st.lists(st.integers(0, 64), max_size=4)
TENSORS = st.tuples(st.sampled_from(sorted(ITEMSIZE)), SHAPES)
FORMS = TENSORS.map(lambda t: tensor_form(t[0], t[1], "image")) | st.lists(TENSORS, max_size=12).map(
    lambda tensors: list_form(tensors, "audio")
)
KEYS = st.builds(Key, st.sampled_from(list(Kind)), st.binary(min_size=32, max_size=32))
HEADERS = st.builds(
    Header,
    key=KEYS,
    form=FORMS,
    extra=st.binary(max_size=4096),
    cost=st.none() | st.integers(0, 1 << 62),
    digest=st.binary(min_size=32, max_size=32),
    made=st.floats(0, 1e12),
    ttl=st.none() | st.floats(0, 1e9),
)
A_KEY = Key.derived(bytes(range(32)))


def a_header(form: Form | None = None, **fields: Any) -> Header:
    given = {"extra": b"beside", "cost": 7, "digest": bytes(32), "made": 100.0, "ttl": 10.0, **fields}
    return Header(A_KEY, form or tensor_form("float32", (3, 5), "image"), **given)


@given(HEADERS)
def test_a_header_comes_back(header: Header) -> None:
    data = encode(header)
    assert len(data) == HEADER
    assert decode(data, header.key) == header


@given(HEADERS, st.data())
def test_one_byte_that_differs_is_noticed(header: Header, data: st.DataObject) -> None:
    stored = bytearray(encode(header))
    used = len(bytes(stored).rstrip(b"\0"))
    place = data.draw(st.integers(0, used - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Altered):
        decode(stored, header.key)


@given(st.binary(max_size=HEADER) | st.binary(min_size=HEADER, max_size=HEADER))
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(Altered):
        decode(data, A_KEY)


def test_an_object_is_one_keys() -> None:
    with pytest.raises(Altered, match="another key"):
        decode(encode(a_header()), Key.derived(bytes(32)))
    with pytest.raises(Altered, match="another key"):
        decode(encode(a_header()), Key.content(A_KEY.value))


@pytest.mark.parametrize(
    "header",
    [
        a_header(form=Form("float32", (3, 5), 61)),
        a_header(form=Form("float33", (3, 5), 60)),
        a_header(extra=bytes(4097)),
        a_header(cost=-1),
    ],
)
def test_what_makes_no_sense_is_refused_though_it_is_whole(header: Header) -> None:
    with pytest.raises(Altered):
        decode(encode(header), A_KEY)


def test_a_feature_of_too_many_parts_is_not_stored() -> None:
    with pytest.raises(TooLarge, match="1000 parts"):
        encode(a_header(form=list_form([("float32", (3, 5))] * 1000, "image")))


def test_time_to_live() -> None:
    assert [a_header().expired(now) for now in (0.0, 109.9, 110.0, 1e9)] == [False, False, True, True]
    assert not a_header(ttl=None).expired(1e12)


@given(st.text(), st.text(), KEYS)
def test_namespaces_are_kept_apart(one: str, other: str, key: Key) -> None:
    assert name_of(one, key).startswith(prefix_of(one))
    if one != other:
        assert name_of(one, key) != name_of(other, key)
        assert not name_of(one, key).startswith(prefix_of(other))


def test_names() -> None:
    assert name_of("team/a", A_KEY) == f"mmb1/team%2Fa/derived/{bytes(range(32)).hex()}"
