"""SGLang's processors as servers have them, as far as they concern pictures: with the plugin's derived keys, and alone.

One class for each way in which the plugin finds pictures before they are decoded.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Protocol
from unittest import mock

from bench.alike import Server
from mmbroker.adapters.fingerprint import versions
from mmbroker.adapters.sglang import artifacts, seams, shaping, undecoded
from mmbroker.adapters.sglang.asking import Asking
from mmbroker.demo.model import tiny_model

#: A prompt with one picture, where the whole of a request is looked at.
_PROMPT: Final = "<|vision_start|><|image_pad|><|vision_end|>What is this?"


@dataclass(frozen=True)
class Output:
    """What is made of a picture. `feature`: a tensor, or a reference that the current turn holds; `beside`: the tensors
    beside it; `said`: all else."""

    feature: Any
    beside: dict[str, Any]
    said: str


class Engine(Protocol):
    """A processor of SGLang's with derived keys, as the plugin gives it some."""

    async def alone(self, media: Any) -> Output:
        """What SGLang makes of it, without us."""

    async def shared(self, media: Any) -> Output:
        """What comes by way of the broker."""

    async def key(self, media: Any) -> bytes:
        """Its derived key."""

    def close(self) -> None: ...


def engine(server: Server, asking: Asking) -> Engine:
    """An engine of the SGLang that is installed."""
    kind = {"artifacts": ByArtifacts, "undecoded": ByBytes}[seams.current().finder]
    return kind(server, asking)


class ByArtifacts:
    """Where SGLang has artifacts: what they are."""

    def __init__(self, server: Server, asking: Asking) -> None:
        from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
        from sglang.srt.runtime_context import create_context, use_context

        with _settings(server) as (wrapped, config, args):
            args.resolve_once()
            with use_context(create_context(args, role="tokenizer")):
                self.processor = QwenVLImageProcessor(config, args, wrapped, "default", skip_mm_pool=True)
                self.finder = _there(artifacts.enable(self.processor, args, asking), server)

    def close(self) -> None:
        self.processor.shutdown()

    async def alone(self, media: Any) -> Output:
        (made,) = await self.processor.prepare_media_artifacts_without_cache([media])
        return self._output(made)

    async def shared(self, media: Any) -> Output:
        original = type(self.processor).prepare_media_artifacts_without_cache
        (made,) = await self.finder.prepare(original, [media], {})
        return self._output(made)

    @staticmethod
    def _output(made: Any) -> Output:
        return Output(made.feature, made.model_specific_data, made.content_digest)

    async def key(self, media: Any) -> bytes:
        modality = self.processor._resolve_artifact_modality(None)
        (snapshot,) = await self.finder._snapshots([media], modality)
        return _value(self.finder._key(media, snapshot, modality))


class ByBytes:
    """Where it has none: all that its processor puts out for a request with this picture."""

    def __init__(self, server: Server, asking: Asking, threads: int = 0) -> None:
        """`threads`: of SGLang's for preprocessing; 0: it is done in the event loop's."""
        from sglang.srt.multimodal.processors.executor import MultimodalProcessorExecutor
        from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

        with _settings(server) as (wrapped, config, args):
            self.processor = QwenVLImageProcessor(config, args, wrapped, "default", skip_mm_pool=True)
            if threads:
                self.processor.mm_processor_executor = MultimodalProcessorExecutor(wrapped, threads)
            self.finder = _there(undecoded.enable(self.processor, args, asking), server)
        kind, find = type(self.processor), self.finder
        load, begin = kind.load_mm_data, kind.process_and_combine_mm_data_async
        combine = kind.process_and_combine_mm_data
        self.hooked = self.finder._processor = copy.copy(self.processor)
        self.hooked.load_mm_data = lambda **options: find.load(load, options)
        self.hooked.process_and_combine_mm_data_async = lambda *args, **options: find.begin_combining(
            begin, args, options
        )
        self.hooked.process_and_combine_mm_data = lambda *args, **options: find.combine(
            combine, args, options
        )

    def close(self) -> None:
        self.finder.close()
        if self.processor.mm_processor_executor is not None:
            self.processor.mm_processor_executor.shutdown()
        self.processor.io_executor.shutdown()
        self.processor.cpu_executor.shutdown()

    async def alone(self, media: Any) -> Output:
        return await self._output(self.processor, media)

    async def shared(self, media: Any) -> Output:
        return await self._output(self.hooked, media)

    @staticmethod
    async def _output(processor: Any, media: Any) -> Output:
        request = SimpleNamespace(video_data=None, audio_data=None, rid="one")
        made = await processor.process_mm_data_async([media], _PROMPT, request)
        (item,) = made.mm_items
        positions = {name: getattr(made, name) for name in ("mrope_positions", "mrope_position_delta")}
        said = f"{made.input_ids} {made.padded_input_ids} {item.offsets} {item.hash}"
        return Output(item.feature, {**item.model_specific_data, **positions}, said)

    async def key(self, media: Any) -> bytes:
        (read,), _ = await self.finder._read([media])
        return _value(read.key)


@contextmanager
def _settings(server: Server) -> Iterator[tuple[Any, Any, Any]]:
    """The model's processor, its configuration, and arguments; meanwhile all else is as the server has it."""
    from sglang.srt.server_args import ServerArgs

    wrapped, config = _loaded(server.pil)
    for name, value in server.attributes.items():
        setattr(wrapped.image_processor, name, copy.deepcopy(value))
    for name, value in server.config.items():
        setattr(config, name, value)
    with (
        mock.patch.dict(os.environ, server.environment),
        mock.patch.object(shaping, "versions", lambda *all: {**versions(*all), **server.versions}),
    ):
        yield (
            wrapped,
            config,
            ServerArgs(
                model_path=str(tiny_model()),
                revision=server.revision,
                device="cpu",
                mm_process_config={"image": dict(server.image)} if server.image else {},
            ),
        )


def _there(finder: Any, server: Server) -> Any:
    if finder is None:
        raise RuntimeError(f"SGLang's processor of {server.name!r} has no derived keys")
    return finder


def _value(key: Any) -> bytes:
    if key is None:
        raise RuntimeError("a picture in bytes has no derived key")
    return bytes(key.value)


def _loaded(pil: bool) -> tuple[Any, Any]:
    """The model's own processor and configuration, new."""
    if pil not in _LOADED:
        from transformers import AutoConfig, AutoProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        wrapped = AutoProcessor.from_pretrained(tiny_model())
        if pil:
            wrapped.image_processor = Qwen2VLImageProcessorPil.from_pretrained(tiny_model())
        _LOADED[pil] = wrapped, AutoConfig.from_pretrained(tiny_model())
    return copy.deepcopy(_LOADED[pil])


_LOADED: Final[dict[bool, tuple[Any, Any]]] = {}
