"""Many features through a small arena: is every byte right that a busy GPU reads late?

A feature is a run of 32-bit numbers that its seed tells, so the GPU itself counts the wrong ones, and nothing waits for
it. Before each read a kernel keeps the stream busy, so that a use is often released before it was read. Engines
release, park and take again in random order; some features go to both.
"""

from __future__ import annotations

import math
import random
import select
import socket
import time
from typing import Any

import msgspec
import torch

import mmbroker

from .gpu_memory import MIB
from .gpu_memory import free as free_memory
from .gpu_peers import PATIENCE, Engine, device, fake, uuid
from .processes import Workshop, results

BATCH = 8
#: Features of one worker that are under way at most; both engines together may have twice as many.
WINDOW = 192
#: Uses that an engine keeps open, and how many of all features go to both engines.
OPEN, BOTH = 48, 0.2
#: How long the GPU is kept busy before a read, in clock cycles at most.
CYCLES = 400_000


def _numbers(seed: int, base: torch.Tensor, count: int) -> torch.Tensor:
    """A feature's content; `base` counts up from 0."""
    return base[:count] + seed


class Reader(Engine):
    """An engine that takes what workers send, and answers when it is done with a feature."""

    def __init__(self, broker: str, name: str, place: str, most: int) -> None:
        super().__init__(broker, name)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(place)
        self._listener.listen(4)
        self._numbers = torch.arange(most, dtype=torch.int32, device=device())
        self._wrong = torch.zeros((), dtype=torch.int64, device=device())
        self._kept: list[tuple[Any, Any, int]] = []
        self._count = dict.fromkeys(("takes", "reads", "host_reads", "parks", "retakes", "features"), 0)

    def serve(self, workers: int, seed: int) -> dict[str, int]:
        """Until every worker has hung up."""
        draw = random.Random(seed)
        peers = [self._listener.accept()[0] for _ in range(workers)]
        poller = select.poll()
        for peer in peers:
            poller.register(peer, select.POLLIN)
        by_fd = {peer.fileno(): peer for peer in peers}
        waiting: list[list[Any]] = []  # use or None, reference, seed, token, descriptor
        while by_fd or waiting:
            # Uses pile up as long as more comes, and are drained when nothing does.
            ready = poller.poll(0 if len(waiting) > OPEN or not by_fd else 2 if waiting else 100)
            for fd, _ in ready:
                data = by_fd[fd].recv(1 << 17)
                if data:
                    waiting += [[None, *item, fd] for item in msgspec.msgpack.decode(data)]
                else:
                    poller.unregister(fd)
                    by_fd.pop(fd)
            if waiting and (len(waiting) > OPEN or not ready):
                at = draw.randrange(len(waiting))
                waiting[at], waiting[-1] = waiting[-1], waiting[at]
                if self._visit(waiting[-1], draw):
                    *_, token, fd = waiting.pop()
                    if fd in by_fd:
                        by_fd[fd].send(token.to_bytes(8, "little"))
                    self._count["features"] += 1
        for peer in peers:
            peer.close()
        return self.counts()

    def _visit(self, item: list[Any], draw: random.Random) -> bool:
        """Read a feature, and then let go of it in one way or another; True: for good."""
        use, ref, seed, *_ = item
        if use is None:
            use = item[0] = self.table.take(ref)
            self._count["takes"] += 1
        self._read(use, seed, draw)
        end = draw.random()
        if end < 0.25:
            return False  # read again later, in the same use
        item[0] = None
        if end < 0.5:
            use.park()
            self._count["parks"] += 1
        else:
            use.release()
        again = draw.random() < 0.3
        self._count["retakes"] += again
        return not again

    def _read(self, use: mmbroker.Use, seed: int, draw: random.Random) -> None:
        if not fake():
            torch.cuda._sleep(draw.randrange(CYCLES))  # type: ignore[no-untyped-call]
        tensor = use.tensor
        if tensor.device != self._numbers.device:
            self._count["host_reads"] += 1
            tensor = tensor.to(self._numbers.device, non_blocking=True)
        self._count["reads"] += 1
        self._wrong += (tensor != _numbers(seed, self._numbers, tensor.numel())).sum()

    def counts(self) -> dict[str, int]:
        """What was done so far, and how many 32-bit numbers were wrong. Waits for the GPU."""
        return {**self._count, "wrong": int(self._wrong), **self.figures()}

    def keep(self, sent: list[tuple[Any, int]]) -> None:
        """Take features; half of the uses stay open, with their tensors made, the rest is for later."""
        for number, (ref, seed) in enumerate(sent):
            use = self.table.take(ref) if number % 2 else None
            if use is not None:
                use.tensor.size()  # it is made here
            self._kept.append((use, ref, seed))

    def check(self) -> dict[str, int]:
        """Read all that was kept; what was not taken before is taken now."""
        draw = random.Random(1)
        refused = 0
        for use, ref, seed in self._kept:
            try:
                with self.table.take(ref) as another:
                    self._read(another, seed, draw)
            except mmbroker.BrokerError:
                refused += 1
            if use is not None:
                self._read(use, seed, draw)
        return {"refused": refused, **self.counts()}

    def close(self) -> None:
        self._kept.clear()
        self._listener.close()
        super().close()


