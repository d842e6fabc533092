"""Which way features go to a rank on a GPU, and why. Every step is tried, none is guessed.

``device``: they are on the device when they are taken. ``pinned``: they are on the host, where the GPU can read them by
itself. ``host``: they are on the host, as on a machine without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from mmbroker.proto.errors import BrokerError, DeadlineExceeded, PoolFull
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import Abort, Create, Created, DevicePlace, Item, Leased

from . import cuda
from .gpu import Gpu
from .mapping import Mapping

if TYPE_CHECKING:
    from .link import Link

_NONCE_BYTES: Final = 4096
#: How long the broker may take to give a place to try, in seconds.
PATIENCE: Final = 2.0


class Path(NamedTuple):
    """`gpu` is None for the host; `device` is what the broker is told; `why` is empty if nothing failed. `full`: for
    want of room, or of an answer; `again` may do better later."""

    name: str
    gpu: Gpu | None
    device: str
    why: str
    full: bool = False


def spell_out(device: str) -> str:
    """``cuda`` is the calling thread's current GPU, as torch has it; other names mean the same in every thread."""
    if device != "cuda":
        return device
    driver = cuda.load()
    if driver is None or driver.kind != "cuda":
        return "cuda:0"
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def find(device: str) -> str:
    """The UUID that a device's name means in this process: ``cuda:1`` or a UUID. Raises `BrokerError`."""
    return cuda.find_device(device.removeprefix("cuda:"), cuda.open_driver()).uuid


def choose(link: Link, device: str, gpus: Callable[[str], Gpu]) -> Path:
    """Try the ways in turn. In the receiver thread. `gpus` has this client's `Gpu` by UUID."""
    if device == "cpu":
        return Path("host", None, "cpu", "")
    try:
        gpu = gpus(find(device))
        gpu.enter()
    except BrokerError as error:
        return Path("host", None, "cpu", str(error))
    try:
        _try_pinning(gpu)
    except BrokerError as error:
        return Path("host", None, "cpu", f"host memory cannot be pinned: {error}")
    if link.device != gpu.uuid:
        serves = link.device or "no GPU"
        why = f"this broker serves {serves}, and the rank is on {gpu.uuid}: start one with --gpu {gpu.uuid}"
        return Path("pinned", gpu, gpu.uuid, why)
    try:
        _try_device(link, gpu, PATIENCE)
    except BrokerError as error:
        full = isinstance(error, PoolFull | DeadlineExceeded | cuda.OutOfDeviceMemory)
        return Path("pinned", gpu, gpu.uuid, str(error), full)
    return Path("device", gpu, gpu.uuid, "")


def again(link: Link, gpu: Gpu) -> Path:
    """As `choose`, where the device had no room; hardly waits. Raises `BrokerError` while it has none."""
    _try_device(link, gpu, 0.0)
    return Path("device", gpu, gpu.uuid, "")


def _try_pinning(gpu: Gpu) -> None:
    page = Mapping.private(_NONCE_BYTES)
    gpu.pin(page)
    if gpu.unpinned:
        raise BrokerError(gpu.unpinned)


def _try_device(link: Link, gpu: Gpu, patience: float) -> None:
    """Write a nonce through one address of the broker's memory, and read it through the other."""
    item = Item(Key.caller(os.urandom(32)), tensor_form("uint8", (_NONCE_BYTES,), "probe"))
    reply = link.call(Create([item], tier="device"), patience)
    lease = reply.results[0] if isinstance(reply, Created) else None
    if not isinstance(lease, Leased):
        raise BrokerError("the broker gave no place on the device to try")
    try:
        nonce, echo = Mapping.private(_NONCE_BYTES), Mapping.private(_NONCE_BYTES)
        written, read = nonce.view(0, _NONCE_BYTES), echo.view(0, _NONCE_BYTES)
        written[:] = os.urandom(_NONCE_BYTES)
        place = gpu.share(DevicePlace(lease.segment, lease.offset, load=False), 0)
        gpu.echo(place, lease.offset, written, read)
        if read != written:
            raise BrokerError(f"what was written to {gpu.uuid} through the broker's memory was not read back")
    finally:
        link.cast(Abort([lease.lease]))
