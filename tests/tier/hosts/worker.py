"""What a tokenizer worker does, on one host, with features that it can make from a number alone.

`Worker.want` asks for features as an adapter does, all at once, makes what it is promised, and reads each one as an
engine's rank does. For a `tests.puppet` process.
"""

from __future__ import annotations

import hashlib
import threading
import time

import torch

import mmbroker
from mmbroker.proto.keys import Key

#: What making something took, in microseconds: enough that every policy would store it.
COST = 10_000_000
#: How long a worker waits for anything, in seconds. A request that is not answered by then has failed.
TIMEOUT = 30.0


def key_of(seed: int) -> Key:
    return Key.derived(seed.to_bytes(32, "big"))


def feature(seed: int, nbytes: int) -> torch.Tensor:
    """Random bits as float32."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8,), generator=generator, dtype=torch.int64)
    return bits.view(torch.float32).view(-1, 2)


class Worker:
    """`engine`: whose rank it is, too."""

    def __init__(self, directory: str, engine: str = "engine") -> None:
        torch.set_num_threads(1)
        self._engine = engine
        self._client = mmbroker.connect(directory, name="worker", timeout=TIMEOUT)
        self._rank = mmbroker.connect(directory, name="rank", timeout=TIMEOUT)
        self._table = self._rank.attach(engine=engine, access="readonly")

    def want(self, seeds: list[int], nbytes: int, patient: bool = False) -> list[str]:
        """How each came: ``made`` here, or ``found``; ``wrong`` if its bytes, or what is beside it, are others.

        `patient`: the broker may die meanwhile; then it is asked again when it is back.
        """
        end = time.monotonic() + TIMEOUT
        while True:
            try:
                return self._want(seeds, nbytes)
            except mmbroker.BrokerError:
                if not patient or time.monotonic() > end:
                    raise
                threading.Event().wait(0.01)

    def _want(self, seeds: list[int], nbytes: int) -> list[str]:
        words = dict.fromkeys(seeds, "found")
        while True:
            got = self._client.get_or_promise([key_of(seed) for seed in seeds], to=self._engine)
            for seed, one in zip(seeds, got, strict=True):
                if isinstance(one, mmbroker.Promise):
                    words[seed] = "made"
                    made = feature(seed, nbytes)
                    self._client.put(made, key=one, extra=b"%d" % seed, cost=COST).drop()
            if all(isinstance(one, mmbroker.Held) for one in got):
                break
            for one in got:
                if isinstance(one, mmbroker.Held):
                    one.drop()
        for seed, held in zip(seeds, got, strict=True):
            assert isinstance(held, mmbroker.Held)
            with held, self._table.take(held.ref) as use:
                same = use.tensor.view(torch.int64).equal(feature(seed, nbytes).view(torch.int64))
                if not same or held.extra != b"%d" % seed:
                    words[seed] = "wrong"
        return [words[seed] for seed in seeds]

    def read(self, keys: list[str]) -> list[str | None]:
        """SHA-256 of the bytes of what is under derived keys, and of what is beside each; None: nobody has it."""
        found: list[str | None] = []
        for key in keys:
            held = self._client.lookup(Key.derived(bytes.fromhex(key)), to=self._engine)
            if held is None:
                found.append(None)
                continue
            with held, self._table.take(held.ref) as use:
                content = use.tensor.contiguous().view(torch.uint8).numpy().tobytes()
                found.append(hashlib.sha256(content + held.extra).hexdigest())
        return found

    def close(self) -> None:
        self._client.close()
        self._rank.close()
