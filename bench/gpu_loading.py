"""Loading: the bandwidth of copies from the arena's host memory to its device memory, and from a seal to its end."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from mmbroker.mapping import address_of

from . import stats
from .gpu_peers import Engine, Feeder, device, fake, uuid
from .processes import Workshop

#: Different features in turn; bytes that one measured run of copies moves at least.
FEATURES, RUN = 8, 400_000_000

Copies = list[tuple[int, int, int]]


class LoadEngine(Engine):
    """Copies as the loader does, on a stream like its own."""

    def bandwidth(self, refs: list[dict[str, Any]], repeats: int, run: int) -> dict[str, float]:
        """GB/s, median of repeats: through the arena, and of plain pinned memory to plain memory."""
        if self.settle(refs):
            raise RuntimeError("the device arena is too small for the features of one round")
        driver = self.gpu.driver
        driver.use(self.gpu.uuid)
        entries = [self.table._entries[ref["boot"], ref["hold"]] for ref in refs]
        arena: Copies = []
        for entry in entries:
            place = entry.place
            assert place is not None
            into = place.maps.writable + (place.address - place.maps.readable)  # type: ignore[union-attr]
            arena.append((into, address_of(entry.memory), entry.ref.nbytes))
        nbytes = refs[0]["nbytes"]
        host = torch.zeros(len(refs), nbytes, dtype=torch.uint8, pin_memory=not fake())
        own = torch.empty(len(refs), nbytes, dtype=torch.uint8, device=device())
        plain: Copies = [(own[n].data_ptr(), host[n].data_ptr(), nbytes) for n in range(len(refs))]
        stream, event = driver.stream(True), driver.event()
        passes = max(1, run // (nbytes * len(refs)))
        found: dict[str, list[float]] = {"arena": [], "plain": []}
        for number in range(repeats + 1):
            for name, copies in (("arena", arena), ("plain", plain)):
                started = time.perf_counter_ns()
                for _ in range(passes):
                    for into, source, size in copies:
                        driver.copy(into, source, size, stream)
                driver.record(event, stream)
                driver.synchronize(event)
                if number:
                    took = time.perf_counter_ns() - started
                    found[name].append(passes * len(refs) * nbytes / took)
        driver.destroy_event(event)
        driver.destroy_stream(stream)
        return {name: round(statistics.median(values), 2) for name, values in found.items()}


def bandwidth(
    shop: Workshop, sizes: tuple[float, ...], repeats: int, run: int, settings: dict[str, Any], say: Any
) -> list[dict[str, Any]]:
    """A line for each size."""
    lines = []
    arena = round(FEATURES * sum(sizes) * 2.2 + 128)
    with (
        shop.broker(gpu=uuid(), host_mib=arena, device_mib=arena, **settings) as broker,
        shop.worker("engine").make(LoadEngine, broker.path, "engine") as engine,
        shop.worker("feeder").make(Feeder, broker.path) as feeder,
    ):
        for mb in sizes:
            say(f"bandwidth: {mb:g} MB")
            feeder.call("load", mb, FEATURES)
            found = engine.call("bandwidth", feeder.call("grant", "engine"), repeats, run)
            feeder.call("drop")
            lines.append(
                {"mb": mb, **found, "percent_of_plain": round(100 * found["arena"] / found["plain"], 1)}
            )
    return lines


def latency(
    shop: Workshop, mb: float, count: int, growing: int, settings: dict[str, Any], say: Any
) -> dict[str, Any]:
    """From the beginning of a seal, in the worker, to the end of the copy, on the GPU. Microseconds."""
    found: dict[str, Any] = {"mb": mb}
    small = round(max(16 * mb, 48))
    for what, host, reserve in (("there", small, small), ("growing", round(growing * mb * 1.2 + 128), 0)):
        say(f"seal to loaded: segments {what}")
        with (
            shop.broker(
                gpu=uuid(), host_mib=host, device_mib=host, device_reserve_mib=reserve, **settings
            ) as broker,
            shop.worker("engine").make(LoadEngine, broker.path, "engine") as engine,
            shop.worker("feeder").make(Feeder, broker.path) as feeder,
        ):
            engine.call("watch")
            warm = round(2 * small / mb) if reserve else 0
            times = []
            for number in range(warm + (count if reserve else growing)):
                ((hold, began),) = feeder.call("put", mb, "engine", 1)
                done = engine.call("loaded_at", hold)
                if number >= warm:
                    times.append(done - began)
                if reserve:
                    feeder.call("drop")
            found[what] = {**stats.us(times), "worst": round(max(times) / 1000, 1)}
            found[what]["imports"] = engine.call("figures")["imports"]
    return found
