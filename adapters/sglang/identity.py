"""Which encoder an engine has: a fingerprint of all that shapes its outputs, and the keys that outputs are found by.

Something too much in it costs a miss, something too little gives wrong answers. So all of SGLang's arguments and
variables are in it, except those that are known to have nothing to do with an encoder. Weights are told by their files:
where they are, which ones, how large and how old, and the headers of those that have one; or by their bytes, if that is
asked for (`adapters.weights`). That they did not change while they were loaded is seen by a look before the engine
starts and another one at its first request.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

from mmbroker.adapters.fingerprint import canonical, derived_key, fingerprint, versions
from mmbroker.adapters.weights import by_content, contents, kinds
from mmbroker.proto.keys import Key

from . import packing
from .settings import SHARE_OUTPUTS

logger = logging.getLogger(__name__)

#: The launcher's look at the weights, for the processes it starts.
WEIGHTS: Final = "MMBROKER_WEIGHTS"
#: And what they contain, if that is asked for.
CONTENT: Final = "MMBROKER_WEIGHTS_CONTENT"
#: Architectures whose encoder makes of one item what depends on nothing but that item: each has a test.
ARCHITECTURES: Final = frozenset({"Qwen2_5_VLForConditionalGeneration"})

#: Ways to load weights that read the model's own files, and nothing else.
LOADS: Final = frozenset(
    {
        *("auto", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes"),
        *("layered", "sharded_state"),
    }
)

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".py")
#: The longest header of a safetensors file that is read, in bytes.
_HEADER: Final = 64 << 20
#: Arguments that differ between two engines of one model, and have nothing to do with its encoder: where it listens,
#: what it writes, what it is called, how much it takes at once. The model's own configuration is told apart from them.
_UNRELATED: Final = re.compile(
    r"_?(host|port|.*_port|.*_ports|.*_addr|.*_ipc_name|instance_id|fastapi_root_path|.*api_key|served_model_name|warmups"
    r"|model_path|tokenizer_path|download_dir|log_.*|.*_log_.*|.*_logging|.*metrics.*|.*trace.*"
    r"|watchdog_timeout|soft_watchdog_timeout|dist_timeout|base_gpu_id|gpu_id_step|numa_node|random_seed|sleep_on_idle|skip_server_warmup|.*worker_num"
    r"|context_length|mem_fraction_static|max_running_requests|max_queued_requests|max_total_tokens|page_size"
    r"|max_prefill_tokens|chunked_prefill_size|cuda_graph_config|cuda_graph_(max_)?bs.*|schedule_policy|schedule_conservativeness|stream_interval"
    r"|.*chat_template.*|reasoning_parser|tool_call_parser|disable_radix_cache|grammar_backend|sampling_backend"
    r"|model_config|mm_feature_transport|mm_preprocess_cache_size_mb|enable_cache_report|weight_version)"
)
_UNRELATED_VARIABLES: Final = re.compile(
    r"SGLANG_(RUN_ID|(.*_)?PORT|.*APP_PATH|LOG.*|.*LOGGING.*|CPU_OMP_THREADS_BIND|VLM_CACHE_SIZE_MB|.*IPC.*)"
)


class Unknown(Exception):
    """It cannot be told which encoder this is; the message is the reason."""


def note_weights(args: Any, environ: MutableMapping[str, str] = os.environ) -> None:
    """In the launcher, before any weights are loaded: remember what their files are."""
    try:
        environ[WEIGHTS] = fingerprint(weights=weights(args)).hex()
        if by_content(environ):
            environ[CONTENT] = fingerprint(weights=contents(_files(args), environ)).hex()
    except (OSError, Unknown) as error:  # not there yet, perhaps
        environ[WEIGHTS] = f"unknown: {error}"


def weights(args: Any) -> list[tuple[Any, ...]]:
    """What tells a model's files from others, without reading them whole. Raises `Unknown`, `OSError`."""
    found: list[tuple[Any, ...]] = []
    for path in _files(args):
        real = path.resolve()
        is_ = real.stat()
        place = (str(real), is_.st_dev, is_.st_ino, is_.st_size, is_.st_mtime_ns)
        found.append((path.name, *place, _header(real)))
    return found


