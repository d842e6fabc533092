"""The receiver in the engine's process: features whose tensors are in the broker get them from this engine's table.

vLLM calls it in the thread that reads requests, not in its scheduler's. It is also where requests are seen first, so
the connector's lookups start here, ahead of the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from vllm.multimodal.cache.base import BaseMultiModalReceiverCache, MultiModalCacheMissError

import mmbroker
from mmbroker.proto.errors import BrokerError

from . import items, settings
from .joining import Joining

logger = logging.getLogger("vllm.mmbroker")

#: Whom to tell the identifiers of requests that have just arrived in this process.
expecting: Final[list[Callable[[list[str]], None]]] = []


class Receiver(BaseMultiModalReceiverCache):  # type: ignore[misc]
    """Of one engine process. `own`: vLLM's own receiver, if its sender is in use."""

    def __init__(self, vllm_config: Any, asked: settings.Settings) -> None:
        super().__init__()
        self._engine = items.engine_for_items(vllm_config)
        self._rank, self._world = vllm_config.parallel_config.data_parallel_index, asked.replicas
        self._table: mmbroker.FeatureTable | None = None
        self.counts = {"received": 0, "received_missing": 0}
        self._joining = Joining(asked.broker, f"{self._engine}-{self._rank}", self._attach, self._stats)

    def _attach(self, client: mmbroker.Client) -> None:
        self._table = client.attach(engine=self._engine, rank=self._rank, world=self._world, access="copy")

    def _stats(self) -> dict[str, int]:
        return {f"vllm_{name}": value for name, value in self.counts.items()}

    def get_and_update_features(self, mm_features: list[Any]) -> list[Any]:
        """Raises `MultiModalCacheMissError` for all that cannot be had; whoever sent them sends their pixels."""
        missing: list[str] = []
        for feature in mm_features:
            try:
                feature.data = self.get_and_update_item(feature.data, feature.mm_hash or feature.identifier)
            except MultiModalCacheMissError as error:
                missing += error.mm_hashes
        if missing:
            raise MultiModalCacheMissError(missing)
        identifiers = [feature.identifier for feature in mm_features]
        for expect in expecting:
            expect(identifiers)
        return mm_features

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is None or items.REFERENCE not in mm_item:
            return mm_item
        try:
            if self._table is None:
                raise mmbroker.FeatureMissing("this engine has not joined a broker")
            item = items.whole(mm_item, self._table)
        except BrokerError as error:
            self.counts["received_missing"] += 1
            logger.info("mmbroker: an item has to be sent again (%s)", error)
            raise MultiModalCacheMissError([mm_hash]) from error
        self.counts["received"] += 1
        return item

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: Any = None) -> None:
        """There is no order to keep here: the broker evicts."""

    def clear_cache(self) -> None:
        """There is nothing here to clear: what is stored is found by its content."""
