"""The scheduler's side: references become tensors by a look-up in the rank's table.

One `Consumer` a scheduler process. What it adds to the scheduler thread is that look-up and the unpacking of what
still travels inside the request; it sends no message, copies no feature, hashes nothing.

Ranks that share a request must agree whether it goes on: one that ran it alone would wait for the others for ever. All
of them have acknowledged its features before it was sent, so they agree unless something is broken. To be sure of it,
everything that may fail is done when requests arrive, for all that arrived at once, and then the ranks compare notes:
once for each arrival with features in it, and only where there are several such ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import mmbroker
from mmbroker.path import spell_out
from mmbroker.proto.reference import is_reference

from . import measure, packing, uses
from .joining import Joining
from .outputs import Output, Outputs
from .settings import Settings

logger = logging.getLogger(__name__)

#: Architectures that leave their input alone: each has a test that runs it on read-only memory. All others get copies.
READS_ONLY: Final = frozenset({"Qwen2_5_VLForConditionalGeneration"})
#: Architectures whose features nobody reads but their encoder, called by `embed_mm_inputs`: there the references stay
#: in their places until then (`encoding`). All others find tensors when their request arrives.
READS_LATE: Final = frozenset({"Qwen2_5_VLForConditionalGeneration"})


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


Envelope = dict[str, Any]
#: Uses by hold.
Taken = dict[tuple[bytes, int], mmbroker.Use]


class Consumer:
    """Takes for one scheduler. `fail` is how this version of SGLang fails one request; it raises, or gives inputs."""

    def __init__(
        self, settings: Settings, scheduler: Any, topology: Topology, fail: Callable[[Any, Any, str], Any]
    ) -> None:
        self._topology = topology
        self._fail = fail
        self._table: mmbroker.FeatureTable | None = None
        self._engine = settings.engine
        self._group = _peers(scheduler) if topology.takes else None
        #: What was taken for requests that are about to be handled, by the id of their envelopes, which it keeps alive.
        self._ready: dict[int, tuple[Envelope, Taken]] = {}
        architectures = getattr(scheduler.model_config.hf_config, "architectures", None) or ["unknown"]
        self._access = "readonly" if architectures[0] in READS_ONLY else "copy"
        self._late = architectures[0] in READS_LATE
        self._device = device_of(scheduler)
        self._stream = getattr(scheduler, "forward_stream", None)
        self._joining: Joining | None = None
        #: What encoders make, for the next time and for other engines, unless that is turned off.
        self.outputs: Outputs | None = None
        if settings.share_outputs:
            alone = topology.world == 1 and self._group is None
            self.outputs = Outputs(
                self._client,
                _is_first(self._group),
                settings.engine if alone else "",
                lambda: self._table,
            )
        if topology.takes:
            name = f"{settings.engine}/scheduler-{topology.rank}"
            self._joining = Joining(settings, name, self._attach)
            self._joining.wait()

    def _attach(self, client: mmbroker.Client) -> None:
        self._table = client.attach(
            engine=self._engine,
            rank=self._topology.rank,
            world=self._topology.world,
            device=self._device,
            access=self._access,
        )
        logger.info(
            "mmbroker: rank %d of engine %s has its features on the %s path%s",
            self._topology.rank,
            self._engine,
            self._table.path,
            "" if self._device == "cpu" else f" to {self._device}",
        )

    def _client(self) -> mmbroker.Client | None:
        return None if self._joining is None else self._joining.client

    def stats(self) -> dict[str, int]:
        """The table's counters, if there is one."""
        return {} if self._table is None else self._table.stats()

    # --- the seams --------------------------------------------------------------------------------------------------

    def requests(self, original: Callable[[Any, Any], Any], scheduler: Any, arrived: Any) -> Any:
        """AROUND `Scheduler.process_input_requests`."""
        found = [
            (output, envelope) for output in _outputs(arrived) if (envelope := packing.envelope_of(output))
        ]
        if not found:
            return original(scheduler, arrived)
        start = time.perf_counter_ns()
        self._prepare(found)
        measure.counters.add("inputs_ns", time.perf_counter_ns() - start)
        try:
            return original(scheduler, arrived)
        finally:
            # What was not fetched belongs to requests that were turned away: a use that dies releases itself.
            self._ready.clear()

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

    # --- when requests arrive: all that may fail on one rank alone --------------------------------------------------

    def _prepare(self, found: list[tuple[Any, Envelope]]) -> None:
        """Take for requests. Those that fail are marked, here and on all ranks alike."""
        errors = [self._try(output, envelope) for output, envelope in found]
        lacks = [not self._take_outputs(envelope) for _, envelope in found]
        errors, lacks = self._agreed(errors, lacks)
        for (_, envelope), error, lack in zip(found, errors, lacks, strict=True):
            if lack:
                self._forgo_outputs(envelope)
            if error is not None:
                _release(self._ready.pop(id(envelope), (None, {}))[1])
                # In the request as received: it goes on to the next pipeline stage, which must fail it too.
                envelope["error"] = f"mmbroker: the features of this request cannot be had ({error})"

    def _try(self, output: Any, envelope: Envelope) -> str | None:
        """Take for one request; why it cannot be done."""
        if not self._topology.takes or "error" in envelope:
            return None
        taken: Taken = {}
        try:
            for item in output.mm_items:
                for place in packing.places(item):
                    if is_reference(place.value):
                        self._take(place, taken)
        except Exception as error:
            # Whatever it is: an exception that leaves the hook ends the engine.
            _release(taken)
            return _described(error)
        self._ready[id(envelope)] = envelope, taken
        return None

    def _take(self, place: packing.Place, taken: Taken) -> None:
        if self._table is None:
            raise mmbroker.BrokerUnavailable("this rank has not joined a broker")
        try:
            use = taken[_key(place.value)] = self._table.take(place.value)
        except mmbroker.FeatureError:
            measure.counters.add("misses")
            raise
        if not self._is_late(place):
            _ = use.tensor  # made now, when it may still fail
        measure.counters.add("takes")

    def _take_outputs(self, envelope: Envelope) -> bool:
        """Take what encoders have made of a request's features. False if some of it cannot be had."""
        _, taken = self._ready.get(id(envelope), (None, {}))
        try:
            for _, key, reference in (
                envelope.get("encoded", ()) if taken and self.outputs is not None else ()
            ):
                if reference is not None:
                    if reference["digest"] != key:
                        raise mmbroker.StaleReference("an encoder output is another feature's")
                    assert self._table is not None
                    taken[_key(reference)] = self._table.take(reference)
        except Exception as error:
            logger.error("mmbroker: encoder outputs cannot be had", exc_info=error)
            return False
        return True

    def _forgo_outputs(self, envelope: Envelope) -> None:
        """On all ranks alike: encoders run on all of them, or on none."""
        _, taken = self._ready.get(id(envelope), (None, {}))
        for _, _, reference in envelope.get("encoded", ()):
            if reference is not None:
                measure.counters.add("outputs_refused")
                if (use := taken.pop(_key(reference), None)) is not None:
                    use.release()

    def _is_late(self, place: packing.Place) -> bool:
        return self._late and place.name == "feature" and not place.extra

    def _agreed(self, errors: list[str | None], lacks: list[bool]) -> tuple[list[str | None], list[bool]]:
        """The same on all ranks that share these requests: without an error, or a lack of outputs, only where all of
        them are."""
        if self._group is None:
            return errors, lacks
        import torch
        import torch.distributed as dist

        mine = [[error is not None for error in errors], lacks]
        failed = torch.tensor(mine, dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        agreed = [
            error or ("another rank of this engine failed; its log says why" if bad else None)
            for error, bad in zip(errors, failed[0].tolist(), strict=True)
        ]
        return agreed, [bool(lack) for lack in failed[1].tolist()]

    # --- when one is handled: what is the same on all ranks ---------------------------------------------------------

    def _inputs(
        self, original: Callable[[Any, Any], Any], scheduler: Any, received: Any, envelope: Envelope
    ) -> Any:
        if "error" not in envelope and self._topology.takes and id(envelope) not in self._ready:
            self._prepare([(received, envelope)])  # it came another way
        if (error := envelope.get("error")) is None:
            try:
                opened = packing.open_copy(received, envelope)
            except Exception as caught:
                error = f"mmbroker: this request cannot be unpacked ({_described(caught)})"
        if error is not None:
            measure.counters.add("errors")
            return self._fail(scheduler, received, error)
        # The references are still in their places: in broadcast mode the original pickles its result for the others.
        result = original(scheduler, opened)
        if self._late and result.padded_input_ids is None:
            # The processor left it to the scheduler because items had no identity yet. It takes far longer by torch.
            result.padded_input_ids = packing.padded(opened, result.mm_items)
        _, taken = self._ready.pop(id(envelope), (None, {}))
        encoded = {hold: rest for hold, *rest in envelope.get("encoded", ())}
        for item in result.mm_items:
            mine = uses.hang_on(item, self._stream)
            for place in packing.places(item):
                if is_reference(place.value):
                    use = taken.get(_key(place.value))
                    if use is None:
                        place.value = None
                        continue
                    mine.append(use)
                    if self._is_late(place):
                        mine.late = uses.Late(use, place.value)
                        if self.outputs is not None and (found := encoded.get(place.value["hold"])):
                            key, reference = found
                            there = None if reference is None else taken.get(_key(reference))
                            if there is not None:
                                mine.append(there)
                            mine.output = Output(self.outputs, key, there)
                    else:
                        place.value = use.tensor
        return result


def device_of(scheduler: Any) -> str:
    """Where a scheduler's tensors are, as `attach` wants it. For its own thread, whose current GPU is meant."""
    return spell_out("cuda") if str(getattr(scheduler, "device", "cpu")).startswith("cuda") else "cpu"


def _peers(scheduler: Any) -> Any:
    """The process group of the ranks that get the same requests as this one; None if there are no others."""
    import torch.distributed as dist

    group = scheduler.dp_tp_cpu_group
    return group if dist.is_initialized() and dist.get_world_size(group) > 1 else None


def _is_first(group: Any) -> bool:
    """Of the ranks that encode the same items, this one offers what comes of it."""
    import torch.distributed as dist

    return group is None or dist.get_rank(group) == 0


def _outputs(arrived: Iterable[Any]) -> Iterable[Any]:
    """The processors' outputs in what arrived: single requests, batches of them, and much that is neither."""
    for message in arrived:
        for request in getattr(message, "batch", None) or (message,):
            output = getattr(request, "mm_inputs", None)
            if output is not None:
                yield output


def _key(reference: dict[str, Any]) -> tuple[bytes, int]:
    return reference["boot"], reference["hold"]


def _release(taken: Taken) -> None:
    for use in taken.values():
        use.release()
    taken.clear()


def _described(error: Exception) -> str:
    logger.error("mmbroker: a request's features cannot be had", exc_info=error)
    return f"{type(error).__name__}: {error}"
