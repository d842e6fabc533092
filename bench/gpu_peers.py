"""The processes of the GPU's bench: an engine whose features are on the device, and a worker that puts them.

Everything runs on the fake driver, too, where tensors "on the device" are the CPU's and figures mean nothing.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

import mmbroker
from mmbroker import cuda
from mmbroker.gpu import Place

from . import ways

#: How long something that was ordered may take, in seconds.
PATIENCE = 60.0
#: How long features may take to the device.
LOADING = 5.0


def fake() -> bool:
    return bool(os.environ.get("MMBROKER_FAKE_CUDA"))


def device() -> torch.device:
    """Where the engine's own tensors are."""
    return torch.device("cpu" if fake() else "cuda:0")


def uuid() -> str:
    """The GPU that everything runs on. Makes no context, and in a process of its own choice, no use of CUDA at all."""
    if fake():
        return cuda.open_driver().devices()[0].uuid
    from mmbroker.cuda.nvml import Nvml

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return cuda.find(shown.split(",")[0] if shown else "0", Nvml().existing()).uuid


def finish() -> None:
    """Until the GPU has done all work of this process."""
    if not fake():
        torch.cuda.synchronize()


class Engine:
    """One rank on the GPU, and its scheduler thread, which is the one that is called."""

    def __init__(self, broker: str, name: str, access: str = "readonly") -> None:
        torch.set_num_threads(1)
        self._base = torch.zeros(1, device=device())  # makes the context, as an engine does before
        self.client = mmbroker.connect(broker, name=name, timeout=PATIENCE)
        self.table = self.client.attach(engine=name, device=uuid(), access=access, timeout=PATIENCE)
        self._stamps: dict[int, int] = {}
        if self.table.path != "device":
            raise RuntimeError(
                f"features do not go to the device, only to {self.table.path}: see `mmbroker doctor`"
            )

    @property
    def gpu(self) -> Any:
        assert self.table.gpu is not None
        return self.table.gpu

    def place(self, ref: dict[str, Any]) -> Place | None:
        """Where an entry is on the device."""
        return self.table._entries[ref["boot"], ref["hold"]].place

    def settle(self, refs: list[dict[str, Any]]) -> int:
        """Wait until the entries are loaded; how many of them have no place on the device."""
        end = time.monotonic() + LOADING
        while time.monotonic() < end:
            places = [self.place(ref) for ref in refs]
            if all(place is not None and not place.event for place in places):
                break
            time.sleep(0.001)
        return sum(place is None for place in places)

    def await_tensors(self, refs: list[dict[str, Any]]) -> None:
        """Until the receiver has made what is taken first, which it does a little later: a request mostly waits longer
        for its turn. What is taken before, the scheduler makes."""
        end = time.monotonic() + LOADING
        while not all(self.table._entries[ref["boot"], ref["hold"]].ready for ref in refs):
            if time.monotonic() > end:
                raise RuntimeError("the tensors of what was granted are not made")
            time.sleep(0.001)

    def emptied(self) -> None:
        """Wait until nothing is granted here any more."""
        end = time.monotonic() + PATIENCE
        while (stats := self.table.stats())["entries"] or stats["unsettled"]:
            if time.monotonic() > end:
                raise RuntimeError(f"entries are left: {stats}")
            time.sleep(0.001)

    def watch(self) -> None:
        """From now on, note when each copy to the device completes."""
        watched: queue.SimpleQueue[Place] = queue.SimpleQueue()
        gpu, load = self.gpu, self.gpu.load

        def loaded() -> None:
            gpu.driver.use(gpu.uuid)
            while True:
                place = watched.get()
                if event := place.event:
                    gpu.driver.synchronize(event)
                self._stamps[place.hold] = time.perf_counter_ns()

        def watching(*args: Any) -> Place:
            place: Place = load(*args)
            watched.put(place)
            return place

        gpu.load = watching
        threading.Thread(target=loaded, name="watch", daemon=True).start()

    def loaded_at(self, hold: int) -> int:
        """When a hold's copy was complete; the clock is the same in all processes of a machine."""
        end = time.monotonic() + PATIENCE
        while hold not in self._stamps:
            if time.monotonic() > end:
                raise RuntimeError(f"hold {hold} was not loaded")
            time.sleep(0.0005)
        return self._stamps[hold]

    def figures(self) -> dict[str, int]:
        """What this process has imported and loaded."""
        return {"imports": self.gpu.imports, "loads": self.gpu.loads, "bytes_loaded": self.gpu.bytes_loaded}

    def close(self) -> None:
        finish()
        with suppress(mmbroker.BrokerUnavailable):  # a broker that was killed needs no farewell
            self.table.close()
        self.client.close()


class Feeder:
    """A worker without a context: features under caller keys, granted again and again."""

    def __init__(self, broker: str) -> None:
        torch.set_num_threads(1)
        self.client = mmbroker.connect(broker, name="feeder", timeout=PATIENCE)
        self._held: list[mmbroker.Held] = []
        self._keys: list[str] = []
        self._count = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def load(self, mb: float, count: int) -> None:
        """Seal `count` features."""
        self._count += 1
        self._keys = [f"{self._count} {mb} MB {number}" for number in range(count)]
        for key, feature in zip(self._keys, ways.tensors(mb, count, seed=1), strict=True):
            self.client.put(feature, key=key).drop()

    def grant(self, engine: str) -> list[dict[str, Any]]:
        """New holds of all of them."""
        held = [one for one in self.client.lookup_many(self._keys, to=engine) if one is not None]
        assert len(held) == len(self._keys), "a sealed feature is gone: the arena is too small"
        self._held += held
        return [one.ref.to_wire() for one in held]

    def put(self, mb: float, engine: str, count: int, rate: float = 0.0) -> list[tuple[int, int]]:
        """New features, `rate` a second or one after the other, kept: the hold of each, and when its seal began."""
        (feature,) = ways.tensors(mb, 1, seed=2)
        told = []
        started = time.perf_counter()
        for number in range(count):
            if rate:
                time.sleep(max(0.0, started + number / rate - time.perf_counter()))
            self._count += 1
            found = self.client.get_or_create(f"new {self._count}", feature.shape, feature.dtype, to=engine)
            assert isinstance(found, mmbroker.Lease), "nobody else has this key"
            found.tensor.copy_(feature)
            began = time.perf_counter_ns()
            held = found.seal()
            self._held.append(held)
            told.append((held.ref.hold, began))
        return told

    def drop(self) -> None:
        while self._held:
            self._held.pop().drop()

    def begin(self, engine: str, rate: float) -> None:
        """Grant and drop on and on, `rate` times a second, beside whatever else happens."""
        self._end.clear()
        self._thread = threading.Thread(target=self._stream, args=(engine, rate))
        self._thread.start()

    def _stream(self, engine: str, rate: float) -> None:
        started = time.perf_counter()
        for sent, key in enumerate(self._cycle(), 1):
            held = self.client.lookup(key, to=engine)
            if held is not None:
                held.drop()
            if self._end.wait(max(0.0, started + sent / rate - time.perf_counter())):
                return

    def _cycle(self) -> Iterator[str]:
        while True:
            yield from self._keys

    def end(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.drop()
        self.client.close()
