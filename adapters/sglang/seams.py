"""Which names of which SGLang version the plugin stands on, and how its hooks get there.

SGLang is released every few weeks, and its names move. So the versions that were tested are listed; on any other the
plugin says so and stands aside. On a listed one every name is looked up first, and when one is missing nothing is
hooked and the process does not start: half a transport is worse than none.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import encoding, hooks, measure

if TYPE_CHECKING:
    from .consumer import Topology

logger = logging.getLogger(__name__)

_ARGS: Final = "sglang.srt.server_args"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager"
_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_BATCH: Final = "sglang.srt.managers.schedule_batch"
_UTILS: Final = "sglang.srt.managers.mm_utils"
_WEIGHTS: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_PROCESSOR: Final = "sglang.srt.multimodal.processors.base_processor"
_COMMONS: Final = "sglang.srt.utils.common"
_ARTIFACTS: Final = "sglang.srt.multimodal.media_artifacts.base"
_CACHE: Final = "sglang.srt.multimodal.cache"

Hooks = dict[tuple[str, str], Callable[..., Any]]

#: What every version has: (module, name in it) and the hook.
_COMMON: Final[Hooks] = {
    (_TOKENIZER, "TokenizerManager.init_running_status"): hooks.begin_tokenizer,
    (_TOKENIZER, "TokenizerManager.generate_request"): hooks.generate_request,
    (_TOKENIZER, "TokenizerManager._tokenize_one_request"): hooks.tokenize,
    (_TOKENIZER, "TokenizerManager._send_one_request"): hooks.send,
    (_PROCESSOR, "BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc"): hooks.wrap_for_ipc,
    (_PROCESSOR, "BaseMultimodalProcessor._fast_image_processor_device"): hooks.processor_device,
    (_SCHEDULER, "Scheduler.__init__"): hooks.begin_scheduler,
    (_SCHEDULER, "Scheduler.process_input_requests"): hooks.process_requests,
    (_SCHEDULER, "Scheduler._get_multimodal_inputs"): hooks.get_inputs,
    (_BATCH, "MultimodalInputs.release_features"): hooks.release_features,
    (_UTILS, "embed_mm_inputs"): encoding.embed,
    **{
        (_WEIGHTS, f"SchedulerWeightUpdaterManager.update_weights_from_{source}"): hooks.update_weights
        for source in ("disk", "distributed", "tensor", "ipc")
    },
}
#: Only timed, and only for `MMBROKER_MEASURE`.
_TIMED: Final[Hooks] = {
    (_UTILS, "hash_feature"): measure.timed("hash_calls", "hash_ns"),
    (_UTILS, "ShmPointerMMData.__init__"): measure.timed("shm_wrap_calls", "shm_wrap_ns"),
    (_UTILS, "ShmPointerMMData.__setstate__"): measure.timed("shm_open_calls", "shm_open_ns"),
    (_UTILS, "ShmPointerMMData.materialize"): measure.timed("shm_read_calls", "shm_read_ns"),
    (_BATCH, "MultimodalDataItem.reconstruct"): measure.timed("reconstruct_calls", "reconstruct_ns"),
}
#: Those of the common hooks that measuring needs, whatever the transport.
_MEASURED: Final = (
    (_TOKENIZER, "TokenizerManager.init_running_status"),
    (_SCHEDULER, "Scheduler.__init__"),
    (_SCHEDULER, "Scheduler._get_multimodal_inputs"),
)


@dataclass(frozen=True)
class Version:
    """One tested version of SGLang. `names`: looked up and used, not hooked. `fail`: how one request fails."""

    hooks: Hooks
    names: tuple[tuple[str, str], ...]
    fail: Callable[[Any, Any, str], Any]
    identify: Callable[[Any, bytes], None]
    topology: Callable[[Any], Topology]
    #: Whether HTTP/2 workers can be made to load plugins.
    http2_workers: bool
    #: The module of ours that finds media before they are decoded.
    finder: str
    #: Modules that the launcher will import, beside the tokenizer's: imported before hooks are set.
    launcher: tuple[str, ...] = ()


def _identify_wide(item: Any, digest: bytes) -> None:
    item.set_identity(digest)


def _identify_narrow(item: Any, digest: bytes) -> None:
    item.set_hash(int.from_bytes(digest[:8], "big"))


def _topology(parallel: Any, shares_attention: bool) -> Topology:
    """Attention's data parallelism lies within the tensor-parallel ranks; replicas have ranks of their own."""
    from .consumer import Topology

    replicas = 1 if shares_attention else parallel.dp_size
    replica = (parallel.dp_rank or 0) if replicas > 1 else 0
    return Topology(
        rank=replica * parallel.tp_size + parallel.tp_rank,
        world=replicas * parallel.tp_size,
        stage=parallel.pp_rank,
        stages=parallel.pp_size,
    )


def _topology_of_context(scheduler: Any) -> Topology:
    from sglang.srt.runtime_context import get_parallel

    return _topology(get_parallel(), get_parallel().attn_dp_enabled)


def _topology_of_scheduler(scheduler: Any) -> Topology:
    return _topology(scheduler.ps, scheduler.server_args.enable_dp_attention)


