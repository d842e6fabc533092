"""Before decoding, where SGLang has no artifacts: pictures that any engine has preprocessed are known by their bytes.

Before SGLang 0.5.20 nothing of its own stands between a request's media and their pixels. The seams are the two steps
of a processor: it *loads* all media, and *combines* what it makes of them with the prompt. What is known is loaded as a
picture without pixels. When it comes to combining, SGLang's own code runs with an image processor that only says how
large each picture is for the model, so that prompt, offsets and positions are SGLang's; the features, most of them
references, take their places afterwards. What is not known is decoded and shaped by those very two steps, as in a
request with these pictures and no other text.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlparse

import torch
from PIL import Image

import mmbroker

from ..fingerprint import derived_key, fingerprint
from . import holding, measure, shaping
from .asking import Asking
from .known import Known, mark_of

logger = logging.getLogger(__name__)

Key = mmbroker.Key
Load = Callable[..., Awaitable[Any]]
Combine = Callable[..., tuple[list[Any], Any, Any]]

#: Processors whose pictures are tested to be the same this way.
SUPPORTED: Final = frozenset({("sglang.srt.multimodal.processors.qwen_vl", "QwenVLImageProcessor")})


def enable(processor: Any, server_args: Any, asking: Asking) -> Undecoded | None:
    """Derived keys for a processor; None, with a word in the log, if it keeps content keys."""
    from sglang.srt.environ import envs

    why = None
    if envs.SGLANG_MM_PRECOMPUTE_HASH.get():
        why = "SGLANG_MM_PRECOMPUTE_HASH reads features before they are sent"
    mark = mark_of(processor, server_args, SUPPORTED, why)
    return None if mark is None else Undecoded(processor, mark, asking)


@dataclasses.dataclass(frozen=True)
class Shaped:
    """What a processor makes of one picture. `width` and `height` are of the decoded one, in pixels, where SGLang knows
    them; `data` is what its item has beside the feature."""

    feature: Any
    data: Mapping[str, Any]
    width: int | None
    height: int | None


class Picture(Image.Image):
    """A picture without pixels, which passes through SGLang's loading as one that is decoded already."""

    def __init__(self, shaped: Shaped) -> None:
        super().__init__()
        self.shaped = shaped
        self._mode = "RGB"

    @property
    def width(self) -> Any:
        return self.shaped.width

    @property
    def height(self) -> Any:
        return self.shaped.height

    def load(self) -> Any:
        return None


