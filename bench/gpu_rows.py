"""What the scheduler thread pays for one feature that is on the GPU, and what SGLang's own ways cost it there.

Ours is take, tensor and release, the first take of each grant, of features that are loaded. SGLang's begins with its
message unpacked, except that its shared memory is opened by unpacking; a row says when the hash is in it, which its
scheduler needs unless the worker made it. `load`: a step of a scheduler-like loop before each feature, so that caches
are as cold as they are there, and for ours 200 more features a second that arrive meanwhile.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from . import gpu_sglang, stats
from .gpu_loop import FEATURES, GpuWork
from .gpu_peers import Engine, Feeder, uuid
from .processes import Workshop

OURS = "broker"
#: How many more features a second arrive under load.
RATE = 200.0
#: Rounds of `FEATURES` before the first that counts. The first few takes of a round cost more, in every way: their code
#: and data are in no cache of a core that has slept.
WARM = 4


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


class _Ours:
    """A broker with an engine on the GPU, and rounds of first takes."""

    def __init__(self, shop: Workshop, stack: ExitStack, mib: int, settings: dict[str, Any]) -> None:
        broker = stack.enter_context(shop.broker(gpu=uuid(), host_mib=mib, device_mib=mib, **settings))
        self._engine, self._feeder, self._more = (
            stack.enter_context(shop.worker(name).make(kind, broker.path, *names))
            for name, kind, *names in (("engine", RowEngine, "engine"), ("feeder", Feeder), ("more", Feeder))
        )

    def load(self, mb: float) -> None:
        self._feeder.call("load", mb, FEATURES)
        self._more.call("load", mb, 4)

    def round(self, load: bool) -> tuple[list[int], int]:
        """Nanoseconds of each feature, and how many were not on the device."""
        if load:
            self._more.call("begin", "engine", RATE)
        refs = self._feeder.call("grant", "engine")
        found: tuple[list[int], int] = self._engine.call("take", refs, load)
        self._feeder.call("drop")
        if load:
            self._more.call("end")
        self._engine.call("emptied")
        return found


def measure(
    shop: Workshop, sizes: tuple[float, ...], takes: int, sglang: bool, settings: dict[str, Any], say: Any
) -> list[dict[str, Any]]:
    """A line for each size, way and load. The ways take turns, so that a machine's slow minutes fall on all of them."""
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ours = _Ours(shop, stack, round(FEATURES * sum(sizes) * 2.2 + 256), settings)
        theirs = gpu_sglang.Rounds(shop, stack) if sglang else None
        for mb in sizes:
            ours.load(mb)
            if theirs is not None:
                theirs.load(mb)
            for load in (False, True):
                say(f"rows: {mb:g} MB, {'under load' if load else 'idle'}")
                times: dict[str, list[int]] = {OURS: []}
                wrong: dict[str, int] = {OURS: 0}
                number = -WARM
                while len(times[OURS]) < takes:
                    turn = {OURS: ours.round(load)}
                    if theirs is not None:
                        turn |= {way: theirs.round(way, load) for way in gpu_sglang.turn(number)}
                    if number >= 0:
                        for way, (found, bad) in turn.items():
                            times.setdefault(way, []).extend(found)
                            wrong[way] = wrong.get(way, 0) + bad
                    number += 1
                for way, found in times.items():
                    what = "not_on_device" if way == OURS else "wrong"
                    lines.append({"mb": mb, "way": way, "load": load, what: wrong[way], **stats.us(found)})
    order = [OURS, *gpu_sglang.WAYS]
    return sorted(lines, key=lambda line: (order.index(line["way"]) > 0, sizes.index(line["mb"])))
