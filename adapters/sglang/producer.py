"""The tokenizer's side: a request's features are put into the broker before the request is sent.

The seam is the end of `_tokenize_one_request`: every processor has passed it, and no request that was rejected. The
put runs in a thread and is awaited; the event loop only writes references into the places of the tensors. What cannot
go through the broker stays as it is, and SGLang's own transport carries it: item by item, counted, said once a minute.

While the broker is healthy a request waits for room: it would only queue in the scheduler instead. When it is not,
the request goes SGLang's own way within a second.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from mmbroker.proto.errors import BrokerError, PoolFull
from mmbroker.proto.keys import Key
from mmbroker.proto.reference import is_reference

from . import holding, measure, packing, pictures, placing, settings
from .asking import Asking
from .fallbacks import Fallbacks, reason_of
from .identity import Encoder
from .joining import Joining
from .packing import Place
from .settings import Settings

logger = logging.getLogger(__name__)

#: The least time for a put, however short the wait for room may be, in seconds.
_LEAST: Final = 1.0
#: How long an item waits that already has others of its request in the broker, in seconds: waiting while holding is
#: how two requests starve each other.
_BRIEFLY: Final = 0.1


class Producer:
    """Puts for one tokenizer process. `identify` gives an item the identity that follows from a digest; `encoder` names
    what the engine's encoder makes of it, if that is shared."""

    def __init__(
        self, asked: Settings, identify: Callable[[Any, bytes], None], encoder: Encoder | None = None
    ) -> None:
        self.on_cpu = asked.on_cpu
        self._encoder = encoder
        self._settings = asked
        self._identify = identify
        self._joining = Joining(asked, f"{asked.engine}/tokenizer")
        self._joining.wait()
        self.asking = Asking(self._joining, asked.engine)
        # SGLang then draws a random identity for each item, in the scheduler.
        self._no_hashes = os.environ.get("SGLANG_MM_SKIP_COMPUTE_HASH", "").lower() in settings.YES
        self._fallbacks = Fallbacks()
        self.claims = holding.Claims()
        #: What finds pictures before they are decoded, if there is one for the model's processor.
        self.finder: Any = None
        #: SGLang's own way for a tensor that is on the GPU; known once there was one (`keep`).
        self._wrap: Callable[[Any], Any] | None = None

    # --- the seams --------------------------------------------------------------------------------------------------

    async def tokenize(
        self, original: Callable[[Any, Any], Awaitable[Any]], manager: Any, request: Any
    ) -> Any:
        """AROUND `TokenizerManager._tokenize_one_request`."""
        mine = holding.scope.get()
        if mine is None:
            return await original(manager, request)
        tokenized, whole = await self._tokenize(original, manager, request, mine, derived=True)
        if not whole:  # its pictures are nowhere but in the broker: once more, without that
            tokenized, _ = await self._tokenize(original, manager, request, mine, derived=False)
        return tokenized

    async def _tokenize(
        self,
        original: Callable[[Any, Any], Awaitable[Any]],
        manager: Any,
        request: Any,
        mine: list[holding.Claim],
        derived: bool,
    ) -> tuple[Any, bool]:
        """The request as it is to be sent, and whether it can be."""
        with holding.Turn(request, max(self._settings.wait, _LEAST), derived) as turn:
            tokenized = await original(manager, request)
            output = getattr(tokenized, "mm_inputs", None)
            if not getattr(output, "mm_items", None) or not hasattr(output, "build_padded_input_ids"):
                return tokenized, True  # no media, or not as a processor puts it out
            try:
                pictures.look(output)
                private = getattr(tokenized, "session_params", None) is not None
                await self._carry(output, private, turn, mine)
            except Exception as error:
                logger.error("mmbroker: a request goes SGLang's own way", exc_info=error)
                self._fallbacks.count("failed", 1, f"{type(error).__name__}: {error}")
                return tokenized, not packing.unsealed(output)
            return tokenized, True

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

    async def _carry(self, output: Any, private: bool, turn: holding.Turn, mine: list[holding.Claim]) -> None:
        start = time.perf_counter_ns()
        found = list(self._features(output))
        try:
            put = await self._put_all(found, private, turn) if found else {}
            known = turn.taken(_holds(output))
            if not put and not known:
                return
            claim = holding.Claim([*known, *put.values()])
            mine.append(claim)
            self.claims.add(claim)
            # A session's items outlive its holds, so nothing is looked up for them.
            shared = None if private or self._encoder is None or self._encoder.unknown else self._encoder
            made = [] if shared is None else await self._made(shared, output, put)
            claim.also(one.held for one in made if one.held is not None)
            self._refer(output, put, made)
            measure.counters.add("requests")
            measure.counters.add("features", len(known) + len(put))
            measure.counters.add("bytes", sum(held.ref.nbytes for held in known))
            measure.counters.add("put_ns", time.perf_counter_ns() - start)
        finally:
            if self._wrap is not None:
                for place in found:
                    if isinstance(place.value, torch.Tensor) and _on_gpu(place.value):
                        place.value = self._wrap(place.value)

    async def _put_all(self, found: list[Place], private: bool, turn: holding.Turn) -> dict[Place, Any]:
        """A `Held` for each place whose value went into the broker."""
        if not self.asking.connected:
            self._fallbacks.count("absent", len(found), "there is no broker")
            return {}
        if not await self.asking.answers():
            self._fallbacks.count("unresponsive", len(found), "the broker does not answer")
            return {}
        put = _Put(self.asking.client, self._settings.engine, found, private, turn)
        helds = await self.asking.put(put.run, _give_back)
        if helds is None:
            self._fallbacks.count("unresponsive", len(found), "the broker has stopped answering")
            return {}
        for reason, count, why in put.refused:
            self._fallbacks.count(reason, count, why)
        return helds

    async def _made(self, encoder: Encoder, output: Any, put: dict[Place, Any]) -> list[Made]:
        """What the engine's encoder makes of the features that are in the broker, with what it has made already."""
        features = {**{place: held.ref.to_wire() for place, held in put.items()}, **self._known(output)}
        looked = _Look(self.asking.client, self._settings.engine, encoder, features)
        made = await self.asking.put(looked.run, looked.give_back) or []
        measure.counters.add("outputs_found", sum(one.held is not None for one in made))
        return made

    def _refer(self, output: Any, helds: dict[Place, Any], made: list[Made]) -> None:
        """Write references into the places of tensors, and make the rest of the request short."""
        values = {place: place.value for place in helds}
        references = {place: held.ref.to_wire() for place, held in helds.items()}
        digests = {place: wire["digest"] for place, wire in {**self._known(output), **references}.items()}
        identities = {place: packing.identity(place.item, digest) for place, digest in digests.items()}
        try:
            for place, identity in identities.items():
                item = place.item
                if not place.extra and item.hash is None and item.pad_value is None and not self._no_hashes:
                    # Otherwise the prompt may already be padded with the item's own values: another identity would
                    # leave it without a place in the prompt.
                    self._identify(item, identity)
            for place, reference in references.items():
                place.value = reference
                measure.counters.add("bytes", reference["nbytes"])
            packing.close(output, [one.encoded() for one in made])
        except BaseException:
            # References without an envelope would reach the model.
            for place, value in values.items():
                place.value = value
            raise

    @staticmethod
    def _known(output: Any) -> dict[Place, dict[str, Any]]:
        """The places of `output` that had references in them before anything was put."""
        return {
            place: place.value
            for item in output.mm_items
            for place in packing.places(item)
            if is_reference(place.value)
        }

    def _features(self, output: Any) -> Iterator[Place]:
        """The places of `output` whose values go through the broker."""
        for item in output.mm_items:
            for place in packing.places(item):
                if is_reference(place.value):
                    continue  # it is there already
                parts = place.value if isinstance(place.value, list) else [place.value]
                if not parts or not all(packing.portable(part) for part in parts):
                    if not place.extra:
                        measure.counters.add("foreign")
                elif not place.extra or sum(part.nbytes for part in parts) >= packing.LARGE:
                    yield place