class Writer:
    """A worker without a context, which writes features of random sizes."""

    def __init__(self, broker: str, places: dict[str, str], least: int, most: int, seed: int) -> None:
        torch.set_num_threads(2)
        self._client = mmbroker.connect(broker, name=f"writer-{seed}", timeout=PATIENCE)
        self._engines = list(places)
        self._peers = {}
        for name, place in places.items():
            self._peers[name] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._peers[name].connect(place)
        self._draw = random.Random(seed)
        self._bounds = (math.log(least), math.log(most))
        self._base = torch.arange(most // 4, dtype=torch.int32)
        self._mine = seed << 40
        self._held: dict[int, mmbroker.Held] = {}
        self._next = 0
        self._poller = select.poll()
        for peer in self._peers.values():
            self._poller.register(peer, select.POLLIN)

    def _batch(self, count: int) -> tuple[list[int], list[torch.Tensor]]:
        seeds = [self._draw.randrange(1 << 30) for _ in range(count)]
        sizes = [round(math.exp(self._draw.uniform(*self._bounds))) // 4 for _ in range(count)]
        return seeds, [_numbers(seed, self._base, max(1, n)) for seed, n in zip(seeds, sizes, strict=True)]

    def feed(self, features: int) -> dict[str, float]:
        """Write and send, and drop what the engines are done with. Returns when all of it is."""
        sent = nbytes = 0
        started = time.perf_counter()
        while sent < features:
            self._hear(0)
            while len(self._held) > WINDOW:
                self._hear(1000)
            count = min(BATCH, features - sent)
            seeds, tensors = self._batch(count)
            keys = [f"{self._mine + sent + number}" for number in range(count)]
            first = self._draw.randrange(len(self._engines))
            to = self._engines[first]
            self._send(to, self._client.put_many(tensors, keys=keys, to=to), seeds)
            if len(self._engines) > 1 and self._draw.random() < BOTH:
                other = self._engines[1 - first]
                found = [held for held in self._client.lookup_many(keys, to=other) if held is not None]
                if len(found) == count:
                    self._send(other, found, seeds)
                else:
                    for held in found:
                        held.drop()
            sent += count
            nbytes += sum(tensor.nbytes for tensor in tensors)
        took = time.perf_counter() - started
        while self._held:
            self._hear(1000)
        return {"features": sent, "bytes": nbytes, "seconds": round(took, 2)}

    def hand(self, engine: str, count: int) -> list[tuple[Any, int]]:
        """Features that stay held, and their seeds."""
        seeds, tensors = self._batch(count)
        told = []
        for seed, tensor in zip(seeds, tensors, strict=True):
            self._next += 1
            held = self._client.put(tensor, key=f"{self._mine + self._next} kept", to=engine)
            self._held[self._next] = held
            told.append((held.ref.to_wire(), seed))
        return told

    def until_lost(self, engine: str) -> int:
        """Put and drop until the broker is gone; how many times."""
        count = 0
        while True:
            seeds, tensors = self._batch(BATCH)
            try:
                for held in self._client.put_many(tensors, keys=[f"{count} {s}" for s in seeds], to=engine):
                    held.drop()
            except mmbroker.BrokerError:
                return count
            count += BATCH

    def _send(self, engine: str, helds: list[mmbroker.Held], seeds: list[int]) -> None:
        items = []
        for held, seed in zip(helds, seeds, strict=True):
            self._next += 1
            self._held[self._next] = held
            items.append((held.ref.to_wire(), seed, self._next))
        self._peers[engine].send(msgspec.msgpack.encode(items))

    def _hear(self, milliseconds: int) -> None:
        """Drop what engines are done with."""
        for fd, _ in self._poller.poll(milliseconds):
            for peer in self._peers.values():
                if peer.fileno() == fd:
                    data = peer.recv(8)
                    if not data:
                        raise RuntimeError("an engine hung up")
                    self._held.pop(int.from_bytes(data, "little")).drop()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._client.close()


def storm(
    shop: Workshop,
    features: int,
    sizes: tuple[int, int],
    device_mib: int,
    host_mib: int,
    settings: dict[str, Any],
    say: Any,
) -> dict[str, Any]:
    """`features` through a device arena of `device_mib`, then how long the arena takes back to its reserve."""
    reserve = min(64, device_mib // 2)
    left = free_memory()
    engines = {name: shop.place(name) for name in ("one", "two")}
    with shop.broker(
        gpu=uuid(), host_mib=host_mib, device_mib=device_mib, device_reserve_mib=reserve, **settings
    ) as broker:
        readers = [
            shop.worker(f"reader-{name}").make(Reader, broker.path, name, place, sizes[1])
            for name, place in engines.items()
        ]
        at_rest = left()
        writers = [
            shop.worker(f"writer-{number}").make(Writer, broker.path, engines, *sizes, number)
            for number in (1, 2)
        ]
        say(f"storm: {features} features, {sizes[0]} to {sizes[1]} bytes, device arena of {device_mib} MiB")
        for number, reader in enumerate(readers):
            reader.start("serve", len(writers), number)
        for writer in writers:
            writer.start("feed", features // 2)
        fed = results(writers, readers)
        for writer in writers:
            writer.call("close")
        counts = results(readers)
        ended = time.monotonic()
        say("storm: back to the reserve")
        while (device_pool := broker.status()["device"])["capacity"] > reserve * MIB:
            if time.monotonic() > ended + PATIENCE:
                break
            time.sleep(0.1)
        back = time.monotonic() - ended
        rest = left()
        status = broker.status()
        for reader in readers:
            reader.call("close")
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    return {
        "features": sum(int(one["features"]) for one in fed),
        "gigabytes": round(sum(one["bytes"] for one in fed) / 1e9, 3),
        "seconds": max(one["seconds"] for one in fed),
        "device_mib": device_mib,
        "reserve_mib": reserve,
        **total,
        "imports_per_engine": [count["imports"] for count in counts],
        "segments_discarded": status["counters"].get("segments_discarded", 0),
        "replicas_evicted": status["counters"].get("replicas_evicted", 0),
        "pool_full": status["counters"].get("pool_full", 0),
        "back_to_reserve_s": round(back, 2),
        "device_capacity_mib_after": device_pool["capacity"] // MIB,
        "gpu_memory_more_than_at_rest_mib": round((at_rest - rest) / MIB, 2),
    }


def killed(
    shop: Workshop, count: int, sizes: tuple[int, int], settings: dict[str, Any], say: Any
) -> dict[str, Any]:
    """The broker ends by SIGKILL while an engine holds `count` features and more arrive."""
    say("killed: the broker, under load")
    most = round(count * sizes[1] / MIB) + 128
    place = shop.place("kept")
    broker = shop.broker(gpu=uuid(), host_mib=most, device_mib=most, **settings)
    with (
        shop.worker("reader-kept").make(Reader, broker.path, "kept", place, sizes[1]) as reader,
        shop.worker("writer-kept").make(Writer, broker.path, {"kept": place}, *sizes, 3) as writer,
        shop.worker("writer-more").make(Writer, broker.path, {"kept": place}, *sizes, 4) as more,
    ):
        reader.call("keep", writer.call("hand", "kept", count))
        more.start("until_lost", "kept")
        time.sleep(0.5)
        broker.kill()
        at_once = reader.call("check")
        put_before = more.result()
        later = reader.call("check")
    return {
        "held": count,
        "features_put_meanwhile": put_before,
        "wrong_at_once": at_once["wrong"],
        "wrong_later": later["wrong"],
        "refused": later["refused"] + at_once["refused"],
        "reads": later["reads"],
    }
