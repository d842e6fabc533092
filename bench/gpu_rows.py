"""What the scheduler thread pays for one feature that is on the GPU, and what SGLang's own ways cost it there.

Ours is take, tensor and release, the first take of each grant, of features that are loaded. SGLang's begins with its
message unpacked, except that its shared memory is opened by unpacking; a row says when the hash is in it, which its
scheduler needs unless the worker made it. `load`: a step of a scheduler-like loop before each feature, so that caches
are as cold as they are there, and for ours 200 more features a second that arrive meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

from . import gpu_sglang, stats
from .gpu_loop import GpuWork
from .gpu_peers import Engine, Feeder, uuid
from .processes import Workshop

OURS = "broker"
#: Different features in turn, as many as in the loop, and how many more a second arrive under load. The first few takes
#: of a turn cost more, in every way: their code and data are in no cache of a core that has slept.
FEATURES, RATE = 32, 200.0


class RowEngine(Engine):
    """Takes what is loaded."""

    def take(self, refs: list[dict[str, Any]], load: bool) -> tuple[list[int], int]:
        """Nanoseconds of the first take of each grant, and how many were not on the device."""
        hosts = self.settle(refs)
        self.await_tensors(refs)
        take, clock, work = self.table.take, time.perf_counter_ns, GpuWork()
        times = []
        for ref in refs:
            if load:
                work.step()
            started = clock()
            use = take(ref)
            use.tensor.size()  # it is made here
            use.release()
            times.append(clock() - started)
        return times, hosts


def measure(
    shop: Workshop, sizes: tuple[float, ...], takes: int, sglang: bool, settings: dict[str, Any], say: Any
) -> list[dict[str, Any]]:
    """A line for each size, way and load."""
    lines: list[dict[str, Any]] = []
    arena = round(FEATURES * sum(sizes) * 2.2 + 256)
    with (
        shop.broker(gpu=uuid(), host_mib=arena, device_mib=arena, **settings) as broker,
        shop.worker("engine").make(RowEngine, broker.path, "engine") as engine,
        shop.worker("feeder").make(Feeder, broker.path) as feeder,
        shop.worker("more").make(Feeder, broker.path) as more,
    ):
        for mb in sizes:
            feeder.call("load", mb, FEATURES)
            more.call("load", mb, 4)
            for load in (False, True):
                say(f"rows: {mb:g} MB, {'under load' if load else 'idle'}")
                if load:
                    more.call("begin", "engine", RATE)
                times: list[int] = []
                hosts, warm = 0, gpu_sglang.WARM
                while len(times) < takes:
                    refs = feeder.call("grant", "engine")
                    found, missing = engine.call("take", refs, load)
                    feeder.call("drop")
                    if warm:
                        warm -= 1
                    else:
                        times += found
                        hosts += missing
                if load:
                    more.call("end")
                engine.call("emptied")
                lines.append({"mb": mb, "way": OURS, "load": load, "not_on_device": hosts, **stats.us(times)})
    if sglang:
        lines += gpu_sglang.measure(shop, sizes, takes, say)
    return lines
