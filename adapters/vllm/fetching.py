"""Encoder outputs from a GPU to the host: neither vLLM's thread nor its stream waits for a copy."""

from __future__ import annotations

import ctypes
import threading
from typing import Final

import torch

from mmbroker import cuda, path
from mmbroker.mapping import Mapping

#: Bytes that are copied at once: so much host memory is pinned for it.
_PIECE: Final = 4 << 20


class Fetching:
    """Of one GPU, which this process uses already. `mark` is for vLLM's thread; all else is for one other thread.

    Every call may raise `DriverError`.
    """

    def __init__(self, device: str) -> None:
        self._driver = cuda.open_driver()
        self._uuid = path.find(device)
        self._current_stream = self._driver.current_stream(self._uuid)
        self._here = threading.local()
        self._stream = self._copied = 0
        self._stage: Mapping | None = None

    def mark(self, tensor: torch.Tensor) -> int:
        """An event behind all that is in the current stream by now; 0: the tensor is not on this GPU, and complete."""
        self._use()
        if self._driver.home(tensor) != self._uuid:
            return 0
        event = self._driver.event()
        try:
            self._driver.record(event, self._current_stream())
        except BaseException:
            self._driver.destroy_event(event)
            raise
        return event

    def fetch(self, tensor: torch.Tensor, marked: int) -> torch.Tensor:
        """A contiguous tensor on the host, once it was complete. Waits, without the GIL."""
        stage = self._ready()
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._driver.synchronize(marked)
        for offset in range(0, tensor.nbytes, _PIECE):
            size = min(_PIECE, tensor.nbytes - offset)
            self._driver.copy(stage, tensor.data_ptr() + offset, size, self._stream)
            self._driver.record(self._copied, self._stream)
            self._driver.synchronize(self._copied)
            ctypes.memmove(host.data_ptr() + offset, stage, size)
        return host

    def forget(self, marked: int) -> None:
        """An event of `mark` is needed no more."""
        self._use()
        self._driver.destroy_event(marked)

    def close(self) -> None:
        """In the thread that fetched."""
        if self._stage is not None:
            self._driver.unpin(self._stage.address)
            self._stage = None
        if self._copied:
            self._driver.destroy_event(self._copied)
        if self._stream:
            self._driver.destroy_stream(self._stream)
        self._stream = self._copied = 0

    def _ready(self) -> int:
        """The stream, its event and the memory to copy to, each made once; where that memory is."""
        self._use()
        if not self._stream:
            self._driver.relaxed_capture()  # vLLM may be capturing graphs
            self._stream = self._driver.stream()
        if not self._copied:
            self._copied = self._driver.event()
        if self._stage is None:
            stage = Mapping.private(_PIECE)
            stage.view(0, _PIECE)  # brings its pages in
            self._driver.pin(stage.address, _PIECE)
            self._stage = stage
        return int(self._stage.address)

    def _use(self) -> None:
        if not getattr(self._here, "uses", False):
            self._driver.use(self._uuid)
            self._here.uses = True
