"""What each way between a slot and the store needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .desk import Desk
from .registry import Scratch
from .store import Store


@dataclass
class Way:
    """`judge` hears how the store did: None when it has moved bytes in time, else what was wrong. `wall`: seconds
    since the epoch, as on all machines."""

    _desk: Desk
    _store: Store
    _scratch: Scratch
    _namespace: str
    _judge: Callable[[str | None], None]
    _wall: Callable[[], float]
