"""Equal content has one key, everywhere; anything else has another."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import hashing
from mmbroker.proto.digest import content_digest
from mmbroker.proto.errors import DigestConflict
from mmbroker.proto.form import list_form, tensor_form
from tests.rig import DTYPES, VIEWS, Rig, a_rig, same, values


def keys(things: list[torch.Tensor]) -> set[bytes]:
    return {mmbroker.digest(thing) for thing in things}


# --- what must differ -----------------------------------------------------------------------------------------------


def test_forms_of_the_same_bytes() -> None:
    """Turned pictures, other channels, other splits: all have the same bytes."""
    raw = torch.arange(30 * 100 * 12, dtype=torch.uint8)
    shapes = [
        (30, 100, 12),
        (100, 30, 12),
        (30, 100, 3, 4),
        (30, 100, 4, 3),
        (36000,),
        (1, 36000),
        (36000, 1),
    ]
    assert len(keys([raw.view(shape) for shape in shapes])) == len(shapes)


def test_dtypes_of_the_same_bytes() -> None:
    raw = values(torch.uint8, (64,), seed=3) & 1
    seen = keys([raw.view(dtype) for dtype in DTYPES])
    assert len(seen) == len(DTYPES)


def test_lists_of_the_same_bytes() -> None:
    raw = torch.arange(24)
    splits = [[24], [12, 12], [8, 16], [16, 8], [0, 24], [24, 0], [0, 0, 24]]
    seen = {mmbroker.digest(list(torch.split(raw, split))) for split in splits}
    assert len(seen | {mmbroker.digest(raw)}) == len(splits) + 1


def test_palettes_with_equal_indices() -> None:
    """A picture that is an index and a palette, as a list: both count."""
    index = torch.zeros(4, 4, dtype=torch.uint8)
    palettes = [torch.full((3,), n, dtype=torch.uint8) for n in (1, 2)]
    assert mmbroker.digest([index, palettes[0]]) != mmbroker.digest([index, palettes[1]])


def test_values_that_a_conversion_would_merge() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    different: list[torch.Tensor] = [
        torch.tensor(70000, dtype=torch.bfloat16),
        torch.tensor(80000, dtype=torch.bfloat16),
        *nan.unbind(),
        torch.tensor(0.0),
        torch.tensor(-0.0),
    ]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        different += torch.arange(256).to(torch.uint8).view(dtype).unbind()
    assert len(keys(different)) == len(different)


def test_engineered_changes() -> None:
    """Blocks that are swapped, permuted, or masked alike: a mixing function would not notice."""
    generator = random.Random(0)
    block = 1 << 10
    data = bytearray(generator.randbytes(8 * block))
    contents = {bytes(data)}
    for _ in range(5000):
        i, j = generator.sample(range(8), 2)
        swapped = bytearray(data)
        swapped[i * block : (i + 1) * block] = data[j * block : (j + 1) * block]
        swapped[j * block : (j + 1) * block] = data[i * block : (i + 1) * block]
        masked = bytearray(data)
        mask = generator.randbytes(16)
        for at in (i, j):
            for k, bit in enumerate(mask):
                masked[at * block + k] ^= bit
        contents |= {bytes(swapped), bytes(masked)}
        data = swapped
    assert len({mmbroker.digest(torch.frombuffer(bytearray(c), dtype=torch.uint8)) for c in contents}) == len(
        contents
    )


def test_swapped_chunks_of_the_tree() -> None:
    """The order of the chunks that are hashed apart counts."""
    first, second = values(torch.uint8, (1 << 20,), seed=1), values(torch.uint8, (1 << 20,), seed=2)
    assert mmbroker.digest(torch.cat([first, second])) != mmbroker.digest(torch.cat([second, first]))


# --- what must not differ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_how_the_memory_lies_does_not_matter(view: str) -> None:
    tensor = VIEWS[view](values(torch.float32, (4, 6)))
    assert mmbroker.digest(tensor) == mmbroker.digest(
        tensor.detach().clone(memory_format=torch.contiguous_format)
    )


def test_every_entry_point_gives_one_key(readonly: Rig) -> None:
    """The function, a put, a list's put, a lease under the digest, and the wire's own hashing of raw bytes."""
    client = readonly.client
    tensor = values(torch.float32, (30, 150))
    raw = content_digest(tensor_form("float32", (30, 150), "image"), [memoryview(tensor.numpy()).cast("B")])
    with client.put(tensor) as held, client.put_many([tensor, tensor.t()])[0] as again:
        assert held.digest == again.digest == mmbroker.digest(tensor) == raw
        hit = client.get_or_create(mmbroker.digest(tensor), (30, 150), torch.float32)
        assert isinstance(hit, mmbroker.Hit)
        hit.held.drop()
    parts = [tensor, tensor]
    form = list_form([("float32", (30, 150))] * 2, "image")
    with client.put_list(parts) as held:
        raw = content_digest(form, [memoryview(tensor.numpy()).cast("B")] * 2)
        assert held.digest == mmbroker.digest(parts) == raw


PROGRAM = """
import torch, mmbroker
x = torch.arange(3_000_000, dtype=torch.int32)
print(mmbroker.digest(x).hex(), mmbroker.digest([x, x.t().clone()]).hex(), mmbroker.digest(x.bfloat16(), "audio").hex())
"""


def test_every_process_finds_the_same_key() -> None:
    """Whatever the hash seed, the address, and the number of hashing threads."""
    x = torch.arange(3_000_000, dtype=torch.int32)
    expected = [mmbroker.digest(x), mmbroker.digest([x, x]), mmbroker.digest(x.bfloat16(), "audio")]
    for seed, threads in (("0", "1"), ("1", "2"), ("random", "4")):
        environment = {"PYTHONHASHSEED": seed, "MMBROKER_HASH_THREADS": threads, "PATH": ""}
        out = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
        ).stdout
        assert [bytes.fromhex(text) for text in out.decode().split()] == expected


@pytest.mark.parametrize("threads", ["1", "2", "3", "nonsense"])
def test_the_number_of_hashing_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    tensor = values(torch.uint8, ((5 << 20) + 17,))
    expected = content_digest(tensor_form("uint8", tensor.shape, "image"), [tensor.numpy().data])
    monkeypatch.setenv("MMBROKER_HASH_THREADS", threads)
    pool = hashing.HashPool()
    monkeypatch.setattr(hashing, "pool", pool)
    try:
        assert mmbroker.digest(tensor) == expected
    finally:
        if pool._pool is not None:
            pool._pool.shutdown()


# --- keys in the broker ---------------------------------------------------------------------------------------------


def test_keys_that_differ_in_one_bit_are_different_features(readonly: Rig) -> None:
    base = bytes(32)
    names = [base] + [bytes(32 - 1 - i) + b"\x01" + bytes(i) for i in range(32)]
    tensors = [torch.tensor([n]) for n in range(len(names))]
    held = readonly.client.put_many(tensors, keys=names, to="a")
    for one, tensor in zip(held, tensors, strict=True):
        with readonly.table.take(one.ref) as use:
            assert same(use.tensor, tensor)
        one.drop()


def test_kinds_never_match_each_other(readonly: Rig) -> None:
    value = mmbroker.digest(torch.arange(77))
    with readonly.client.put(torch.arange(77)):
        assert readonly.client.lookup(bytes(value)) is None  # a caller's key
        assert readonly.client.lookup(mmbroker.Key.derived(bytes(value))) is None
        found = readonly.client.lookup(value)
        assert found is not None
        found.drop()


@pytest.mark.parametrize(
    "other",
    [torch.arange(6, dtype=torch.int64), torch.ones(6), torch.ones(3, 2, dtype=torch.int32), torch.ones(7)],
    ids=["dtype and size", "dtype", "shape", "both"],
)
def test_the_first_form_under_a_key_stays(readonly: Rig, other: Any) -> None:
    first = torch.arange(6, dtype=torch.int32)
    with readonly.client.put(first, key="form", to="a") as held:
        with pytest.raises(DigestConflict):
            readonly.client.put(other, key="form", to="a")
        with pytest.raises(DigestConflict):
            readonly.client.get_or_create("form", other.shape, other.dtype)
        with pytest.raises(DigestConflict):
            readonly.client.put(first, key="form", modality="audio")
        with readonly.table.take(held.ref) as use:
            assert same(use.tensor, first)


def test_the_same_picture_a_hundred_times_is_one_copy() -> None:
    with a_rig("readonly") as rig:
        tensor = torch.randn(100, 100)
        held = [rig.client.put(tensor, to="a") for _ in range(100)]
        status = rig.broker.status()
        assert status["features"] == 1
        assert (rig.client.stats()["leases"], rig.client.stats()["hits"]) == (1, 99)
        assert len({one.ref.hold for one in held}) == 100
        assert len({one.ref.feature for one in held}) == 1
        for one in held:
            with rig.table.take(one.ref) as use:
                assert same(use.tensor, tensor)
            one.drop()


def test_hashing_needs_no_second_copy() -> None:
    """64 MiB are hashed with less than 8 MiB more."""
    program = """
