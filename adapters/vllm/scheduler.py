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

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mmbroker.proto.reference import Reference

from .lookups import ABSENT, TIMEOUT, Lookups, Output

logger = logging.getLogger("vllm.mmbroker")


class Position(Protocol):
    """Where a feature stands in its prompt, in tokens."""

    offset: int
    length: int
    is_embed: Any  # which of these are an encoder's, None: all

    def get_num_embeds(self) -> int: ...


class Feature(Protocol):
    """What vLLM has of one picture of a request. `data` is None, or a mapping from fields to values."""

    identifier: str
    modality: str
    data: Any
    mm_position: Any


class Request(Protocol):
    request_id: str
    mm_features: Sequence[Any]


class SchedulerHalf:
    """`bare` tells whether a feature came without its pixels. `consumes`: this engine may load.

    A step with 64 new requests may cost 50 us in all, which is some ten looks into dicts for each: so what is usual
    comes first, in one piece, and what is not has methods of its own.
    """

    def __init__(
        self,
        lookups: Lookups,
        bare: Callable[[Any], bool],
        wait: float,
        consumes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookups = lookups
        self._want = lookups.want
        self._fitting = lookups.fitting
        self._bare = bare
        self._wait = wait
        self._consumes = consumes
        self._clock = clock
        self._needs: dict[str, dict[str, Output]] = {}  # of each request what it wants, until it is past it
        self._since: dict[str, float] = {}  # when a request that waits began to
        self._cached: set[str] = set()  # in vLLM's own encoder cache, as far as we were told
        self._loads: dict[str, Reference] = {}
        self._unavailable: set[str] = set()
        self.counts = {"loads": 0, "unavailable": 0, "late": 0, "misfits": 0}
        #: Will this be loaded, if it is needed in this step?
        self.has_cache_item: Callable[[str], bool] = lookups.fitting.__contains__

    def ensure_cache_available(self, request: Request, computed: int) -> bool:
        """May the request be scheduled now? `computed` of its tokens are."""
        try:
            name, features = request.request_id, request.mm_features
            position = features[-1].mm_position
            if computed >= position.offset + position.length:
                if name in self._needs:
                    self._past(name)
                return True
            wanted = self._needs.get(name)
            if wanted is None:
                if not self._consumes:
                    return True
                wanted = self._needs[name] = {}
            if name in self._unavailable:
                return False
            ready = True
            for feature in features:
                position = feature.mm_position
                if computed and position.offset + position.length <= computed:
                    continue
                identifier = feature.identifier
                output = wanted.get(identifier)
                if output is None:
                    if identifier in self._cached and not self._bare(feature):
                        continue  # vLLM has it, most likely; if not, its encoder runs
                    output = wanted[identifier] = self._want(identifier)
                tokens = position.length if position.is_embed is None else position.get_num_embeds()
                if output.tokens == tokens and output.expires is None:
                    self._fitting[identifier] = output
                elif not self._goes_without(name, feature, tokens, wanted):
                    ready = False
            if ready and self._since:
                self._since.pop(name, None)
            return ready
        except Exception:
            logger.exception("mmbroker: request %s cannot be served", request.request_id)
            self._unavailable.add(request.request_id)
            return False

    def _goes_without(self, name: str, feature: Feature, tokens: int, wanted: dict[str, Output]) -> bool:
        """May a request go on though this feature of it is not simply there? Then its encoder runs, if need be."""
        identifier, bare = feature.identifier, self._bare(feature)
        output = wanted[identifier]
        if output.tokens == tokens:  # but its session has been lost
            if output.expires is None or self._clock() <= output.expires:
                self._fitting[identifier] = output
                return True
            output = wanted[identifier] = self._lookups.renew(output)
        elif output.tokens is not None and output.tokens != ABSENT:
            self.counts["misfits"] += 1
            self._lookups.refuse(output)
        if output.tokens is None:
            now = self._clock()
            if now - self._since.setdefault(name, now) < (TIMEOUT + 0.5 if bare else self._wait):
                return False
            self.counts["late"] += 1
        if bare:
            self.counts["unavailable"] += 1
            self._unavailable.add(name)
        return not bare

    def take_unavailable_requests(self) -> set[str]:
        """Requests that cannot be served: vLLM fails them, and no others."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has made room for a feature's encoder output."""
        identifier = request.mm_features[index].identifier
        output = self._fitting.get(identifier)
        if output is None:
            self._cached.add(identifier)
        elif identifier not in self._loads:
            self._loads[identifier] = output.ref
            output.wants += 1  # until it is loaded

    def build_loads(self, freed: Sequence[str]) -> list[tuple[str, Reference]]:
        """What the workers load in this step. `freed`: identifiers that have left vLLM's encoder cache."""
        self._cached.difference_update(freed)
        if not self._loads:
            return []
        loads, self._loads = self._loads, {}
        self._cached.update(loads)
        self.counts["loads"] += len(loads)
        return list(loads.items())

    def forgotten(self) -> None:
        """vLLM has emptied its encoder cache, without a word on what was in it."""
        self._cached.clear()

    def loaded(self, identifiers: Sequence[str]) -> None:
        """All workers have loaded these."""
        for identifier in identifiers:
            self._lookups.done(identifier)

    def request_finished(self, request_id: str) -> None:
        if self._unavailable:
            self._unavailable.discard(request_id)
        if self._since:
            self._since.pop(request_id, None)
        if request_id in self._needs:
            self._past(request_id)

    def _past(self, name: str) -> None:
        for identifier in self._needs.pop(name):
            self._lookups.done(identifier)
