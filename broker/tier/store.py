"""A store of objects that several machines share: what the mover needs of one, and Mooncake Store.

Calls block, may take seconds, and cannot be cancelled; any thread may make them. This is the only module that knows
Mooncake, and it is imported when a store is opened: nobody else needs it installed.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from mmbroker.proto.errors import BrokerError

from . import doorman
from .objects import Altered

#: The one release that is known to work; its builds for CUDA have the same interface.
PACKAGE: Final = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
#: What its import needs of Debian.
LIBRARIES: Final = "libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4 libnl-3-200 libnl-route-3-200"
PROTOCOLS: Final = ("tcp", "rdma")
#: After a failed call the transport may still be at it for so long, in seconds: more than `_SETTINGS` allow.
SETTLED: Final = 6.0


class StoreError(BrokerError):
    """The store did not do what it was asked: it is not reachable, too slow, or of another version. For `settles`
    seconds from now on it may still use the memory that it was given."""

    settles = SETTLED


class StoreFull(StoreError):
    """The store has no room for an object, and has not begun."""

    settles = 0.0


class Adrift(StoreError):
    """A transfer was given up while it moved, and nobody can tell when it ends: before this process does, or not."""

    settles = math.inf


class Store(Protocol):
    """Memory is given as address and bytes, and must lie in registered memory."""

    def register(self, address: int, nbytes: int) -> None:
        """From now on objects may be read to here, and written from here. Raises `StoreError`."""

    def unregister(self, address: int) -> None:
        """No longer. Never raises."""

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of these objects there are, in one call. Raises `StoreError`."""

    def read(self, name: str, offset: int, address: int, nbytes: int) -> bool:
        """Copy a part of an object to memory. False: there is no such object. Raises `Altered` for one that is shorter,
        `StoreError`; then the memory may still be written, for as long as that says."""

    def write(self, name: str, pieces: Sequence[tuple[int, int]]) -> None:
        """Store an object made of pieces of memory, unless there is one of that name. Raises `StoreError`."""

    def remove(self, name: str) -> None:
        """Remove an object, if there is one. Raises `StoreError`."""

    def remove_all(self, prefix: str) -> int:
        """Remove all objects whose names begin so; how many there were. Raises `StoreError`."""

    def probe(self) -> None:
        """Raise `StoreError` unless it answers."""

    def close(self) -> None:
        """What this process holds for the store is gone afterwards."""


# --- Mooncake ---------------------------------------------------------------------------------------------------------

_OK, _FULL, _INVALID = 0, -200, -600
#: There is no such object, or somebody is just storing it.
_ABSENT: Final = (-704, -703)
_WORDS: Final = {
    -200: "it has no room",
    -600: "it refused a parameter",
    -707: "its promise to keep the object there ran out while it was read",
    -800: "a transfer failed: the machine that has the object is gone, or does not answer",
    -900: "its master cannot be reached",
    -901: "its master did not answer in time",
}
#: A transfer that moves at all has a minute; then the library tells that it has failed, and lets it go on. Less than
#: that, in seconds.
_GIVEN_UP: Final = 55.0
#: How long a call may take at most, and how the bytes travel. Read once, when the library is loaded; a variable that is
#: set already stays.
_SETTINGS: Final = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "2",
    "MC_TCP_SLICE_SIZE": str(4 << 20),
    # Its own log goes to stderr, in a style of its own: only what went wrong.
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "error",
}


