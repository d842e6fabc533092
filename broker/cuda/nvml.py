"""What the management library knows about GPUs. It needs no CUDA context, and neither makes nor shows one.

Called through ctypes: a few functions are not worth a dependency, and the daemon stays small.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from .devices import Device
from .driver import DriverError, NoDriver

_LIBRARY: Final = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE: Final = 7
_UNKNOWN: Final = (1 << 64) - 1
#: Longer than any UUID or name.
_TEXT: Final = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """A session with the library. Raises `NoDriver` where there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NoDriver(
                "NVML_ERROR_LIBRARY_NOT_FOUND",
                "nvmlInit",
                f"{_LIBRARY} cannot be loaded ({error}): in a container, ask for the driver capability 'utility'",
            ) from None
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._handles: dict[str, ctypes.c_void_p] = {}
        self._call("nvmlInit_v2")

    def existing(self) -> list[Device]:
        """All GPUs, in the order of their places on the bus."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        devices = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            uuid = self._text("nvmlDeviceGetUUID", handle)
            self._handles[uuid] = handle
            name = self._text("nvmlDeviceGetName", handle)
            devices.append(Device(uuid, index, name, self._memory(handle).total))
        return devices

    def free(self, uuid: str) -> int:
        """Bytes that nobody has."""
        return int(self._memory(self._handle(uuid)).free)

    def busy(self, uuid: str) -> float:
        """The share of the last fraction of a second in which any kernel ran, from 0 to 1."""
        rates = _Rates()
        self._call("nvmlDeviceGetUtilizationRates", self._handle(uuid), ctypes.byref(rates))
        return float(rates.gpu) / 100

    def processes(self, uuid: str) -> dict[int, int]:
        """Pid and bytes of the processes that compute on a GPU; -1 where the bytes are not told."""
        handle, room = self._handle(uuid), 64
        while True:
            count, found = ctypes.c_uint(room), (_Process * room)()
            function = "nvmlDeviceGetComputeRunningProcesses_v3"
            code = getattr(self._library, function)(handle, ctypes.byref(count), found)
            if code != _INSUFFICIENT_SIZE:
                self._check(function, code)
                used = {process.pid: process.used for process in found[: count.value]}
                return {pid: -1 if nbytes == _UNKNOWN else nbytes for pid, nbytes in used.items()}
            room = 2 * count.value

    def _handle(self, uuid: str) -> ctypes.c_void_p:
        if uuid not in self._handles:
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(handle))
            self._handles[uuid] = handle
        return self._handles[uuid]

    def _memory(self, handle: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self._call(function, handle, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code:
            message = self._library.nvmlErrorString(code).decode()
            raise DriverError(f"NVML_ERROR_{code}", function, message)
