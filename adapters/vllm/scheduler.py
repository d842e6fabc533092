"""The scheduler's half: says which encoder outputs will be loaded instead of computed.

vLLM calls it at every step, for every request with media, in the engine's one thread. Everything here is a look into
dicts; what has to be asked, `Lookups` asks in a thread of its own.

How long a request waits for that: one that has its pixels at most `wait` seconds, then its encoder runs; one without
(only metadata) as long as a lookup may take, then it fails alone, and whoever sent it sends it again with pixels.
vLLM leaves such a request out of its steps meanwhile, and serves the others.

What `has_cache_item` says is there must be there when the worker loads it: a request without pixels for which it is not
ends the whole engine. So each request keeps what it needs wanted until it is past it, and a load until the worker has
said that it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mmbroker.proto.reference import Reference

from .lookups import ABSENT, TIMEOUT, Found, Lookups


class Position(Protocol):
    """Where a feature stands in its prompt, in tokens."""

    offset: int
    length: int


class Feature(Protocol):
    """What vLLM has of one picture of a request. `data` is None, or a mapping from fields to values."""

    identifier: str
    modality: str
    data: Any
    mm_position: Any


class Request(Protocol):
    request_id: str
    mm_features: Sequence[Any]

    def get_num_encoder_embeds(self, input_id: int) -> int: ...


class _Need:
    """What one request needs: the features it is not past yet, of which `wanted` are looked up."""

    __slots__ = ("end", "since", "wanted")

    def __init__(self, end: int) -> None:
        self.end = end
        self.since = 0.0  # the wait began; 0: it has not
        self.wanted: dict[int, str] = {}


class SchedulerHalf:
    """`bare` tells whether a feature came without its pixels. `consumes`: this engine may load."""

    def __init__(
        self,
        lookups: Lookups,
        bare: Callable[[Any], bool],
        wait: float,
        consumes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookups = lookups
        self._answers = lookups.answers
        self._bare = bare
        self._wait = wait
        self._consumes = consumes
        self._clock = clock
        self._needs: dict[str, _Need] = {}
        self._cached: set[str] = set()  # in vLLM's own encoder cache, as far as we were told
        self._loads: dict[str, Reference] = {}
        self._unavailable: set[str] = set()
        self.counts = {"loads": 0, "unavailable": 0, "late": 0, "misfits": 0, "decide_ns": 0, "decisions": 0}

    def has_cache_item(self, identifier: str) -> bool:
        answer = self._answers.get(identifier)
        return type(answer) is Found and answer.fits

    def ensure_cache_available(self, request: Request, computed: int) -> bool:
        """May the request be scheduled now? `computed` of its tokens are."""
        need = self._needs.get(request.request_id)
        if need is not None and computed >= need.end:
            if need.wanted:
                self._past(need)
            return True
        if not self._consumes:
            return True
        if request.request_id in self._unavailable:
            return False
        if need is None:
            last = request.mm_features[-1].mm_position
            need = self._needs[request.request_id] = _Need(last.offset + last.length)
            if computed >= need.end:
                return True
        return self._ready(request, need, computed)

    def _ready(self, request: Request, need: _Need, computed: int) -> bool:
        ready = True
        now = 0.0
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length <= computed:
                continue
            identifier = feature.identifier
            if index not in need.wanted:
                if identifier in self._cached and not self._bare(feature):
                    continue  # vLLM has it, most likely; if not, its encoder runs
                need.wanted[index] = identifier
                self._lookups.want(identifier)
            answer = self._answers.get(identifier)
            if type(answer) is Found:
                now = now or self._clock()
                if answer.expires < now:
                    self._lookups.renew(identifier)
                    answer = None
                elif answer.ref.shape[:1] != (request.get_num_encoder_embeds(index),):
                    self.counts["misfits"] += 1
                    self._lookups.refuse(identifier)
                    answer = ABSENT
            if type(answer) is Found:
                answer.fits = True
                continue
            bare = self._bare(feature)
            if answer is None:
                now = now or self._clock()
                need.since = need.since or now
                if now - need.since < (TIMEOUT + 0.5 if bare else self._wait):
                    ready = False
                    continue
                self.counts["late"] += 1
            if bare:
                self.counts["unavailable"] += 1
                self._unavailable.add(request.request_id)
                return False
        if ready:
            need.since = 0.0
        return ready

    def give_up(self, request_id: str) -> None:
        """Something is wrong with this request or with us: it fails alone."""
        self._unavailable.add(request_id)

    def take_unavailable_requests(self) -> set[str]:
        """Requests that cannot be served: vLLM fails them, and no others."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has made room for a feature's encoder output."""
        identifier = request.mm_features[index].identifier
        self._cached.add(identifier)
        answer = self._answers.get(identifier)
        if isinstance(answer, Found) and answer.fits and identifier not in self._loads:
            self._loads[identifier] = answer.ref
            self._lookups.hold(identifier)
            self.counts["loads"] += 1

    def build_loads(self, freed: Sequence[str]) -> list[tuple[str, Reference]]:
        """What the workers load in this step. `freed`: identifiers that have left vLLM's encoder cache."""
        self._cached.difference_update(freed)
        if not self._loads:
            return []
        loads, self._loads = self._loads, {}
        return list(loads.items())

    def forgotten(self) -> None:
        """vLLM has emptied its encoder cache, without a word on what was in it."""
        self._cached.clear()

    def loaded(self, identifiers: Sequence[str]) -> None:
        """All workers have loaded these."""
        for identifier in identifiers:
            self._lookups.done(identifier)

    def request_finished(self, request_id: str) -> None:
        need = self._needs.pop(request_id, None)
        self._unavailable.discard(request_id)
        if need is not None:
            self._past(need)

    def _past(self, need: _Need) -> None:
        for identifier in need.wanted.values():
            self._lookups.done(identifier)
        need.wanted = {}