import re, torch, mmbroker
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
mmbroker.digest(torch.ones(3 << 20))
x = torch.ones(16 << 20)
before = peak()
mmbroker.digest(x)
print(peak() - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert int(out) < 8 << 10


KEYS = [None, "a name", b"n" * 32, mmbroker.Key.derived(b"d" * 32), mmbroker.Key.content(b"c" * 32)]


@pytest.mark.parametrize("key", KEYS, ids=["its content", "text", "32 bytes", "derived", "a content key"])
def test_what_a_hold_says_finds_its_feature(rig: Rig, key: Any) -> None:
    """However it was found or made: its key always, its digest wherever a digest alone says which key is meant."""
    tensor = values(torch.float32, (3, 5), seed=77)
    with rig.client.put(tensor, key=key) as put:
        out = rig.client.get_or_create(put.key, (3, 5), torch.float32)
        found = rig.client.lookup(put.key)
        assert out.held is not None and found is not None
        assert put.key == out.held.key == found.key
        assert put.ref.feature == out.held.ref.feature == found.ref.feature
        for held in (put, out.held, found):
            again = rig.client.lookup(held.digest)
            if held.key.kind.name == "DERIVED":
                assert again is None and not isinstance(held.digest, mmbroker.Digest)
            else:
                assert again is not None and again.ref.feature == put.ref.feature
                assert isinstance(held.digest, mmbroker.Digest) == (held.key.kind.name == "CONTENT")
                again.drop()
        out.held.drop()
        found.drop()


def test_what_a_sealed_lease_holds_is_found_by_what_it_says(rig: Rig) -> None:
    tensor = values(torch.float32, (3, 5), seed=78)
    with rig.client.get_or_create(mmbroker.digest(tensor), (3, 5), torch.float32).lease as lease:
        lease.tensor.copy_(tensor)
        held = lease.seal()
    again = rig.client.lookup(held.digest)
    assert again is not None and again.ref.feature == held.ref.feature
    held.drop()
    again.drop()
