"""What an encoder made of an item, as a feature: used in place of a run of the encoder, and offered to other engines.

The tokenizer looks for it under a key that names the feature and the encoder (`identity`), once the feature itself is
in the broker; what it found travels in the request, and the scheduler takes it with the feature. It is read where the
encoder would have run, and copied there, because SGLang caches what the encoder gives for longer than the request
lasts. If it does not fit, the encoder runs.

What the encoder did make is offered by the first of the ranks that made it: the scheduler's thread notes the tensor,
and a thread of its own puts it. Never much at once: what is over the budget is dropped, and counted. From a GPU it goes
to the host's memory, where it outlasts the features that come and go on the device; it is a fraction of their size.

Requests queue for seconds, so an item may be waiting for the encoder when its output is put for another one that is
equal. It is given the output then: the encoder runs once for all that wait.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import torch

import mmbroker
from mmbroker.adapters.span import Span
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.keys import Key

from . import measure

logger = logging.getLogger(__name__)

#: Most bytes that are noted and not put yet.
_BUDGET: Final = 64 << 20
#: Most bytes a second, beyond a budget's worth at once.
_RATE: Final = 256 << 20
#: Most outputs that are put at once.
_MOST: Final = 16
#: How long a put may wait for room, in seconds: requests wait for the same.
_PATIENCE: Final = 0.2


class Offer(NamedTuple):
    """A tensor to be put. `span`: the time that the encoder took for it and `of` bytes in all."""

    key: bytes
    tensor: torch.Tensor
    modality: str
    span: Span
    of: int


class Outputs:
    """Of one scheduler. `client`: what it has joined a broker with, if it has. `offers`: is it the one that offers?

    `engine`: its engine, if this is the only rank of it; others would have to agree on what comes late. `table`: its
    table, if it has joined.
    """

    def __init__(
        self,
        client: Callable[[], mmbroker.Client | None],
        offers: bool,
        engine: str = "",
        table: Callable[[], mmbroker.FeatureTable | None] = lambda: None,
    ) -> None:
        self._client = client
        self._offers = offers
        self._engine = engine
        self._table = table
        #: By key, those that had to be made when their request arrived. The scheduler adds, the thread takes.
        self._waiting: dict[bytes, list[weakref.ref[Output]]] = {}
        self._current = True
        self._queue: SimpleQueue[Offer] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None  # the thread's, on a GPU
        self._offered = self._done = 0  # bytes; the first is the scheduler's own, the second the thread's
        self._allowed = float(_BUDGET)
        self._looked = time.monotonic()

    @property
    def current(self) -> bool:
        """Is the encoder the one that the keys name?"""
        return self._current

    def weights_changed(self) -> None:
        """Keys name the weights that the engine was started with: nothing is used or offered any more."""
        if self._current:
            self._current = False
            logger.warning("mmbroker: new weights; encoder outputs are no longer shared with other engines")

    def wait(self, output: Output) -> None:
        """Give it what is made of an equal item, once that is put."""
        if self._engine and self._offers and self._current:
            key = output.key
            self._waiting.setdefault(key, []).append(weakref.ref(output, partial(self._forget, key)))

    def _forget(self, key: bytes, gone: weakref.ref[Output]) -> None:
        waiting = self._waiting.get(key, [])
        with suppress(ValueError):
            waiting.remove(gone)
        if not waiting:
            self._waiting.pop(key, None)

    def offer(self, key: bytes, tensor: torch.Tensor, modality: str, span: Span, of: int) -> None:
        """Note what the encoder made. Never waits."""
        if not (self._offers and self._current):
            return
        measure.counters.add("outputs_offered")
        now = time.monotonic()
        self._allowed = min(float(_BUDGET), self._allowed + (now - self._looked) * _RATE)
        self._looked = now
        if tensor.nbytes > min(self._allowed, _BUDGET - (self._offered - self._done)):
            measure.counters.add("outputs_dropped")
            return
        self._allowed -= tensor.nbytes
        self._offered += tensor.nbytes
        self._queue.put(Offer(key, tensor, modality, span, of))
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish, name="mmbroker-outputs", daemon=True)
            self._thread.start()

    def _publish(self) -> None:
        while True:
            batch = [self._queue.get()]
            with suppress(Empty):  # each put takes turns with the scheduler's thread: as few as can be
                while len(batch) < _MOST:
                    batch.append(self._queue.get_nowait())
            groups: dict[tuple[str, bool], list[Offer]] = {}
            for offer in batch:
                wanted = bool(self._those_who_wait(self._waiting.get(offer.key, ())))
                groups.setdefault((offer.modality, wanted), []).append(offer)
            for (modality, wanted), offers in groups.items():
                try:
                    self._put(offers, modality, wanted)
                    measure.counters.add("outputs_published", len(offers))
                except Exception as error:  # a copy less for others; the engine has its own
                    measure.counters.add("outputs_failed", len(offers))
                    logger.log(
                        logging.DEBUG if isinstance(error, BrokerError) else logging.ERROR,
                        "mmbroker: encoder outputs were not published",
                        exc_info=error,
                    )
            self._done += sum(offer.tensor.nbytes for offer in batch)
            del batch, groups, offer, offers  # whoever waits for the next ones keeps none of these

    def _put(self, offers: list[Offer], modality: str, wanted: bool) -> None:
        client = self._client()
        if client is None or not client.connected:
            raise mmbroker.BrokerUnavailable("there is no broker")
        costs = [offer.span.micros(offer.tensor.nbytes, offer.of) for offer in offers]
        # On a GPU the spans were waited for: the tensors are complete, whatever stream this thread is in.
        with self._aside(offers[0].tensor):
            helds = client.put_many(
                [offer.tensor for offer in offers],
                to=self._engine if wanted else None,
                keys=[Key.derived(offer.key) for offer in offers],
                modality=modality,
                cost=costs,
                timeout=_PATIENCE,
            )
        try:
            table = self._table()
            for offer, held in zip(offers, helds, strict=True):
                if wanted and table is not None:
                    for output in self._those_who_wait(self._waiting.pop(offer.key, ())):
                        output.give(table.take(held.ref))
        finally:
            for held in helds:
                held.drop()

    @staticmethod
    def _those_who_wait(refs: Iterable[weakref.ref[Output]]) -> list[Output]:
        return [output for ref in list(refs) if (output := ref()) is not None and output.waits]

    def _aside(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        """A stream for copies that neither waits for what the model does, nor makes that wait."""
        if not tensor.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


class Output:
    """What the encoder makes of one item of the scheduler: its key, and a use of it if it was there already.

    `give` is for another thread than everything else.
    """

    def __init__(self, shared: Outputs, key: bytes, use: mmbroker.Use | None) -> None:
        self.key = key
        self.waits = use is None  # for the encoder
        self._shared = shared
        self._use = use
        self._late: mmbroker.Use | None = None  # given later
        self._closed = False
        if self.waits:
            shared.wait(self)

    def read(self, item: Any, device: Any, width: int) -> torch.Tensor | None:
        """What is there, where the encoder is, if it fits the item: one row for each of its tokens, of a multiple of
        `width`. Its memory is the broker's: to be copied in the current stream before `let_go`."""
        if self._use is None:
            self._use = self._late
        if self._use is None or not self._shared.current:
            return None
        try:
            tensor = self._use.tensor
        except Exception as error:
            logger.error("mmbroker: an encoder output cannot be read", exc_info=error)
            tensor = None
        if not isinstance(tensor, torch.Tensor) or not _fits(tensor, item, width):
            self._use = self._late = None
            measure.counters.add("outputs_refused")
            return None
        self.waits = False
        measure.counters.add("outputs_used")
        return tensor.to(device, non_blocking=True)

    def let_go(self) -> None:
        """It was copied, or will be by what is in the current stream."""
        if self._use is not None:
            self._use.pause()

    def offer(self, item: Any, tensor: torch.Tensor, span: Span, of: int) -> None:
        self._shared.offer(self.key, tensor, str(item.modality.name).lower(), span, of)

    def give(self, use: mmbroker.Use) -> None:
        """What was made of an equal item. It is released with this one."""
        self._late = use
        measure.counters.add("outputs_given")
        if self._closed:  # meanwhile
            self.close()

    def close(self, stream: object = None) -> None:
        """The item is over."""
        self._closed = True
        late, self._late, self._use = self._late, None, None
        if late is not None:
            late.release(stream)


def tokens(item: Any) -> int:
    """How many tokens of the prompt an item stands for."""
    return sum(int(last) - int(first) + 1 for first, last in item.offsets)


def _fits(tensor: torch.Tensor, item: Any, width: int) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == tokens(item) and tensor.shape[1] % max(width, 1) == 0
