"""What shapes the output of one of SGLang's processors, beside the media: the fingerprint in its derived keys.

SGLang's own fingerprint is for one server's cache: it leaves out the bounds of sizes, the model's path and most
versions. Ours is compared between servers, so it has all that could matter, and rather too much: the configurations of
model and processor as they are after the start, the versions of whatever handles pixels, the very source files of the
processors' classes, their modules' constants, and the variables that SGLang reads for media.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ..fingerprint import fingerprint, versions

#: Changes when what is stored with a feature changes its meaning.
FORMAT: Final = 1
_PACKAGES: Final = (
    *("mmbroker", "sglang", "torch", "torchvision", "transformers", "huggingface-hub", "pillow", "numpy"),
    *("pillow-simd", "opencv-python", "opencv-python-headless", "av", "decord"),
)
#: Variables of SGLang and of the model families that say how media are handled begin so, or have this in them.
_VARIABLES: Final = ("SGLANG_", "VIDEO_", "IMAGE_", "MAX_PIXELS", "MIN_PIXELS", "FPS")
_ABOUT_MEDIA: Final = ("IMAGE", "VIDEO", "AUDIO", "PIXEL", "RESIZE", "RESAMPLE", "FPS", "FRAME", "MM_")
_PARTS: Final = ("image_processor", "video_processor", "feature_extractor")


def fingerprint_of(processor: Any, server_args: Any) -> bytes:
    """32 bytes for everything that shapes what `processor` makes of given bytes and options.

    Raises `TypeError`, by its place, for a setting that cannot be written down: such a processor has no derived keys.
    """
    wrapped = processor._processor
    parts = [part for name in _PARTS if (part := getattr(wrapped, name, None)) is not None]
    classes = [type(thing) for thing in (processor, wrapped, *parts)]
    return fingerprint(
        format=FORMAT,
        versions=versions(*_PACKAGES),
        python=list(sys.version_info),
        model={"path": str(server_args.model_path), "revision": getattr(server_args, "revision", None)},
        config=plain(processor.hf_config),
        processor=plain(wrapped),
        parts=[plain(part) for part in parts],
        settings=plain(_settings(processor)),
        classes=[_name(kind) for kind in classes],
        code=dict(_code(classes)),
        constants=dict(_constants(type(processor))),
        environment=dict(_environment()),
        device=str(processor._fast_image_processor_device(wrapped)),
    )


def _settings(processor: Any) -> Any:
    """What SGLang itself says of a processor's settings; where it does not (before 0.5.20), what it sets."""
    if hasattr(processor, "preprocess_fingerprint_payload"):
        return processor.preprocess_fingerprint_payload()
    names = (
        *("gpu_image_decode", "disable_fast_image_processor", "mm_feature_transport"),
        *("image_config", "video_config", "audio_config"),
    )
    # Where pictures are decoded is not where they are shaped.
    return {"gpu": torch.cuda.is_available(), **{name: getattr(processor, name) for name in names}}


def plain(value: Any) -> Any:
    """The value with everything of torch, numpy and transformers in it written down as plain values."""
    if isinstance(value, enum.Enum):
        return value
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return {"class": _name(type(value)), "fields": plain(value.to_dict())}
    if isinstance(value, Mapping):
        return {plain(key): plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain(child) for child in value]
    if isinstance(value, tuple):
        return tuple(plain(child) for child in value)
    if isinstance(value, set | frozenset):
        return frozenset(plain(child) for child in value)
    if isinstance(value, torch.dtype | torch.device | Path):
        return {"class": _name(type(value)), "is": str(value)}
    if isinstance(value, torch.Tensor):
        value = (
            value.detach().cpu().float().numpy()
            if value.dtype == torch.bfloat16
            else value.detach().cpu().numpy()
        )
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # numpy's arrays and scalars
        return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": value.tobytes()}
    if isinstance(value, type):
        return {"type": _name(value)}
    return value


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _code(classes: list[type]) -> Iterator[tuple[str, bytes]]:
    """The source files of classes and of what they inherit from, each as a hash of its bytes."""
    modules = {base.__module__ for kind in classes for base in kind.__mro__}
    for name in sorted(modules):
        module = sys.modules.get(name)
        file = inspect.getsourcefile(module) if hasattr(module, "__file__") and module is not None else None
        if file is not None:
            yield name, hashlib.sha256(Path(file).read_bytes()).digest()


def _constants(kind: type) -> Iterator[tuple[str, Any]]:
    """The constants of the modules that make a processor's class: some are bounds that were read at the start."""
    for base in kind.__mro__:
        if base.__module__.startswith("sglang."):
            for name, value in vars(sys.modules[base.__module__]).items():
                if name.isupper() and isinstance(value, bool | int | float | str | enum.Enum | None):
                    yield f"{base.__module__}.{name}", value


def _environment() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name.startswith(_VARIABLES) and any(word in name for word in _ABOUT_MEDIA):
            yield name, value
