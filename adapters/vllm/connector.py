"""The ECConnector: what vLLM makes once in its scheduler and once in each worker, and calls at every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from mmbroker.path import spell_out
from mmbroker.proto.reference import Reference

from . import identity, receiver, seams, settings
from .fetching import Fetching
from .joining import Joining
from .lookups import Lookups
from .saving import Saves
from .scheduler import SchedulerHalf
from .worker import WorkerHalf

logger = logging.getLogger("vllm.mmbroker")


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers: what to load in a step, and whether the encoder runs in it."""

    loads: list[tuple[str, Reference]] = field(default_factory=list)
    encodes: bool = False


@dataclass
class Loaded(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler: what they have loaded in a step. All of them load the same."""

    identifiers: list[str] = field(default_factory=list)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        return self


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """An error in it is logged, and costs at most a hold or a save: it must not reach vLLM's loop, which would end."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("mmbroker: %s failed", method.__name__)

    return call


class MMBrokerConnector(ECConnectorBase):  # type: ignore[misc]
    """One half, by its role. With settings that make no sense it raises `ValueError`, and vLLM does not start; where it
    cannot serve, both halves stay None, and vLLM runs as if there were no connector."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        transfer = vllm_config.ec_transfer_config
        asked = settings.read(transfer.ec_connector_extra_config)
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self._joining: Joining | None = None
        self._lookups: Lookups | None = None
        why = settings.unknown_version() or _unsuited(vllm_config)
        if why is not None:
            if role is ECConnectorRole.SCHEDULER:
                logger.warning("mmbroker stands aside: %s. vLLM serves without it.", why)
        elif role is ECConnectorRole.SCHEDULER:
            self._begin_scheduler(vllm_config, asked)
        else:
            self._begin_worker(vllm_config, asked)

    def _begin_scheduler(self, vllm_config: Any, asked: settings.Settings) -> None:
        name = settings.replica_name(vllm_config)
        keys = _keys(vllm_config, asked, logger.warning)
        self._joining = joining = Joining(asked.broker, f"{name}/scheduler", stats=self._stats, says=True)
        self._lookups = Lookups(lambda: joining.there, name, keys.key)
        half = SchedulerHalf(self._lookups, _Bare(vllm_config), asked.wait, consumes=bool(self.is_consumer))
        self.scheduler = half
        for name in ("has_cache_item", "ensure_cache_available", "update_state_after_alloc"):
            setattr(self, name, getattr(half, name))
        if self.is_consumer:
            receiver.expecting.append(self._lookups.expect)

    def _begin_worker(self, vllm_config: Any, asked: settings.Settings) -> None:
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        if not parallel_state.get_pp_group().is_first_rank:
            return  # later pipeline stages never see an encoder's output
        seams.keep_weights()
        tensor_group = parallel_state.get_tp_group()
        rank, world = tensor_group.rank_in_group, tensor_group.world_size
        # Named here, in the thread that vLLM has set its device in: in others torch's current one is the first.
        device = spell_out("cuda") if current_platform.is_cuda() else "cpu"
        saves = None
        if self.is_producer and rank == 0:
            keys = _keys(vllm_config, asked, lambda text: None)  # the scheduler's half says it
            fetching = None if device == "cpu" else Fetching(device)
            saves = Saves(keys.key, int(asked.save_mib * (1 << 20)), fetching)
        self.worker = WorkerHalf(
            asked.broker,
            settings.replica_name(vllm_config),
            rank,
            world,
            device,
            saves,
        )

    def _stats(self) -> dict[str, int]:
        counts = {} if self._lookups is None else dict(self._lookups.counts)
        if self.scheduler is not None:
            counts.update(self.scheduler.counts)
        return {f"vllm_{name}": value for name, value in counts.items()}

    # --- the scheduler's process ------------------------------------------------------------------------------------

    # Where this connector serves, the half's own methods stand in place of these three, which are called for each
    # request at each step: a call in between would double what the short ones cost.

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return True

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        pass

    def take_unavailable_requests(self) -> set[str]:
        return set() if self.scheduler is None else self.scheduler.take_unavailable_requests()

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        if self.scheduler is None:
            return Loads()
        loads = self.scheduler.build_loads(scheduler_output.free_encoder_mm_hashes)
        return Loads(loads, bool(scheduler_output.scheduled_encoder_inputs))

    @_harmless
    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.ec_connector_worker_meta
        if self.scheduler is not None and isinstance(told, Loaded):
            self.scheduler.loaded(told.identifiers)

    @_harmless
    def forgotten(self) -> None:
        """For our hook: vLLM itself does not tell a connector that its encoder cache has been emptied."""
        if self.scheduler is not None:
            self.scheduler.forgotten()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._finished(request.request_id)
        return False, None

    @_harmless
    def _finished(self, request_id: str) -> None:
        if self.scheduler is not None:
            self.scheduler.request_finished(request_id)

    # --- a worker's process -----------------------------------------------------------------------------------------

    # In this order, and all before the encoder runs but the last two.

    def start_save_caches(self, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        if self.worker is not None and not self.is_consumer and isinstance(meta, Loads) and meta.encodes:
            self.worker.encoding()

    def start_load_caches(self, encoder_cache: MutableMapping[str, Any], **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        if self.worker is not None and isinstance(meta, Loads):
            self.worker.load(encoder_cache, meta.loads)
            if meta.encodes:
                self.worker.encoding()

    @_harmless
    def save_caches(self, encoder_cache: MutableMapping[str, Any], mm_hash: str, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.save(encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        if self.worker is None:
            return None
        self._encoded(self.worker)
        loaded = self.worker.take_loaded()
        return Loaded(loaded) if loaded else None

    @_harmless
    def _encoded(self, worker: WorkerHalf) -> None:
        worker.encoded()

    # --- either -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._lookups is not None:
            if self._lookups.expect in receiver.expecting:
                receiver.expecting.remove(self._lookups.expect)
            self._lookups.close()
        if self._joining is not None:
            self._joining.close()
        if self.worker is not None:
            self.worker.close()


class _Bare:
    """Tells whether a feature came with nothing but what its place in the prompt follows from."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._fields: dict[str, frozenset[str]] = {}
        if vllm_config.model_config.is_multimodal_model:
            parser = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config).info.data_parser
            self._fields = {
                modality: frozenset(parser.placeholder_metadata_fields(modality))
                for modality in parser.embedding_fields
            }

    def __call__(self, feature: Any) -> bool:
        data = feature.data
        return data is not None and data.keys() <= self._fields.get(feature.modality, frozenset())


def _keys(vllm_config: Any, asked: settings.Settings, say: Any) -> identity.Identity:
    device = identity.device_name()
    keys = identity.Identity(lambda: identity.of_encoder(vllm_config, device), asked.uuids, say)
    keys.prepare()
    return keys


def _unsuited(vllm_config: Any) -> str | None:
    """Why a connector cannot serve an engine with this configuration, if so."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return f"it brings tensors to the CPU and to CUDA, and this is {current_platform.device_type}"
    model = vllm_config.model_config
    if not model.is_multimodal_model:
        return f"{model.model} takes no media"
    if model.is_encoder_decoder:
        return "an encoder-decoder model does not share its encoder's outputs"
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        return "a broker serves one node, and this engine has several"
    return None
