"""A driver without a GPU: host memory that behaves like a GPU's, its refusals and its lateness included.

Several processes share a machine through the directory that ``MMBROKER_FAKE_CUDA`` names (`fake_memory`). Copies and
events are late, and until a copy is done its destination holds poison, so reading too early shows (`fake_streams`).
Faults come by order (`fake_faults`, ``MMBROKER_FAKE_CUDA_FAULTS``).

torch works on the CPU here, at once. So what the thread's current stream is told to wait for, or to copy, has happened
when the call returns: the next line of Python may read it, as the next kernel could on a GPU. Writing into a map that
is not writable kills the process, where a GPU would lose its context.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from .devices import Device, visible
from .driver import DriverError, error, forked
from .fake_faults import Faults
from .fake_memory import Machine, Space
from .fake_streams import POISON, Copy, Engine, Wait, Work
from .pins import Pins, cut

if TYPE_CHECKING:
    import torch

_PAGE: Final = 4096
_T = TypeVar("_T")


class _Thread(threading.local):
    """What belongs to each thread: its GPU, its current stream, and whether captures elsewhere bind it."""

    uuid: str | None = None
    current = 0
    relaxed = False


class Crash(BaseException):
    """What a GPU's driver does not refuse: the process would have died."""


class FakeDriver:
    """See `driver.Driver`. `faults` and `engine` are for tests."""

    kind: Final = "fake"

    def __init__(
        self,
        machine: Machine,
        faults: Faults | None = None,
        shown: str | None = None,
        seed: int | None = None,
        late: float | None = None,
    ) -> None:
        """`shown` is what ``CUDA_VISIBLE_DEVICES`` says; `seed` and `late` are the machine's unless given."""
        self.faults = faults or Faults()
        self.machine = machine
        self.engine = Engine(
            machine.make.seed if seed is None else seed, machine.make.late if late is None else late
        )
        self.space = Space()
        self.pins = Pins()
        self.handles: dict[int, tuple[int, str]] = {}  # handle -> descriptor and GPU
        self.events: dict[int, Work | None] = {}  # event -> the work that completes it
        self._devices = {device.uuid: device for device in visible(shown, machine.existing)[0]}
        self._contexts: dict[str, int] = {}
        self.torchs = {0}  # streams that count as torch's own
        self._captures: dict[int, bool] = {}  # stream -> whether its capture is still good
        self._numbers = iter(range(1, 1 << 62))
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._call("cuInit", context=False)

    # --- without a context ------------------------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        return list(self._devices.values())

    def existing(self) -> list[Device]:
        return list(self.machine.existing)

    def free(self, uuid: str) -> int:
        self._call("nvmlDeviceGetMemoryInfo", context=False)
        return self.machine.free(uuid)

    def processes(self, uuid: str) -> dict[int, int]:
        return self.machine.processes(uuid)

    def node(self, uuid: str) -> int | None:
        node = self.machine.make.node
        return node if node >= 0 else None

    def granularity(self, uuid: str) -> int:
        self._known(uuid, "cuMemGetAllocationGranularity")
        return self.machine.make.granularity

    def export(self, uuid: str, nbytes: int) -> int:
        self._call("cuMemCreate", context=False)
        self._known(uuid, "cuMemCreate")
        if nbytes <= 0 or nbytes % self.machine.make.granularity:
            raise error("CUDA_ERROR_INVALID_VALUE", "cuMemCreate", f"{nbytes} bytes are not whole pieces")
        self._call("cuMemExportToShareableHandle", context=False)
        return self.machine.create(uuid, nbytes)

    def context(self, uuid: str) -> bool:
        self._known(uuid, "cuDevicePrimaryCtxGetState")
        return uuid in self._contexts

    # --- with a context ---------------------------------------------------------------------------------------------

    def use(self, uuid: str, create: bool = False) -> None:
        self._call("cuDevicePrimaryCtxRetain", context=False)
        self._known(uuid, "cuDevicePrimaryCtxRetain")
        with self._lock:
            if uuid not in self._contexts:
                if not create:
                    raise error(
                        "CUDA_ERROR_INVALID_CONTEXT",
                        "cuDevicePrimaryCtxRetain",
                        f"this process has no context on {uuid}, and was not told to create one",
                    )
                self._contexts[uuid] = self.machine.enter(uuid)
        self._thread.uuid = uuid

    def import_(self, fd: int, nbytes: int) -> int:
        self._call("cuMemImportFromShareableHandle", context=False)
        uuid = self.machine.owner(fd)
        if uuid is None or os.fstat(fd).st_size != nbytes:
            raise error(
                "CUDA_ERROR_INVALID_VALUE", "cuMemImportFromShareableHandle", f"no memory of {nbytes} bytes"
            )
        handle = next(self._numbers)
        self.handles[handle] = (os.dup(fd), uuid)
        return handle

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", context=False)
        fd, _ = _take(self.handles, handle, "cuMemRelease")
        os.close(fd)

    def map(self, handle: int, nbytes: int, writable: bool) -> int:
        self._call("cuMemMap", unsafe=True)
        if handle not in self.handles:
            raise _unknown("cuMemMap", handle)
        fd, uuid = self.handles[handle]
        if nbytes != os.fstat(fd).st_size:
            raise error("CUDA_ERROR_INVALID_VALUE", "cuMemMap", f"the memory has not {nbytes} bytes")
        self._call("cuMemSetAccess")
        if uuid != self._thread.uuid:
            raise error("CUDA_ERROR_INVALID_DEVICE", "cuMemSetAccess", f"the memory is {uuid}'s")
        return self.space.add(-1 if self.faults.zeros else fd, nbytes, uuid, writable)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", unsafe=True)
        if self.engine.touched(address, nbytes):
            raise error("CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemUnmap", "a copy is still using this memory")
        try:
            self.space.remove(address, nbytes)
        except KeyError:
            raise _unknown("cuMemUnmap", address) from None

    def pin(self, address: int, nbytes: int, read_only: bool = False) -> None:
        self._call("cuMemHostRegister", unsafe=True)
        if nbytes <= 0 or nbytes % _PAGE or address % _PAGE:
            raise error("CUDA_ERROR_INVALID_VALUE", "cuMemHostRegister", "only whole pages can be pinned")
        if self.faults.memlock is not None and self.pins.nbytes + nbytes > self.faults.memlock:
            raise error(
                "CUDA_ERROR_OUT_OF_MEMORY",
                "cuMemHostRegister",
                f"more than {self.faults.memlock} bytes locked",
            )
        try:
            self.pins.add(address, nbytes)
        except ValueError as problem:
            raise error(
                "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "cuMemHostRegister", str(problem)
            ) from None

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", unsafe=True)
        try:
            nbytes = self.pins.remove(address)
        except KeyError:
            raise error(
                "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "cuMemHostUnregister", f"{address:#x} is not pinned"
            ) from None
        if self.engine.touched(address, nbytes):
            raise error("CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemHostUnregister", "a copy is still using it")

    def stream(self, high_priority: bool = False) -> int:
        self._call("cuStreamCreateWithPriority")
        return self.engine.add_stream()

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy")
        try:
            self.engine.remove_stream(stream)
        except KeyError:
            raise _unknown("cuStreamDestroy", stream) from None

    def event(self) -> int:
        self._call("cuEventCreate")
        event = next(self._numbers)
        self.events[event] = None
        return event

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy")
        _take(self.events, event, "cuEventDestroy")

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord")
        if event not in self.events:
            raise _unknown("cuEventRecord", event)
        work = Work()
        self._add("cuEventRecord", stream, work)
        self.events[event] = work

    def query(self, event: int) -> bool:
        self._call("cuEventQuery", unsafe=True)
        if event not in self.events:
            raise _unknown("cuEventQuery", event)
        work = self.events[event]
        return work is None or work.done

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent")
        if event not in self.events:
            raise _unknown("cuStreamWaitEvent", event)
        work = self.events[event]
        if stream in self._captures:
            self._captures[stream] = False
            raise error(
                "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "cuStreamWaitEvent", "the event is not of this capture"
            )
        if work is not None and not work.done:
            self._add("cuStreamWaitEvent", stream, Wait(work))

    def synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", unsafe=True)
        if event not in self.events:
            raise _unknown("cuEventSynchronize", event)
        work = self.events[event]
        if work is not None:
            self.engine.finish(work)

    def finish(self) -> None:
        self._call("cuCtxSynchronize", unsafe=True)
        self.engine.finish_all()

    def copy(self, dst: int, src: int, nbytes: int, stream: int, room: bool = False) -> None:
        self._call("cuMemcpyAsync")
        for offset, size in cut(self.pins, dst, src, nbytes) or ((0, nbytes),):
            if size:
                self._copy(dst + offset, src + offset, size, stream)

    def current_stream(self, uuid: str) -> Callable[[], int]:
        return lambda: self._thread.current

    def lasting(self, stream: object, uuid: str) -> bool:
        return (
            self._thread.current if stream is None else getattr(stream, "cuda_stream", stream)
        ) in self.torchs

    def relaxed_capture(self) -> None:
        self._call("cuThreadExchangeStreamCaptureMode", context=False)
        self._thread.relaxed = True

    def capturing(self, stream: int) -> bool:
        self._call("cuStreamIsCapturing")
        return stream in self._captures

    def tensor(
        self, address: int, dtype: torch.dtype, shape: tuple[int, ...], uuid: str, owner: object
    ) -> torch.Tensor:
        import torch

        region = (ctypes.c_ubyte * (math.prod(shape) * dtype.itemsize)).from_address(address)
        region.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(region, dtype=dtype).view(shape)

    def home(self, tensor: torch.Tensor) -> str:
        return next(iter(self._contexts), "")

    def empty(self, nbytes: int, uuid: str, stream: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def used_by_current(self, tensor: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        self.engine.close()
        for fd in self._contexts.values():
            os.close(fd)
        self._contexts.clear()

    # --- for tests --------------------------------------------------------------------------------------------------

    @contextmanager
    def current(self, stream: int) -> Iterator[None]:
        """Make a stream this thread's current one."""
        before, self._thread.current = self._thread.current, stream
        try:
            yield
        finally:
            self._thread.current = before

    @contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """Capture a stream: what comes into it is not done. Raises `DriverError` at the end if it was broken."""
        self._captures[stream] = True
        try:
            yield
        finally:
            good = self._captures.pop(stream)
        if not good:
            raise error(
                "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "cuStreamEndCapture", "the capture was broken"
            )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _call(self, call: str, context: bool = True, unsafe: bool = False) -> None:
        """What comes before every call. `unsafe`: it breaks captures, unless this thread is relaxed."""
        if self._pid != os.getpid():
            raise forked(call)
        self.faults.check(call, context)
        if context and self._thread.uuid is None:
            raise error("CUDA_ERROR_INVALID_CONTEXT", call, "this thread has not said which GPU it uses")
        if unsafe and self._captures and not self._thread.relaxed:
            self._captures.update(dict.fromkeys(self._captures, False))
            raise error("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", call, "not while a stream is being captured")

    def _copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        target, source = self.space.find(dst), self.space.find(src)
        for place, start in ((target, dst), (source, src)):
            if place is not None and start + nbytes > place.address + place.nbytes:
                raise error("CUDA_ERROR_INVALID_VALUE", "cuMemcpyAsync", f"{start:#x} has fewer bytes mapped")
        if target is not None and not target.writable:
            raise error("CUDA_ERROR_INVALID_VALUE", "cuMemcpyAsync", f"{dst:#x} is mapped read-only")

        def poison() -> None:
            if not self.engine.touched(dst, nbytes):  # else something before it still needs what is there
                ctypes.memset(dst, POISON, nbytes)

        # Host memory that is not pinned is read before the call returns, and written before it returns.
        work = Copy(dst, src, nbytes, snapshot=source is None and not self.pins.whole(src, nbytes))
        self._add("cuMemcpyAsync", stream, work, poison)
        if target is None and not self.pins.whole(dst, nbytes):
            self.engine.finish(work)

    def _add(self, call: str, stream: int, work: Work, before: Callable[[], None] | None = None) -> None:
        if stream in self._captures:
            return
        try:
            self.engine.add(stream, work, before)
        except KeyError:
            raise Crash(f"{call}: a GPU's driver may crash here: stream {stream} was destroyed") from None
        if stream == self._thread.current and type(work) is not Work:
            self.engine.finish(work)

    def _known(self, uuid: str, call: str) -> None:
        if uuid not in self._devices:
            raise error("CUDA_ERROR_INVALID_DEVICE", call, f"CUDA does not show {uuid} to this process")


def _take(books: dict[int, _T], number: int, call: str) -> _T:
    try:
        return books.pop(number)
    except KeyError:
        raise _unknown(call, number) from None


def _unknown(call: str, number: int) -> DriverError:
    return error("CUDA_ERROR_INVALID_HANDLE", call, f"{number:#x} is nothing of this process")
