"""What vLLM's scheduler hands to a connector, without vLLM: features, requests, and a client that answers as told."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmbroker.adapters.vllm.lookups import Lookups
from mmbroker.adapters.vllm.scheduler import SchedulerHalf
from mmbroker.proto.reference import Reference
from tests.kit import eventually


@dataclass
class Position:
    offset: int
    length: int
    is_embed: Any = None

    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else sum(self.is_embed)


@dataclass
class Feature:
    identifier: str
    mm_position: Position
    data: dict[str, Any] | None = field(default_factory=lambda: {"pixel_values": 0, "grid": 0})
    modality: str = "image"


@dataclass
class Request:
    request_id: str
    mm_features: Sequence[Feature]


def request(name: str, *identifiers: str, bare: bool = False, tokens: int = 4) -> Request:
    """Pictures of `tokens` tokens each, two apart."""
    return Request(
        name,
        [
            Feature(
                identifier, Position(2 + index * (tokens + 2), tokens), {"grid": 0} if bare else {"pixels": 0}
            )
            for index, identifier in enumerate(identifiers)
        ],
    )


def is_bare(feature: Feature) -> bool:
    return feature.data is not None and feature.data.keys() <= {"grid"}


class Held:
    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        self.ref = Reference(bytes(16), number, number, number, bytes(32), "float32", shape, 4 * shape[0])
        self.drops = 0

    def drop(self) -> None:
        self.drops += 1


class Client:
    """Knows `there`; answers lookups while `gate` is set."""

    connected = True

    def __init__(self, there: Iterable[str] = (), tokens: int = 4) -> None:
        self.there = set(there)
        self.tokens = tokens
        self.gate = threading.Event()
        self.gate.set()
        self.reconnects = 0
        self.asked: list[list[str]] = []
        self.held: list[Held] = []

    def lookup_many(self, keys: Sequence[str], **options: Any) -> list[Held | None]:
        self.asked.append(list(keys))
        assert self.gate.wait(10)
        return [self._hold() if key in self.there else None for key in keys]

    def _hold(self) -> Held:
        self.held.append(Held(len(self.held) + 1, (self.tokens, 8)))
        return self.held[-1]

    def stats(self) -> dict[str, int]:
        return {"reconnects": self.reconnects}

    @property
    def holding(self) -> int:
        assert all(held.drops <= 1 for held in self.held)
        return sum(not held.drops for held in self.held)


class Scene:
    """A scheduler's half over such a client. `now` is its clock."""

    def __init__(self, client: Client, wait: float = 0.25) -> None:
        self.client = client
        self.now = 100.0
        self.lookups = Lookups(lambda: client if client.connected else None, "engine", lambda name: name)  # type: ignore[arg-type, return-value]
        self.half = SchedulerHalf(self.lookups, is_bare, wait, clock=lambda: self.now)

    def answered(self, *identifiers: str) -> None:
        def there() -> bool:
            outputs = [self.lookups.answers.get(identifier) for identifier in identifiers]
            return all(output is not None and output.tokens is not None for output in outputs)

        eventually(there, "answers to lookups")

    def arrive(self, *identifiers: str) -> None:
        """Requests that will want these are on their way for long enough."""
        self.lookups.expect(list(identifiers))

        def there() -> bool:
            outputs = [self.lookups._ahead[identifier] for identifier in identifiers]
            return all(output.tokens is not None for output in outputs)

        eventually(there, "answers that wait for their requests")

    def until_ready(self, one: Request, computed: int = 0) -> None:
        eventually(lambda: self.half.ensure_cache_available(one, computed), "a request that can be scheduled")

    def schedule(self, one: Request, computed: int = 0) -> list[str]:
        """What vLLM does with a request that it schedules whole: the identifiers that are loaded, not encoded."""
        loaded = []
        for index, feature in enumerate(one.mm_features):
            position = feature.mm_position
            if position.offset + position.length <= computed:
                continue
            if self.half.has_cache_item(feature.identifier):
                loaded.append(feature.identifier)
            else:
                assert not is_bare(feature), (
                    "a request without pixels reached the encoder: the engine is dead"
                )
            self.half.update_state_after_alloc(one, index)
        return loaded

    def close(self) -> None:
        self.client.gate.set()
        self.lookups.close()
