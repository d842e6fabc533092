"""The tokenizer's side: a request's features are put into the broker before the request is sent.

The seam is the end of `_tokenize_one_request`: every processor has passed it, and no request that was rejected. The
put runs in a thread and is awaited; the event loop only writes references into the places of the tensors. What cannot
go through the broker stays as it is, and SGLang's own transport carries it: item by item, counted, said once a minute.

While the broker is healthy a request waits for room: it would only queue in the scheduler instead. When it is not,
the request goes SGLang's own way within a second.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch

from mmbroker.proto.dtypes import ITEMSIZE
from mmbroker.proto.errors import BrokerError, DeadlineExceeded, FeatureError, PoolFull
from mmbroker.proto.reference import is_reference

from . import holding, measure, packing, pictures, settings
from .fallbacks import Fallbacks, reason_of
from .joining import Joining
from .packing import Place
from .settings import Settings

logger = logging.getLogger(__name__)

#: Requests whose features are on their way into the broker, or wait for room, at once.
_WORKERS: Final = 64
#: The least time for a put, however short the wait for room may be, in seconds.
_LEAST: Final = 1.0
#: A put that takes longer than this makes the producer ask whether the broker still answers, in seconds.
_PATIENCE: Final = 0.4
#: How long the broker may take to answer that, in seconds.
_ANSWER: Final = 0.5
#: How long features that are on the GPU wait for room there, in seconds; then the host has to do.
_ON_DEVICE: Final = 0.5
#: How long an item waits that already has others of its request in the broker, in seconds: waiting while holding is
#: how two requests starve each other.
_BRIEFLY: Final = 0.1


class Producer:
    """Puts for one tokenizer process. `identify` gives an item the identity that follows from a digest."""

    def __init__(self, asked: Settings, identify: Callable[[Any, bytes], None]) -> None:
        self._settings = asked
        self._identify = identify
        self._joining = Joining(asked, f"{asked.engine}/tokenizer")
        self._joining.wait()
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mmbroker-put")
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="mmbroker-ask")
        self._asking: asyncio.Future[bool] | None = None
        self._silent = False
        # SGLang then draws a random identity for each item, in the scheduler.
        self._no_hashes = os.environ.get("SGLANG_MM_SKIP_COMPUTE_HASH", "").lower() in settings.YES
        self._fallbacks = Fallbacks()
        self.claims = holding.Claims()
        #: SGLang's own way for a tensor that is on the GPU; known once there was one (`keep`).
        self._wrap: Callable[[Any], Any] | None = None

    # --- the seams --------------------------------------------------------------------------------------------------

    async def tokenize(
        self, original: Callable[[Any, Any], Awaitable[Any]], manager: Any, request: Any
    ) -> Any:
        """AROUND `TokenizerManager._tokenize_one_request`."""
        tokenized = await original(manager, request)
        mine = holding.scope.get()
        output = getattr(tokenized, "mm_inputs", None)
        if (
            mine is None
            or not getattr(output, "mm_items", None)
            or not hasattr(output, "build_padded_input_ids")
        ):
            return tokenized  # no media, or not as a processor puts it out
        try:
            pictures.look(output)
            private = getattr(tokenized, "session_params", None) is not None
            await self._carry(output, private, mine)
        except Exception as error:
            # The request is whole, or has references that are held: either way it can be served.
            logger.error("mmbroker: a request goes SGLang's own way", exc_info=error)
            self._fallbacks.count("failed", 1, f"{type(error).__name__}: {error}")
        return tokenized

    def send(self, original: Callable[[Any, Any], Any], manager: Any, tokenized: Any) -> Any:
        """AROUND `TokenizerManager._send_one_request`, which is a coroutine in newer versions."""
        if tokenized.rid in manager.rid_to_state:
            self.claims.dispatched(tokenized.rid, _holds(getattr(tokenized, "mm_inputs", None)))
        return original(manager, tokenized)

    def keep(self, wrap: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
        """AROUND `BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc`: what is on the GPU stays there till it is put."""
        client = self._joining.client
        if client is None or not client.connected or not client.device or not _on_gpu(tensor):
            return wrap(tensor)
        self._wrap = wrap
        return tensor

    # --- one request ------------------------------------------------------------------------------------------------

    async def _carry(self, output: Any, private: bool, mine: list[holding.Claim]) -> None:
        found = list(self._features(output))
        try:
            if found:
                await self._carry_all(output, found, private, mine)
        finally:
            if self._wrap is not None:
                for place in found:
                    if isinstance(place.value, torch.Tensor) and _on_gpu(place.value):
                        place.value = self._wrap(place.value)

    async def _carry_all(
        self, output: Any, found: list[Place], private: bool, mine: list[holding.Claim]
    ) -> None:
        client = self._joining.client
        if client is None or not client.connected:
            self._fallbacks.count("absent", len(found), "there is no broker")
            return
        if self._silent and not await self._answers(client):
            self._fallbacks.count("unresponsive", len(found), "the broker does not answer")
            return
        start = time.perf_counter_ns()
        put = _Put(client, self._settings, found, private)
        done = self._pool.submit(contextvars.copy_context().run, put.run)  # whose trace it belongs to
        helds = await self._result(done, client)
        if helds is None:
            self._fallbacks.count("unresponsive", len(found), "the broker has stopped answering")
            return
        for reason, count, why in put.refused:
            self._fallbacks.count(reason, count, why)
        if not helds:
            return
        claim = holding.Claim(helds.values())
        mine.append(claim)
        self.claims.add(claim)
        try:
            self._refer(output, helds)
        except BaseException:
            # References without an envelope would reach the model.
            for place in helds:
                place.value = put.values[place]
            raise
        measure.counters.add("requests")
        measure.counters.add("features", len(helds))
        measure.counters.add("put_ns", time.perf_counter_ns() - start)

    def _refer(self, output: Any, helds: dict[Place, Any]) -> None:
        """Write references into the places of tensors, and make the rest of the request short."""
        for place, held in helds.items():
            item = place.item
            if not place.extra and item.hash is None and item.pad_value is None and not self._no_hashes:
                # Otherwise the prompt may already be padded with the item's own values: another identity would
                # leave it without a place in the prompt.
                self._identify(item, held.ref.digest)
            place.value = held.ref.to_wire()
            measure.counters.add("bytes", held.ref.nbytes)
        packing.close(output)

    def _features(self, output: Any) -> Iterator[Place]:
        """The places of `output` whose values go through the broker."""
        for item in output.mm_items:
            for place in packing.places(item):
                parts = place.value if isinstance(place.value, list) else [place.value]
                if not parts or not all(_portable(part) for part in parts):
                    if not place.extra:
                        measure.counters.add("foreign")
                elif not place.extra or sum(part.nbytes for part in parts) >= packing.LARGE:
                    yield place

    async def _result(self, done: Future[dict[Place, Any]], client: Any) -> dict[Place, Any] | None:
        """What the put got; None if the broker stopped answering. Whatever comes too late is given back."""
        waiting = asyncio.wrap_future(done)
        try:
            while True:
                await asyncio.wait({waiting}, timeout=_PATIENCE)
                if waiting.done():
                    return waiting.result()
                if not await self._answers(client):
                    done.add_done_callback(_give_back)
                    return None
        except asyncio.CancelledError:
            if not done.cancel():
                done.add_done_callback(_give_back)
            raise

    async def _answers(self, client: Any) -> bool:
        """Does the broker answer at all? One question at a time, whoever asks."""
        if self._asking is None or self._asking.done():
            loop = asyncio.get_running_loop()
            self._asking = loop.run_in_executor(self._asker, _ask, client)
        self._silent = not await asyncio.shield(self._asking)
        return not self._silent


class _Put:
    """One request's features on their way into the broker. `run` is for a thread; `refused` says what did not go."""

    def __init__(self, client: Any, settings: Settings, found: Sequence[Place], private: bool) -> None:
        self._client = client
        self._options = {"to": settings.engine, "private": private}
        self._deadline = time.monotonic() + max(settings.wait, _LEAST)
        self._found = found
        self.values = {place: place.value for place in found}
        self.refused: list[tuple[str, int, str]] = []

    def run(self) -> dict[Place, Any]:
        """A `Held` for each place that went."""
        try:
            return self._put(self._found, self._left())
        except PoolFull as error:
            if len(self._found) == 1 or error.requested <= error.limit:
                return self._refuse(len(self._found), error)  # there was no room in all the time
        except BrokerError as error:
            return self._refuse(len(self._found), error)
        # The batch can never fit as a whole: one by one, in order, until one is refused.
        helds: dict[Place, Any] = {}
        for index, place in enumerate(self._found):
            try:
                helds.update(self._put([place], min(self._left(), _BRIEFLY) if helds else self._left()))
            except PoolFull as error:
                if error.requested > error.limit:
                    self._refuse(1, error)
                    continue
                self._refuse(len(self._found) - index, error)
                break
            except BrokerError as error:
                self._refuse(len(self._found) - index, error)
                break
        return helds

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _refuse(self, count: int, error: BrokerError) -> dict[Place, Any]:
        self.refused.append((reason_of(error), count, f"{type(error).__name__}: {error}"))
        return {}

    def _put(self, batch: Sequence[Place], timeout: float) -> dict[Place, Any]:
        """All of a batch, or none of it."""
        tensors: dict[tuple[str, bool], list[Place]] = {}
        for place in batch:
            if isinstance(self.values[place], torch.Tensor):
                tensors.setdefault((_modality(place), self._there(place)), []).append(place)
        lists = [place for place in batch if not isinstance(self.values[place], torch.Tensor)]
        helds: dict[Place, Any] = {}
        try:
            for (modality, there), group in tensors.items():
                values = [self.values[place] for place in group]
                got = self._send(self._client.put_many, values, modality, there, _share(timeout, helds))
                helds.update(zip(group, got, strict=True))
            for place in lists:
                helds[place] = self._send(
                    self._client.put_list,
                    self.values[place],
                    _modality(place),
                    self._there(place),
                    _share(timeout, helds),
                )
        except BaseException:
            for held in helds.values():
                held.drop()
            raise
        return helds

    def _there(self, place: Place) -> bool:
        """Is it on a GPU, and does the broker serve one?"""
        value = self.values[place]
        return bool(self._client.device) and all(map(_on_gpu, value if isinstance(value, list) else [value]))

    def _send(self, put: Callable[..., Any], values: Any, modality: str, there: bool, timeout: float) -> Any:
        """From the GPU to the GPU if `there`; where that cannot be, to the host."""
        start = time.monotonic()
        if there:
            brief = min(timeout, _ON_DEVICE)
            try:
                got = put(values, modality=modality, tier="device", timeout=brief, **self._options)
            except (PoolFull, DeadlineExceeded, FeatureError) as error:
                logger.debug("mmbroker: features on the GPU go through the host", exc_info=error)
            else:
                measure.counters.add("put_on_device", len(values) if isinstance(got, list) else 1)
                return got
        left = max(timeout - (time.monotonic() - start), _BRIEFLY if there else 0.0)
        return put(values, modality=modality, timeout=left, **self._options)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _portable(value: object) -> bool:
    """Can a broker carry it? A user's dict, an array or a sparse tensor stays with SGLang."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
        and str(value.dtype).removeprefix("torch.") in ITEMSIZE
    )


def _modality(place: Place) -> str:
    return str(place.item.modality.name).lower()


def _share(timeout: float, helds: dict[Place, Any]) -> float:
    """Only the first of several puts may wait for room."""
    return min(timeout, _BRIEFLY) if helds else timeout


def _ask(client: Any) -> bool:
    try:
        client.lookup("does the broker answer?", timeout=_ANSWER)
    except BrokerError:
        return False
    return True


def _give_back(done: Future[dict[Place, Any]]) -> None:
    if not done.cancelled() and done.exception() is None:
        for held in done.result().values():
            held.drop()


def _holds(output: Any) -> Iterator[tuple[bytes, int]]:
    """The holds that a request's references name."""
    for item in getattr(output, "mm_items", None) or ():
        for place in packing.places(item):
            if is_reference(place.value):
                yield place.value["boot"], place.value["hold"]
