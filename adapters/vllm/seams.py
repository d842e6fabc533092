"""Where the general plugin hooks vLLM: the factories of its processor caches, its table of requests, and what empties
its encoder cache.

They are no official points, so the versions that were tested are listed (`settings.VERSIONS`). On any other nothing is
hooked; the connector then says why, if there is one. A hook does nothing for an engine that did not ask for a broker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from . import settings

_HOOKED: Final = "_mmbroker_hooked"
#: Where a front end's table of requests keeps what sends them again.
_RESENDER: Final = "_mmbroker_resender"


def install() -> None:
    """Set the hooks of this process, once."""
    if settings.unknown_version() is not None:
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor
    from vllm.renderers import base as renderers
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import async_llm, core, llm_engine, output_processor

    _hook(EngineArgs, "create_engine_config", _configure)
    _hook(renderers, "processor_cache_from_config", _sender)
    _hook(core, "engine_receiver_cache_from_config", _receiver)
    _hook(BaseMultiModalProcessor, "_cached_apply_hf_processor", _process)
    _hook(Scheduler, "reset_encoder_cache", _forget)
    _hook(output_processor.OutputProcessor, "add_request", _add_request)
    _hook(output_processor.OutputProcessor, "process_outputs", _process_outputs)
    _hook(async_llm.AsyncLLM, "__init__", _begin)
    _hook(llm_engine.LLMEngine, "__init__", _begin)


def keep_weights() -> None:
    """In a worker's process: what is in the broker was made by the weights that this engine started with."""
    from vllm.v1.worker.gpu_worker import Worker

    _hook(Worker, "reload_weights", _reload)


def _hook(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _HOOKED):
        return

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(hooked, _HOOKED, True)
    setattr(owner, name, hooked)


def _asked(vllm_config: Any) -> settings.Settings | None:
    """The settings of an engine whose processors' outputs go through a broker."""
    asked = settings.asked(vllm_config)
    if asked is None or not asked.processors or not vllm_config.model_config.supports_multimodal_inputs:
        return None
    return asked


def _configure(original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `EngineArgs.create_engine_config`, before any other process gets the configuration."""
    vllm_config = original(arguments, *args, **kwargs)
    if settings.asked(vllm_config) is not None:
        extra, parallel = (
            vllm_config.ec_transfer_config.ec_connector_extra_config,
            vllm_config.parallel_config,
        )
        extra["replicas"] = parallel.data_parallel_size
        if parallel.data_parallel_size_local != parallel.data_parallel_size:
            extra["processors"] = False  # a broker serves one node, and some replicas are elsewhere
    return vllm_config


def _sender(original: Callable[[Any], Any], vllm_config: Any) -> Any:
    """AROUND `processor_cache_from_config`, in each API server."""
    asked = _asked(vllm_config)
    if asked is None or vllm_config.model_config.get_multimodal_config().mm_processor_cache_gb <= 0:
        return original(vllm_config)
    from .sender import Sender

    return Sender(vllm_config, asked)


def _receiver(original: Callable[[Any], Any], vllm_config: Any) -> Any:
    """AROUND `engine_receiver_cache_from_config`, in each engine's process."""
    asked = _asked(vllm_config)
    if asked is None or vllm_config.model_config.get_multimodal_config().mm_processor_cache_gb <= 0:
        return original(vllm_config)
    from .receiver import Receiver

    return Receiver(vllm_config, asked)


def _process(original: Callable[..., Any], processor: Any, inputs: Any, *args: Any) -> Any:
    """AROUND `BaseMultiModalProcessor._cached_apply_hf_processor`: our cache learns whose items it is asked for."""
    serving = getattr(inputs.cache, "serving", None)
    if serving is None:
        return original(processor, inputs, *args)
    with serving(processor, inputs):
        return original(processor, inputs, *args)


def _forget(original: Callable[[Any], None], scheduler: Any) -> None:
    """AROUND `Scheduler.reset_encoder_cache`: what it has forgotten can be had from the broker again."""
    original(scheduler)
    forgotten = getattr(scheduler.get_ec_connector(), "forgotten", None)
    if forgotten is not None:
        forgotten()


def _reload(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """IN PLACE OF `Worker.reload_weights`."""
    raise RuntimeError(
        "mmbroker shares what this engine's encoder made of the weights that it started with: to replace weights while "
        "it runs, start it without the connector"
    )


def _begin(original: Callable[..., Any], front_end: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND the constructors of both front ends."""
    original(front_end, *args, **kwargs)
    if _asked(front_end.vllm_config) is not None:
        from .resending import Resender

        setattr(front_end.output_processor, _RESENDER, Resender(front_end))


def _add_request(original: Callable[..., Any], table: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `OutputProcessor.add_request`."""
    original(table, request, *args, **kwargs)
    resender = getattr(table, _RESENDER, None)
    if resender is not None:
        resender.added(table, request)


def _process_outputs(
    original: Callable[..., Any], table: Any, outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `OutputProcessor.process_outputs`."""
    resender = getattr(table, _RESENDER, None)
    if resender is not None:
        outputs = resender.sift(table, outputs)
    return original(table, outputs, *args, **kwargs)
