"""New encoder outputs on their way into the broker: off the step's path, and within a budget.

A step only notes the tensor; a thread copies it. What would exceed the budget is not kept at all, and counted: the
next engine that needs it computes it, as it would have done anyway.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import mmbroker
from mmbroker.adapters.span import Span
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.keys import Key

from .saying import Saying

logger = logging.getLogger("vllm.mmbroker")

#: How long the broker may take to find room, in seconds: it is a cache, and nobody waits for this one.
_TIMEOUT: Final = 2.0
#: Most outputs put in one call.
_BATCH: Final = 32
MODALITY: Final = "encoder output"

#: What the encoder took for so many bytes.
Took = tuple[Span, int]


class Offer(NamedTuple):
    """`written`: on a GPU, what tells when it is complete."""

    identifier: str
    tensor: Any
    written: Any
    took: Took | None


class Saves:
    """`key`: of an identifier, None: it is not to be shared. `budget`: most bytes that wait. One thread offers."""

    def __init__(self, key: Callable[[str], Key | None], budget: int) -> None:
        self._key = key
        self._budget = budget
        self._client: Callable[[], mmbroker.Client | None] = lambda: None
        self._waiting: deque[Offer] = deque()
        self._offered = self._ended = 0  # bytes so far: each is written by one thread
        self._bell = threading.Event()
        self._stop = False
        self._saying = Saying("encoder outputs were not saved")
        self._thread: threading.Thread | None = None
        self.counts = {
            "saved": 0,
            "saved_bytes": 0,
            "save_over_budget": 0,
            "save_absent": 0,
            "save_errors": 0,
        }

    def begin(self, client: Callable[[], mmbroker.Client | None]) -> None:
        """`client` gives the client that has a broker at this moment."""
        self._client = client
        self._thread = threading.Thread(target=self._run, name="mmbroker-saving", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Bytes that wait."""
        return self._offered - self._ended

    def offer(self, identifier: str, tensor: Any, took: Took | None = None) -> None:
        """Save a tensor that is not written any more. Never waits."""
        if self._client() is None:
            self.counts["save_absent"] += 1
            return
        if self.pending + tensor.nbytes > self._budget:
            self.counts["save_over_budget"] += 1
            self._saying.count(f"{self.pending} bytes wait already, and save_mib allows {self._budget}")
            return
        self._offered += tensor.nbytes
        self._waiting.append(Offer(identifier, tensor.detach(), _written(tensor), took))
        self._bell.set()

    def close(self) -> None:
        """What waits is put, as far as that takes no longer than one call."""
        self._stop = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(2 * _TIMEOUT)

    def _run(self) -> None:
        while not self._stop or self._waiting:
            self._bell.wait()
            if not self._stop:
                self._bell.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                try:
                    self._put(batch)
                except Exception as error:
                    self.counts["save_errors"] += len(batch)
                    if not isinstance(error, BrokerError):
                        logger.exception("mmbroker: encoder outputs could not be saved")
                    self._saying.count(f"{type(error).__name__}: {error}", len(batch))
                self._ended += sum(offer.tensor.nbytes for offer in batch)
                del batch

    def _put(self, batch: list[Offer]) -> None:
        keys: list[Key] = []
        tensors: list[Any] = []
        costs: list[int | None] = []
        for identifier, tensor, written, took in batch:
            key = self._key(identifier)
            if key is not None and key not in keys:
                if written is not None:
                    written.synchronize()
                keys.append(key)
                tensors.append(tensor)
                costs.append(None if took is None else took[0].micros(tensor.nbytes, took[1]))
        client = self._client()
        if client is None:
            self.counts["save_absent"] += len(keys)
        elif keys:
            options: Any = {"modality": MODALITY, "cost": costs, "timeout": _TIMEOUT}
            for held in client.put_many(tensors, keys=keys, **options):
                held.drop()  # it stays as a cache
            self.counts["saved"] += len(keys)
            self.counts["saved_bytes"] += sum(tensor.nbytes for tensor in tensors)


def _written(tensor: Any) -> Any:
    """On a GPU, what tells when the encoder has written it; None on the CPU, where it has."""
    if not tensor.is_cuda:
        return None
    import torch

    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
