"""Keys: a kind and 32 bytes, and kinds never match each other."""

from __future__ import annotations

import copy
import pickle

import pytest

from mmbroker.proto import Digest, Key, Kind, as_key

RAW = bytes(range(32))


def test_kinds_never_match() -> None:
    keys = {Key.content(RAW), Key.derived(RAW), Key.caller(RAW)}
    assert len(keys) == 3
    assert {key.value for key in keys} == {RAW}


@pytest.mark.parametrize("nbytes", [0, 31, 33])
@pytest.mark.parametrize("kind", [Kind.CONTENT, Kind.DERIVED])
def test_a_key_has_thirty_two_bytes(kind: Kind, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"32 bytes, this one {nbytes}"):
        Key(kind, b"k" * nbytes)


def test_names_become_caller_keys() -> None:
    names: list[bytes | str] = ["", "a", "b", b"", b"a", b"c", b"x" * 31, b"x" * 33, "x" * 32, b"x" * 32]
    keys = [Key.caller(name) for name in names]
    assert {key.kind for key in keys} == {Kind.CALLER}
    assert Key.caller("a") == Key.caller(b"a")  # one name, however it is spelt
    assert len(set(keys)) == len(names) - 2
    assert Key.caller(b"x" * 32).value == b"x" * 32  # 32 bytes are a key already
    assert Key.caller("x" * 32).value != b"x" * 32  # 32 letters are a name


def test_written_down_caller_key() -> None:
    assert (
        Key.caller("a name").value.hex() == "55d50da1f32b272cfb75d0a7b73a6f33652fd1bc67c142c8c444727190696846"
    )


@pytest.mark.parametrize("data", [bytearray(RAW), memoryview(RAW)])
def test_buffers_are_taken_by_value(data: bytearray | memoryview) -> None:
    key = as_key(data)  # type: ignore[arg-type]
    assert key == Key.caller(RAW)
    assert hash(key) == hash(Key.caller(RAW))


def test_as_key() -> None:
    assert as_key(Key.derived(RAW)) == Key.derived(RAW)
    assert as_key(Digest(RAW)) == Key.content(RAW)
    assert as_key(RAW) == Key.caller(RAW)
    assert as_key("a") == Key.caller("a")


def test_a_digest_is_bytes_that_stay_a_digest() -> None:
    digest = Digest(RAW)
    assert digest == RAW and digest.hex() == RAW.hex() and hash(digest) == hash(RAW)
    for twin in (copy.copy(digest), copy.deepcopy(digest), pickle.loads(pickle.dumps(digest))):
        assert as_key(twin) == Key.content(RAW)
    with pytest.raises(ValueError, match="32 bytes"):
        as_key(Digest(RAW[:8]))