def _files(args: Any) -> list[Path]:
    """A model's weights, and what is read beside them. Raises `Unknown` if there are none, `OSError`."""
    directory = _directory(str(args.model_path), getattr(args, "revision", None))
    found = [path for path in sorted(directory.iterdir()) if path.name.endswith(_WEIGHTS) and path.is_file()]
    if all(path.name.endswith((".py", ".json")) for path in found):
        raise Unknown(f"{directory} has no weights")
    return found


def _directory(model: str, revision: str | None) -> Path:
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a name of a model either
        config = None
    if not isinstance(config, str):
        raise Unknown(f"{model} is no directory, and not in the cache of models either")
    return Path(config).parent


def _header(path: Path) -> bytes:
    if path.suffix != ".safetensors":
        return b""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(min(length, _HEADER))).digest()


class Encoder:
    """The encoder of one tokenizer's engine. Thread-safe; the fingerprint is made when it is first needed."""

    def __init__(self, manager: Any, engine: str, environ: MutableMapping[str, str] = os.environ) -> None:
        self._args = manager.server_args
        self._config = manager.model_config.hf_config
        self._engine = engine
        self._environ = dict(environ)
        self._making = threading.Lock()
        self._fingerprint: bytes | None = None
        self._asked = False

    @property
    def unknown(self) -> bool:
        """Is it known by now that nothing is shared?"""
        return self._asked and self._fingerprint is None

    def key(self, item: Any, digest: bytes) -> Key | None:
        """The key of what this encoder makes of an item whose feature has this digest. None: it cannot be told."""
        mark = self._mark()
        beside = None if mark is None else packing.beside(item)
        if mark is None or beside is None:
            return None
        return derived_key(mark, digest, str(item.modality.name).encode(), beside)

    def _mark(self) -> bytes | None:
        with self._making:
            if not self._asked:
                try:
                    self._fingerprint = self._make()
                except Exception as error:  # whatever it is: then nothing is shared
                    level = logging.WARNING if self._environ.get(SHARE_OUTPUTS) else logging.INFO  # asked for
                    logger.log(level, "mmbroker: encoder outputs are not shared: %s", error)
                self._asked = True
        return self._fingerprint

    def _make(self) -> bytes:
        args = self._args
        architecture = (getattr(self._config, "architectures", None) or ["unknown"])[0]
        if architecture not in ARCHITECTURES:
            raise Unknown(f"it has not been tried whether {architecture} encodes each item by itself")
        if getattr(args, "enable_lora", False) or getattr(args, "lora_paths", None):
            raise Unknown("adapters (LoRA) may change the encoder from request to request")
        own: Any = ""
        files: list[Any] = []
        load = str(getattr(args.load_format, "value", args.load_format))
        if load == "dummy":
            own = self._engine  # drawn at random: no other engine has them
        elif load not in LOADS:
            raise Unknown(f"with --load-format {load} weights may come from elsewhere than the model's files")
        else:
            files = weights(args)
            if fingerprint(weights=files).hex() != self._environ.get(WEIGHTS):
                raise Unknown(
                    f"the model's files are not what they were before it was loaded ({self._environ.get(WEIGHTS)})"
                )
            if by_content(self._environ):
                files, own = [self._environ[CONTENT]], kinds()
        config = re.sub(r'"_name_or_path": "[^"]*"', "", self._config.to_json_string(use_diff=False))
        return fingerprint(
            weights=files,
            own=own,
            config=config,
            arguments=_arguments(args),
            variables={
                name: value
                for name, value in self._environ.items()
                if name.startswith("SGLANG_") and not _UNRELATED_VARIABLES.fullmatch(name)
            },
            versions=versions(
                "mmbroker", "sglang", "sgl-kernel", "torch", "transformers", "flashinfer-python"
            ),
            machine=platform.machine(),
        )


def _arguments(args: Any) -> dict[str, Any]:
    """SGLang's arguments as they were resolved; what has no plain form as what it shows of itself."""
    names = getattr(type(args), "__struct_fields__", None) or vars(args)
    found: dict[str, Any] = {}
    for name in names:
        if _UNRELATED.fullmatch(name):
            continue
        value = getattr(args, name, None)
        try:
            canonical(value)
        except (TypeError, ValueError):
            value = f"{type(value).__qualname__} {value!r}"
        found[name] = value
    return found