_USED: Final = (
    (_BATCH, "MultimodalProcessorOutput.build_padded_input_ids"),
    (_BATCH, "MultimodalDataItem.set_hash"),
)
VERSIONS: Final = {
    "0.5.17": Version(
        hooks={
            (_ARGS, "ServerArgs.__post_init__"): hooks.resolve,
            ("uvicorn", "run"): hooks.run_workers,
            (_TOKENIZER, "TokenizerManager._wait_one_response"): hooks.wait_for_answer,
            (_TOKENIZER, "TokenizerManager._handle_batch_output"): hooks.hear_batch,
            (_TOKENIZER, "TokenizerManager._handle_abort_req"): hooks.hear_abort,
            (_SCHEDULER, "Scheduler._add_request_to_queue"): hooks.add_to_queue,
            (_PROCESSOR, "BaseMultimodalProcessor.load_mm_data"): hooks.load_media,
            (_PROCESSOR, "BaseMultimodalProcessor.process_and_combine_mm_data_async"): hooks.begin_combining,
            (_PROCESSOR, "BaseMultimodalProcessor.process_and_combine_mm_data"): hooks.combine_media,
        },
        names=(
            *_USED,
            (_BATCH, "Req.set_finish_with_abort"),
            (_BATCH, "FINISH_ABORT"),
            (_COMMONS, "get_image_bytes"),
            (_COMMONS, "ImageData"),
        ),
        fail=hooks.fail_by_abort,
        identify=_identify_narrow,
        topology=_topology_of_scheduler,
        http2_workers=False,
        finder="undecoded",
        launcher=("uvicorn",),
    ),
    "0.5.23": Version(
        hooks={
            # Not `__post_init__`: its class is a struct that remembers the one it was born with.
            (_ARGS, "ServerArgs.resolve_once"): hooks.resolve,
            (_BATCH, "Req.release_mm_inputs_on_abort"): hooks.release_on_abort,
            (_ARTIFACTS, "MediaArtifactCacheMixin.prepare_media_artifacts"): hooks.prepare_artifacts,
            (
                _ARTIFACTS,
                "MediaArtifactCacheMixin.prepare_media_artifacts_without_cache",
            ): hooks.prepare_artifacts,
        },
        names=(
            *_USED,
            (_BATCH, "MultimodalDataItem.set_identity"),
            (_SCHEDULER, "_MultimodalInputProcessingError"),
            *((_CACHE, name) for name in ("build_processor_fingerprint", "parse_content_hash")),
            (_CACHE, "resolve_multimodal_item_hash"),
            ("sglang.srt.runtime_context", "get_parallel"),
        ),
        fail=hooks.fail_by_error,
        identify=_identify_wide,
        topology=_topology_of_context,
        http2_workers=True,
        finder="artifacts",
        launcher=(_ARTIFACTS,),
    ),
}


class HalfHooked(SystemExit):
    """A name is missing. SGLang logs a plugin's exceptions and goes on; this one ends the process, with its message."""


def version() -> Version | None:
    """The version that runs here, None if it is not one of the tested."""
    return VERSIONS.get(_name())


def _name() -> str:
    from sglang.version import __version__

    return str(__version__)


def unknown() -> str:
    return f"mmbroker was tested with SGLang {' and '.join(VERSIONS)}, and this is {_name()}"


def install(broker: bool, measured: bool, main: bool) -> None:
    """Hook what this process has: of the modules that are in use here, all names or none.

    `broker`: carry features; `measured`: time SGLang's own path. `main`: this is the launcher, which may become the
    tokenizer's process, but has not imported it yet.
    """
    found = version()
    if found is None:
        return
    wanted: Hooks = {**_COMMON, **found.hooks} if broker else {key: _COMMON[key] for key in _MEASURED}
    if measured:
        wanted.update(_TIMED)
        wanted.setdefault((_UTILS, "embed_mm_inputs"), encoding.count)
    if main:
        for module in (_TOKENIZER, *found.launcher):
            importlib.import_module(module)
    here = {key: hook for key, hook in wanted.items() if key[0] in sys.modules}
    missing = [f"{module}.{name}" for module, name in (*here, *found.names) if not _exists(module, name)]
    if missing:
        raise HalfHooked(
            f"mmbroker: SGLang {_name()} has no {', '.join(missing)} here. Nothing was hooked and this process ends, "
            "because half a transport is worse than none: start SGLang without --mm-transport broker"
        )
    _apply({f"{module}.{name}": hook for (module, name), hook in here.items()})


def _exists(module: str, name: str) -> bool:
    if module not in sys.modules:
        return True  # not of this process
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def _apply(targets: dict[str, Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in targets.items():
        if target not in HookRegistry._patched:
            HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    failed = sorted(target for target in targets if target not in HookRegistry._patched)
    if failed:
        raise HalfHooked(f"mmbroker: SGLang could not hook {', '.join(failed)}; its log says why")


def warn_of_overrides(instance: Any) -> None:
    """A hook sits on a class; a subclass with a method of its own escapes it, which nobody would notice otherwise."""
    for module, name in (*_COMMON, *getattr(version(), "hooks", ())):
        owner, _, attribute = name.partition(".")
        for base in type(instance).__mro__:
            if (base.__module__, base.__qualname__) == (module, owner):
                break
            if attribute in base.__dict__ and any(
                (later.__module__, later.__qualname__) == (module, owner) for later in type(instance).__mro__
            ):
                logger.warning(
                    "mmbroker: %s.%s has a %s of its own, which the broker's hook on %s does not see",
                    base.__module__,
                    base.__qualname__,
                    attribute,
                    owner,
                )


def current() -> Version:
    """The version that runs here, which is a tested one."""
    found = version()
    if found is None:
        raise HalfHooked(unknown())
    return found
