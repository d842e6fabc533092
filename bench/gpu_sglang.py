"""SGLang's own ways to the GPU, by its own classes and functions, in the order of its worker and of its scheduler."""

from __future__ import annotations

import pickle
import time
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from . import ways
from .gpu_loop import FEATURES, GpuWork
from .processes import Workshop

CACHED = "cuda_ipc, handle cache"
UNCACHED = "cuda_ipc, no handle cache"
HASHED = "cuda_ipc, handle cache, and hash"
HASH = "gpu_tensor_hash alone"
SHARED = "cpu (ShmPointerMMData)"
WAYS = (CACHED, UNCACHED, HASHED, HASH, SHARED)
#: Its pool, in bytes.
POOL = 4 << 30


def _modules() -> tuple[Any, Any]:
    """The transport, and the multimodal utilities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers import mm_utils
        from sglang.srt.utils import cuda_ipc_transport_utils
    return cuda_ipc_transport_utils, mm_utils


class Probe:
    """Says why SGLang's code cannot be used here, if it cannot."""

    def why(self) -> str:
        try:
            _modules()
            if not torch.cuda.is_available():
                return "torch sees no GPU"
        except Exception as error:  # whatever an import may raise
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        pass


class Sender:
    """A tokenizer worker with a pool on the GPU."""

    def __init__(self) -> None:
        transport, self._utils = _modules()
        transport.get_server_args = lambda: SimpleNamespace(tp_size=1)  # its pool asks how many ranks read
        self._proxy = transport.CudaIpcTensorTransportProxy
        self._pool = transport.MmItemMemoryPool(POOL, 0.02, 0)
        self._features: list[torch.Tensor] = []

    def load(self, mb: float) -> None:
        self._features = [x.cuda() for x in ways.tensors(mb, FEATURES, seed=1)]
        torch.cuda.synchronize()

    def messages(self, way: str) -> list[bytes]:
        """Features handed over, pickled as they travel."""
        if way == SHARED:
            return [pickle.dumps(self._utils.ShmPointerMMData(x.cpu())) for x in self._features]
        told = [pickle.dumps(self._wrap(x, way != UNCACHED)) for x in self._features]
        torch.cuda.synchronize()
        return told

    def _wrap(self, tensor: torch.Tensor, cached: bool) -> Any:
        """As SGLang's processor does it."""
        end = time.monotonic() + 30
        while True:
            flag, part, offset = self._pool.return_a_slice_tensor_with_flag(tensor)
            if part is not None:
                break
            if time.monotonic() > end:
                raise RuntimeError("SGLang's pool stays full")
            time.sleep(0.01)
        part.copy_(tensor.view(torch.int8).view(-1), non_blocking=True)
        return self._proxy(
            data=part,
            info_data=tensor,
            sync_buffer_meta=flag,
            pool_ipc_handle=self._pool._pool_ipc_handle if cached else None,
            pool_byte_offset=offset,
            pool_device_index=self._pool._pool_device_index,
        )

    def close(self) -> None:
        self._pool.shutdown()


class Scheduler:
    """The engine's thread that receives."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        _, self._utils = _modules()
        self._features: list[torch.Tensor] = []
        torch.zeros(1, device="cuda")

    def load(self, mb: float) -> None:
        """The same features, to compare."""
        self._features = [x.cuda() for x in ways.tensors(mb, FEATURES, seed=1)]

    def measure(self, way: str, messages: list[bytes], load: bool) -> tuple[list[int], int]:
        """Nanoseconds of each, and how many tensors were wrong."""
        clock, work, utils = time.perf_counter_ns, GpuWork(), self._utils
        times, wrong = [], 0
        for number, message in enumerate(messages):
            if load:
                work.step()
            proxy = None if way == SHARED else pickle.loads(message)
            if way == HASH:
                tensor = proxy.reconstruct_on_target_device(0)
                torch.cuda.synchronize()
            started = clock()
            if way == SHARED:
                tensor = pickle.loads(message).materialize()
            elif way == HASH:
                utils.gpu_tensor_hash(tensor)
            else:
                tensor = proxy.reconstruct_on_target_device(0)
                if way == HASHED:
                    utils.gpu_tensor_hash(tensor)
            times.append(clock() - started)
            wrong += not torch.equal(tensor.to("cuda").view(-1), self._features[number].view(-1))
        return times, wrong

    def close(self) -> None:
        torch.cuda.synchronize()


def missing(shop: Workshop) -> str:
    """Why there are no rows of SGLang's; empty if there are."""
    with shop.worker("sglang-probe").make(Probe) as probe:
        why: str = probe.call("why")
    return why


def turn(number: int) -> list[str]:
    """The ways that have a round beside a round of ours: half as many, and few of the one that takes longest."""
    return [way for way in WAYS if number % (8 if way == SHARED else 2) == 0]


class Rounds:
    """A worker and a scheduler of SGLang's, and rounds of one way each."""

    def __init__(self, shop: Workshop, stack: ExitStack) -> None:
        self._sender, self._scheduler = (
            stack.enter_context(shop.worker(f"sglang-{name}").make(kind))
            for name, kind in (("worker", Sender), ("scheduler", Scheduler))
        )

    def load(self, mb: float) -> None:
        for side in (self._sender, self._scheduler):
            side.call("load", mb)

    def round(self, way: str, load: bool) -> tuple[list[int], int]:
        """Nanoseconds of each feature, and how many tensors were wrong."""
        found: tuple[list[int], int] = self._scheduler.call(
            "measure", way, self._sender.call("messages", way), load
        )
        return found
