"""The way of a feature from its slot into the store, step by step."""

from __future__ import annotations

from collections.abc import Callable

from mmbroker import hashing
from mmbroker.proto.digest import tree_hash
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.messages import Worth

from . import objects
from .desk import Desk, Granted
from .objects import HEADER, Header, TooLarge
from .registry import Place, Scratch
from .store import Store, StoreError, StoreFull


class Keeper:
    """Stores what is worth it; one thread at a time. `judge` and `wall` as for a `Fetcher`. `ttl`: for how many seconds
    what is stored may be served."""

    def __init__(
        self,
        desk: Desk,
        store: Store,
        scratch: Scratch,
        namespace: str,
        judge: Callable[[str | None], None],
        wall: Callable[[], float],
        ttl: float | None,
    ) -> None:
        self._desk = desk
        self._store = store
        self._scratch = scratch
        self._namespace = namespace
        self._judge = judge
        self._wall = wall
        self._ttl = ttl

    def keep(self, worth: Worth) -> bool:
        """True if the store has it now. Never raises what the store or the broker may."""
        try:
            with self._desk.reading(worth.key) as found:
                if found is None:
                    self._desk.count("put_skipped")  # evicted meanwhile
                    return False
                granted, extra = found
                self._write(worth, granted, extra)
        except StoreFull:
            self._desk.count("full")
            return False
        except StoreError as error:
            self._desk.count("put_failed")
            self._judge(str(error))
            return False
        except (BrokerError, TooLarge):
            self._desk.count("put_skipped")
            return False
        self._judge(None)
        self._desk.count("puts")
        self._desk.count("put_bytes", worth.nbytes)
        return True

    def remove(self, name: str) -> None:
        """An object's time is over."""
        try:
            self._store.remove(name)
        except StoreError as error:
            self._judge(str(error))
        else:
            self._desk.count("removed")

    def _write(self, worth: Worth, granted: Granted, extra: bytes) -> None:
        form, place = granted.form, granted.place
        header = Header(worth.key, form, extra, worth.cost, self._hash(place), self._wall(), self._ttl)
        with self._scratch.header() as room:
            room.view[:] = objects.encode(header)
            self._put(objects.name_of(self._namespace, worth.key), room, place)

    # --- the steps --------------------------------------------------------------------------------------------------

    def _hash(self, place: Place) -> bytes:
        return tree_hash(place.view, hashing.pool.map)

    def _put(self, name: str, header: Place, content: Place) -> None:
        pieces = [(header.address, HEADER)]
        if content.view.nbytes:
            pieces.append((content.address, content.view.nbytes))
        self._store.write(name, pieces)
