"""The encoder ahead of the model: in a stream of its own, while the GPU still computes the batch before.

An encoder needs nothing of that batch. But SGLang runs it in the model's stream, and the host waits for that batch
before it launches the encoder, and again between its parts: the GPU rests at each batch's begin. Here what SGLang will
ask an encoder for is made before that, as soon as the batch is known. SGLang's own call finds it.

Not where several ranks share the work: their encoders talk to each other, which must not happen in two streams at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from . import measure, uses
from .settings import YES

logger = logging.getLogger(__name__)

#: How often it says that an encoder failed ahead, in seconds.
_COMPLAINT: Final = 60.0
#: SGLang captures the encoder's work in CUDA graphs; then it is left alone.
_GRAPHS: Final = "SGLANG_VIT_ENABLE_CUDA_GRAPH"


class Ahead:
    """Of one scheduler. `cached`: does SGLang's cache have what its encoder made of this item?"""

    def __init__(self, cached: Callable[[Any], bool]) -> None:
        self._cached = cached
        self._stream: Any = None
        self._next_complaint = 0.0

    def renew(self) -> None:
        """What the encoder reads, such as its weights, was changed in other streams."""
        self._stream = None

    def run(self, encoders: Mapping[Any, Any], batch: Sequence[tuple[Sequence[Any], int, int]]) -> None:
        """Make what will be asked for. `encoders`: by modality. `batch`: each request's items, how many tokens of it
        were computed before, and how many are now. If it fails, SGLang's own call tells why, or succeeds."""
        for modality, encoder in encoders.items():
            missing = list(self._missing(modality, batch))
            if not missing:
                continue
            try:
                encoder.prepare(missing, self)
                measure.counters.add("encoded_ahead", len(missing))
            except Exception as error:  # above all a GPU that is full
                measure.counters.add("ahead_failed", len(missing))
                self._complain(error)

    def _missing(self, modality: Any, batch: Iterable[tuple[Sequence[Any], int, int]]) -> Iterator[Any]:
        """As SGLang looks for them: items in what is computed now, each once."""
        seen = set()
        for items, prefix, extended in batch:
            mine = [item for item in items if item is not None and item.is_modality(modality=modality)]
            if any(len(item.offsets) != 1 or uses.late(item) is None for item in mine):
                continue  # they are encoded another way
            for item in mine:
                ((first, last),) = item.offsets
                there = last >= prefix and first < prefix + extended
                if there and item.hash not in seen and not self._cached(item):
                    seen.add(item.hash)
                    yield item

    @contextmanager
    def aside(self, device: Any) -> Iterator[None]:
        """In the stream for this, on a GPU."""
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        if self._stream is None:
            stream: Any = current
            while stream == current:  # torch has few, and gives them out in turn
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            self._stream = stream
        with torch.cuda.stream(self._stream):
            yield

    def join(self, tensor: torch.Tensor) -> None:
        """Let the current stream use a tensor that was made aside."""
        if tensor.is_cuda:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_complaint:
            self._next_complaint = now + _COMPLAINT
            logger.warning(
                "mmbroker: an encoder failed ahead of the model, and runs with it instead: %s", error
            )


def sensible(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether SGLang's encoders can be run like this in this process."""
    return environ.get(_GRAPHS, "").lower() not in YES
