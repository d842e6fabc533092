"""Weights by their content: each file is read once, and read again as soon as it may be another one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmbroker.adapters import weights
from mmbroker.adapters.weights import contents


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were read whole, in order."""
    names: list[str] = []
    digest = weights._digest

    def counted(path: Path) -> str:
        names.append(path.name)
        return digest(path)

    monkeypatch.setattr(weights, "_digest", counted)
    return names


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def files(directory: Path, **content: bytes) -> list[Path]:
    directory.mkdir(exist_ok=True)
    for name, data in content.items():
        (directory / name).write_bytes(data)
    return [directory / name for name in content]


def test_files_are_read_once(tmp_path: Path, read: list[str], cache: dict[str, str]) -> None:
    paths = files(tmp_path / "model", a=b"one", b=b"two")
    expected = [("a", hashlib.sha256(b"one").digest()), ("b", hashlib.sha256(b"two").digest())]
    for _ in range(3):
        assert contents(paths, cache) == expected
    assert sorted(read) == ["a", "b"]
    assert contents(paths[1:], cache) == expected[1:] and len(read) == 2


def _write(path: Path) -> None:
    path.write_bytes(b"new")


def _write_and_set_back(path: Path) -> None:
    is_ = path.stat()
    path.write_bytes(b"new")
    os.utime(path, ns=(is_.st_atime_ns, is_.st_mtime_ns))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"new")
    os.replace(other, path)


@pytest.mark.parametrize("change", [_write, _write_and_set_back, _replace])
def test_a_file_that_may_be_another_is_read_again(
    tmp_path: Path, read: list[str], cache: dict[str, str], change: Callable[[Path], None]
) -> None:
    paths = files(tmp_path / "model", a=b"old", b=b"two")
    contents(paths, cache)
    change(paths[0])
    assert contents(paths, cache)[0] == ("a", hashlib.sha256(b"new").digest())
    assert sorted(read) == ["a", "a", "b"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_memory_is_none(
    tmp_path: Path, read: list[str], cache: dict[str, str], data: bytes
) -> None:
    paths = files(tmp_path / "model", a=b"one")
    first = contents(paths, cache)
    place = tmp_path / "cache" / "mmbroker" / "weights.json"
    assert list(json.loads(place.read_bytes())) == [str(paths[0])]
    place.write_bytes(data)
    assert contents(paths, cache) == first and read == ["a", "a"]
    assert contents(paths, cache) == first and read == ["a", "a"]


def test_without_a_place_to_remember_everything_is_read(
    tmp_path: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    paths = files(tmp_path / "model", a=b"one")
    for _ in range(2):
        assert contents(paths, {"XDG_CACHE_HOME": str(paths[0])})[0][0] == "a"
    assert read == ["a", "a"] and "is not remembered" in caplog.text


def test_a_file_that_is_written_while_it_is_read(
    tmp_path: Path, cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = files(tmp_path / "model", a=b"one")
    digest = weights._digest

    def slow(path: Path) -> str:
        found = digest(path)
        path.write_bytes(b"another")
        return found

    monkeypatch.setattr(weights, "_digest", slow)
    with pytest.raises(weights.Changed, match="was written while it was read"):
        contents(paths, cache)
    monkeypatch.undo()
    assert contents(paths, cache) == [("a", hashlib.sha256(b"another").digest())]


def test_who_asks_at_the_same_time_waits_for_the_first(
    tmp_path: Path, read: list[str], cache: dict[str, str]
) -> None:
    paths = files(tmp_path / "model", a=b"one")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: contents(paths, cache), range(8)))
    assert found == [found[0]] * 8 and read == ["a"]


@pytest.mark.parametrize(
    ("value", "asked"), [(None, False), ("", False), ("files", False), ("content", True)]
)
def test_asked_for(value: str | None, asked: bool) -> None:
    assert weights.by_content({} if value is None else {weights.WEIGHTS_BY: value}) is asked


def test_a_value_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"MMBROKER_WEIGHTS_BY='hash': it is 'files' or 'content'"):
        weights.by_content({weights.WEIGHTS_BY: "hash"})


def test_kinds_are_the_same_each_time() -> None:
    assert weights.kinds() == weights.kinds() != []
