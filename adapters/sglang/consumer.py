"""The scheduler's side: references become tensors by a look-up in the rank's table.

One `Consumer` a scheduler process. What it adds to the scheduler thread is that look-up and the unpacking of what
still travels inside the request; it sends no message, copies no feature, hashes nothing.

Ranks of one engine must agree whether a request goes on: one that ran it alone would wait for the others for ever. All
ranks have acknowledged a feature before its request is sent, so they agree by themselves unless something is broken;
where one engine has several ranks that share each request, they compare notes all the same (`_agree`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mmbroker
from mmbroker.proto.reference import is_reference

from . import measure, packing, uses
from .joining import Joining
from .settings import Settings

logger = logging.getLogger(__name__)

#: Architectures that leave their input alone: each has a test that runs it on read-only memory. All others get copies.
READS_ONLY: Final = frozenset({"Qwen2_5_VLForConditionalGeneration"})
#: How long a starting scheduler waits for a broker, in seconds: so that its own warm-up goes through it already.
_PATIENCE: Final = 3.0


@dataclass(frozen=True)
class Topology:
    """Where a scheduler stands. `rank` of `world`: among all first pipeline stages of all replicas."""

    rank: int
    world: int
    stage: int
    stages: int

    @property
    def takes(self) -> bool:
        """Later pipeline stages relay references; they never read a feature."""
        return self.stage == 0


class Consumer:
    """Takes for one scheduler. `fail` raises what makes this version of SGLang fail the one request it is at."""

    def __init__(
        self, settings: Settings, scheduler: Any, topology: Topology, fail: Callable[[Any, Any, str], Any]
    ) -> None:
        self._topology = topology
        self._fail = fail
        self._table: mmbroker.FeatureTable | None = None
        self._engine = settings.engine
        self._device = "cpu"
        architectures = getattr(scheduler.model_config.hf_config, "architectures", None) or ["unknown"]
        self._access = "readonly" if architectures[0] in READS_ONLY else "copy"
        self._joining: Joining | None = None
        if topology.takes:
            name = f"{settings.engine}/scheduler-{topology.rank}"
            self._joining = Joining(settings, name, self._attach)
            self._joining.joined.wait(_PATIENCE)

    def _attach(self, client: mmbroker.Client) -> None:
        self._table = client.attach(
            engine=self._engine,
            rank=self._topology.rank,
            world=self._topology.world,
            device=self._device,
            access=self._access,
        )

    def inputs(self, original: Callable[[Any, Any], Any], scheduler: Any, received: Any) -> Any:
        """AROUND `Scheduler._get_multimodal_inputs`."""
        start = time.perf_counter_ns()
        try:
            envelope = packing.envelope_of(received)
            if envelope is None:
                return original(scheduler, received)
            return self._inputs(original, scheduler, received, envelope)
        finally:
            counters = measure.counters
            counters.add("inputs_ns", time.perf_counter_ns() - start)
            counters.add("inputs")
            counters.add("items", len(getattr(received, "mm_items", ())))

    def _inputs(
        self, original: Callable[[Any, Any], Any], scheduler: Any, received: Any, envelope: dict[str, Any]
    ) -> Any:
        if (earlier := envelope.get("error")) is not None:
            return self._fail(scheduler, received, earlier)
        error: str | None = None
        result: Any = None
        try:
            opened = packing.open_copy(received, envelope)
        except Exception as caught:
            error = _described(caught)
        else:
            # The references are still in their places: in broadcast mode the original pickles its result for others.
            result = original(scheduler, opened)
            try:
                if self._topology.takes:
                    self._take(result.mm_items)
                else:
                    _forget(result.mm_items)
            except Exception as caught:
                error = _described(caught)
        error = self._agree(scheduler, error)
        if error is None:
            return result
        if result is not None:
            _give_back(result.mm_items)
        measure.counters.add("errors")
        message = f"mmbroker: the features of this request cannot be had ({error})"
        if self._topology.stages > 1:
            # The request as received goes on to the next stage, which must fail it too.
            envelope["error"] = message
        return self._fail(scheduler, received, message)

    def _take(self, items: list[Any]) -> None:
        """Put tensors in the places of references. If it raises, the caller releases what was taken."""
        for item in items:
            taken = uses.hang_on(item)
            for place in packing.places(item):
                reference = place.value
                if not is_reference(reference):
                    continue
                if self._table is None:
                    raise mmbroker.BrokerUnavailable("this rank has not joined a broker")
                try:
                    use = self._table.take(reference)
                except mmbroker.FeatureError:
                    measure.counters.add("misses")
                    raise
                taken.append(use)
                place.value = use.tensor
                measure.counters.add("takes")

    def _agree(self, scheduler: Any, error: str | None) -> str | None:
        """The same answer on all ranks that share this request: None only if all of them have its features."""
        import torch.distributed as dist

        group = scheduler.dp_tp_cpu_group
        if not self._topology.takes or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return error
        import torch

        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if not failed.item():
            return None
        return error or "another rank of this engine failed; its log says why"


def _give_back(items: list[Any]) -> None:
    """Nothing of these items is used: a log that keeps the error keeps this frame, and them with it."""
    for item in items:
        uses.release(item)
        item.feature = item.precomputed_embeddings = None
        item.model_specific_data = {}


def _described(error: Exception) -> str:
    """Whatever it is, it stays here: an exception that leaves the hook ends the engine."""
    logger.error("mmbroker: a request's features cannot be had", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _forget(items: list[Any]) -> None:
    for item in items:
        for place in packing.places(item):
            if is_reference(place.value):
                place.value = None
