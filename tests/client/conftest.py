from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmbroker.proto import messages as m
from tests.client.peer import Handler, Peer
from tests.rig import readonly, rig

__all__ = ["readonly", "rig"]


@pytest.fixture
def peer(no_leaks: None) -> Iterator[Callable[..., Peer]]:
    """Makes brokers that do what they are told."""
    made: list[Peer] = []

    def make(handler: Handler = lambda peer, call: m.Done(), **options: Any) -> Peer:
        made.append(Peer(handler, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
