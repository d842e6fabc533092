"""GPU memory, as the management library counts it: of brokers, of a worker, and of an engine that starts beside one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mmbroker import cuda

from .gpu_peers import PATIENCE, Engine, Feeder, device, fake, uuid
from .processes import Workshop

MIB = 1 << 20


class Bare:
    """An engine that has just made its context."""

    def __init__(self) -> None:
        torch.zeros(1, device=device())

    def free(self) -> int:
        """What it would size its cache by."""
        return free()() if fake() else torch.cuda.mem_get_info()[0]

    def close(self) -> None:
        pass


def free() -> Callable[[], int]:
    """A function that tells the free bytes, made without any use of CUDA."""
    which = uuid()
    if fake():
        driver = cuda.open_driver()
        return lambda: driver.free(which)
    from mmbroker.cuda.nvml import Nvml

    library = Nvml()
    return lambda: library.free(which)


def contexts() -> set[int]:
    """Processes with a context."""
    if fake():
        return set(cuda.open_driver().processes(uuid()))
    from mmbroker.cuda.nvml import Nvml

    return set(Nvml().processes(uuid()))


def measure(shop: Workshop, settings: dict[str, Any], say: Any) -> dict[str, Any]:
    """MiB, each as the difference that one step makes."""
    say("memory")
    left = free()
    found: dict[str, Any] = {}
    last = left()

    def step(name: str) -> None:
        nonlocal last
        now = left()
        found[name] = round((last - now) / MIB, 2)
        last = now

    with shop.worker("memory-before").make(Bare) as bare:
        alone = bare.call("free")
    shop.worker("memory-before").close()
    last = left()
    with shop.broker(gpu=uuid(), host_mib=256, **settings) as broker:
        step("broker_idle")
        with shop.worker("memory-worker").make(Feeder, broker.path) as feeder:
            feeder.call("load", 2.4, 4)
            step("cpu_worker")
            found["cpu_worker_has_context"] = int(shop.worker("memory-worker").pid in contexts())
            with shop.worker("memory-beside").make(Bare) as bare:
                found["engine_beside_has_less"] = round((alone - bare.call("free")) / MIB, 2)
            shop.worker("memory-beside").close()
            last = left()
            with shop.worker("memory-bare").make(Bare):
                step("bare_context")
            shop.worker("memory-bare").close()
            last = left()
            with shop.worker("memory-engine").make(Engine, broker.path, "engine") as engine:
                step("engine_attached")
                refs = feeder.call("grant", "engine")
                engine.call("settle", refs)
                step("first_segment_and_its_maps")
                feeder.call("drop")
    for name in ("memory-engine", "memory-worker"):  # what they mapped lives as long as they do
        shop.worker(name).close()
    last = left()
    with shop.broker(gpu=uuid(), host_mib=256, device_reserve_mib=64, **settings) as broker:
        end = time.monotonic() + PATIENCE
        while broker.status()["device"]["capacity"] < 64 * MIB and time.monotonic() < end:
            time.sleep(0.01)
        step("broker_with_one_segment")
    step("after_it_ended")
    return found
