"""The two sides of a transport as objects for workers: a `Source` of arrivals, and a `Scheduler` that takes them.

Messages go over a socket that keeps their bounds and is read without waiting; the scheduler's progress comes back
through a board in shared memory, so that the measured thread makes no system call that the transport does not need.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator

import torch

import mmbroker

from . import ways
from .processes import Board, pin

#: The last message of a round.
END = b"end"


def engine_of(way: str) -> str:
    """The engine's name for one way of access: each has a table of its own."""
    return f"engine-{ways.ACCESS[way]}"


class Scheduler:
    """The engine's side: both tables, private tensors, and a socket on which messages arrive."""

    def __init__(self, broker: str, place: str, board: str, sglang: bool) -> None:
        torch.set_num_threads(1)
        self.board = Board(board)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(place)
        listener.listen(1)
        self._listener = listener
        self._inbox: socket.socket | None = None
        self._clients, self._tables = [], []
        self._openers: dict[str, ways.Opener] = {}
        for way, access in ways.ACCESS.items():
            client = mmbroker.connect(broker, name=f"bench-{access}")
            table = client.attach(engine=engine_of(way), rank=0, world=1, access=access)
            self._clients.append(client)
            self._tables.append(table)
            self._openers[way] = ways.BrokerOpener(table)
        if sglang:
            self._openers[ways.SGLANG] = self._openers[ways.SGLANG_HASHED] = ways.SglangOpener()

    def load(self, mb: float, count: int) -> None:
        """Private tensors for the rounds to come, equal to the source's."""
        self._openers[ways.PRIVATE] = ways.PrivateOpener(ways.tensors(mb, count, seed=1))
        gc.collect()
        gc.freeze()  # as engines do; what is collected later is what the loop makes

    def isolate(self, own: int, others: int) -> None:
        """This thread on one core; every other thread of this process, the receivers too, on the other."""
        pin(os.getpid(), [others])
        os.sched_setaffinity(0, [own])

    def inbox(self) -> socket.socket:
        if self._inbox is None:
            self._inbox, _ = self._listener.accept()
        return self._inbox

    def opener(self, way: str) -> ways.Opener:
        return self._openers[way]

    def table(self, way: str) -> mmbroker.FeatureTable:
        return self._tables[list(ways.ACCESS).index(way)]

    def arrivals(self) -> Iterator[bytes]:
        """All messages of a round, waited for by asking again and again, as a scheduler does."""
        inbox = self.inbox()
        while True:
            try:
                data = inbox.recv(1 << 17, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if data == END:
                return
            yield data

    def stats(self) -> dict[str, dict[str, int]]:
        """What the tables counted, by access."""
        return dict(zip(ways.ACCESS.values(), (dict(table.stats()) for table in self._tables), strict=True))

    def close(self) -> None:
        for table in self._tables:
            table.close()
        for client in self._clients:
            client.close()
        if self._inbox is not None:
            self._inbox.close()
        self._listener.close()
        self.board.close()


class Source:
    """The workers' side: features of one size, sealed once, sent again and again."""

    def __init__(self, broker: str, place: str, board: str, sglang: bool) -> None:
        torch.set_num_threads(1)
        self._client = mmbroker.connect(broker, name="bench-source", timeout=30.0)
        self._board = Board(board)
        self._outbox = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outbox.connect(place)
        self._sglang = sglang
        self._features: list[torch.Tensor] = []
        self._hashes: list[int] = []
        self._keys: list[str] = []

    def load(self, mb: float, count: int) -> None:
        """Make `count` features, and seal them under caller keys."""
        self._features = ways.tensors(mb, count, seed=1)
        self._keys = [f"{mb} MB {number}" for number in range(count)]
        for key, feature in zip(self._keys, self._features, strict=True):
            self._client.put(feature, key=key).drop()
        if self._sglang:
            self._hashes = [ways.sglang().hash_feature(feature) for feature in self._features]

    def isolate(self, core: int) -> None:
        pin(os.getpid(), [core])

    def feed(self, way: str, rate: float, window: int, most: int = 0, together: int = 1) -> dict[str, float]:
        """Send arrivals of `together` features until `most` were sent; 0: until told to stop on the board.

        `rate` a second, on a fixed schedule: a source that is late sends at once; 0: one after the other. No more than
        `window` are under way. Returns what was sent in how long, and the share of the time that the window was full.
        """
        sender, board = self._sender(way), self._board.numbers
        started = time.perf_counter()
        sent, blocked = 0, 0.0
        while not (board[Board.STOP] or sent == most > 0):
            due = started + sent / rate if rate else 0.0
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(min(wait, 0.005))
                continue
            before = time.perf_counter()
            while sent - board[Board.RELEASED] >= window and not board[Board.STOP]:
                time.sleep(0.00005)
            blocked += time.perf_counter() - before
            sender.released(board[Board.RELEASED])
            self._outbox.send(sender.message(sent, together))
            sent += 1
        took = time.perf_counter() - started
        while board[Board.RELEASED] < sent:
            time.sleep(0.0001)
        sender.released(sent)
        self._outbox.send(END)
        return {"sent": sent, "seconds": took, "blocked": blocked / took}

    def _sender(self, way: str) -> ways.Sender:
        if way == ways.PRIVATE:
            return ways.PrivateSender(self._features)
        if way in ways.ACCESS:
            return ways.BrokerSender(self._client, self._keys, engine_of(way))
        return ways.SglangSender(self._features, self._hashes if way == ways.SGLANG_HASHED else None)

    def close(self) -> None:
        self._outbox.close()
        self._client.close()
        self._board.close()
