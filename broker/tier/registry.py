"""The memory that the store may read and write: host segments as they are mapped, and scratch memory for headers.

Each map is registered once, when it is first needed, and unregistered just before it is unmapped, which is after the
last view of it is gone.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mmbroker.mapping import Mapping

from .objects import HEADER
from .store import Store, StoreError


class Place(NamedTuple):
    """Memory that the store may use while `view`, or a view of it, is alive. `address` is where it begins."""

    view: memoryview
    address: int


class Registry:
    """Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: set[int] = set()

    def place(self, mapping: Mapping, offset: int, nbytes: int) -> Place:
        """Bytes of a map, which the store may use from now on. Raises `StoreError`, `InvalidMessage`."""
        view = mapping.view(offset, nbytes)
        with self._lock:
            if mapping.address not in self._known:
                self._store.register(mapping.address, mapping.nbytes)
                self._known.add(mapping.address)
                address = mapping.address
                mapping.before_unmap(lambda: self._forget(address))
        return Place(view, mapping.address + offset)

    def _forget(self, address: int) -> None:
        with self._lock:
            self._known.discard(address)
            self._store.unregister(address)

    def __len__(self) -> int:
        return len(self._known)


class Scratch:
    """Room for headers: for so many at a time, and as many that rest. Thread-safe.

    After a call that failed the store may still write there, so that room is not used for a while.
    """

    def __init__(self, registry: Registry, headers: int) -> None:
        self._mapping = Mapping.private(2 * headers * HEADER)
        self._registry = registry
        self._free = list(range(2 * headers))
        self._resting: list[tuple[float, int]] = []  # until when, the first first
        self._lock = threading.Lock()

    @contextmanager
    def header(self) -> Iterator[Place]:
        """Room for one. Raises `StoreError` if all of it is in use, or rests."""
        with self._lock:
            while self._resting and self._resting[0][0] <= time.monotonic():
                self._free.append(self._resting.pop(0)[1])
            if not self._free:
                raise StoreError("too many calls to the store have failed at once")
            number = self._free.pop()
        settles = 0.0
        try:
            yield self._registry.place(self._mapping, number * HEADER, HEADER)
        except StoreError as error:
            settles = error.settles
            raise
        finally:
            with self._lock:
                if not settles:
                    self._free.append(number)
                elif settles < math.inf:
                    insort(self._resting, (time.monotonic() + settles, number))
