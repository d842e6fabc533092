"""How long an encoder takes, which is what its output is worth to a cache."""

from __future__ import annotations

import time
from typing import Any

import torch


class Span:
    """How long something takes where it runs; on a GPU it has only been enqueued when `stop` is called."""

    def __init__(self, device: Any) -> None:
        self._events: list[Any] | None = None
        self._start = time.perf_counter()
        self._seconds = 0.0
        if getattr(device, "type", "cpu") == "cuda":
            event: Any = torch.cuda.Event
            # Whoever waits for the end sleeps: the encoder takes milliseconds.
            self._events = [event(enable_timing=True, blocking=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> Span:
        if self._events is not None:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._start
        return self

    def seconds(self) -> float:
        """Waits until it is over. Not for the scheduler's thread."""
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3

    def micros(self, nbytes: int, of: int) -> int:
        """The share of `nbytes` in what made `of` bytes in all, in microseconds. Waits likewise."""
        return int(self.seconds() * 1e6 * nbytes / max(of, 1))
