"""When two encoder outputs are the same: vLLM's hash of the media, and our fingerprint of everything else.

vLLM's hash commits to the media's bytes, the model's *name* and the options of the request. So the fingerprint has what
the name only promises: the model's and the processor's configuration, the files its weights come from, precision,
quantisation, parallelism and versions. What cannot be told is not shared.

Weights are known by their files: device, inode, size and time of change, which nothing can set back. A copy of a model
is another model, which costs a miss; or they are known by their bytes, if that is asked for (`adapters.weights`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mmbroker.adapters.fingerprint import derived_key, fingerprint, versions
from mmbroker.adapters.weights import WEIGHTS_BY, by_content, contents, kinds
from mmbroker.proto.keys import Key

#: What vLLM's hashes look like. Other identifiers are a client's own word, or a mere counter of one process.
_HASH: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_VERSIONS: Final = ("mmbroker", "vllm", "torch", "transformers", "pillow", "numpy")
#: Of vLLM's multimodal settings, those that do not reach an encoder's or a processor's output.
_IRRELEVANT: Final = frozenset(
    {
        "allow_missing_mm_embeddings",
        "enable_mm_embeds",
        "limit_per_prompt",
        "mm_encoder_only",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)


class NotTold(Exception):
    """Why outputs of this engine are not shared: one sentence."""


class Identity:
    """Keys of one kind of output of one engine. `make` gives the fingerprint, or raises `NotTold`.

    It is made when it is first needed: by then vLLM has fetched the model's files. Any thread may ask.
    """

    def __init__(self, make: Callable[[], bytes], uuids: bool, say: Callable[[str], None]) -> None:
        self._make = make
        self._uuids = uuids
        self._say = say
        self._lock = threading.Lock()
        self._known: bytes | None = None
        self._refused = False

    def key(self, identifier: str) -> Key | None:
        """None: what goes by this identifier is not shared."""
        if not self._uuids and _HASH.fullmatch(identifier) is None:
            return None
        print_ = self._fingerprint()
        return None if print_ is None else derived_key(print_, identifier.encode())

    def prepare(self) -> None:
        """Make what keys need now, if that takes reading: not when a scheduler asks for the first one."""
        if os.environ.get(WEIGHTS_BY):
            self._fingerprint()

    def _fingerprint(self) -> bytes | None:
        with self._lock:
            if self._known is None and not self._refused:
                try:
                    self._known = self._make()
                except NotTold as error:
                    self._refused = True
                    self._say(str(error))
            return self._known


def of_encoder(vllm_config: Any, device: str) -> bytes:
    """Fingerprint of an engine's encoder outputs."""
    _check(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    folder = _folder(vllm_config)
    return fingerprint(
        kind="vllm encoder output",
        processor=of_processor(vllm_config),
        weights=_weights(folder, vllm_config.load_config),
        quantization=str(model.quantization),
        quantized=str(getattr(vllm_config, "quant_config", None).__class__.__name__),
        dtype=str(model.dtype),
        tensor_parallel=parallel.tensor_parallel_size,
        device=device,
        compiled=bool(getattr(vllm_config.compilation_config, "compile_mm_encoder", False)),
    )


def of_processor(vllm_config: Any) -> bytes:
    """Fingerprint of what an engine's processors put out."""
    model = vllm_config.model_config
    mm = model.get_multimodal_config()
    folder = _folder(vllm_config)
    return fingerprint(
        kind="vllm processor output",
        architectures=list(model.architectures),
        config=_plain(model.hf_config.to_dict()),
        files={
            path.name: hashlib.sha256(path.read_bytes()).digest()
            for path in sorted(folder.glob("*.json"))
            if not path.name.endswith(".index.json")
        },
        dtype=str(model.dtype),
        settings={
            name: _plain(value)
            for name, value in vars(mm).items()
            if name not in _IRRELEVANT and name[0] != "_"
        },
        trust=bool(model.trust_remote_code),
        revision=str(model.revision),
        versions=versions(*_VERSIONS),
    )


def device_name() -> str:
    """The kind of device that encoders run on: two kinds round differently."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return str(current_platform.get_device_name())
    return str(current_platform.device_type)


def _check(vllm_config: Any) -> None:
    """Raise `NotTold` for what no fingerprint at the start can cover."""
    lora = vllm_config.lora_config
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        raise NotTold("LoRA adapters of the encoder are loaded by name only, so its outputs are not shared")
    extension = getattr(vllm_config.parallel_config, "worker_extension_cls", "")
    if extension:
        raise NotTold(f"the worker extension {extension} may replace weights: encoder outputs are not shared")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise NotTold("weights that are replaced while the engine runs cannot be told apart: not shared")


def _folder(vllm_config: Any) -> Path:
    """The directory of the model's files."""
    model = vllm_config.model_config
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception as error:
        raise NotTold(
            f"the files of model {model.model} are not on this machine ({type(error).__name__}), so its "
            "outputs cannot be told from another model's: not shared"
        ) from error


def _weights(folder: Path, load: Any) -> list[Any]:
    if load.load_format == "dummy":
        raise NotTold("dummy weights are random: encoder outputs are not shared")
    found = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    if not found:
        raise NotTold(
            f"{folder} has no weights that could be told from others: encoder outputs are not shared"
        )
    try:
        if by_content():
            return [*contents(found), *kinds()]
    except (OSError, ValueError) as error:
        raise NotTold(f"the weights cannot be told by their content ({error}): not shared") from error
    told = []
    for path in found:
        stat = path.stat()
        told.append((path.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns))
    return told


def _plain(value: object) -> str:
    """Any configuration as text: of equal text, equal configuration."""
    return json.dumps(value, sort_keys=True, default=repr)
