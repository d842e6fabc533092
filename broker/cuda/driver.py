"""What the broker and its clients ask of a GPU's driver, and how it refuses.

Two implementations: `real` calls CUDA, `fake` does the same with host memory and is late on purpose. Addresses,
streams, events and handles are ints, with 0 for the default stream; sizes are bytes; a GPU is named by its UUID.

The first group of calls needs no CUDA context, and makes none: the broker uses nothing else. The others work in the
context that torch uses too, in any thread that has called `use`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from mmbroker.proto.errors import BrokerError

from .devices import Device

if TYPE_CHECKING:
    import torch


class Driver(Protocol):
    """A GPU driver. Every call may raise `DriverError`."""

    @property
    def kind(self) -> str:
        """``cuda`` or ``fake``."""
        ...

    # --- without a context ------------------------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        """The GPUs that CUDA shows this process, in its order."""
        ...

    def existing(self) -> list[Device]:
        """All GPUs of the machine, whatever ``CUDA_VISIBLE_DEVICES`` says. For messages."""
        ...

    def free(self, uuid: str) -> int:
        """Bytes of memory that nobody has."""
        ...

    def processes(self, uuid: str) -> dict[int, int]:
        """The processes with a context on a GPU: pid and bytes, -1 where they are not told."""
        ...

    def node(self, uuid: str) -> int | None:
        """The NUMA node of the host that a GPU is nearest to; None: not known, or there is but one."""
        ...

    def granularity(self, uuid: str) -> int:
        """Exported memory comes in multiples of this."""
        ...

    def export(self, uuid: str, nbytes: int) -> int:
        """New memory, as a descriptor; it lives as long as a descriptor, a handle or a map of it, anywhere.

        Raises `OutOfDeviceMemory` and `NotShareable`.
        """
        ...

    def context(self, uuid: str) -> bool:
        """Whether this process has a context on a GPU."""
        ...

    # --- with a context ---------------------------------------------------------------------------------------------

    def use(self, uuid: str, create: bool = False) -> None:
        """Let the calling thread use a GPU. Raises `DriverError` if the process has no context there, unless told
        to `create` one: that costs hundreds of MiB of GPU memory."""
        ...

    def import_(self, fd: int, nbytes: int) -> int:
        """A handle to exported memory. The descriptor may be closed afterwards. Raises `NotShareable`."""
        ...

    def release(self, handle: int) -> None:
        """Give a handle back; maps made with it stay."""
        ...

    def map(self, handle: int, nbytes: int, writable: bool) -> int:
        """The whole memory behind a handle at a new address. Raises `NotShareable`, `OutOfDeviceMemory`."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Take a map apart. Nothing may be using it any more, no copy under way included."""
        ...

    def pin(self, address: int, nbytes: int, read_only: bool = False) -> None:
        """Lock host memory, and let the GPU read and write it by itself. Whole pages. May take milliseconds.
        `read_only`: it is mapped so, and the GPU only reads it."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin` of the memory that begins here. No copy may be using it."""
        ...

    def stream(self, high_priority: bool = False) -> int:
        """A new stream, which never waits for the default one by itself."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Work that is already in it is still done."""
        ...

    def event(self) -> int:
        """A new event, complete as long as it was never recorded."""
        ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """The event completes when everything that is in the stream by now has."""
        ...

    def query(self, event: int) -> bool:
        """Whether the event has completed. Never waits. Raises `Fault` if the GPU's work went wrong."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What comes into the stream from now on waits for the event, as it was last recorded."""
        ...

    def synchronize(self, event: int) -> None:
        """Wait here for the event. Without the GIL."""
        ...

    def finish(self) -> None:
        """Wait here for everything in all streams. Without the GIL."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: int, room: bool = False) -> None:
        """Copy between any two addresses. Host memory that is not pinned makes it wait, or be slow. `room`: the stream
        has few copies to do, so that one from pinned memory does not wait, and need not give up the GIL."""
        ...

    def current_stream(self, uuid: str) -> Callable[[], int]:
        """What tells the stream on which torch works in the thread that calls it. A scheduler calls it at each release,
        so there is nothing between it and torch."""
        ...

    def lasting(self, stream: object, uuid: str) -> bool:
        """Whether a stream, as torch's object or its raw number, is known to live as long as the process: torch's own
        do. None: the one that `current_stream` tells. Of others nothing may be asked once they may be destroyed: CUDA
        does not refuse that, it crashes."""
        ...

    def relaxed_capture(self) -> None:
        """Let the calling thread work on while another one captures a CUDA graph, without breaking the capture."""
        ...

    def capturing(self, stream: int) -> bool:
        """Whether a stream is being captured into a CUDA graph."""
        ...

    def tensor(
        self, address: int, dtype: torch.dtype, shape: tuple[int, ...], uuid: str, owner: object
    ) -> torch.Tensor:
        """A contiguous tensor, of at least one element, over memory of the GPU; `owner` lives as long as it and its
        views."""
        ...

    def home(self, tensor: torch.Tensor) -> str:
        """The GPU whose memory a tensor is in; empty: the CPU. The fake has only CPU tensors: they are at home on the
        GPU of which the process has a context, if it has one."""
        ...

    def empty(self, nbytes: int, uuid: str, stream: int) -> torch.Tensor:
        """A uint8 tensor of shape (nbytes,) from torch's own memory, to be written in `stream` first."""
        ...

    def used_by_current(self, tensor: torch.Tensor) -> None:
        """A tensor of `empty` is read in torch's current stream: when it dies, its memory waits for that."""
        ...

    def close(self) -> None:
        """Let go of the contexts that `use` took. Everything made through this driver must be gone by then."""
        ...


class DriverError(BrokerError):
    """A call of the driver was refused: `call`, and `code` as the driver names it."""

    def __init__(self, code: str, call: str, message: str) -> None:
        super().__init__(f"{call}: {message} ({code})")
        self.code = code
        self.call = call


class OutOfDeviceMemory(DriverError):
    """The GPU is full: leave it alone for a while, and use host memory."""


class NotShareable(DriverError):
    """GPU memory cannot be passed between these processes: use host memory for good."""


class NoDriver(DriverError):
    """There is no working driver or GPU in this process. Also said by a forked child: CUDA does not survive a fork."""


class Fault(DriverError):
    """The GPU's work went wrong, and this process's context is lost: nothing on this GPU works here any more."""


_FAULTS: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTEXT_IS_DESTROYED",
        "ECC_UNCORRECTABLE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE",
    )
)
_NO_DRIVER: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "DEINITIALIZED",
        "NOT_INITIALIZED",
        "NO_DEVICE",
        "STUB_LIBRARY",
        "SYSTEM_DRIVER_MISMATCH",
        "SYSTEM_NOT_READY",
    )
)
#: The calls that fail where GPU memory cannot be shared, each in its own way.
_SHARING: Final = frozenset(
    {
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
    }
)


def error(code: str, call: str, message: str) -> DriverError:
    """The error for a code of CUDA, of the class that says what to do about it."""
    kind = DriverError
    if code in _FAULTS:
        kind = Fault
    elif code in _NO_DRIVER:
        kind = NoDriver
    elif code == "CUDA_ERROR_OUT_OF_MEMORY" and call != "cuMemHostRegister":
        kind = OutOfDeviceMemory
    elif call in _SHARING:
        kind = NotShareable
    return kind(code, call, message)


def forked(call: str) -> NoDriver:
    """The error for a process that inherited its driver from its parent."""
    message = "CUDA does not survive a fork: start this process by spawn"
    return NoDriver("CUDA_ERROR_NOT_INITIALIZED", call, message)
