"""Features a second from producers through one rank's table: `put_many` of new ones, and hits on sealed ones."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

import torch

import mmbroker

from . import ways
from .peers import END
from .processes import Board, Workshop
from .producer import BATCH

ENGINE = "engine-sink"
#: Requests of `BATCH` features that a producer has under way at once.
WINDOW = 3
PRODUCERS = 2
KINDS = ("new", "hit")


class Taker:
    """The engine: takes and releases what arrives from every producer."""

    def __init__(self, broker: str, places: list[str], board: str) -> None:
        self._client = mmbroker.connect(broker, name="bench-taker")
        self._table = self._client.attach(engine=ENGINE, rank=0, world=1, access="readonly")
        self._board = Board(board)
        self._listeners = []
        for place in places:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(place)
            listener.listen(1)
            self._listeners.append(listener)
        self._inboxes: dict[int, socket.socket] = {}

    def serve(self, producers: int) -> int:
        """Take all features of so many producers until each has said that it is over; how many there were."""
        open_inboxes = {n: self._inbox(n) for n in range(producers)}
        taken = 0
        while open_inboxes:
            for number, inbox in list(open_inboxes.items()):
                try:
                    message = inbox.recv(1 << 17, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                if message == END:
                    del open_inboxes[number]
                    continue
                for item in ways.request(message).items:
                    use = self._table.take(item.feature)
                    use.tensor.size()
                    use.release()
                    taken += 1
                self._board.numbers[number] += 1
        return taken

    def _inbox(self, number: int) -> socket.socket:
        if number not in self._inboxes:
            self._inboxes[number], _ = self._listeners[number].accept()
        return self._inboxes[number]

    def close(self) -> None:
        for one in (*self._inboxes.values(), *self._listeners):
            one.close()
        self._table.close()
        self._client.close()
        self._board.close()


class Putter:
    """One producer."""

    def __init__(self, broker: str, place: str, board: str, number: int) -> None:
        self._client = mmbroker.connect(broker, name=f"bench-putter-{number}", timeout=30.0)
        self._board, self._number = Board(board), number
        self._outbox = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outbox.connect(place)
        self._changes = 0

    def run(self, kind: str, mb: float, seconds: float) -> float:
        """Send requests for so long; features a second, to the last one's release. `kind`: one of `KINDS`."""
        features = ways.tensors(mb, BATCH, seed=10 + self._number)
        keys = [f"{self._number} {mb} {n}" for n in range(BATCH)]
        if kind == "hit":
            for key, feature in zip(keys, features, strict=True):
                self._client.put(feature, key=key).drop()
        requests: deque[list[mmbroker.Held]] = deque()
        before = self._board.numbers[self._number]
        sent = 0
        started = time.perf_counter()
        while True:
            over = time.perf_counter() - started >= seconds
            if requests and (over or len(requests) == WINDOW):
                self._wait(before + sent - len(requests) + 1)
                for held in requests.popleft():
                    held.drop()
            elif over:
                break
            else:
                requests.append(self._hold(kind, keys, features))
                self._outbox.send(ways.message(sent, [held.ref.to_wire() for held in requests[-1]]))
                sent += 1
        took = time.perf_counter() - started
        self._outbox.send(END)
        return sent * BATCH / took

    def _wait(self, requests: int) -> None:
        """Until the engine has released so many requests."""
        while self._board.numbers[self._number] < requests:
            time.sleep(0.00005)

    def _hold(self, kind: str, keys: list[str], features: list[torch.Tensor]) -> list[mmbroker.Held]:
        if kind == "hit":
            return [held for held in self._client.lookup_many(keys, to=ENGINE) if held is not None]
        for feature in features:
            self._changes += 1
            feature[0, 0] = self._changes
        return list(self._client.put_many(features, to=ENGINE))

    def close(self) -> None:
        self._outbox.close()
        self._client.close()
        self._board.close()


def measure(shop: Workshop, sizes: list[float], seconds: float, say: Any) -> list[dict[str, Any]]:
    """One line for each size, kind and number of producers."""
    lines: list[dict[str, Any]] = []
    places = [shop.place("putter") for _ in range(PRODUCERS)]
    board = shop.place("board")
    arena = round(2 * PRODUCERS * BATCH * WINDOW * max(sizes) + 64)
    with (
        shop.broker(host_mib=arena) as broker,
        shop.worker("rank").make(Taker, broker.path, places, board) as taker,
        shop.worker("caller").make(Putter, broker.path, places[0], board, 0) as first,
        shop.worker("grower").make(Putter, broker.path, places[1], board, 1) as second,
    ):
        for mb in sizes:
            for kind in KINDS:
                for producers in ((first,), (first, second)):
                    say(f"throughput: {mb} MB, {kind}, {len(producers)} producer(s)")
                    for measured in (False, True):  # the first time warms, and lets the arena grow
                        taker.start("serve", len(producers))
                        for one in producers:
                            one.start("run", kind, mb, seconds if measured else seconds / 4)
                        rates = [one.result() for one in producers]
                        taker.result()
                    rate = sum(rates)
                    line = {"mb": mb, "kind": kind, "producers": len(producers), "batch": BATCH}
                    line["features_per_second"] = round(rate, 1)
                    if kind == "new":  # of a hit no byte is touched
                        line["gb_per_second"] = round(rate * mb / 1000, 3)
                    lines.append(line)
    return lines
