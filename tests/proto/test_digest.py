"""Content digests: equal for equal content everywhere, different for anything else."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.proto.digest import CHUNK, content_digest, tree_hash
from mmbroker.proto.dtypes import ITEMSIZE
from mmbroker.proto.form import Form, list_form, tensor_form
from mmbroker.proto.keys import Digest


def digest(dtype: str, shape: tuple[int, ...], data: bytes, modality: str = "image") -> Digest:
    return content_digest(tensor_form(dtype, shape, modality), [memoryview(data)])


def digest_list(tensors: list[tuple[str, tuple[int, ...], bytes]], modality: str = "image") -> Digest:
    form = list_form([(dtype, shape) for dtype, shape, _ in tensors], modality)
    return content_digest(form, [memoryview(data) for _, _, data in tensors])


def pattern(nbytes: int) -> bytes:
    return bytes(itertools.islice(itertools.cycle(range(251)), nbytes))


# Written down once: a key computed by any version, library or machine has to stay the same key.
VECTORS: dict[str, tuple[Digest, str]] = {
    "one tensor": (
        digest("float32", (2, 3), pattern(24)),
        "2fe35bfd0f393ac9bcf218369445780ce0bac5dea2d7e008ded09cc08d95fcc4",
    ),
    "no dimensions": (
        digest("int64", (), pattern(8)),
        "f4dd40b613343d693d463ff91c8a4790da7d9226210f5de61c7920009b922e17",
    ),
    "no bytes": (
        digest("float16", (0, 7), b""),
        "8f78e1010a6e7e72cc017af5bc37c0bca7476715a1c3b1d09c2ca4339a38f74c",
    ),
    "two chunks and a bit": (
        digest("uint8", (2 * CHUNK + 3,), pattern(2 * CHUNK + 3), "video"),
        "93a65a5df766df877a5ff78dcd98d117f8a6fbf8b4724de63fbdb2aa15008dd3",
    ),
    "a list": (
        digest_list([("bfloat16", (2,), pattern(4)), ("bool", (3,), b"\0\1\1")], "audio"),
        "b51e332e649055a713c54c2fcf5dcb3887d165e9df9fb66a9074e39dc423a65c",
    ),
    "an empty list": (
        digest_list([]),
        "3b1b2b9dc2fa5a888ddba9521f0bd2a7e0a4eb4d98585d12d179699ccc358df1",
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_written_down_digests(name: str) -> None:
    computed, written = VECTORS[name]
    assert computed.hex() == written
    assert isinstance(computed, Digest)


def by_the_book(data: bytes) -> bytes:
    """The tree hash as its description says, written without the code under test."""
    leaves = [hashlib.sha256(b"\x00" + data[i : i + 1048576]).digest() for i in range(0, len(data), 1048576)]
    counts = len(data).to_bytes(8, "little") + len(leaves).to_bytes(8, "little")
    return hashlib.sha256(b"\x01" + counts + b"".join(leaves)).digest()


@pytest.mark.parametrize(
    "nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK + 5]
)
def test_the_tree_at_its_chunks_boundaries(nbytes: int) -> None:
    assert tree_hash(memoryview(pattern(nbytes))) == by_the_book(pattern(nbytes))


def test_a_whole_digest_by_the_book() -> None:
    def text(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    data, other = pattern(24), pattern(3)
    head = b"\x03" + struct.pack("<I", 1) + text(b"image")
    tensor = text(b"float32") + struct.pack("<I2QQ", 2, 2, 3, 24) + by_the_book(data)
    assert digest("float32", (2, 3), data) == hashlib.sha256(head + tensor).digest()

    second = text(b"bool") + struct.pack("<I1QQ", 1, 3, 3) + by_the_book(other)
    both = digest_list([("float32", (2, 3), data), ("bool", (3,), other)])
    assert both == hashlib.sha256(head + b"\x02" + struct.pack("<I", 2) + tensor + second).digest()


def test_threads_change_nothing() -> None:
    data = memoryview(random.Random(1).randbytes(5 * CHUNK + 17))
    with ThreadPoolExecutor(4) as pool:
        assert tree_hash(data, pool.map) == tree_hash(data)


def test_every_process_computes_the_same_key() -> None:
    """Whatever its hash seed."""
    code = (
        "from mmbroker.proto import content_digest; from mmbroker.proto.form import tensor_form;"
        "print(content_digest(tensor_form('uint8', (4,), 'image'), [memoryview(b'abcd')]).hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }
    assert keys == {digest("uint8", (4,), b"abcd").hex()}


# --- nothing else has the same key ----------------------------------------------------------------------------------


def test_the_form_is_part_of_the_key() -> None:
    """Transposed, other channels, other type, other modality: the same bytes, and six and more different keys."""
    data = pattern(36_000)
    keys = {
        digest("uint8", (30, 100, 12), data),
        digest("uint8", (100, 30, 12), data),
        digest("uint8", (30, 150, 8), data),
        digest("uint8", (150, 30, 8), data),
        digest("uint8", (100, 120, 3), data),  # RGB
        digest("uint8", (100, 90, 4), data),  # RGBA
        digest("uint8", (36_000,), data),
        digest("uint8", (36_000, 1), data),
        digest("uint8", (1, 36_000), data),
        digest("int8", (36_000,), data),
        digest("bool", (36_000,), data),
        digest("uint8", (36_000,), data, "audio"),
        digest("float32", (9_000,), data),
        digest("int32", (9_000,), data),
    }
    assert len(keys) == 14


@pytest.mark.parametrize("itemsize", sorted(set(ITEMSIZE.values())))
def test_every_dtype_has_keys_of_its_own(itemsize: int) -> None:
    names = [name for name, size in ITEMSIZE.items() if size == itemsize]
    assert len({digest(name, (16,), pattern(16 * itemsize)) for name in names}) == len(names)


def test_empty_tensors_are_told_apart() -> None:
    shapes = [(0,), (0, 0), (0, 1), (1, 0), (0, 7)]
    keys = {digest(dtype, shape, b"") for dtype in ("float32", "float16") for shape in shapes}
    assert len(keys) == 2 * len(shapes)


def test_how_a_list_is_split_is_part_of_the_key() -> None:
    data = pattern(12)
    one = [digest("uint8", (12,), data), digest_list([("uint8", (12,), data)])]
    splits = [digest_list([("uint8", (n,), data[:n]), ("uint8", (12 - n,), data[n:])]) for n in range(13)]
    three = digest_list([("uint8", (4,), data[i : i + 4]) for i in (0, 4, 8)])
    assert len({*one, *splits, three}) == 16


@pytest.mark.parametrize(
    ("dtype", "size", "patterns"),
    [
        (
            "bfloat16",
            2,
            [0x4789, 0x479C, 0x7F80],
        ),  # about 70,000 and 80,000, and infinity: all infinite in float16
        ("float32", 4, [0x7FC00000, 0x7FC00001, 0x7F800001, 0xFFC00000]),  # one NaN after the other
        ("float32", 4, [0x00000000, 0x80000000]),  # +0 and -0
        ("float64", 8, [0x7FF8000000000000, 0x7FF8000000000001]),
        ("float8_e4m3fn", 1, [0x7F, 0xFF, 0x00, 0x80]),
        ("float8_e5m2", 1, [0x7C, 0x7D, 0x7E, 0x7F]),
    ],
)
def test_bytes_are_hashed_not_values(dtype: str, size: int, patterns: list[int]) -> None:
    raw = [p.to_bytes(size, "little") for p in patterns]
    assert len({digest(dtype, (1,), r) for r in raw}) == len(raw)
    assert [digest(dtype, (1,), bytearray(r)) for r in raw] == [digest(dtype, (1,), r) for r in raw]


def test_both_kinds_of_fp8_differ() -> None:
    assert digest("float8_e4m3fn", (4,), b"\0\1\2\3") != digest("float8_e5m2", (4,), b"\0\1\2\3")


def test_ten_thousand_engineered_variants_differ() -> None:
    """Blocks swapped, permuted, or changed by one mask in two places: what simple mixing functions fall for."""
    rng = random.Random(15)
    block, blocks = 16, 64
    base = bytearray(rng.randbytes(block * blocks))
    seen = {bytes(base): digest("uint8", (len(base),), base)}
    while len(seen) < 10_000:
        data = bytearray(base)
        i, j = (block * k for k in rng.sample(range(blocks), 2))
        way = rng.randrange(3)
        if way == 0:
            data[i : i + block], data[j : j + block] = data[j : j + block], data[i : i + block]
        elif way == 1:
            mask = rng.randrange(1, 256)
            for at in (i, j):
                data[at] ^= mask
        else:
            order = rng.sample(range(blocks), blocks)
            data = bytearray(b"".join(base[block * k : block * (k + 1)] for k in order))
        seen[bytes(data)] = digest("uint8", (len(data),), data)
    assert len(set(seen.values())) == len(seen)


def test_chunks_swapped_across_their_boundary_differ() -> None:
    rng = random.Random(4)
    a, b = rng.randbytes(CHUNK), rng.randbytes(CHUNK)
    shape = (2 * CHUNK,)
    assert digest("uint8", shape, a + b) != digest("uint8", shape, b + a)


forms = st.builds(
    lambda dtype, shape, modality: tensor_form(dtype, tuple(shape), modality),
    st.sampled_from(sorted(ITEMSIZE)),
    st.lists(st.integers(0, 3), max_size=4),
    st.text(max_size=8),
)


@given(forms, forms, st.binary(max_size=8), st.binary(max_size=8))
def test_keys_are_equal_just_when_form_and_bytes_are(
    one: Form, two: Form, seed1: bytes, seed2: bytes
) -> None:
    data = [
        (seed * form.nbytes)[: form.nbytes].ljust(form.nbytes, b"\0")
        for form, seed in ((one, seed1), (two, seed2))
    ]
    keys = [content_digest(form, [memoryview(d)]) for form, d in zip((one, two), data, strict=True)]
    assert (keys[0] == keys[1]) == ((one, data[0]) == (two, data[1]))
