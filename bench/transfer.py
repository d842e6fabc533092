"""Bytes between two processes: by way of the store, and by plain TCP, in turns on the same machine.

One process is a machine that lends its memory to the store, and the other a mover on another one, which lends none. The
plain connection is the best of its kind: one socket, one call to send all, one to receive all into warm memory.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from mmbroker.mapping import Mapping
from mmbroker.proto.keys import Key
from mmbroker.tier import objects
from mmbroker.tier.store import MooncakeStore

from . import stats
from .operators import cpu_s
from .processes import Workshop
from .store import NAMESPACE, Master, silence

STORE, TCP = "store", "plain TCP"
GET, PUT = "get", "put"
#: Blocks that a measurement is divided into, so that the ways take turns.
BLOCKS = 6
_ORDER = struct.Struct("<BQ")  # is it a put, bytes


class Far:
    """Lends the store `mib`; and answers a plain connection from memory of its own."""

    def __init__(self, master: str, mib: int, nbytes: int) -> None:
        silence()
        self._store = MooncakeStore(master, "127.0.0.1", mib << 20)
        self._memory = Mapping.private(nbytes).view(0, nbytes)
        self._memory[:] = os.urandom(1 << 20) * (nbytes >> 20) + bytes(nbytes % (1 << 20))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while order := peer.recv(_ORDER.size, socket.MSG_WAITALL):
                put, nbytes = _ORDER.unpack(order)
                if put:
                    _receive(peer, self._memory[:nbytes])
                    peer.sendall(b"!")
                else:
                    peer.sendall(self._memory[:nbytes])

    def close(self) -> None:
        self._thread.join()
        self._listener.close()
        self._store.close()


class Near:
    """Puts and gets, one after the other; `far` is the other process, for its processor time."""

    def __init__(self, master: str, nbytes: int, port: int, far: int) -> None:
        silence()
        self._store = MooncakeStore(master, "127.0.0.1", 0)
        mapping = Mapping.private(nbytes)
        self._address, self._memory = mapping.address, mapping.view(0, nbytes)
        self._memory[:] = os.urandom(1 << 20) * (nbytes >> 20) + bytes(nbytes % (1 << 20))
        self._store.register(mapping.address, nbytes)
        self._plain = socket.create_connection(("127.0.0.1", port))
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._far = far

    def measure(self, nbytes: int, count: int) -> dict[tuple[str, str], dict[str, list[float]]]:
        """By way, and put or get: milliseconds of each, and of processor time in both processes for each block's."""
        found: dict[tuple[str, str], dict[str, list[float]]] = {}
        ways: dict[tuple[str, str], Callable[[str], object]] = {
            (TCP, PUT): lambda _: self._tcp_put(nbytes),
            (STORE, PUT): lambda name: self._store.write(name, [(self._address, nbytes)]),
            (TCP, GET): lambda _: self._tcp_get(nbytes),
            (STORE, GET): lambda name: self._store.read(name, 0, self._address, nbytes),
        }
        each = max(1, count // BLOCKS)
        for block in range(-1, BLOCKS):  # the first warms: memory that the store touches, and connections
            names = [objects.name_of(NAMESPACE, Key.derived(os.urandom(32))) for _ in range(each)]
            for way, act in ways.items():
                ms, cpu = self._times(act, names)
                if block >= 0:
                    kept = found.setdefault(way, {"ms": [], "cpu_ms": []})
                    kept["ms"] += ms
                    kept["cpu_ms"].append(cpu)
            for name in names:
                self._store.remove(name)
        return found

    def _times(self, act: Callable[[str], object], names: list[str]) -> tuple[list[float], float]:
        times, clock = [], time.perf_counter_ns
        before = self._busy()
        for name in names:
            started = clock()
            act(name)
            times.append((clock() - started) / 1e6)
        return times, 1e3 * (self._busy() - before) / len(names)

    def _busy(self) -> float:
        return cpu_s(os.getpid()) + cpu_s(self._far)

    def _tcp_put(self, nbytes: int) -> None:
        self._plain.sendall(_ORDER.pack(True, nbytes))
        self._plain.sendall(self._memory[:nbytes])
        self._plain.recv(1)

    def _tcp_get(self, nbytes: int) -> None:
        self._plain.sendall(_ORDER.pack(False, nbytes))
        _receive(self._plain, self._memory[:nbytes])

    def close(self) -> None:
        self._plain.close()
        self._store.close()


def _receive(peer: socket.socket, into: memoryview) -> None:
    """All of it: the kernel waits for the whole, unless it is interrupted."""
    while into:
        got = peer.recv_into(into, len(into), socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("the other process is gone")
        into = into[got:]


def measure(
    shop: Workshop, sizes: list[float], count: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A line for each size, way, and put or get."""
    lines = []
    largest = round(max(sizes) * 1e6)
    # Room for every object of a block, twice: what was removed may be kept for a moment.
    mib = (2 * largest * max(2, count // BLOCKS) >> 20) + 64
    with Master(shop.place("master")) as master:
        far, near = shop.worker("first"), shop.worker("second")
        with (
            far.make(Far, master.address, mib, largest) as other,
            near.make(Near, master.address, largest, other.call("port"), far.pid) as asker,
        ):
            for mb in sizes:
                say(f"transfer: {mb:g} MB")
                for (way, what), kept in asker.call("measure", round(mb * 1e6), count).items():
                    p50 = statistics.median(kept["ms"])
                    lines.append(
                        {
                            "mb": mb,
                            "way": way,
                            "what": what,
                            "ms_p50": round(p50, 3),
                            "ms_p99": round(stats.percentile(kept["ms"], 99), 3),
                            "gb_per_s": round(mb / p50, 3),
                            "cpu_ms": round(statistics.median(kept["cpu_ms"]), 3),
                            "n": len(kept["ms"]),
                        }
                    )
    return lines
