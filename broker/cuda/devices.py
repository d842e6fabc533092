"""What a GPU is called: an index, a UUID or the beginning of one. Pure.

Everything inside identifies a GPU by its UUID; an index is only ever something a person typed. It counts as CUDA counts
in this process, after ``CUDA_VISIBLE_DEVICES``: what torch calls ``cuda:1`` here is 1 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmbroker.proto.errors import BrokerError


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `uuid` begins with ``GPU-``, or with ``MIG-`` for a part of one; `total` is its memory in bytes."""

    uuid: str
    index: int
    name: str
    total: int

    @property
    def whole(self) -> bool:
        """Not a MIG instance."""
        return not self.uuid.startswith("MIG-")


class NoSuchDevice(BrokerError):
    """A name that no single GPU goes by. The message is one sentence that lists those that exist."""


def find(
    name: str, seen: Sequence[Device], existing: Sequence[Device] = (), visible: str | None = None
) -> Device:
    """The GPU among `seen`, those that CUDA shows this process, that `name` means. Raises `NoSuchDevice`.

    For the message only: all GPUs of the machine (`existing`), and what ``CUDA_VISIBLE_DEVICES`` says (`visible`).
    """
    name = name.strip()
    among = _among(seen, existing, visible)
    if name.upper().startswith("MIG"):
        raise NoSuchDevice(f"{name} is a MIG instance, and only whole GPUs are served: {among}")
    found = _called(name, seen)
    if len(found) > 1:
        several = ", ".join(device.uuid for device in found)
        raise NoSuchDevice(f"{name!r} begins the name of {len(found)} GPUs ({several}): write more of it")
    if not found:
        if hidden := _begin_with(name, existing):
            raise NoSuchDevice(f"{hidden[0].uuid} exists, but is hidden from this process: {among}")
        raise NoSuchDevice(f"there is no GPU {name or 'without a name'!r} here: {among}")
    if not found[0].whole:
        raise NoSuchDevice(f"{found[0].uuid} is a MIG instance, and only whole GPUs are served: {among}")
    return found[0]


def visible(text: str | None, existing: Sequence[Device]) -> tuple[list[Device], str | None]:
    """What CUDA makes of ``CUDA_VISIBLE_DEVICES``: the GPUs in its order, numbered anew, and the entry it stopped at.

    CUDA reads up to the first entry that names no GPU, several, or one a second time, and says nothing. None: not set.
    """
    if text is None:
        return list(existing), None
    seen: list[Device] = []
    for entry in map(str.strip, text.split(",")) if text.strip() else ():
        found = _called(entry, existing)
        if len(found) != 1 or any(device.uuid == found[0].uuid for device in seen):
            return seen, entry
        seen.append(replace(found[0], index=len(seen)))
    return seen, None


def _called(name: str, devices: Sequence[Device]) -> list[Device]:
    """Devices that an index or a UUID means."""
    if name.isdecimal():
        return [device for device in devices if device.index == int(name)]
    return _begin_with(name, devices)


def _begin_with(name: str, devices: Sequence[Device]) -> list[Device]:
    """Devices whose UUID begins with a name; the ``GPU-`` in front may be left out."""
    name = name.lower()
    if not name or name in "gpu-":
        return []
    return [
        device
        for device in devices
        if device.uuid.lower().startswith(name) or device.uuid.lower().removeprefix("gpu-").startswith(name)
    ]


def _among(seen: Sequence[Device], existing: Sequence[Device], text: str | None) -> str:
    """The rest of the sentence: what exists."""
    if not seen and not existing:
        return "CUDA finds no GPU on this machine"
    if text is None:
        return f"there is {_list(seen or existing)}"
    _, stopped = visible(text, existing)
    setting = f"CUDA_VISIBLE_DEVICES={text or '(empty)'}"
    if stopped is not None:
        setting += f", which CUDA reads only up to {stopped!r},"
    if not seen:
        return f"{setting} shows none of {_list(existing)}"
    return f"{setting} shows {_list(seen)}"


def _list(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.index} ({device.uuid}, {device.name})" for device in devices)
