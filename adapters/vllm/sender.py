"""The sender in an API server: what a processor put out is kept in the broker, and found there before it runs.

vLLM asks it by the hash of the media's bytes, before the processor. Of three features under that hash

* the *head* tells how the picture stands in the prompt, and is needed for any hit;
* if the *encoder's output* is there, the request leaves with metadata alone;
* else, if the *tensors* are there, it leaves with a reference to them.

What is found is held until the request is over: it cannot be evicted on the way. A head that nobody has is promised to
the first that asks, and others wait for it, so that API servers which get a picture at the same time run its processor
once. Without a broker, or for what cannot be shared, vLLM's own cache of this process serves.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec
import torch
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache, MultiModalProcessorOnlyCache
from vllm.utils.cache import CacheInfo

import mmbroker
from mmbroker.adapters.fingerprint import derived_key
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.keys import Key

from . import identity, items, settings
from .joining import Joining
from .saying import Saying

logger = logging.getLogger("vllm.mmbroker")

#: How long a broker that is there may take, in seconds; then vLLM goes its own way, and asks no more for a while.
_TIMEOUT, _SILENCE = 1.0, 10.0
#: How long another API server may take to make what this one needs, too, in seconds.
_MAKING: Final = 2.0
#: How long a starting API server waits for a broker, in seconds.
_PATIENCE: Final = 3.0
#: Most heads that are remembered here.
_HEADS: Final = 4096

Found = tuple[Callable[[], Any], Sequence[Any]]


class Sender(BaseMultiModalProcessorCache):  # type: ignore[misc]
    """Of one API server. vLLM calls it from one thread, one request after the other."""

    def __init__(self, vllm_config: Any, asked: settings.Settings) -> None:
        super().__init__()
        self._asked = asked
        self._engine = items.engine_for_items(vllm_config)
        rank = vllm_config.parallel_config._api_process_rank
        self._name = f"{settings.engine_name(vllm_config)}/api-{max(rank, 0)}"
        device = identity.device_name()
        loads = vllm_config.ec_transfer_config.is_ec_consumer
        self._outputs = (
            identity.Identity(
                lambda: identity.of_encoder(vllm_config, device), asked.uuids, lambda text: None
            )
            if loads
            else None
        )
        if self._outputs is not None:
            self._outputs.prepare()
        self._processed = identity.Identity(
            lambda: identity.of_processor(vllm_config), asked.uuids, logger.warning
        )
        self._own = MultiModalProcessorOnlyCache(vllm_config.model_config)
        self._joining: Joining | None = None  # made at the first request: this process may fork before
        self._table: mmbroker.FeatureTable | None = None
        self._heads: OrderedDict[str, items.Head] = OrderedDict()
        self._silent_until = 0.0
        self._saying = Saying("pictures went to the engine vLLM's own way")
        self._found: dict[str, Found] = {}  # for the request that is being processed
        self._promises: dict[str, mmbroker.Promise] = {}  # likewise: heads that it is to make
        self._processor: Any = None
        self._inputs: Any = None
        self._modalities: Iterator[str] = iter(())  # vLLM asks for one after the other
        self._info = self._told = CacheInfo(hits=0, total=0)
        self.counts = {
            "bare": 0, "referred": 0, "put": 0, "own": 0, "sender_errors": 0, "sent_again": 0,
            "promises_late": 0,
        }  # fmt: skip

    # --- the seams --------------------------------------------------------------------------------------------------

    @contextmanager
    def serving(self, processor: Any, inputs: Any) -> Iterator[None]:
        """While this lasts, what is asked belongs to these inputs of this processor."""
        self._processor, self._inputs = processor, inputs
        self._modalities = iter(inputs.mm_data_items)
        try:
            yield
        finally:
            self._processor = self._inputs = None
            self._found.clear()
            for promise in self._promises.values():
                promise.drop()
            self._promises.clear()

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._found or self._own.is_cached_item(mm_hash)

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        if self._processor is not None:
            try:
                self._look_up(next(self._modalities), mm_hashes)
            except (BrokerError, msgspec.MsgspecError) as error:
                self._failed(error)
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        hit = mm_item is None
        self._info = CacheInfo(hits=self._info.hits + hit, total=self._info.total + 1)
        if not hit:
            return self._store(mm_item, mm_hash)
        found = self._found.get(mm_hash)
        if found is None:
            self.counts["own"] += 1
            return self._own.get_and_update_item(None, mm_hash)
        make, updates = found
        return make(), updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        self._own.touch_sender_cache_item(mm_hash)

    def clear_cache(self) -> None:
        """What the broker has is found by its content: there is nothing in it to clear."""
        self._own.clear_cache()
        self._heads.clear()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        info = self._info
        if delta:
            info, self._told = info - self._told, info
        return info

    def close(self) -> None:
        if self._joining is not None:
            self._joining.close()

    # --- finding ----------------------------------------------------------------------------------------------------

    def _client(self) -> mmbroker.Client | None:
        if self._joining is None:
            self._joining = Joining(self._asked.broker, self._name, self._attach, self._stats)
            self._joining.joined.wait(_PATIENCE)
        return self._joining.there if time.monotonic() >= self._silent_until else None

    def _failed(self, error: Exception) -> None:
        self.counts["sender_errors"] += 1
        self._saying.count(f"{type(error).__name__}: {error}")
        if isinstance(error, mmbroker.DeadlineExceeded):
            self._silent_until = time.monotonic() + _SILENCE

    def _attach(self, client: mmbroker.Client) -> None:
        """To read heads."""
        self._table = client.attach(engine=self._name, access="copy")

    def _stats(self) -> dict[str, int]:
        return {f"vllm_{name}": value for name, value in self.counts.items()}

    def _key(self, kind: bytes, mm_hash: str) -> Key | None:
        key = self._processed.key(mm_hash)
        return None if key is None else derived_key(key.value, kind)

    def _look_up(self, modality: str, mm_hashes: Sequence[str]) -> None:
        client = self._client()
        if client is None:
            return
        index = {mm_hash: i for i, mm_hash in enumerate(mm_hashes)}
        heads = self._read_heads(client, list(index))
        fields = frozenset(self._processor.info.data_parser.placeholder_metadata_fields(modality))
        short = [h for h, head in heads.items() if items.bare(head, fields) is not None]
        for mm_hash, held in self._lookup(client, {h: self._output_key(h) for h in short}).items():
            make: Callable[[], Any] = partial(items.bare, heads[mm_hash], fields)
            self._note(mm_hash, make, held, modality, index[mm_hash], heads[mm_hash], "bare")
        rest = {
            h: self._key(b"tensors", h) for h, head in heads.items() if h not in self._found and head.large
        }
        for mm_hash, held in self._lookup(client, rest, to=self._engine).items():
            make = partial(items.referring, heads[mm_hash], held.ref)
            self._note(mm_hash, make, held, modality, index[mm_hash], heads[mm_hash], "referred")

    def _note(
        self,
        mm_hash: str,
        make: Callable[[], Any],
        held: Any,
        modality: str,
        index: int,
        head: items.Head,
        counter: str,
    ) -> None:
        """What was found for the request that is being processed."""
        claim = items.Claim(held)
        again = _Again(self, self._processor, self._inputs, modality, index)

        def carried() -> Any:
            self.counts[counter] += 1
            return make().keep(claim, again)

        self._found[mm_hash] = carried, items.updates_of(head, modality)

    def _output_key(self, mm_hash: str) -> Key | None:
        return None if self._outputs is None else self._outputs.key(mm_hash)

    def _lookup(
        self, client: mmbroker.Client, keys: Mapping[str, Key | None], to: str | None = None
    ) -> dict[str, Any]:
        known = {mm_hash: key for mm_hash, key in keys.items() if key is not None}
        if not known:
            return {}
        try:
            helds = client.lookup_many(list(known.values()), to=to, private=to is not None, timeout=_TIMEOUT)
        except mmbroker.NoSuchEngine:  # it is starting
            return {}
        return {mm_hash: held for mm_hash, held in zip(known, helds, strict=True) if held is not None}

    def _read_heads(self, client: mmbroker.Client, mm_hashes: list[str]) -> dict[str, items.Head]:
        heads = {mm_hash: self._heads[mm_hash] for mm_hash in mm_hashes if mm_hash in self._heads}
        unknown = {h: self._key(b"head", h) for h in mm_hashes if h not in heads}
        for mm_hash, held in self._get_or_promise(client, unknown).items():
            with held, self._attached().take(held.ref) as use:
                heads[mm_hash] = self._remember(mm_hash, items.read_head(bytes(use.tensor.numpy())))
        return heads

    def _get_or_promise(self, client: mmbroker.Client, keys: Mapping[str, Key | None]) -> dict[str, Any]:
        """Heads that are there. What nobody makes is ours to make; what somebody else makes is waited for, unless there
        is something to make here: others may wait for that."""
        known = {mm_hash: key for mm_hash, key in keys.items() if key is not None}
        if not known or self._promises:
            return self._lookup(client, keys, to=self._name)
        try:
            got = client.get_or_promise(list(known.values()), to=self._name, private=True, timeout=_MAKING)
        except mmbroker.NoSuchEngine:  # it is starting
            return {}
        except mmbroker.DeadlineExceeded:  # it takes them long: then we make it, too
            self.counts["promises_late"] += 1
            return {}
        for mm_hash, one in zip(known, got, strict=True):
            if isinstance(one, mmbroker.Promise):
                self._promises[mm_hash] = one
        return {h: one for h, one in zip(known, got, strict=True) if isinstance(one, mmbroker.Held)}

    def _attached(self) -> mmbroker.FeatureTable:
        if self._table is None:
            raise mmbroker.FeatureMissing("this API server has not joined a broker")
        return self._table

    def _remember(self, mm_hash: str, head: items.Head) -> items.Head:
        self._heads[mm_hash] = head
        if len(self._heads) > _HEADS:
            self._heads.popitem(last=False)
        return head

    # --- storing ----------------------------------------------------------------------------------------------------

    def _store(self, mm_item: Any, mm_hash: str) -> Any:
        """What goes to the engine instead of an item that was just made, and its prompt updates."""
        item, updates = mm_item
        modality = updates[0].modality if updates else ""
        client = self._client()
        keys = self._key(b"head", mm_hash), self._key(b"tensors", mm_hash)
        taken = items.apart(item, updates) if client is not None and None not in keys and modality else None
        if client is None or taken is None or not taken.tensors or keys[0] is None or keys[1] is None:
            return self._own.get_and_update_item(mm_item, mm_hash)
        try:
            held = client.put_list(
                taken.tensors, key=keys[1], to=self._engine, modality=modality, private=True, timeout=_TIMEOUT
            )
            # Whoever waits for the head goes on to look for the tensors.
            head = torch.frombuffer(bytearray(taken.head), dtype=torch.uint8)
            key = self._promises.get(mm_hash, keys[0])
            client.put(head, key=key, modality="head", timeout=_TIMEOUT).drop()
        except BrokerError as error:
            self._failed(error)
            return self._own.get_and_update_item(mm_item, mm_hash)
        self.counts["put"] += 1
        told = self._remember(mm_hash, items.read_head(taken.head))
        return items.referring(told, held.ref).keep(items.Claim(held), lambda: item), updates


class _Again:
    """Makes one item of a request from its media, whatever the broker has."""

    def __init__(self, sender: Sender, processor: Any, inputs: Any, modality: str, index: int) -> None:
        self._sender, self._processor = sender, processor
        self._media = inputs.mm_data_items[modality][index]
        self._options = inputs.hf_processor_mm_kwargs
        self._modality = modality

    def __call__(self) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItems

        if self._media is None:
            raise ValueError(
                "this request came without its media, and what stood for it is gone: send the media"
            )
        self._sender.counts["sent_again"] += 1
        processor = self._processor
        parsed = processor.info.parse_mm_data({self._modality: [self._media]}, validate=False)
        output = processor._apply_hf_processor_main(mm_items=parsed, hf_kwargs=self._options)
        fields = processor._get_mm_fields_config(output, self._options)
        return MultiModalKwargsItems.from_hf_inputs(output, fields)[self._modality][0]
