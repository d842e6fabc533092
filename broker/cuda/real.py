"""The real driver: CUDA through cuda-bindings, and NVML for what must be known without a context.

The few calls that a scheduler thread makes, or that a receiver makes for each feature, go straight into the library and
keep the GIL: they take a few microseconds and do not wait, and giving the GIL up for so long would invite every other
thread to take it. Everything that may wait or take long gives it up.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mmbroker.proto.dtypes import TYPESTR

from .devices import Device
from .driver import NoDriver, error, forked
from .nvml import Nvml
from .pins import Pins, cut

if TYPE_CHECKING:
    import torch

_LIBRARY: Final = "libcuda.so.1"
_SUCCESS: Final = 0
_NOT_READY: Final = 600


class RealDriver:
    """See `driver.Driver`. Raises `NoDriver` where there is no library; where no GPU is shown, it has no devices."""

    kind: Final = "cuda"

    def __init__(self) -> None:
        try:
            library, quick = ctypes.CDLL(_LIBRARY), ctypes.PyDLL(_LIBRARY)
        except OSError as problem:
            raise NoDriver(
                "CUDA_ERROR_NOT_FOUND", "cuInit", f"{_LIBRARY} cannot be loaded: {problem}"
            ) from None
        try:
            from cuda.bindings import driver as cuda
        except ImportError as problem:
            raise NoDriver(
                "CUDA_ERROR_NOT_FOUND",
                "cuInit",
                f"install mmbroker[cuda]: cuda-bindings is missing ({problem})",
            ) from None
        self._cuda: Any = cuda
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._contexts: dict[str, Any] = {}
        self._pins = Pins()
        handle, size = ctypes.c_void_p, ctypes.c_size_t
        self._record = _function(quick.cuEventRecord, handle, handle)
        self._query = _function(quick.cuEventQuery, handle)
        self._wait = _function(quick.cuStreamWaitEvent, handle, handle, ctypes.c_uint)
        copied = (ctypes.c_uint64, ctypes.c_uint64, size, handle)
        self._copy = _function(library.cuMemcpyAsync, *copied)
        self._quick_copy = _function(quick.cuMemcpyAsync, *copied)
        try:
            self._call("cuInit", 0)
        except NoDriver as problem:
            if problem.code != "CUDA_ERROR_NO_DEVICE":
                raise
            self._devices: dict[str, Device] = {}
            return
        (count,) = self._call("cuDeviceGetCount")
        self._devices = {device.uuid: device for device in map(self._device, range(count))}

    # --- without a context ------------------------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        return list(self._devices.values())

    def existing(self) -> list[Device]:
        return self._nvml.existing()

    def free(self, uuid: str) -> int:
        return self._nvml.free(uuid)

    def processes(self, uuid: str) -> dict[int, int]:
        return self._nvml.processes(uuid)

    def node(self, uuid: str) -> int | None:
        (name,) = self._call("cuDeviceGetPCIBusId", 32, self._ordinal(uuid, "cuDeviceGetPCIBusId"))
        bus = bytes(name).partition(b"\0")[0].decode().lower()
        try:
            node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
        except (OSError, ValueError):  # a container may not show it
            return None
        return node if node >= 0 else None

    def granularity(self, uuid: str) -> int:
        flags = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (granularity,) = self._call("cuMemGetAllocationGranularity", self._properties(uuid), flags)
        return int(granularity)

    def export(self, uuid: str, nbytes: int) -> int:
        (handle,) = self._call("cuMemCreate", nbytes, self._properties(uuid), 0)
        try:
            (fd,) = self._call("cuMemExportToShareableHandle", handle, self._shared, 0)
        finally:
            self._call("cuMemRelease", handle)
        os.set_inheritable(int(fd), False)
        return int(fd)

    def context(self, uuid: str) -> bool:
        _, active = self._call(
            "cuDevicePrimaryCtxGetState", self._ordinal(uuid, "cuDevicePrimaryCtxGetState")
        )
        return bool(active)

    # --- with a context ---------------------------------------------------------------------------------------------

    def use(self, uuid: str, create: bool = False) -> None:
        ordinal = self._ordinal(uuid, "cuDevicePrimaryCtxRetain")
        with self._lock:
            if uuid not in self._contexts:
                if not create and not self.context(uuid):
                    raise error(
                        "CUDA_ERROR_INVALID_CONTEXT",
                        "cuDevicePrimaryCtxRetain",
                        f"this process has no context on {uuid}, and was not told to create one",
                    )
                (self._contexts[uuid],) = self._call("cuDevicePrimaryCtxRetain", ordinal)
        self._call("cuCtxSetCurrent", self._contexts[uuid])

    def import_(self, fd: int, nbytes: int) -> int:
        (handle,) = self._call("cuMemImportFromShareableHandle", fd, self._shared)
        return int(handle)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, handle: int, nbytes: int, writable: bool) -> int:
        flags = self._cuda.CUmemAccess_flags
        (ordinal,) = self._call("cuCtxGetDevice")
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(ordinal)
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        (pointer,) = self._call("cuMemAddressReserve", nbytes, 0, 0, 0)
        try:
            self._call("cuMemMap", pointer, nbytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", pointer, nbytes, [access], 1)
            except BaseException:
                self._call("cuMemUnmap", pointer, nbytes)
                raise
        except BaseException:
            self._call("cuMemAddressFree", pointer, nbytes)
            raise
        return int(pointer)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemAddressFree", address, nbytes)

    def pin(self, address: int, nbytes: int, read_only: bool = False) -> None:
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE
        if read_only:
            flags |= self._cuda.CU_MEMHOSTREGISTER_READ_ONLY
        self._call("cuMemHostRegister", address, nbytes, flags)
        self._pins.add(address, nbytes)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)
        self._pins.remove(address)

    def stream(self, high_priority: bool = False) -> int:
        _, greatest = self._call("cuCtxGetStreamPriorityRange")
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        (stream,) = self._call("cuStreamCreateWithPriority", flags, greatest if high_priority else 0)
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def event(self) -> int:
        (event,) = self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return int(event)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        if code := self._record(event, stream):
            self._refuse("cuEventRecord", code)

    def query(self, event: int) -> bool:
        code = self._query(event)
        if code in (_SUCCESS, _NOT_READY):
            return not code
        return self._refuse("cuEventQuery", code)

    def wait(self, stream: int, event: int) -> None:
        if code := self._wait(stream, event, 0):
            self._refuse("cuStreamWaitEvent", code)

    def synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def finish(self) -> None:
        self._call("cuCtxSynchronize")

    def copy(self, dst: int, src: int, nbytes: int, stream: int, room: bool = False) -> None:
        if room and self._pins.whole(src, nbytes):
            if code := self._quick_copy(dst, src, nbytes, stream):
                self._refuse("cuMemcpyAsync", code)
            return
        for offset, size in cut(self._pins, dst, src, nbytes) or ((0, nbytes),):
            if code := self._copy(dst + offset, src + offset, size, stream):
                self._refuse("cuMemcpyAsync", code)

    def current_stream(self, uuid: str) -> Callable[[], int]:
        import torch

        ordinal = self._ordinal(uuid, "cudaGetCurrentStream")
        ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if ask is None:
            raise NoDriver(
                "CUDA_ERROR_NOT_FOUND",
                "cudaGetCurrentStream",
                "this torch was built without CUDA",
            )
        return partial(ask, ordinal)

    def lasting(self, stream: object, uuid: str) -> bool:
        import torch

        ordinal = self._ordinal(uuid, "cudaGetCurrentStream")
        if stream is None:
            stream = torch.cuda.current_stream(ordinal)
        if getattr(stream, "device_index", ordinal) != ordinal:
            return False  # another GPU's
        raw = getattr(stream, "cuda_stream", stream)
        # torch numbers its own streams; of one that somebody else has made, the number is its address.
        return raw == 0 or getattr(stream, "stream_id", raw) != raw

    def relaxed_capture(self) -> None:
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("cuThreadExchangeStreamCaptureMode", mode)

    def capturing(self, stream: int) -> bool:
        (status,) = self._call("cuStreamIsCapturing", stream)
        return bool(status != self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def tensor(
        self, address: int, dtype: torch.dtype, shape: tuple[int, ...], uuid: str, owner: object
    ) -> torch.Tensor:
        import torch

        # In one call: a receiver makes a tensor for each feature that arrives, and torch gives up the GIL in each call.
        name = self._typestrs.get(dtype)
        whole = torch.as_tensor(
            _Array(address, name or f"<i{dtype.itemsize}", shape, owner),
            device=f"cuda:{self._devices[uuid].index}",
        )
        return whole if name else whole.view(dtype)

    def home(self, tensor: torch.Tensor) -> str:
        if not tensor.is_cuda:
            return ""
        return next(uuid for uuid, device in self._devices.items() if device.index == tensor.device.index)

    def empty(self, nbytes: int, uuid: str, stream: int) -> torch.Tensor:
        import torch

        device = torch.device("cuda", self._devices[uuid].index)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):  # type: ignore[no-untyped-call]
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def used_by_current(self, tensor: torch.Tensor) -> None:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def close(self) -> None:
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for uuid in contexts:
            self._call("cuDevicePrimaryCtxRelease", self._devices[uuid].index)

    # --- inside -----------------------------------------------------------------------------------------------------

    @cached_property
    def _typestrs(self) -> dict[Any, str]:
        """The dtypes that torch takes by their numpy names."""
        import torch

        return {getattr(torch, dtype): name for dtype, name in TYPESTR.items()}

    @cached_property
    def _nvml(self) -> Nvml:
        return Nvml()

    @cached_property
    def _shared(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, uuid: str) -> Any:
        """What is asked of new memory: on this GPU, and exportable as a descriptor."""
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._ordinal(uuid, "cuMemCreate")
        properties.requestedHandleTypes = self._shared
        return properties

    def _device(self, ordinal: int) -> Device:
        (device,) = self._call("cuDeviceGet", ordinal)
        (name,) = self._call("cuDeviceGetName", 256, device)
        (uuid,) = self._call("cuDeviceGetUuid", device)
        (total,) = self._call("cuDeviceTotalMem", device)
        text = bytes(name).split(b"\0")[0].decode()  # what comes after the end is anything
        kind = "MIG" if " MIG " in text else "GPU"
        return Device(f"{kind}-{UUID(bytes=bytes(uuid.bytes))}", ordinal, text, int(total))

    def _ordinal(self, uuid: str, call: str) -> int:
        if (device := self._devices.get(uuid)) is None:
            raise error("CUDA_ERROR_INVALID_DEVICE", call, f"CUDA does not show {uuid} to this process")
        return device.index

    def _call(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        """What a function returns beside its code. cuda-bindings gives the GIL up meanwhile."""
        if self._pid != os.getpid():
            raise forked(function)
        code, *values = getattr(self._cuda, function)(*arguments)
        if code:
            self._refuse(function, int(code))
        return tuple(values)

    def _refuse(self, function: str, number: int) -> bool:
        """Raises the error for a code."""
        code = self._cuda.CUresult(number)
        _, text = self._cuda.cuGetErrorString(code)
        raise error(code.name, function, text.decode() if text else "refused")


class _Array:
    """Memory as torch understands it. torch keeps it, and so the owner, as long as it has a tensor over it."""

    __slots__ = ("__cuda_array_interface__", "owner")

    def __init__(self, address: int, typestr: str, shape: tuple[int, ...], owner: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),  # torch knows no read-only tensors; the map itself is
            "version": 2,
        }
        self.owner = owner


def _function(function: Any, *arguments: type) -> Any:
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function
