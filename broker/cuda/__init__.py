"""GPUs: the driver that works here, the real one or a fake, and what GPUs are called."""

from __future__ import annotations

import os
from typing import Final

from .devices import Device, NoSuchDevice, find
from .driver import Driver, DriverError, Fault, NoDriver, NotShareable, OutOfDeviceMemory, forked

__all__ = [
    "Device",
    "Driver",
    "DriverError",
    "Fault",
    "NoDriver",
    "NoSuchDevice",
    "NotShareable",
    "OutOfDeviceMemory",
    "find",
    "find_device",
    "load",
    "open_driver",
]


#: The fake's directory (None: CUDA) -> the process that opened the driver, and the driver.
_drivers: Final[dict[str | None, tuple[int, Driver]]] = {}


def load() -> Driver | None:
    """This process's driver, or None where there is none; `open_driver` says why."""
    try:
        return open_driver()
    except NoDriver:
        return None


def open_driver() -> Driver:
    """This process's driver, always the same one. Raises `NoDriver` with the reason.

    With ``MMBROKER_FAKE_CUDA`` it is the fake over that directory, otherwise CUDA. No context is made. A child that was
    forked from a process that had a driver has none.
    """
    fake = os.environ.get("MMBROKER_FAKE_CUDA") or None
    if fake not in _drivers:
        _drivers.setdefault(fake, (os.getpid(), _make(fake)))
    pid, driver = _drivers[fake]
    if pid != os.getpid():
        raise forked("cuInit")
    return driver


def find_device(name: str, driver: Driver) -> Device:
    """The GPU that an index, a UUID or the beginning of one means in this process. Raises `NoSuchDevice`."""
    try:
        existing = driver.existing()
    except DriverError:  # without NVML the message knows only what CUDA shows
        existing = driver.devices()
    return find(name, driver.devices(), existing, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _make(fake: str | None) -> Driver:
    if fake:
        from .fake import FakeDriver
        from .fake_faults import VARIABLE, Faults
        from .fake_memory import Machine

        faults = Faults(os.environ.get(VARIABLE, ""))
        return FakeDriver(Machine(fake), faults, os.environ.get("CUDA_VISIBLE_DEVICES"))
    from .real import RealDriver

    return RealDriver()
