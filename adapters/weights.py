"""Which weights a model has, whoever has copied them where: what keys of encoder outputs need to mean the same on
several machines.

By default weights are told by their files' places and ages, which costs nothing and makes a copy another model. With
``MMBROKER_WEIGHTS_BY=content`` they are told by their bytes. Each file is read whole once, before the engine serves;
what came of it is remembered by the file's place, size and ages, so the next start reads nothing. Outputs are shared
with machines of the same kinds of processors only, because others round differently.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from mmbroker.cuda.driver import DriverError, NoDriver
from mmbroker.cuda.nvml import Nvml

logger = logging.getLogger(__name__)

WEIGHTS_BY: Final = "MMBROKER_WEIGHTS_BY"
_WAYS: Final = ("files", "content")
#: Files that are read at once.
_READERS: Final = 4


class Changed(OSError):
    """A file was written while it was read."""


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """What a file was when it was read, and the SHA-256 of its bytes."""

    age: tuple[int, int, int, int, int]
    digest: str


_decoder = msgspec.json.Decoder(dict[str, _Known])


def by_content(environ: Mapping[str, str] = os.environ) -> bool:
    """Was it asked for? Raises `ValueError` that names the variable for anything but its two values."""
    way = environ.get(WEIGHTS_BY) or _WAYS[0]
    if way not in _WAYS:
        raise ValueError(f"{WEIGHTS_BY}={way!r}: it is 'files' or 'content'")
    return way == _WAYS[1]


def contents(paths: Sequence[Path], environ: Mapping[str, str] = os.environ) -> list[tuple[str, bytes]]:
    """Name and SHA-256 of each file, in order. Reads those that it does not know, which takes a second for a GiB or
    two, in threads; processes that ask at once wait for the first. Raises `OSError`, `Changed`."""
    with _memory(environ) as known:
        ages = {path: _age(path) for path in paths}
        unread = [
            path
            for path in paths
            if str(path.resolve()) not in known or known[str(path.resolve())].age != ages[path]
        ]
        if unread:
            nbytes = sum(ages[path][2] for path in unread)
            logger.info(
                "mmbroker: %d MiB of weights are read once, to be known by their content", nbytes >> 20
            )
        with ThreadPoolExecutor(_READERS) as pool:
            for path, digest in zip(unread, pool.map(_digest, unread), strict=True):
                if _age(path) != ages[path]:
                    raise Changed(f"{path} was written while it was read")
                known[str(path.resolve())] = _Known(ages[path], digest)
        return [(path.name, bytes.fromhex(known[str(path.resolve())].digest)) for path in paths]


def kinds() -> list[str]:
    """The kinds of processors here, on which it depends how an encoder rounds."""
    found = {platform.machine()}
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        found |= {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    with suppress(NoDriver, DriverError):
        found |= {device.name for device in Nvml().existing()}
    return sorted(found)


def _age(path: Path) -> tuple[int, int, int, int, int]:
    """What changes with every write to a file, and with every other file in its place."""
    is_ = path.stat()
    return is_.st_dev, is_.st_ino, is_.st_size, is_.st_mtime_ns, is_.st_ctime_ns


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _memory(environ: Mapping[str, str]) -> Iterator[dict[str, _Known]]:
    """What is known of files, for one process at a time; written back if it has grown. Without a place to remember,
    every start reads everything."""
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = Path(home) / "mmbroker" / "weights.json"
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(place.with_suffix(".lock"), "w")  # noqa: SIM115
    except OSError as error:
        logger.warning("mmbroker: what is read of weights is not remembered: %s", error)
        yield {}
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known: dict[str, _Known] = {}
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            known = _decoder.decode(place.read_bytes())
        before = dict(known)
        yield known
        if known != before:
            with suppress(OSError):
                _replace(place, msgspec.json.encode(known))


def _replace(place: Path, data: bytes) -> None:
    """A file is there whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, place)
