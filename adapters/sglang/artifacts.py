"""Before decoding: a picture that any engine has preprocessed already is neither decoded nor preprocessed again.

The seam is where SGLang turns the media of a request into *artifacts*: what its processor makes of one picture, apart
from any prompt. Here the media's own bytes are known and nothing is decoded. All pictures of a request are asked for by
their derived keys in one call. A hit becomes an artifact with a reference in its feature's place, and SGLang composes
the request from it as from any other; what else an artifact holds comes with the hit. What nobody has is promised to
this process, made by SGLang, and put; whoever wants the same meanwhile waits for it, in this engine or another.

Whoever waits holds nothing: neither a promise nor a hold (`Client.get_or_promise`). So a request of which parts are
there and parts are not fills the cache first, and then asks for all of it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import torch

import mmbroker
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.messages import MAX_EXTRA

from ..fingerprint import derived_key, fingerprint
from . import holding, measure, packing, placing, shaping
from .asking import Asking

logger = logging.getLogger(__name__)

Key = mmbroker.Key
Original = Callable[..., Awaitable[list[Any]]]
Make = Callable[[Sequence[int]], Awaitable[list[Any]]]

#: Processors whose artifacts are tested to be whole after a way through the broker, and the artifacts' class.
SUPPORTED: Final[Mapping[tuple[str, str], str]] = {
    ("sglang.srt.multimodal.processors.qwen_vl", "QwenVLImageProcessor"): "QwenVLImagePreprocessArtifact",
}
#: How often a request asks again because parts of it were there, or were being made, and parts were not.
_ROUNDS: Final = 4
#: Fields of an artifact that are not stored: they follow from the request, or are the feature.
_OWN: Final = frozenset({"content_digest", "artifact_key", "feature_hash", "feature"})


def enable(processor: Any, server_args: Any, asking: Asking) -> Artifacts | None:
    """Derived keys for a processor, if its kind has them; None, with a word in the log, if it keeps content keys."""
    kind = type(processor)
    name = SUPPORTED.get((kind.__module__, kind.__qualname__))
    if name is None:
        logger.info(
            "mmbroker: %s has content keys: its output is found again, but is made first", kind.__qualname__
        )
        return None
    try:
        mark = shaping.fingerprint_of(processor, server_args)
        if processor.processor_fingerprint is None:
            # SGLang's own names for artifacts, which it leaves out where it keeps none.
            from sglang.srt.multimodal.cache import build_processor_fingerprint

            processor.processor_fingerprint = build_processor_fingerprint(processor, processor.hf_config)
    except Exception as error:
        # Whatever is strange about this processor: it works, and has content keys.
        logger.warning(
            "mmbroker: %s has content keys (%s: %s)", kind.__qualname__, type(error).__name__, error
        )
        return None
    processor.uses_media_artifacts_without_cache = True
    artifact = getattr(importlib.import_module(kind.__module__), name)
    logger.info("mmbroker: %s has derived keys: what is known is not decoded again", kind.__qualname__)
    return Artifacts(processor, mark, artifact, asking)


class Artifacts:
    """The artifacts of one processor, and the broker between it and them. In the event loop's thread."""

    def __init__(self, processor: Any, mark: bytes, artifact: type[Any], asking: Asking) -> None:
        self._processor = processor
        self._mark = mark
        self._artifact = artifact
        self._asking = asking

    async def prepare(self, original: Original, media: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        """AROUND `MediaArtifactCacheMixin.prepare_media_artifacts` and the one without a cache."""
        turn = holding.turn.get()
        if turn is None or not turn.derived or self._elsewhere(options) or not await self._there():
            return await original(self._processor, media, **options)
        modality = self._processor._resolve_artifact_modality(options.get("modality"))
        primed = _Primed(self._processor, media, await self._snapshots(media, modality))
        keys = [self._key(source, primed.snapshot_media_source(source), modality) for source in media]
        firsts: dict[Key, int] = {}
        for index, key in enumerate(keys):
            if key is not None:
                firsts.setdefault(key, index)
        if not firsts or not _as_announced(primed, media, options):
            return await original(primed, media, **options)

        async def make(indices: Sequence[int]) -> list[Any]:
            return await original(primed, [media[index] for index in indices], **_of(options, indices))

        def named(key: Key) -> dict[str, Any]:
            """What SGLang calls an artifact here."""
            source = media[firsts[key]]
            digest = primed.snapshot_media_source(source).content_digest
            own = self._processor._artifact_key(digest, source, modality=modality)
            return {"content_digest": digest, "artifact_key": own, "feature_hash": _hash_of(own)}

        found = await self._find(turn, firsts, make, named)
        rest = [index for index, key in enumerate(keys) if key is None or key not in found]
        made = dict(zip(rest, await make(rest), strict=True)) if rest else {}
        return [made[i] if i in made else found[key] for i, key in enumerate(keys)]  # type: ignore[index]

    async def _there(self) -> bool:
        return self._asking.connected and await self._asking.answers()

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

    async def _find(
        self, turn: holding.Turn, firsts: dict[Key, int], make: Make, named: Callable[[Key], dict[str, Any]]
    ) -> dict[Key, Any]:
        """An artifact for each key, with a reference that `turn` holds; only for some, and as they were made, if the
        broker cannot be had."""
        made: dict[Key, Any] = {}
        for _ in range(_ROUNDS):
            got = await self._ask(turn, list(firsts))
            if got is None:
                break
            mine = dict(zip(firsts, got, strict=True))
            promises = {key: one for key, one in mine.items() if isinstance(one, mmbroker.Promise)}
            if not promises:
                return self._found(turn, mine, named)
            try:
                whole = len(promises) == len(mine)
                if not whole:
                    _drop_all([one for one in got if isinstance(one, mmbroker.Held)])
                todo = [key for key in promises if key not in made]
                made.update(zip(todo, await make([firsts[key] for key in todo]), strict=True))
                measure.counters.add("derived_made", len(todo))
                helds = await self._keep(turn, promises, [made[key] for key in promises], whole)
            finally:
                _drop_all(list(promises.values()))
            if helds is None:
                break
            if whole:
                turn.hold(helds)
                return {
                    key: dataclasses.replace(made[key], feature=held.ref.to_wire())
                    for key, held in zip(promises, helds, strict=True)
                }
        return made

    async def _ask(self, turn: holding.Turn, keys: list[Key]) -> list[Any] | None:
        """Holds and promises; None if the broker cannot be asked, or others take too long to make them."""
        call = partial(self._asking.client.get_or_promise, keys, to=self._asking.engine, private=turn.private)
        try:
            return await self._asking.find(lambda: call(timeout=turn.left()), _drop_all)
        except BrokerError as error:
            return self._give_up(error)

    @staticmethod
    def _give_up(error: BrokerError) -> None:
        """It goes on as if there were no derived keys, and is counted by its content key's fate."""
        measure.counters.add("derived_failed")
        logger.debug("mmbroker: pictures are not found by their bytes", exc_info=error)

    def _found(
        self, turn: holding.Turn, helds: dict[Key, Any], named: Callable[[Key], dict[str, Any]]
    ) -> dict[Key, Any]:
        """Artifacts of hits, with what was stored beside their features."""
        try:
            found = {
                key: self._artifact(feature=held.ref.to_wire(), **named(key), **_opened(held.extra))
                for key, held in helds.items()
            }
        except Exception as error:
            # Nobody but this plugin, at this version, has put it there: a bug of ours, and no reason to fail.
            logger.error("mmbroker: what is stored beside a feature makes no sense", exc_info=error)
            _drop_all(list(helds.values()))
            return {}
        turn.hold(list(helds.values()))
        measure.counters.add("derived_hits", len(helds))
        return found

    async def _keep(
        self, turn: holding.Turn, promises: dict[Key, Any], artifacts: list[Any], whole: bool
    ) -> list[Any] | None:
        """Put what was promised; for this request (`whole`), or for anybody. None if that cannot be."""
        features = [artifact.feature for artifact in artifacts]
        extras = [_closed(artifact) for artifact in artifacts]
        if not all(packing.portable(feature) for feature in features) or any(
            extra is None for extra in extras
        ):
            return None

        def put() -> list[Any]:
            options: dict[str, Any] = {"keys": list(promises.values()), "extras": extras, "modality": "image"}
            if whole:
                options |= {"to": self._asking.engine, "private": turn.private}
            helds = _put(self._asking.client, features, turn, options)
            if not whole:
                _drop_all(helds)
            return helds

        try:
            return await self._asking.put(put, _drop_all)
        except BrokerError as error:
            return self._give_up(error)


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


def _put(client: Any, features: list[Any], turn: holding.Turn, options: dict[str, Any]) -> list[Any]:
    there = bool(client.device) and all(feature.is_cuda for feature in features)
    got: list[Any] = placing.put(client.put_many, features, there, turn.left(), 0.0, **options)
    return got


def _drop_all(ones: Sequence[Any]) -> None:
    for one in ones:
        if one is not None:
            one.drop()


# --- what is stored beside a feature --------------------------------------------------------------------------------


def _closed(artifact: Any) -> bytes | None:
    """The rest of an artifact as bytes; None if it is more, or other, than can be stored."""
    fields = {field.name: getattr(artifact, field.name) for field in dataclasses.fields(artifact)}
    try:
        data = msgspec.msgpack.encode(
            _down({name: value for name, value in fields.items() if name not in _OWN})
        )
    except TypeError:
        return None
    return data if len(data) <= MAX_EXTRA else None


def _opened(extra: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = _up(msgspec.msgpack.decode(extra))
    return fields


def _down(value: Any) -> Any:
    """A value as its kind and its content; raises `TypeError` for a kind that is not foreseen."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return ["is", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_down(child) for child in value]]
    if type(value) is dict:
        return ["dict", [[_down(key), _down(child)] for key, child in value.items()]]
    if packing.packable(value):
        return ["tensor", packing.pack(value)]
    raise TypeError(f"a {type(value).__name__} cannot be stored beside a feature")


def _up(data: Any) -> Any:
    kind, content = data
    match kind:
        case "is":
            return content
        case "list":
            return [_up(child) for child in content]
        case "tuple":
            return tuple(_up(child) for child in content)
        case "dict":
            return {_up(key): _up(child) for key, child in content}
        case "tensor":
            tensor: torch.Tensor = packing.unpack(content)
            return tensor
    raise ValueError(f"no kind of value: {kind!r}")
