"""The transports under test, each with its two ends: what a tokenizer worker does, and what the scheduler thread does.

All carry the same request, pickled as SGLang's own inter-process channel does it; they differ in what stands in it for
the tensor. SGLang's ends are its own classes and functions, called in the order of its scheduler: the message is
unpickled, which opens the shared memory; features are materialised; an item without a hash is hashed.
"""

from __future__ import annotations

import pickle
import warnings
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch

import mmbroker

T = TypeVar("T")

#: Names of the transports, as they stand in the tables.
PRIVATE = "private tensors"
READONLY = "broker, readonly"
COPY = "broker, copy"
SGLANG = "sglang"
SGLANG_HASHED = "sglang, hash given"
ACCESS = {READONLY: "readonly", COPY: "copy"}

#: Floats in one patch of an image, as the Qwen-VL family has them.
PATCH = 1176


@dataclass(slots=True)
class Item:
    """One image of a request."""

    modality: str
    offsets: list[tuple[int, int]]
    hash: int | None
    feature: Any


@dataclass(slots=True)
class Request:
    """What a tokenizer worker sends to a scheduler."""

    rid: str
    items: list[Item]
    input_ids: array[int] = field(default_factory=lambda: array("q", range(300)))


def variants(sglang: bool) -> tuple[str, ...]:
    """The transports to compare."""
    return (READONLY, COPY, SGLANG_HASHED, SGLANG) if sglang else (READONLY, COPY)


def patches(mb: float) -> int:
    """Rows of a float32 feature of about `mb` megabytes (of 10^6 bytes)."""
    return max(1, round(mb * 1e6 / (4 * PATCH)))


def tensors(mb: float, count: int, seed: int) -> list[torch.Tensor]:
    """Different features of one size; the same ones for the same seed, in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(patches(mb), PATCH, generator=generator) for _ in range(count)]


def turn(things: Sequence[T], number: int, together: int) -> list[T]:
    """The next `together` of what comes again and again."""
    return [things[(number * together + n) % len(things)] for n in range(together)]


def message(number: int, features: Sequence[Any], digests: Sequence[int | None] = ()) -> bytes:
    """A request with what stands for its features, as bytes."""
    items = [Item("image", [(4, 259)], digest, feature) for feature, digest in zip_longest(features, digests)]
    return pickle.dumps(Request(f"request-{number:08d}", items), protocol=pickle.HIGHEST_PROTOCOL)


def request(message: bytes) -> Request:
    """The scheduler's side of it; opens SGLang's shared memory."""
    found: Request = pickle.loads(message)
    return found


# --- the worker's end ------------------------------------------------------------------------------------------------


class Sender(Protocol):
    """Sends features of one size, in turn."""

    def message(self, number: int, together: int = 1) -> bytes:
        """Hand features over, as many as a request has, and make the message that says so. `number` counts messages."""

    def released(self, count: int) -> None:
        """The scheduler is done with the first `count` messages' features."""


class PrivateSender:
    """Sends messages of the broker's size, with a feature's number in place of a reference."""

    def __init__(self, features: list[torch.Tensor]) -> None:
        self._refs = [
            mmbroker.Reference(
                bytes(16), 1 << 40, number, 1 << 40, bytes(32), "float32", tuple(x.shape), x.nbytes
            ).to_wire()
            for number, x in enumerate(features)
        ]

    def message(self, number: int, together: int = 1) -> bytes:
        return message(number, turn(self._refs, number, together))

    def released(self, count: int) -> None:
        pass


class BrokerSender:
    """Grants features that are sealed already, under caller keys: a new hold for each message."""

    def __init__(self, client: mmbroker.Client, keys: list[str], engine: str) -> None:
        self._client, self._keys, self._engine = client, keys, engine
        self._helds: deque[list[mmbroker.Held]] = deque()  # of each message
        self._dropped = 0

    def message(self, number: int, together: int = 1) -> bytes:
        found = self._client.lookup_many(turn(self._keys, number, together), to=self._engine)
        held = [one for one in found if one is not None]
        assert len(held) == together, "a sealed feature is gone: the arena is too small"
        self._helds.append(held)
        return message(number, [one.ref.to_wire() for one in held])

    def released(self, count: int) -> None:
        while self._dropped < count:
            for held in self._helds.popleft():
                held.drop()
            self._dropped += 1


class SglangSender:
    """SGLang's `cpu` transport: a shared memory file for each feature. With `hashes`, they travel along."""

    def __init__(self, features: list[torch.Tensor], hashes: list[int] | None) -> None:
        self._features, self._hashes = features, hashes
        self._pointer = sglang().ShmPointerMMData

    def message(self, number: int, together: int = 1) -> bytes:
        features = turn(self._features, number, together)
        digests = [None] * together if self._hashes is None else turn(self._hashes, number, together)
        pointers = [
            self._pointer(feature, precomputed_hash=digest)
            for feature, digest in zip(features, digests, strict=True)
        ]
        return message(number, pointers, digests)

    def released(self, count: int) -> None:
        pass  # the scheduler removes the file


# --- the scheduler's end ---------------------------------------------------------------------------------------------


#: A tensor, its hash, and what `Opener.close` wants.
Opened = tuple[torch.Tensor, object, Any]


class Opener(Protocol):
    """From a message to its tensors, and the end of their use."""

    def open(self, message: bytes) -> list[Opened]:
        """Of each feature."""

    def close(self, use: Any) -> None:
        """The request is over; the caller keeps no tensor."""


class PrivateOpener:
    """No transport at all: the tensors were here before."""

    def __init__(self, features: list[torch.Tensor]) -> None:
        self._features = features

    def open(self, message: bytes) -> list[Opened]:
        refs = [item.feature for item in request(message).items]
        return [(self._features[ref["feature"]], ref["digest"], None) for ref in refs]

    def close(self, use: Any) -> None:
        pass


class BrokerOpener:
    """A look into the rank's table."""

    def __init__(self, table: mmbroker.FeatureTable) -> None:
        self._take = table.take

    def open(self, message: bytes) -> list[Opened]:
        uses = [self._take(item.feature) for item in request(message).items]
        return [(use.tensor, use.digest, use) for use in uses]

    def close(self, use: Any) -> None:
        use.release()


class SglangOpener:
    """SGLang's receiver and input processing."""

    def __init__(self) -> None:
        self._hash = sglang().hash_feature

    def open(self, message: bytes) -> list[Opened]:
        items = request(message).items
        for item in items:
            item.feature = item.feature.materialize()
            if item.hash is None:
                item.hash = self._hash(item.feature)
        return [(item.feature, item.hash, None) for item in items]

    def close(self, use: Any) -> None:
        pass


def sglang() -> Any:
    """SGLang's module of multimodal transports; it takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers import mm_utils
    return mm_utils