def load() -> Any:
    """The library. Raises `StoreError` with what is to be installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise StoreError(
            f"Mooncake is not installed in this environment: pip install '{PACKAGE}' (or 'mmbroker[tier]')"
        ) from None
    except ImportError as error:
        raise StoreError(
            f"Mooncake cannot be loaded ({error}): install what it needs, on Debian and Ubuntu with "
            f"apt-get install {LIBRARIES}"
        ) from None


def _has_rdma() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


class MooncakeStore:
    """A client of Mooncake Store. `master`: HOST:PORT of its master. `address`: the one address of this machine to
    listen on. `nbytes`: memory of this process that it lends to the store; 0: none.

    Raises `StoreError`, `BrokerError` for an address that is not this machine's.
    """

    def __init__(self, master: str, address: str, nbytes: int = 0, protocol: str = "tcp") -> None:
        doorman.check(address)
        if protocol == "rdma" and not _has_rdma():  # the library would use TCP without a word
            raise StoreError(
                "no RDMA device is on this machine (none in /sys/class/infiniband): say --protocol tcp"
            )
        library = load()
        self._master = master
        try:
            self._store = library.MooncakeDistributedStore()
            code = self._store.setup(address, "P2PHANDSHAKE", nbytes, 0, protocol, "", master)
            doorman.guard(address)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise StoreError(
                f"this is another version of Mooncake ({error}): pip install '{PACKAGE}'"
            ) from None
        if code == _INVALID and nbytes:
            raise StoreError(
                f"this machine cannot lend {nbytes >> 20:,} MiB to the store: give a smaller --store-mib"
            )
        if code != _OK:
            raise StoreError(
                f"no Mooncake master of this version answers at {master} (code {code}): see that one runs there "
                f"(mooncake_master --rpc_address=HOST --rpc_port=PORT), and that it comes from {PACKAGE}"
            )

    def register(self, address: int, nbytes: int) -> None:
        self._check(self._store.register_buffer(address, nbytes), "did not take memory for transfers")

    def unregister(self, address: int) -> None:
        self._store.unregister_buffer(address)

    def exist(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        self._check(min(codes), "did not say what it has")
        return [code > 0 for code in codes]

    def read(self, name: str, offset: int, address: int, nbytes: int) -> bool:
        asked = time.monotonic()
        code = self._store.get_into_ranges([address], [[name]], [[[0]]], [[[offset]]], [[[nbytes]]])[0][0][0]
        if code in _ABSENT:
            return False
        if code < 0 and time.monotonic() - asked >= _GIVEN_UP:
            raise Adrift(
                f"the store of {self._master} did not give {nbytes} bytes within a minute (code {code}): their memory "
                "is not used again before this process ends, so start it anew once the network is well"
            )
        if code == _INVALID and self._ends_before(name, offset + nbytes):
            raise Altered(f"the object ends before byte {offset + nbytes}")
        self._check(code, "did not give an object")
        return True

    def _ends_before(self, name: str, end: int) -> bool:
        """What its master says: a machine that cannot be reached gives the code of a bad parameter, too."""
        return 0 <= int(self._store.get_size(name)) < end

    def write(self, name: str, pieces: Sequence[tuple[int, int]]) -> None:
        addresses, sizes = [address for address, _ in pieces], [size for _, size in pieces]
        code = self._store.batch_put_from_multi_buffers([name], [addresses], [sizes])[0]
        if code == _FULL:
            raise StoreFull(
                f"the store of {self._master} has no room: lend it more memory (--store-mib, or mooncake_client)"
            )
        self._check(code, "did not take an object")

    def remove(self, name: str) -> None:
        code = self._store.remove(name, True)
        if code not in _ABSENT:
            self._check(code, "did not remove an object")

    def remove_all(self, prefix: str) -> int:
        removed = int(self._store.remove_by_regex(f"^{re.escape(prefix)}.*", True))
        self._check(removed, "did not remove a namespace")
        return removed

    def probe(self) -> None:
        # Not `health_check`, which says that all is well for as long as it likes.
        self._check(self._store.is_exist("mmb1"), "does not answer")

    def close(self) -> None:
        self._store.close()

    def _check(self, code: int, what: str) -> None:
        if code < 0:
            raise StoreError(
                f"the store of {self._master} {what}: {_WORDS.get(code, 'it failed')} (code {code})"
            )