class Made(NamedTuple):
    """What an encoder makes of the feature of a hold: its key, and a hold on it if it is there."""

    hold: int
    key: Key
    held: Any

    def encoded(self) -> packing.Encoded:
        return self.hold, self.key.value, None if self.held is None else self.held.ref.to_wire()


class _Look:
    """A look for what an encoder has made of features already. `run` is for a thread."""

    def __init__(
        self, client: Any, engine: str, encoder: Encoder, features: dict[Place, dict[str, Any]]
    ) -> None:
        self._client = client
        self._engine = engine
        self._encoder = encoder
        self._features = features

    def run(self) -> list[Made]:
        """Briefly, because a request that waits while it holds something starves others."""
        keys = {
            reference["hold"]: key
            for place, reference in self._features.items()
            if place.name == "feature" and not place.extra
            if (key := self._encoder.key(place.item, reference["digest"])) is not None
        }
        if not keys:
            return []
        try:
            found = self._client.lookup_many(list(keys.values()), to=self._engine, timeout=_BRIEFLY)
        except BrokerError as error:
            logger.debug("mmbroker: encoder outputs were not found in time", exc_info=error)
            found = [None] * len(keys)
        return [Made(hold, key, held) for (hold, key), held in zip(keys.items(), found, strict=True)]

    @staticmethod
    def give_back(made: list[Made]) -> None:
        for one in made:
            if one.held is not None:
                one.held.drop()


class _Put:
    """One request's features on their way into the broker. `run` is for a thread; `refused` says what did not go."""

    def __init__(
        self, client: Any, engine: str, found: Sequence[Place], private: bool, turn: holding.Turn
    ) -> None:
        self._client = client
        self._options = {"to": engine, "private": private}
        self._turn = turn
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
        """Room may have been waited for in vain already, by a derived key: it is asked for once more, and why there is
        none is told."""
        return max(self._turn.left(), _BRIEFLY)

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
        return placing.put(put, values, there, timeout, _BRIEFLY, modality=modality, **self._options)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _modality(place: Place) -> str:
    return str(place.item.modality.name).lower()


def _share(timeout: float, helds: dict[Place, Any]) -> float:
    """Only the first of several puts may wait for room."""
    return min(timeout, _BRIEFLY) if helds else timeout


def _give_back(helds: dict[Place, Any]) -> None:
    for held in helds.values():
        held.drop()


def _holds(output: Any) -> Iterator[tuple[bytes, int]]:
    """The holds that a request's references name."""
    for item in getattr(output, "mm_items", None) or ():
        for place in packing.places(item):
            if is_reference(place.value):
                yield place.value["boot"], place.value["hold"]
