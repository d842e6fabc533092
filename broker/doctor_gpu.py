"""The doctor's checks of GPUs. What needs a context is tried in a child process, which makes one and ends.

Run as a program this module is that child: it is given exported memory as a descriptor, imports it as an engine does,
and writes what happened to standard output.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from mmbroker.proto.errors import BrokerError

from . import cuda
from .check import BROKEN, FINE, NOTE, Check
from .cuda import Device, Driver, DriverError
from .mapping import Mapping, address_of

MIB: Final = 1 << 20
_NONCE: Final = 4096
#: How long a child may take to make a context, in seconds.
_PATIENCE: Final = 60.0
#: What a context of CUDA's may take, in bytes.
_CONTEXT: Final = 1 << 30
#: What a broker leaves free unless it is told otherwise, and one segment.
_HEADROOM: Final = (2048 + 64) * MIB
_NODES: Final = ("/dev/nvidiactl", "/dev/dxg")
_HOST_PATH: Final = "engines use the host's memory"


def checks() -> tuple[list[Check], str]:
    """The checks, and the UUID of the GPU that a broker would serve; empty if there is none."""
    try:
        driver = cuda.open_driver()
        devices = driver.devices()
    except DriverError as error:
        return [_no_driver(error)], ""
    found = Check("driver", FINE, "the fake one" if driver.kind == "fake" else "CUDA, through cuda-bindings")
    whole = [device for device in devices if device.whole]
    listed = [_gpus(driver, devices)]
    for device in whole:
        listed += _device(driver, device)
    return [found, *listed], whole[0].uuid if whole else ""


def _no_driver(error: DriverError) -> Check:
    """Broken only where there is a GPU."""
    nodes = [node for node in _NODES if Path(node).exists()]
    if nodes:
        advice = (
            f"{nodes[0]} is there, so there is a GPU: repair the driver, or give the container its libraries"
        )
        return Check("driver", BROKEN, str(error), advice)
    return Check(
        "driver", NOTE, str(error), f"nothing without a GPU: start the broker with --cpu, {_HOST_PATH}"
    )


def _gpus(driver: Driver, devices: list[Device]) -> Check:
    listed = "; ".join(f"{d.index}: {d.name}, {d.uuid}, {d.total // MIB} MiB" for d in devices)
    if not devices:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "no GPU" if shown is None else f"no GPU with CUDA_VISIBLE_DEVICES={shown}"
        return Check("GPUs", NOTE, f"CUDA shows {because}", "start the broker with --cpu, or show it a GPU")
    if not all(device.whole for device in devices):
        return Check("GPUs", NOTE, listed, "MIG instances are not served: use a whole GPU, or --cpu")
    return Check("GPUs", FINE, listed)


def _device(driver: Driver, device: Device) -> list[Check]:
    """What one GPU can do; each step needs the one before."""
    where = f" ({device.index})" if len(driver.devices()) > 1 else ""
    free = _free(driver, device, f"GPU memory{where}")
    try:
        nbytes = driver.granularity(device.uuid)
        fd = driver.export(device.uuid, nbytes)
    except DriverError as error:
        advice = (
            f"{_HOST_PATH}; in a container or on WSL2, see whether the driver can share memory by descriptor"
        )
        return [free, Check(f"VMM export{where}", BROKEN, str(error), advice)]
    exported = Check(f"VMM export{where}", FINE, f"{nbytes // MIB} MiB, without a context")
    try:
        told = _child(device.uuid, fd, nbytes)
    finally:
        os.close(fd)
    return [free, exported, _imported(told, f"import{where}"), _pinned(told, f"pinning{where}")]


def _free(driver: Driver, device: Device, name: str) -> Check:
    try:
        free = driver.free(device.uuid)
    except DriverError as error:
        advice = "the broker asks NVML before it grows: in a container, add the driver capability 'utility'"
        return Check(name, BROKEN, str(error), advice)
    found = f"{free // MIB} of {device.total // MIB} MiB free"
    if free < _HEADROOM:
        advice = "the device arena cannot grow: lower --device-headroom-mib, or free GPU memory"
        return Check(name, NOTE, found, advice)
    return Check(name, FINE, found)


def _child(uuid: str, fd: int, nbytes: int) -> dict[str, Any]:
    """What a fresh process makes of exported memory."""
    command = [sys.executable, "-m", "mmbroker.doctor_gpu", uuid, str(fd), str(nbytes)]
    try:
        done = subprocess.run(
            command,
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        told = {"import": f"a child process did not end within {_PATIENCE:g} s"}
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        told = {"import": f"a child process died: {last[0]}"}
    return told


def _imported(told: dict[str, Any], name: str) -> Check:
    if problem := told.get("import"):
        advice = f"{_HOST_PATH}; run broker and engine with the same driver, GPUs and rights"
        return Check(name, BROKEN, problem, advice)
    return Check(name, FINE, "by a child process; written through one map, read through the other")


def _pinned(told: dict[str, Any], name: str) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = (
        "memlock has no limit" if limit == resource.RLIM_INFINITY else f"memlock is limited to {limit} bytes"
    )
    if "pinning" not in told:
        return Check(name, NOTE, f"not tried; {memlock}", "repair the import first")
    if problem := told["pinning"]:
        advice = "raise the limit: `ulimit -l unlimited`, docker run --ulimit memlock=-1; copies are slow until then"
        return Check(name, BROKEN, f"{problem}; {memlock}", advice)
    return Check(name, FINE, f"a page of a segment; {memlock}")


# --- the child ------------------------------------------------------------------------------------------------------


def _try(uuid: str, fd: int, nbytes: int) -> dict[str, str | None]:
    """What does not work, by what was tried."""
    driver = cuda.open_driver()
    told: dict[str, str | None] = {}
    try:
        if driver.free(uuid) < min(_CONTEXT, _total(driver, uuid) // 2):
            raise BrokerError("there is no room for a context on this GPU: free memory, then try again")
        driver.use(uuid, create=True)
        told["import"] = _echo(driver, fd, nbytes)
    except BrokerError as error:
        return {"import": str(error)}
    page = Mapping.private(_NONCE)
    address = address_of(page.view(0, _NONCE))
    try:
        driver.pin(address, _NONCE)
        driver.unpin(address)
        told["pinning"] = None
    except BrokerError as error:
        told["pinning"] = str(error)
    return told


def _total(driver: Driver, uuid: str) -> int:
    return next(device.total for device in driver.devices() if device.uuid == uuid)


def _echo(driver: Driver, fd: int, nbytes: int) -> str | None:
    """A nonce written through a writable map of the memory, and read through one that is not."""
    handle = driver.import_(fd, nbytes)
    writable, readable = driver.map(handle, nbytes, True), driver.map(handle, nbytes, False)
    driver.release(handle)
    stream, event = driver.stream(), driver.event()
    nonce, echo = Mapping.private(_NONCE), Mapping.private(_NONCE)
    written, read = nonce.view(0, _NONCE), echo.view(0, _NONCE)
    written[:] = os.urandom(_NONCE)
    driver.copy(writable, address_of(written), _NONCE, stream)
    driver.copy(address_of(read), readable, _NONCE, stream)
    driver.record(event, stream)
    driver.synchronize(event)
    driver.unmap(writable, nbytes)
    driver.unmap(readable, nbytes)
    return None if read == written else "what was written through one map was not read through the other"


if __name__ == "__main__":
    print(json.dumps(_try(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
