"""New encoder outputs on their way into the broker: off the step's path, and within a budget.

A step only notes the tensor; a thread copies it. What would exceed the budget is not kept at all, and counted: the
next engine that needs it computes it, as it would have done anyway.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import mmbroker
from mmbroker.adapters.span import Span
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.keys import Key

from .fetching import Fetching
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
    """`written`: on a GPU, the event that tells when it is complete, else 0."""

    identifier: str
    tensor: Any
    written: int
    took: Took | None


class Saves:
    """`key`: of an identifier, None: it is not to be shared. `budget`: most bytes that wait. `fetching`: how they come
    from the GPU, None: they are on the host. One thread offers."""

    def __init__(
        self, key: Callable[[str], Key | None], budget: int, fetching: Fetching | None = None
    ) -> None:
        self._key = key
        self._budget = budget
        self._fetching = fetching
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
        try:
            plain = tensor.detach().contiguous()  # in the stream that wrote it
            written = 0 if self._fetching is None else self._fetching.mark(plain)
        except BrokerError as error:
            self._failed(error, 1)
            return
        self._offered += plain.nbytes
        self._waiting.append(Offer(identifier, plain, written, took))
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
                    self._failed(error, len(batch))
                self._ended += sum(offer.tensor.nbytes for offer in batch)
                del batch
        if self._fetching is not None:
            with suppress(BrokerError):  # the GPU is lost, and its memory with it
                self._fetching.close()

    def _failed(self, error: Exception, count: int) -> None:
        self.counts["save_errors"] += count
        if not isinstance(error, BrokerError):
            logger.error("mmbroker: encoder outputs could not be saved", exc_info=error)
        self._saying.count(f"{type(error).__name__}: {error}", count)

    def _put(self, batch: list[Offer]) -> None:
        keys: list[Key] = []
        tensors: list[Any] = []
        costs: list[int | None] = []
        try:
            for identifier, tensor, written, took in batch:
                key = self._key(identifier)
                if key is not None and key not in keys:
                    tensors.append(
                        self._fetching.fetch(tensor, written) if self._fetching and written else tensor
                    )
                    keys.append(key)
                    costs.append(None if took is None else took[0].micros(tensor.nbytes, took[1]))
        finally:
            for offer in batch:
                if self._fetching is not None and offer.written:
                    self._fetching.forget(offer.written)
        client = self._client()
        if client is None:
            self.counts["save_absent"] += len(keys)
        elif keys:
            options: Any = {"modality": MODALITY, "cost": costs, "timeout": _TIMEOUT}
            for held in client.put_many(tensors, keys=keys, **options):
                held.drop()  # it stays as a cache
            self.counts["saved"] += len(keys)
            self.counts["saved_bytes"] += sum(tensor.nbytes for tensor in tensors)
