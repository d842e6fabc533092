"""A plugin for SGLang that times the scheduler's loop: how long each turn takes in which a batch ran, and how long
Python's full garbage collections take there.

Copied into a directory of its own with the metadata of an installed distribution, so that SGLang loads it, whatever the
transport. It costs two clock readings a turn. Counts by length go into a mapped file that anybody may read.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

#: The directory where the files of counts go.
VARIABLE = "MMBROKER_BENCH_LOOPS"
#: Counts for each eighth of a doubling of nanoseconds.
_PARTS = 8
_BUCKETS = 64 * _PARTS
#: Behind them: how many full collections there were, and their nanoseconds.
_COLLECTIONS, _COLLECTING = _BUCKETS, _BUCKETS + 1
CELLS = _BUCKETS + 2
_SUFFIX = ".loops"


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    turns = _Turns()
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.get_next_batch_to_run", turns.begin, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.run_batch", turns.ran, HookType.AROUND)


class _Turns:
    """A turn is from one choice of a batch to the next: what came in between is received in it."""

    def __init__(self) -> None:
        self._cells: memoryview | None = None
        self._since = 0
        self._busy = False
        self._collecting = 0

    def begin(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter_ns()
        if self._busy:
            if self._cells is None:
                self._cells = _open()
                gc.callbacks.append(self._collected)
            self._cells[bucket(now - self._since)] += 1
        self._since, self._busy = now, False
        return original(*args, **kwargs)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter_ns()
        if phase == "start":
            self._collecting = now
        elif info["generation"] == 2 and self._cells is not None:
            self._cells[_COLLECTIONS] += 1
            self._cells[_COLLECTING] += now - self._collecting

    def ran(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._busy = True
        return original(*args, **kwargs)


def bucket(nanoseconds: int) -> int:
    """Which count a time belongs to."""
    if nanoseconds < _PARTS:
        return max(0, nanoseconds)
    power = nanoseconds.bit_length() - 1
    return power * _PARTS + ((nanoseconds >> (power - 3)) & (_PARTS - 1))


def length(index: int) -> float:
    """The middle of a bucket, in nanoseconds."""
    power, part = divmod(index, _PARTS)
    return float((1 << power) * (1 + (part + 0.5) / _PARTS))


def _open() -> memoryview:
    with open(Path(os.environ[VARIABLE], f"{os.getpid()}{_SUFFIX}"), "xb+") as file:
        file.write(bytes(8 * CELLS))
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), 8 * CELLS)).cast("Q")


def read(directory: Path) -> list[int]:
    """The counts of all schedulers together; see `turns` and `collections`."""
    total = [0] * CELLS
    for path in directory.glob(f"*{_SUFFIX}"):
        for index, count in enumerate(struct.unpack(f"{CELLS}Q", path.read_bytes())):
            total[index] += count
    return total


def turns(cells: list[int]) -> list[int]:
    """Turns by bucket."""
    return cells[:_BUCKETS]


def collections(before: list[int], after: list[int]) -> dict[str, float]:
    """Full garbage collections between two looks, and their milliseconds."""
    count, taken = (after[at] - before[at] for at in (_COLLECTIONS, _COLLECTING))
    return {"count": count, "ms": round(taken / 1e6, 1)}


def install(site: Path) -> None:
    """Make it a plugin of whoever has `site` in its PYTHONPATH."""
    metadata = site / "mmbroker_bench-0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(__file__, site / "mmbroker_bench_loops.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mmbroker-bench\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nmmbroker_loops = mmbroker_bench_loops:register\n"
    )
