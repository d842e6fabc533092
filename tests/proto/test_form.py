"""Forms: sizes are computed here, and nothing that a peer declares is believed."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.proto import messages as m
from mmbroker.proto.dtypes import ITEMSIZE
from mmbroker.proto.errors import InvalidMessage
from mmbroker.proto.form import (
    MAX_NBYTES,
    MAX_RANK,
    PART_ALIGNMENT,
    Form,
    Part,
    check_form,
    list_form,
    size_of,
    tensor_form,
)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_sizes(dtype: str) -> None:
    itemsize = ITEMSIZE[dtype]
    assert size_of(dtype, ()) == itemsize
    assert size_of(dtype, (3, 5)) == 15 * itemsize
    assert size_of(dtype, (3, 0, 5)) == 0
    assert size_of(dtype, (1,) * MAX_RANK) == itemsize


def test_a_huge_picture_is_a_number_until_somebody_allocates_it() -> None:
    assert tensor_form("float32", (12_000, 12_000, 3), "image").nbytes == 1_728_000_000


@pytest.mark.parametrize(
    "shape",
    [
        (1 << 40, 1 << 40),
        (1 << 32, 1 << 32),  # wraps to 0 in 64 bits
        (1 << 63, 2),
        (0, 1 << 63),  # no bytes, and still no tensor
        (1 << 64,),
        (1 << 48, 2),
        (MAX_NBYTES + 1,),
    ],
    ids=str,
)
def test_products_that_overflow_are_refused(shape: tuple[int, ...]) -> None:
    for build in (
        lambda: size_of("uint8", shape),
        lambda: tensor_form("uint8", shape, "image"),
        lambda: list_form([("uint8", shape)], "image"),
        lambda: check_form(Form("uint8", shape, 0)),
        lambda: check_form(Form("list", (1,), 0, parts=(Part("uint8", shape, 0),))),
    ):
        with pytest.raises(InvalidMessage, match=str(MAX_NBYTES)) as caught:
            build()
        m.encode(m.Failed("InvalidMessage", str(caught.value), caught.value.figures))  # it can be sent


def test_the_sum_of_a_list_is_limited_too() -> None:
    half = ("uint8", (MAX_NBYTES // 2,))
    assert list_form([half, half], "image").nbytes == MAX_NBYTES
    with pytest.raises(InvalidMessage, match="a list of 3 tensors"):
        list_form([half, half, ("uint8", (1,))], "image")


@pytest.mark.parametrize(
    ("dtype", "shape", "said"),
    [
        ("float33", (1,), "float33"),
        ("", (1,), "dtype"),
        ("torch.float32", (1,), "torch.float32"),
        ("list", (1,), "list"),
        ("uint8", (-1,), "negative"),
        ("uint8", (-1, -1), "negative"),
        ("uint8", (0, -1), "negative"),
        ("uint8", (1,) * (MAX_RANK + 1), "26 axes"),
    ],
)
def test_what_cannot_be_a_tensor(dtype: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        check_form(Form(dtype, shape, 1))


def test_parts_are_aligned_and_in_order() -> None:
    form = list_form(
        [("uint8", (3,)), ("float32", ()), ("int64", (0,)), ("bool", (PART_ALIGNMENT,))], "audio"
    )
    assert form.parts is not None
    assert [p.offset for p in form.parts] == [0, 256, 512, 512]
    assert (form.dtype, form.shape, form.nbytes, form.modality) == ("list", (4,), 768, "audio")
    check_form(form)


GOOD = list_form([("uint8", (3,)), ("float32", (2,))], "image")
P0, P1 = GOOD.parts or ()


@pytest.mark.parametrize(
    "form",
    [
        Form("uint8", (4,), 3),
        Form("uint8", (4,), 5),
        Form("uint8", (4,), -4),
        Form("uint8", (4,), 1 << 63),
        msgspec.structs.replace(GOOD, nbytes=GOOD.nbytes - 1),
        msgspec.structs.replace(GOOD, shape=(3,)),
        msgspec.structs.replace(GOOD, shape=()),
        msgspec.structs.replace(GOOD, dtype="uint8"),
        msgspec.structs.replace(GOOD, parts=(P1, P0)),
        msgspec.structs.replace(GOOD, parts=(P0,)),
        msgspec.structs.replace(GOOD, parts=()),
        msgspec.structs.replace(
            GOOD, parts=(P0, msgspec.structs.replace(P1, offset=0))
        ),  # overlaps the first
        msgspec.structs.replace(GOOD, parts=(P0, msgspec.structs.replace(P1, offset=-256))),
        msgspec.structs.replace(GOOD, parts=(P0, msgspec.structs.replace(P1, offset=1 << 40))),
    ],
    ids=str,
)
def test_a_form_that_does_not_add_up_is_refused(form: Form) -> None:
    with pytest.raises(InvalidMessage, match="add up") as caught:
        check_form(form)
    m.encode(m.Failed("InvalidMessage", str(caught.value), caught.value.figures))


def test_what_a_list_declares_is_told_in_printable_words() -> None:
    """A list's dtype and shape say nothing, so that only this refusal sees what was sent there."""
    parts = list_form([("uint8", (1,))], "image").parts
    for dtype, shape in (("\0\x1b[2J", (1,)), ("x" * 100_000, (1,)), ("list", (1,) * 50_000)):
        with pytest.raises(InvalidMessage, match="add up") as caught:
            check_form(Form(dtype, shape, 1, "image", parts))
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_modality_has_a_sensible_name() -> None:
    check_form(tensor_form("uint8", (1,), "m" * 64))
    for name in ("m" * 65, "\x1b[2J", "two\nlines"):
        with pytest.raises(InvalidMessage, match="64 printable"):
            check_form(tensor_form("uint8", (1,), name))


shapes = st.lists(st.integers(0, 1 << 10), max_size=4).map(tuple)  # six of the largest still fit one feature
tensors = st.tuples(st.sampled_from(sorted(ITEMSIZE)), shapes)


@given(tensors, st.lists(tensors, max_size=5))
def test_what_is_built_here_adds_up(
    one: tuple[str, tuple[int, ...]], many: list[tuple[str, tuple[int, ...]]]
) -> None:
    form = tensor_form(*one, "image")
    check_form(form)
    assert form.nbytes == math.prod(one[1]) * ITEMSIZE[one[0]]

    form = list_form(many, "image")
    check_form(form)
    end = 0
    for part, (dtype, shape) in zip(form.parts or (), many, strict=True):
        assert part.offset >= end and part.offset % PART_ALIGNMENT == 0
        end = part.offset + size_of(dtype, shape)
    assert end == form.nbytes


any_form = st.builds(
    Form,
    st.sampled_from([*sorted(ITEMSIZE), "list", "?"]),
    st.lists(st.integers(-2, 1 << 64), max_size=4).map(tuple),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(max_size=70),
    st.none()
    | st.lists(
        st.builds(
            Part,
            st.sampled_from(["uint8", "float32", "?"]),
            st.lists(st.integers(-1, 1 << 50), max_size=3).map(tuple),
            st.integers(-1, 1 << 50),
        ),
        max_size=3,
    ).map(tuple),
)


@given(any_form)
def test_any_form_is_right_or_refused(form: Form) -> None:
    try:
        check_form(form)
    except InvalidMessage as refusal:
        m.encode(m.Failed("InvalidMessage", str(refusal), refusal.figures))
    else:
        assert 0 <= form.nbytes <= MAX_NBYTES
