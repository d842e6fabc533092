"""What a tokenizer worker pays for one feature, and for a request of eight.

The yardstick is the same tree hash in the same number of threads, and one copy, done alone: into memory that was
touched before, and to another place each time, as no transport copies to the same place twice. Each turn begins when
what the one before has ended is settled, which takes both cores for a moment. SGLang hashes a
request's features one after the other on one thread, or leaves it to the scheduler; and it creates a shared memory
file for each. All take turns on the same tensors, which change before every turn, so that nothing is a hit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import torch

import mmbroker
from mmbroker.hashing import hash_threads
from mmbroker.proto.digest import content_digest
from mmbroker.proto.form import tensor_form

from . import stats, ways
from .processes import Workshop

#: Features in a batch.
BATCH = 8
#: The yardstick's copies go to so many megabytes in turn: more than a processor's caches hold.
TARGETS_MB = 128
#: How long a dropped hold takes to be over everywhere, at most, in seconds.
SETTLED = 0.006
#: The engine with one idle rank that reads in place.
ENGINE = "engine-readonly"
#: Names of what is measured.
YARDSTICK, CACHED = "hash + one copy alone", "put, no engine"
PUT, PUT_COPY = "put to an idle rank, readonly", "put to an idle rank, copy"
SGLANG_HASHED, SGLANG = "sglang: hash + shm", "sglang: shm alone"
#: The row of each transport's producer.
ROWS = {ways.READONLY: PUT, ways.COPY: PUT_COPY, ways.SGLANG_HASHED: SGLANG_HASHED, ways.SGLANG: SGLANG}


class IdleRank:
    """The one rank of an engine. It takes nothing: it only acknowledges."""

    def __init__(self, broker: str, access: str) -> None:
        self._client = mmbroker.connect(broker, name="bench-rank")
        self._table = self._client.attach(engine=f"engine-{access}", rank=0, world=1, access=access)

    def close(self) -> None:
        self._table.close()
        self._client.close()


class Producer:
    """Measures every way to send the same features."""

    def __init__(self, broker: str, sglang: bool) -> None:
        torch.set_num_threads(1)  # more would go on spinning after a copy, beside whatever is measured next
        self._client = mmbroker.connect(broker, name="bench-producer", timeout=30.0)
        self._threads = hash_threads()
        self._pool = ThreadPoolExecutor(self._threads)
        self._changes = 0
        self._sglang: Any = ways.sglang() if sglang else None

    def threads(self) -> int:
        """Hash threads of the broker's client and of the yardstick."""
        return self._threads

    def measure(self, mb: float, batch: int, count: int, warm: int) -> dict[str, list[int]]:
        """Nanoseconds of each way, of `batch` features each time; `warm` puts before fill the arena."""
        features = ways.tensors(mb, batch, seed=2)
        targets = cycle([torch.full_like(features[0], 1.0) for _ in range(max(2, round(TARGETS_MB / mb)))])
        clock = time.perf_counter_ns

        def yardstick() -> None:
            for feature in features:
                form = tensor_form("float32", feature.shape, "image")
                data = memoryview(feature.numpy()).cast("B")  # type: ignore[arg-type]
                content_digest(form, [data], self._pool.map if self._threads > 1 else map)
                next(targets).copy_(feature)

        def put(engine: str | None) -> Callable[[], list[mmbroker.Held]]:
            if batch == 1:
                return lambda: [self._client.put(features[0], to=engine)]
            return lambda: self._client.put_many(features, to=engine)

        def sglang(hashed: bool) -> Callable[[], list[Any]]:
            make, digest = self._sglang.ShmPointerMMData, self._sglang.hash_feature
            return lambda: [make(x, precomputed_hash=digest(x) if hashed else None) for x in features]

        ways_to_send: dict[str, Callable[[], Any]] = {
            YARDSTICK: yardstick,
            PUT: put(ENGINE),
            PUT_COPY: put("engine-copy"),
            CACHED: put(None),
        }
        if self._sglang is not None:
            ways_to_send |= {SGLANG_HASHED: sglang(True), SGLANG: sglang(False)}
        for _ in range(warm):
            self._change(features)
            self._undo(put(None)())
        times: dict[str, list[int]] = {name: [] for name in ways_to_send}
        order, draw = list(ways_to_send.items()), random.Random(mb)
        for turn in range(count + 1):
            draw.shuffle(order)  # none shall always come after the same one, whose leavings are in the caches
            for name, send in order:
                self._change(features)
                started = clock()
                sent = send()
                took = clock() - started
                self._undo(sent)
                if turn:  # the first one warms
                    times[name].append(took)
        return times

    def _change(self, features: list[torch.Tensor]) -> None:
        for feature in features:
            self._changes += 1
            feature[0, 0] = self._changes

    @staticmethod
    def _undo(sent: list[Any] | None) -> None:
        for one in sent or []:
            if isinstance(one, mmbroker.Held):
                one.drop()
            else:
                one.close_and_unlink()
        time.sleep(SETTLED)

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown()


def measure(shop: Workshop, sizes: list[float], count: int, sglang: bool, say: Any) -> dict[str, Any]:
    """One line for each size and batch: p50 and p99 of every way, microseconds for one feature."""
    lines: list[dict[str, Any]] = []
    arena = round(3 * BATCH * max(sizes) + 64)
    with (
        shop.broker(host_mib=arena) as broker,
        shop.worker("rank").make(IdleRank, broker.path, "readonly"),
        shop.worker("rank").make(IdleRank, broker.path, "copy"),
        shop.worker("source").make(Producer, broker.path, sglang) as producer,
    ):
        threads = producer.call("threads")
        filled = False
        for mb in sorted(sizes, reverse=True):
            for batch in (1, BATCH):
                say(f"producer: {mb} MB, {batch} at once")
                turns = max(3, round(count * min(1.0, 10 / (mb * batch))))
                warm = 2 if filled else round(arena / (mb * batch)) + 1
                filled = True
                times = producer.call("measure", mb, batch, turns, warm)
                per_feature = {name: [ns // batch for ns in values] for name, values in times.items()}
                found = {name: stats.us(values) for name, values in per_feature.items()}
                for name, one in found.items():
                    lines.append(
                        {
                            "mb": mb,
                            "batch": batch,
                            "way": name,
                            "us_p50": one["p50"],
                            "us_p99": one["p99"],
                            "n": one["n"],
                            "times_yardstick": round(one["p50"] / found[YARDSTICK]["p50"], 3),
                        }
                    )
    lines.sort(key=lambda line: (line["mb"], line["batch"]))
    return {"hash_threads": threads, "sglang_hash_threads": 1, "lines": lines}
