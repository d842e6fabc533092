"""How much memory may still be allocated here, and whose limit says so.

Over the memory limit of a control group, filling a memfd does not fail: the kernel kills. So the limits are read
before memory is taken: what the machine has available, and every group from this process's own up to the root, in both
versions of control groups. Of each, a margin is left alone. Page cache counts as free: the kernel gives it up on
demand.

`machine` is where ``/proc`` and ``/sys`` are found: the root directory, or a copy of the files that matter. None means
`MACHINE`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from mmbroker.proto.errors import BrokerError

MIB: Final = 1 << 20
MACHINE: Final = Path("/")
#: Above this, a group's limit means that there is none (version 1 writes a huge number).
_UNLIMITED: Final = 1 << 60


class MemoryLimit(BrokerError):
    """Memory was not taken because a limit is too near. The message names the limit, and what is free under it."""


class Limit(NamedTuple):
    """One limit: its name as a fragment of a sentence, its size and what is free under it, in bytes."""

    name: str
    total: int
    free: int

    @property
    def headroom(self) -> int:
        """Free bytes beside the margin: a sixteenth of the limit, at least 16 and at most 256 MiB."""
        return max(0, self.free - min(max(self.total // 16, 16 * MIB), 256 * MIB))


def headroom(machine: Path | None = None) -> tuple[int, str]:
    """Bytes that may still be allocated, and the name of the tightest limit."""
    tightest = min(limits(machine), key=lambda limit: limit.headroom)
    return tightest.headroom, tightest.name


def check(nbytes: int, machine: Path | None = None) -> None:
    """Raise `MemoryLimit` unless `nbytes` more may be allocated."""
    for limit in limits(machine):
        if nbytes > limit.headroom:
            raise MemoryLimit(
                f"{limit.name} leaves {limit.headroom} bytes beside the margin (of {limit.total}), "
                f"{nbytes} more were wanted: raise that limit, or free memory under it",
                requested=nbytes,
                free=limit.headroom,
                limit=limit.total,
            )


def limits(machine: Path | None = None) -> Iterator[Limit]:
    """Every limit that applies to this process: the machine's, then the groups', from its own upwards."""
    machine = machine or MACHINE
    meminfo = _numbers(machine / "proc/meminfo", unit=1024)
    yield Limit("the machine's available memory", meminfo["MemTotal:"], meminfo["MemAvailable:"])
    for version, mount, group in _groups(machine):
        path = group
        while True:
            directory = machine / str(mount / path).lstrip("/")
            if (limit := _read_group(directory, version, "/" + "/".join(path.parts))) is not None:
                yield limit
            if path == path.parent:
                break
            path = path.parent


def _groups(machine: Path) -> Iterator[tuple[int, Path, Path]]:
    """Version, mount point and group (relative to the mount point) of each hierarchy that limits memory."""
    mine: dict[int, str] = {}
    for line in _text(machine / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mine[2] = path
        elif "memory" in controllers.split(","):
            mine[1] = path
    for line in _text(machine / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version not in mine:
            continue
        # What a mount shows starts at `root`. A container may see its own group as the mount's root, or not at all.
        path = mine[version]
        inner = path[len(root) :] if root != "/" and path.startswith(root) else path
        group = Path(inner.lstrip("/"))
        if ".." in group.parts or not (machine / str(mount / group).lstrip("/")).is_dir():
            group = Path()
        yield version, Path(mount), group


def _read_group(directory: Path, version: int, name: str) -> Limit | None:
    """A group's limit; None if it has none, or vanished."""
    stat = _numbers(directory / "memory.stat")
    if version == 2:
        bounds = [_number(directory / file) for file in ("memory.max", "memory.high")]
        used, prefix = _number(directory / "memory.current"), ""
        dirty = stat.get("file_dirty", 0) + stat.get("file_writeback", 0)
    else:
        bounds = [_number(directory / "memory.limit_in_bytes")]
        used, prefix = _number(directory / "memory.usage_in_bytes"), "total_"
        dirty = stat.get("total_dirty", 0) + stat.get("total_writeback", 0)
    bound = min((bound for bound in bounds if bound is not None), default=_UNLIMITED)
    if used is None or bound >= _UNLIMITED:
        return None
    cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
    return Limit(f"the memory limit of control group {name}", bound, bound - used + max(0, cache - dirty))


def _text(path: Path) -> str:
    """A file's text; nothing if it is not there (any more)."""
    try:
        return path.read_text()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EACCES):
            return ""
        raise


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """A file of lines ``name number ...``."""
    fields = (line.split() for line in _text(path).splitlines())
    return {name: int(value) * unit for name, value, *_ in fields}
