"""Counters of one process: what its thread paid, and how its features went.

They live in a mapped file when `MMBROKER_MEASURE` names a directory, so that whoever reads it sees them as they are, at
any time, and after the process was killed; otherwise in memory. Every counter is a whole number; times are nanoseconds.

`MMBROKER_MEASURE` also counts and times SGLang's own path, without a change in what it does: so the two transports can
be compared, and a test can tell that SGLang's own was never taken.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: Why a feature went SGLang's own way. A closed list, so that each has a counter from the start.
REASONS: Final = (
    "late",
    "absent",
    "unresponsive",
    "not_attached",
    "lagging",
    "full",
    "too_large",
    "refused",
    "failed",
)

#: In the tokenizer's process.
PRODUCER: Final = (
    "requests",  # that carried at least one reference
    "features",  # put or found in the broker
    "bytes",
    "put_on_device",  # from the GPU to the GPU
    "through_host",  # on the GPU, and there was no room for them, or no way
    "put_ns",  # from the request's arrival at the seam until its references were there, summed over requests
    "derived",  # 1 if the processor has derived keys
    "content",  # 1 if it has content keys only
    "derived_hits",  # pictures that were neither decoded nor preprocessed here
    "derived_made",  # pictures that were, and were promised to others
    "derived_failed",  # requests whose pictures could not be asked for or put by derived keys
    "foreign",  # values that are no tensors: passed on untouched
    "holds",
    "dropped",
    "outputs_found",  # what an encoder made of a feature, put by whichever engine
    *(f"fallback_{reason}" for reason in REASONS),
)
#: In a scheduler's process. The times are the scheduler thread's own.
CONSUMER: Final = (
    "inputs",  # requests with multimodal inputs, either transport
    "inputs_ns",  # from a request's inputs as received to inputs with tensors and hashes, either transport
    "items",
    "takes",
    "releases",
    "encoded",  # features that an encoder read, of those that are read late; with MMBROKER_MEASURE of SGLang's, too
    "moved",  # of these, copied to the encoder's device by the thread that runs it
    "misses",
    "errors",  # requests failed by this plugin
    "outputs_used",  # in place of a run of the encoder
    "outputs_given",  # to an item that waited for the encoder, when an equal one's was put
    "outputs_refused",  # found, but not fit to be used: the encoder ran
    "outputs_offered",  # to other engines
    "outputs_dropped",  # for want of budget
    "outputs_published",
    "outputs_failed",  # to be published
)
#: SGLang's own transport, either process; counted only with MMBROKER_MEASURE.
ENGINE: Final = (
    "hash_calls",
    "hash_ns",
    "shm_wrap_calls",  # a tensor copied into a segment
    "shm_wrap_ns",
    "shm_open_calls",  # a segment opened while a request was unpickled
    "shm_open_ns",
    "shm_read_calls",  # a tensor made from an open segment
    "shm_read_ns",
    "reconstruct_calls",
    "reconstruct_ns",
)
NAMES: Final = (*PRODUCER, *CONSUMER, *ENGINE)

_INDEX: Final = {name: index for index, name in enumerate(NAMES)}
_HEADER: Final = 4096


class Counters:
    """One cell for each of `NAMES`. Each counter is written by one thread; any process may read."""

    def __init__(self, directory: str | None = None, role: str = "") -> None:
        nbytes = 8 * len(NAMES)
        self._cells: memoryview
        if directory is None:
            self._cells = memoryview(bytearray(nbytes)).cast("Q")
            return
        header = json.dumps({"role": role, "pid": os.getpid(), "names": NAMES}).encode()
        path = Path(directory, f"{role}-{os.getpid()}.counters")
        with open(path, "xb+") as file:
            file.write(header.ljust(_HEADER) + bytes(nbytes))
            file.flush()
            mapping = mmap.mmap(file.fileno(), _HEADER + nbytes)
        self._cells = memoryview(mapping)[_HEADER:].cast("Q")

    def add(self, name: str, value: int = 1) -> None:
        self._cells[_INDEX[name]] += value

    def read(self) -> dict[str, int]:
        return dict(zip(NAMES, self._cells, strict=True))


def read(directory: str | os.PathLike[str]) -> dict[str, dict[str, int]]:
    """All counters in a directory, by role (``tokenizer``, ``scheduler-0``, ...); processes of one role are summed."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(Path(directory).glob("*.counters")):
        data = path.read_bytes()
        if len(data) <= _HEADER:
            continue  # just being made
        header = json.loads(data[:_HEADER])
        counts = found.setdefault(header["role"], dict.fromkeys(NAMES, 0))
        for name, value in zip(header["names"], memoryview(data)[_HEADER:].cast("Q"), strict=True):
            counts[name] = counts.get(name, 0) + value
    return found


def told() -> dict[str, int]:
    """The counters that have counted something, as a client tells them to its broker."""
    return {f"sglang_{name}": value for name, value in counters.read().items() if value}


#: The counters of this process. Replaced once, by `open_counters`, before anything is counted.
counters = Counters()


def open_counters(directory: str | None, role: str) -> None:
    """Make this process's counters visible, if anybody wants to see them."""
    global counters
    if directory is not None:
        fresh = Counters(directory, role)
        for name, value in counters.read().items():
            fresh.add(name, value)
        counters = fresh


def timed(calls: str, spent: str) -> Callable[..., Any]:
    """An AROUND hook that counts a function's calls and the time in them."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return original(*args, **kwargs)
        finally:
            counters.add(calls)
            counters.add(spent, time.perf_counter_ns() - start)

    return hook


def inputs_hook(original: Callable[..., Any], scheduler: Any, mm_inputs: Any) -> Any:
    """AROUND `Scheduler._get_multimodal_inputs`, where the broker's own hook does not stand."""
    start = time.perf_counter_ns()
    try:
        return original(scheduler, mm_inputs)
    finally:
        counters.add("inputs_ns", time.perf_counter_ns() - start)
        counters.add("inputs")
        counters.add("items", len(getattr(mm_inputs, "mm_items", ())))
