"""The worker's half: puts what the scheduler's half promised into vLLM's encoder cache, and offers what is new.

A load is a take from this rank's table, whose entry was there before the scheduler said so. The tensor is this rank's
own copy, made by the table's receiver thread, so that vLLM may keep it as long as it likes and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

import mmbroker
from mmbroker.adapters.span import Span
from mmbroker.proto.reference import Reference

from .joining import Joining
from .saving import Saves


class WorkerHalf:
    """Of rank `rank` of `world`. `device`: where vLLM's tensors are; `there`: what torch calls that, if it is not the
    same. `saves`: where new outputs go; None: another rank saves them, or nobody."""

    def __init__(
        self,
        path: str | None,
        engine: str,
        rank: int,
        world: int,
        device: str,
        saves: Saves | None,
        there: str | None = None,
    ) -> None:
        self._engine, self._rank, self._world, self._device = engine, rank, world, device
        self._there = torch.device(there or device)
        self._table: mmbroker.FeatureTable | None = None
        self._loaded: list[str] = []
        self._saves = saves
        self._span: Span | None = None
        self._made: dict[str, Any] = {}
        self.counts = {"worker_loads": 0, "worker_load_errors": 0}
        self._joining = Joining(path, f"{engine}/worker-{rank}", self._attach, self.stats)
        if saves is not None:
            saves.begin(lambda: self._joining.there)

    def _attach(self, client: mmbroker.Client) -> None:
        self._table = client.attach(
            engine=self._engine, rank=self._rank, world=self._world, device=self._device, access="copy"
        )

    def stats(self) -> dict[str, int]:
        counts = {**self.counts, **({} if self._saves is None else self._saves.counts)}
        return {f"vllm_{name}": value for name, value in counts.items()}

    def load(self, cache: MutableMapping[str, Any], loads: Iterable[tuple[str, Reference]]) -> None:
        """Everything in `loads` is in `cache` afterwards. Raises `FeatureError` if the broker broke its word."""
        for identifier, ref in loads:
            if identifier not in cache:
                if self._table is None:
                    raise mmbroker.FeatureMissing("this rank has no table, and was told to load from it")
                try:
                    with self._table.take(ref) as use:
                        # A no-op, unless it has stayed on the host. The release waits for a copy, in this stream.
                        cache[identifier] = use.tensor.to(self._there, non_blocking=True)
                except mmbroker.FeatureError:
                    self.counts["worker_load_errors"] += 1
                    raise
                self.counts["worker_loads"] += 1
            self._loaded.append(identifier)

    def encoding(self) -> None:
        """The encoder runs now: what it takes is what its outputs are worth to the broker."""
        if self._saves is not None:
            self._span = Span(self._there)

    def save(self, cache: MutableMapping[str, Any], identifier: str) -> None:
        """The encoder has run in this step, and this is one of its outputs."""
        if self._saves is not None:
            if self._span is not None and not self._made:
                self._span.stop()
            self._made[identifier] = cache[identifier]

    def encoded(self) -> None:
        """The step's outputs are all there."""
        span, made = self._span, self._made
        self._span, self._made = None, {}
        of = sum(tensor.nbytes for tensor in made.values())
        for identifier, tensor in made.items():
            assert self._saves is not None
            self._saves.offer(identifier, tensor, None if span is None else (span, of))

    def take_loaded(self) -> list[str]:
        """What was loaded since this was last asked."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def close(self) -> None:
        if self._saves is not None:
            self._saves.close()
        self._joining.close()