class Undecoded:
    """The pictures of one processor, and the broker between it and them."""

    def __init__(self, processor: Any, mark: bytes, asking: Asking) -> None:
        self._processor = processor
        self._mark = mark
        self._known = Known(Shaped, asking)
        executor = processor.mm_processor_executor
        # As SGLang's: a thread, and a copy of transformers' processor for it, which takes the better part of a second.
        self._quick = None if executor is None else type(executor)(processor._processor, 1)

    async def load(self, original: Load, options: Mapping[str, Any]) -> Any:
        """AROUND the coroutine `BaseMultimodalProcessor.load_mm_data`. In the event loop's thread."""
        turn, media = holding.turn.get(), options.get("image_data") or ()
        if turn is None or not turn.derived or not _pictures_only(options) or not await self._known.there():
            return await original(self._processor, **options)
        found: list[Shaped] | None = None
        try:
            if self._as_many(options):  # else SGLang does not read all of them
                read, error = await self._read(media)
                if error is not None:  # what was read need not be fetched again
                    options = {**options, "image_data": [one.media for one in read]}
                    raise error

                async def make(some: Sequence[int]) -> list[Shaped]:
                    return await self._make(original, [read[index].media for index in some], options)

                if any(one.key is not None for one in read):
                    found = await self._known.find(turn, [one.key for one in read], make, lambda index: {})
        except Exception as error:
            # Mostly one that cannot be had or decoded: what SGLang says of it is in its own words.
            measure.counters.add("derived_failed")
            logger.debug("mmbroker: pictures are not found by their bytes", exc_info=error)
        if found is not None:
            options = {**options, "image_data": [Picture(one) for one in found]}
        return await original(self._processor, **options)

    async def begin_combining(self, original: Load, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """AROUND the coroutine `BaseMultimodalProcessor.process_and_combine_mm_data_async`: what is there already does
        not stand in line for SGLang's threads, behind what others have to be made."""
        images = args[0].images
        if self._quick is None or not images or not all(isinstance(one, Picture) for one in images):
            return await original(self._processor, *args, **options)
        return await self._quick.run(self._processor.process_and_combine_mm_data, *args, **options)

    def combine(self, original: Combine, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """AROUND `BaseMultimodalProcessor.process_and_combine_mm_data`. In any thread."""
        found = [picture.shaped for picture in args[0].images if isinstance(picture, Picture)]
        twin = copy.copy(options.get("processor") or self._processor._processor)
        twin._check_special_mm_tokens = partial(_check, twin)
        if found:
            twin.image_processor = _Sizes(twin.image_processor, found)
        items, ids, output = original(self._processor, *args, **{**options, "processor": twin})
        if found:
            for item, shaped in zip(items, found, strict=True):
                item.feature = shaped.feature
                item.model_specific_data = dict(shaped.data)
        return items, ids, output

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._quick is not None:
            self._quick.shutdown()

    def _as_many(self, options: Mapping[str, Any]) -> bool:
        """Has the prompt as many places for pictures as there are pictures?"""
        prompt, tokens = options["prompt"], options["multimodal_tokens"]
        text = prompt if isinstance(prompt, str) else self._processor._tokenizer.decode(prompt)
        parts = re.split(tokens.get_combined_regex(), text)
        kinds = [kind.name for part in parts if (kind := tokens.get_modality_of_token(part)) is not None]
        return kinds == ["IMAGE"] * len(options["image_data"])

    async def _read(self, media: Sequence[Any]) -> tuple[list[_Read], BaseException | None]:
        """The bytes of each, fetched once; and why some could not be had, if so, which are as they were."""
        pool = self._processor.io_executor
        reading = [asyncio.wrap_future(pool.submit(_read, self._mark, source)) for source in media]
        found = await asyncio.gather(*reading, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        read = [
            _Read(source, None) if isinstance(one, BaseException) else one
            for source, one in zip(media, found, strict=True)
        ]
        return read, errors[0] if errors else None

    async def _make(self, load: Load, media: list[Any], options: Mapping[str, Any]) -> list[Shaped]:
        """What SGLang makes of these, in its own two steps."""
        tokens = options["multimodal_tokens"]
        prompt = tokens.image_token * len(media)
        base = await load(self._processor, **{**options, "prompt": prompt, "image_data": media})
        items, _, _ = await self._processor.process_and_combine_mm_data_async(base, tokens)
        return [
            Shaped(item.feature, item.model_specific_data, *_size(image))
            for item, image in zip(items, base.images, strict=True)
        ]


class _Read(NamedTuple):
    """One of a request's media, as bytes if it was read. `key`: None for what came decoded already, and for options
    that cannot be written down."""

    media: Any
    key: Key | None


def _read(mark: bytes, source: Any) -> _Read:
    """As SGLang's `load_image` reads it, which takes the bytes as well."""
    from sglang.srt.utils.common import ImageData, get_image_bytes

    url, options = source, {}
    if isinstance(source, ImageData):
        options = dict(vars(source))
        url = options.pop("url")
    if isinstance(url, str):
        url = get_image_bytes(unquote(urlparse(url).path) if url.startswith("file://") else url)
    if not isinstance(url, bytes):
        return _Read(source, None)
    try:
        mark = fingerprint(shaped=mark, modality="IMAGE", options=shaping.plain(options))
    except TypeError:
        return _Read(source, None)
    return _Read(url, derived_key(mark, url))


def _pictures_only(options: Mapping[str, Any]) -> bool:
    """Does a request have pictures, and nothing but pictures to be decoded?"""
    media = options.get("image_data") or ()
    others = options.get("video_data"), options.get("audio_data")
    return bool(media) and not any(others) and not any(isinstance(one, dict) for one in media)


def _size(image: Any) -> tuple[int | None, int | None]:
    """Width and height of what is decoded, if SGLang itself could say; it cannot of tensors, which a GPU decodes."""
    return (image.width, image.height) if isinstance(image, Image.Image) else (None, None)


def _check(processor: Any, text: Sequence[str], inputs: Mapping[str, Any], modalities: Sequence[str]) -> None:
    """What transformers checks of a prompt's tokens, in 17 ms for eight pictures of 640x480: it counts them in Python.
    If something is wrong, it says so itself."""
    ids = inputs["input_ids"]
    for modality in modalities:
        number = getattr(processor, f"{modality}_token_id", None)
        word = getattr(processor, f"{modality}_token", None)
        if number is None or word is None:
            continue
        if [int((row == number).sum()) for row in ids] != [sample.count(word) for sample in text]:
            type(processor)._check_special_mm_tokens(processor, text, inputs, modalities)


class _Sizes:
    """An image processor that knows already what to say of each picture but its pixels."""

    def __init__(self, real: Any, shaped: Sequence[Shaped]) -> None:
        self._real = real
        self._data = {name: torch.cat([one.data[name] for one in shaped]) for name in shaped[0].data}
        patches = int(self._data["image_grid_thw"].prod(dim=-1).sum())
        self._data["pixel_values"] = torch.zeros(()).expand(patches)  # of that length, and without memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, images: Any, **_: Any) -> dict[str, torch.Tensor]:
        return dict(self._data)
