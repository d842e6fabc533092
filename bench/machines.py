"""Two machines on one: brokers of their own, movers, workers that ask, and one store. And a third without a tier."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
import threading
import time

import torch

import mmbroker
from mmbroker.proto.keys import Key

from .processes import PATIENCE, Broker, end_process
from .ways import PATCH, patches


class Mover:
    """`mmbroker tier` beside a broker. A context manager."""

    def __init__(self, broker: Broker, master: str, store_mib: int = 0, **options: object) -> None:
        given = {"master": master, "address": "127.0.0.1", "store-mib": store_mib, **options}
        command = [sys.executable, "-m", "mmbroker", "tier"]
        for name, value in given.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        root, name = os.path.split(broker.path)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "MMBROKER_DIR": root, "MMBROKER_NAME": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the store tells its life there
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        if not (ready and self._process.stdout.readline()):
            self.close()
            raise RuntimeError(f"the mover did not start: {' '.join(command)}")
        self.pid = self._process.pid

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        end_process(self._process)


def tier_of(broker: Broker) -> dict[str, int]:
    """What a broker says of its only tier: is it open, what came of what it sought, and what its mover counts."""
    told = broker.status()
    (tier,) = told["movers"]
    (mover,) = [session for session in told["sessions"] if session["pid"] == tier["pid"]]
    return {"open": tier["open"], **tier["counts"], **mover["tally"]}


def wait_until(broker: Broker, what: str, name: str, least: int) -> None:
    """Until a counter of the broker's tier is at least so high."""
    end = time.monotonic() + PATIENCE
    while (told := tier_of(broker)).get(name, 0) < least:
        if time.monotonic() > end:
            raise RuntimeError(f"not within {PATIENCE:.0f} s: {what}; the tier: {told}")
        threading.Event().wait(0.05)


class Worker:
    """A worker that makes features, or gets them. A feature's key is what it is, and a number."""

    def __init__(self, broker: str, name: str) -> None:
        self._client = mmbroker.connect(broker, name=name, timeout=30.0)

    def make(self, mb: float, numbers: list[int], cost: int) -> None:
        """Make features that nobody has, of so many megabytes, and drop them: they stay as a cache."""
        feature = torch.rand(patches(mb), PATCH)
        for number in numbers:
            feature[0, 0] = number
            self._client.put(feature, key=self._promise(size(mb), number), cost=cost).drop()

    def get(self, what: str, numbers: list[int]) -> list[int]:
        """Nanoseconds until each of these features is here, which are somewhere."""
        times = []
        for number in numbers:
            took, held = self._ask(_key(what, number))
            assert isinstance(held, mmbroker.Held), "it did not come in time"
            held.drop()
            times.append(took)
        return times

    def miss(self, count: int) -> list[int]:
        """Nanoseconds until it is clear that nobody has a feature."""
        times = []
        for _ in range(count):
            took, promise = self._ask(Key.derived(os.urandom(32)))
            assert isinstance(promise, mmbroker.Promise)
            promise.drop()
            times.append(took)
        return times

    def _promise(self, what: str, number: int) -> mmbroker.Promise:
        _, promise = self._ask(_key(what, number))
        assert isinstance(promise, mmbroker.Promise), "somebody has it already"
        return promise

    def _ask(self, key: Key) -> tuple[int, object]:
        started = time.perf_counter_ns()
        (got,) = self._client.get_or_promise([key])
        return time.perf_counter_ns() - started, got

    def close(self) -> None:
        self._client.close()


class Processor(Worker):
    """A worker with the image processor of the tiny Qwen2.5-VL, which SGLang's tokenizer processes call."""

    def __init__(self, broker: str, name: str, width: int, height: int) -> None:
        super().__init__(broker, name)
        from transformers import AutoProcessor

        from mmbroker.demo import pictures
        from mmbroker.demo.model import tiny_model

        self._processor = AutoProcessor.from_pretrained(tiny_model()).image_processor
        data = io.BytesIO()
        pictures.generated(8, width, height).save(data, "JPEG", quality=85)
        self._jpeg = data.getvalue()

    def process(self, what: str, numbers: list[int]) -> tuple[list[int], int]:
        """Make the picture's feature and put it, once for each number: nanoseconds from its file to its tensor, and
        bytes of that."""
        from PIL import Image

        times, nbytes = [], 0
        for number in numbers:
            promise = self._promise(what, number)
            started = time.perf_counter_ns()
            picture = Image.open(io.BytesIO(self._jpeg)).convert("RGB")
            feature = self._processor(images=[picture], return_tensors="pt")["pixel_values"]
            times.append(time.perf_counter_ns() - started)
            self._client.put(feature, key=promise, cost=times[-1] // 1000).drop()
            nbytes = feature.nbytes
        return times, nbytes


def size(mb: float) -> str:
    """What a feature is that has no other property."""
    return f"{mb:g} MB"


def _key(what: str, number: int) -> Key:
    return Key.derived(f"{what}, {number}".encode().rjust(32))
