"""What any engine has made of pictures already, found by derived keys, and what this process makes, for all to find.

All pictures of a request are asked for in one call. A hit is a reference in the place of a feature, and what else was
made of the picture comes with it. What nobody has is promised to this process, made here, and put; whoever wants the
same meanwhile waits for it, in this engine or another.

Whoever waits holds nothing: neither a promise nor a hold (`Client.get_or_promise`). So a request of which parts are
there and parts are not fills the cache first, and then asks for all of it again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import torch

import mmbroker
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.messages import MAX_EXTRA

from . import holding, measure, packing, placing, shaping
from .asking import Asking

logger = logging.getLogger(__name__)

Key = mmbroker.Key
#: What a processor makes of the media with these numbers, of each by itself.
Make = Callable[[Sequence[int]], Awaitable[list[Any]]]
#: The fields of what is made of the medium with this number that are not stored.
Named = Callable[[int], Mapping[str, Any]]

#: How often a request asks again because parts of it were there, or were being made, and parts were not.
_ROUNDS: Final = 4
#: How long nothing is looked for after something was made that a broker cannot carry, in seconds.
_BARRED: Final = 60.0


def mark_of(
    processor: Any, server_args: Any, supported: Container[tuple[str, str]], why: str | None = None
) -> bytes | None:
    """The fingerprint in a processor's derived keys. None, with a word in the log, if it keeps content keys: because it
    is none of those supported (modules and names of classes), for another reason (`why`), or has a setting that cannot
    be written down."""
    kind = type(processor)
    if (kind.__module__, kind.__qualname__) not in supported:
        logger.info(
            "mmbroker: %s has content keys: its output is found again, but is made first", kind.__qualname__
        )
        return None
    try:
        mark = None if why else shaping.fingerprint_of(processor, server_args)
    except Exception as error:
        # Whatever is strange about this processor: it works, and has content keys.
        mark, why = None, f"{type(error).__name__}: {error}"
    if mark is None:
        logger.warning("mmbroker: %s has content keys (%s)", kind.__qualname__, why)
    else:
        logger.info("mmbroker: %s has derived keys: what is known is not decoded again", kind.__qualname__)
    return mark


class Known:
    """Where pictures are found. `kind`: the data class of what a processor makes of one, with a `feature`; all its
    fields but that and `own` are stored beside the feature. In the event loop's thread."""

    def __init__(self, kind: type[Any], asking: Asking, own: frozenset[str] = frozenset()) -> None:
        self._kind = kind
        self._own = own | {"feature"}
        self._asking = asking
        self._barred = 0.0  # until when nothing is looked for

    async def there(self) -> bool:
        """Is there a broker that answers, and could it carry what was made lately?"""
        if time.monotonic() < self._barred:
            return False
        return self._asking.connected and await self._asking.answers()

    async def find(
        self, turn: holding.Turn, keys: Sequence[Key | None], make: Make, named: Named
    ) -> list[Any]:
        """One of the kind for each of the media: with a reference that `turn` holds; as it was made, if it has no key,
        or if the broker cannot be had."""
        firsts: dict[Key, int] = {}
        for index, key in enumerate(keys):
            if key is not None:
                firsts.setdefault(key, index)
        found = await self._find(turn, firsts, make, named) if firsts else {}
        rest = [index for index, key in enumerate(keys) if key is None or key not in found]
        made = dict(zip(rest, await make(rest), strict=True)) if rest else {}
        return [made[i] if i in made else found[key] for i, key in enumerate(keys)]  # type: ignore[index]

    async def _find(
        self, turn: holding.Turn, firsts: dict[Key, int], make: Make, named: Named
    ) -> dict[Key, Any]:
        """By key; only some, and as they were made, if the broker cannot be had."""
        made: dict[Key, Any] = {}
        for _ in range(_ROUNDS):
            got = await self._ask(turn, list(firsts))
            if got is None:
                break
            mine = dict(zip(firsts, got, strict=True))
            promises = {key: one for key, one in mine.items() if isinstance(one, mmbroker.Promise)}
            if not promises:
                return self._found(turn, mine, {key: named(firsts[key]) for key in mine})
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
        self, turn: holding.Turn, helds: dict[Key, Any], names: dict[Key, Mapping[str, Any]]
    ) -> dict[Key, Any]:
        """Hits, with what was stored beside their features."""
        try:
            found = {
                key: self._kind(feature=held.ref.to_wire(), **names[key], **opened(held.extra))
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
        self, turn: holding.Turn, promises: dict[Key, Any], made: list[Any], whole: bool
    ) -> list[Any] | None:
        """Put what was promised; for this request (`whole`), or for anybody. None if that cannot be."""
        features = [one.feature for one in made]
        extras = [closed(one, self._own) for one in made]
        if not all(packing.portable(feature) for feature in features) or any(
            extra is None for extra in extras
        ):
            # Whoever waits for one of these would make it after us, one after the other, and in vain.
            self._barred = time.monotonic() + _BARRED
            measure.counters.add("derived_failed")
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


def _put(client: Any, features: list[Any], turn: holding.Turn, options: dict[str, Any]) -> list[Any]:
    there = bool(client.device) and all(feature.is_cuda for feature in features)
    got: list[Any] = placing.put(client.put_many, features, there, turn.left(), 0.0, **options)
    return got


def _drop_all(ones: Sequence[Any]) -> None:
    for one in ones:
        if one is not None:
            one.drop()


# --- what is stored beside a feature --------------------------------------------------------------------------------


def closed(made: Any, own: frozenset[str]) -> bytes | None:
    """The fields of `made` but its own, as bytes; None if that is more, or other, than can be stored."""
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    try:
        data = msgspec.msgpack.encode(
            down({name: value for name, value in fields.items() if name not in own})
        )
    except TypeError:
        return None
    return data if len(data) <= MAX_EXTRA else None


def opened(extra: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = up(msgspec.msgpack.decode(extra))
    return fields


def down(value: Any) -> Any:
    """A value as its kind and its content; raises `TypeError` for a kind that is not foreseen."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return ["is", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [down(child) for child in value]]
    if type(value) is dict:
        return ["dict", [[down(key), down(child)] for key, child in value.items()]]
    if packing.packable(value):
        return ["tensor", packing.pack(value)]
    raise TypeError(f"a {type(value).__name__} cannot be stored beside a feature")


def up(data: Any) -> Any:
    kind, content = data
    match kind:
        case "is":
            return content
        case "list":
            return [up(child) for child in content]
        case "tuple":
            return tuple(up(child) for child in content)
        case "dict":
            return {up(key): up(child) for key, child in content}
        case "tensor":
            tensor: torch.Tensor = packing.unpack(content)
            return tensor
    raise ValueError(f"no kind of value: {kind!r}")
