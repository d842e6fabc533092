"""Before decoding: a picture that any engine has preprocessed already is neither decoded nor preprocessed again.

The seam, from SGLang 0.5.20 on, is where it turns the media of a request into *artifacts*: what its processor makes of
one picture, apart from any prompt. Here the media's own bytes are known and nothing is decoded. A hit becomes an
artifact with a reference in its feature's place, and SGLang composes the request from it as from any other.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import mmbroker

from ..fingerprint import derived_key, fingerprint
from . import holding, shaping
from .asking import Asking
from .known import Known, mark_of

Key = mmbroker.Key
Original = Callable[..., Awaitable[list[Any]]]

#: Processors whose artifacts are tested to be whole after a way through the broker, and the artifacts' class.
SUPPORTED: Final[Mapping[tuple[str, str], str]] = {
    ("sglang.srt.multimodal.processors.qwen_vl", "QwenVLImageProcessor"): "QwenVLImagePreprocessArtifact",
}
#: Fields of an artifact that are not stored: they follow from the request, or are the feature.
_OWN: Final = frozenset({"content_digest", "artifact_key", "feature_hash"})


def enable(processor: Any, server_args: Any, asking: Asking) -> Artifacts | None:
    """Derived keys for a processor, if its kind has them; None, with a word in the log, if it keeps content keys."""
    kind, why = type(processor), None
    name = SUPPORTED.get((kind.__module__, kind.__qualname__))
    if name is not None and processor.processor_fingerprint is None:
        # SGLang's own names for artifacts, which it leaves out where it keeps none.
        from sglang.srt.multimodal.cache import build_processor_fingerprint

        try:
            processor.processor_fingerprint = build_processor_fingerprint(processor, processor.hf_config)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    mark = mark_of(processor, server_args, SUPPORTED, why)
    if mark is None or name is None:
        return None
    processor.uses_media_artifacts_without_cache = True
    artifact = getattr(importlib.import_module(kind.__module__), name)
    return Artifacts(processor, mark, artifact, asking)


class Artifacts:
    """The artifacts of one processor, and the broker between it and them. In the event loop's thread."""

    def __init__(self, processor: Any, mark: bytes, artifact: type[Any], asking: Asking) -> None:
        self._processor = processor
        self._mark = mark
        self._known = Known(artifact, asking, _OWN)

    async def prepare(self, original: Original, media: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        """AROUND `MediaArtifactCacheMixin.prepare_media_artifacts` and the one without a cache."""
        turn = holding.turn.get()
        if turn is None or not turn.derived or self._elsewhere(options) or not await self._known.there():
            return await original(self._processor, media, **options)
        modality = self._processor._resolve_artifact_modality(options.get("modality"))
        primed = _Primed(self._processor, media, await self._snapshots(media, modality))
        keys = [self._key(source, primed.snapshot_media_source(source), modality) for source in media]
        if not any(key is not None for key in keys) or not _as_announced(primed, media, options):
            return await original(primed, media, **options)

        async def make(indices: Sequence[int]) -> list[Any]:
            return await original(primed, [media[index] for index in indices], **_of(options, indices))

        def named(index: int) -> dict[str, Any]:
            """What SGLang calls an artifact here."""
            digest = primed.snapshot_media_source(media[index]).content_digest
            own = self._processor._artifact_key(digest, media[index], modality=modality)
            return {"content_digest": digest, "artifact_key": own, "feature_hash": _hash_of(own)}

        found: list[Any] = await self._known.find(turn, keys, make, named)
        return found

    def _elsewhere(self, options: Mapping[str, Any]) -> bool:
        """Does SGLang find these by what the caller said of them, without reading them?"""
        hashes = options.get("content_hashes") or ()
        trusted = self._processor.trust_mm_content_hashes and any(one is not None for one in hashes)
        return trusted or any(options.get("featureless_hit_mask") or ())

    async def _snapshots(self, media: Sequence[Any], modality: Any) -> list[Any]:
        """The bytes of each, fetched once."""
        pool, take = self._processor.io_executor, self._processor.snapshot_media_source
        return [
            await taking
            for taking in [asyncio.wrap_future(pool.submit(take, source, modality)) for source in media]
        ]

    def _key(self, source: Any, snapshot: Any, modality: Any) -> Key | None:
        """None for what came decoded already, and for options that cannot be written down."""
        if snapshot.source != "bytes":
            return None
        try:
            options = shaping.plain(dict(self._processor.artifact_preprocess_kwargs(source, modality)))
            mark = fingerprint(shaped=self._mark, modality=modality.name, options=options)
        except TypeError:
            return None
        return derived_key(mark, snapshot.content_digest.encode())  # SGLang's SHA-256 of the same bytes


class _Primed:
    """A processor that has read its media: SGLang's own way goes on from here with the very same bytes."""

    def __init__(self, processor: Any, media: Sequence[Any], snapshots: Sequence[Any]) -> None:
        self._processor = processor
        self._media = media  # alive, as long as their ids are used
        self._snapshots = {id(source): snapshot for source, snapshot in zip(media, snapshots, strict=True)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def snapshot_media_source(self, source: Any, modality: Any = None) -> Any:
        return self._snapshots[id(source)]


def _as_announced(primed: _Primed, media: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Are the bytes those that the caller said they would be? If not, SGLang says so in its own words."""
    from sglang.srt.multimodal.cache import parse_content_hash

    hashes = options.get("content_hashes")
    if hashes is None:
        return True
    return len(hashes) == len(media) and all(
        said is None or parse_content_hash(said) == primed.snapshot_media_source(source).content_digest
        for source, said in zip(media, hashes, strict=True)
    )


def _of(options: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """The options of some of the media."""
    return {
        name: [value[index] for index in indices]
        if name in ("content_hashes", "featureless_hit_mask") and value is not None
        else value
        for name, value in options.items()
    }


def _hash_of(artifact_key: str) -> int:
    """The identity that SGLang gives an artifact within one engine."""
    from sglang.srt.multimodal.cache import resolve_multimodal_item_hash

    return int(resolve_multimodal_item_hash(existing_hash=0, namespace=artifact_key))
