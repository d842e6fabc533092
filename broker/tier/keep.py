"""The way of a feature from its slot into the store, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from mmbroker import hashing
from mmbroker.proto.digest import tree_hash
from mmbroker.proto.errors import BrokerError
from mmbroker.proto.messages import Worth

from . import objects
from .desk import Granted
from .objects import HEADER, Header, TooLarge
from .registry import Place
from .store import StoreError, StoreFull
from .way import Way


@dataclass
class Keeper(Way):
    """Stores what is worth it; one thread at a time. `ttl`: for how many seconds what is stored may be served."""

    _ttl: float | None

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
