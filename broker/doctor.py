"""What works on this machine, what does not, and what to do about it.

Every check tries the thing itself, in the way that the broker and its clients use it. A note is something that is done
without; a broken check is something that was asked for by being here and will not work.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Final

from mmbroker.proto.errors import BrokerError

from . import doctor_gpu, instance
from .arena import memory
from .arena.host import HostSegment
from .check import BROKEN, FINE, NOTE, Check
from .mapping import Mapping
from .vitals import version

MIB: Final = 1 << 20

_SO_PEERPIDFD: Final = 77
_POPULATE_READ: Final = 22
#: A broker has two or three descriptors for each session, and two for each segment.
_DESCRIPTORS: Final = 1024
#: Below this, a host arena is too small to be of use.
_LITTLE: Final = 1 << 30
_PAGE: Final = mmap.PAGESIZE


def examine(name: str | None = None) -> list[Check]:
    """All checks, the GPU's first. `name`: of the broker that is meant. No CUDA context is made in this process."""
    gpu, device = doctor_gpu.checks()
    return [
        *gpu,
        *(_tried(name, check) for name, check in _HOST.items()),
        _tried("instance directory", lambda: directory(name or device.lower() or "cpu")),
        *brokers(name),
        _tried("SGLang plugin", plugin),
        _tried("Mooncake", mooncake),
    ]


def passed(checks: Iterable[Check]) -> bool:
    """Whether nothing is broken."""
    return all(check.state != BROKEN for check in checks)


def _tried(name: str, check: Callable[[], Check]) -> Check:
    """What a check finds; a check that fails in a way that nobody thought of is broken, and the others go on."""
    try:
        return check()
    except (BrokerError, OSError) as error:
        return Check(name, BROKEN, f"{type(error).__name__}: {error}", "see the message")


# --- the host -------------------------------------------------------------------------------------------------------


def host_memory() -> Check:
    room, limit = memory.headroom()
    found = f"{room // MIB} MiB may still be taken; the tightest limit is {limit}"
    if room < 64 * MIB:
        return Check("host memory", BROKEN, found, "free memory, or raise that limit: one segment has 64 MiB")
    advice = "start the broker with a --host-mib that fits" if room < _LITTLE else ""
    return Check("host memory", NOTE if advice else FINE, found, advice)


def namespaces() -> Check:
    """Numbers to compare between containers: the same ones, the same namespace."""
    numbers = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "ipc", "user")}
    found = ", ".join(f"{kind} {number}" for kind, number in numbers.items())
    return Check("namespaces", FINE, found)


def pidfd() -> Check:
    """The broker knows by it when a client's process is gone."""
    ways = []
    with suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        ways.append("pidfd_open")
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, suppress(OSError):
        os.close(struct.unpack("i", here.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
        ways.append("SO_PEERPIDFD")
    if "SO_PEERPIDFD" in ways:
        return Check("pidfd", FINE, " and ".join(ways))
    if ways:
        advice = "run broker and clients in one pid namespace, or use Linux 6.5 or later"
        return Check("pidfd", NOTE, "pidfd_open, but no SO_PEERPIDFD", advice)
    advice = "use Linux 5.3 or later: memory of writers that die is lost until the broker ends"
    return Check("pidfd", NOTE, "neither pidfd_open nor SO_PEERPIDFD", advice)


def sealing() -> Check:
    """A segment as the broker makes it, mapped as clients do."""
    segment = HostSegment.create(16 * _PAGE)
    try:
        writable, readable = (
            Mapping.of(segment.rw_fd, 16 * _PAGE, True),
            Mapping.of(segment.ro_fd, 16 * _PAGE, False),
        )
        nonce = os.urandom(_PAGE)
        writable.view(0, _PAGE)[:] = nonce
        if readable.view(0, _PAGE) != nonce:
            return Check("memfd", BROKEN, "what one map wrote, another does not read", "this kernel is unfit")
        with suppress(PermissionError):
            os.truncate(segment.rw_fd, _PAGE)
            return Check("memfd", BROKEN, "a sealed memfd could be shrunk", "this kernel is unfit")
    finally:
        segment.close()
    return Check("memfd", FINE, "made, sealed, mapped twice")


def populating() -> Check:
    with mmap.mmap(-1, 16 * _PAGE) as pages:
        try:
            pages.madvise(_POPULATE_READ)
        except OSError as error:
            advice = "use Linux 5.14 or later: pages come one by one at their first use"
            return Check("MADV_POPULATE", NOTE, error.strerror or "refused", advice)
    return Check("MADV_POPULATE", FINE, "pages of a segment come all at once")


def descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} at once, and up to {hard} where a process asks, as the broker does"
    if hard < _DESCRIPTORS:
        return Check(
            "descriptors", BROKEN, found, f"raise the hard limit to {_DESCRIPTORS} or more (`ulimit -Hn`)"
        )
    if soft < _DESCRIPTORS:
        return Check("descriptors", NOTE, found, "raise the engine's limit with `ulimit -n`: it does not ask")
    return Check("descriptors", FINE, found)


_HOST: Final = {
    "host memory": host_memory,
    "namespaces": namespaces,
    "pidfd": pidfd,
    "memfd": sealing,
    "MADV_POPULATE": populating,
    "descriptors": descriptors,
}


# --- brokers and engines --------------------------------------------------------------------------------------------


def directory(name: str) -> Check:
    """An instance directory made and removed, beside those that are in use; and whether `name` fits."""
    root = instance.root()
    instance.check_length(root / name)
    try:
        with instance.Instance(root / f"doctor-{os.getpid()}"):
            pass
    except instance.InstanceError as error:
        return Check("instance directory", BROKEN, str(error), "set MMBROKER_DIR to a directory of your own")
    length = len(os.fsencode(root / name / instance.LIFELINE))
    found = f"{root}: usable; a socket's path has {length} of at most {instance.MAX_SOCKET_PATH} bytes"
    return Check("instance directory", FINE, found)


def brokers(name: str | None) -> list[Check]:
    """Each broker that lives here, or the one that is meant."""
    living = instance.living(instance.root())
    found = [path for path in living if name in (None, path.name)]
    if not found:
        which = f"none of the name {name}" if name else "none"
        return [Check("broker", NOTE, f"{which} under {instance.root()}", "start one: mmbroker start")]
    return [_tried("broker", lambda path=path: _broker(path)) for path in found]  # type: ignore[misc]


def _broker(path: Path) -> Check:
    from .reach import report

    daemon = report(path)["daemon"]
    own, its = version(), daemon.get("version", "unknown")
    found = f"version {its} at {path}, process {daemon['pid']}"
    if its != own:
        return Check("broker", NOTE, found, f"this is version {own}: restart the broker")
    return Check("broker", FINE, found)


def plugin() -> Check:
    """Whether an SGLang that starts here finds the plugin, and the plugin knows it."""
    from mmbroker.adapters.sglang.settings import TESTED

    name, tested = "SGLang plugin", " and ".join(TESTED)
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Check(name, NOTE, "SGLang is not installed here", "install mmbroker where SGLang is")
    found = metadata.entry_points(group="sglang.srt.plugins", name="mmbroker")
    if not found:
        advice = "install mmbroker with pip: a directory on PYTHONPATH has no entry points"
        return Check(name, BROKEN, f"SGLang {installed} does not see it", advice)
    if installed not in TESTED:
        advice = f"the plugin stands aside; use SGLang {tested}"
        return Check(name, BROKEN, f"SGLang {installed} is none of those that were tested", advice)
    return Check(name, FINE, f"seen by SGLang {installed}, which was tested")


def mooncake() -> Check:
    """Whether `mmbroker tier` finds the library of its store here, and can load it."""
    from .tier.store import LIBRARIES, PACKAGE, StoreError, load

    name = "Mooncake"
    if util.find_spec("mooncake") is None:
        advice = f"where `mmbroker tier` is to run: pip install '{PACKAGE}' (or 'mmbroker[tier]')"
        return Check(name, NOTE, "not installed here: nothing is shared with other machines", advice)
    try:
        load()
    except StoreError as error:
        # Everything but the tier works without it.
        return Check(name, NOTE, str(error), f"apt-get install {LIBRARIES}; reinstall '{PACKAGE}'")
    return Check(name, FINE, "its library loads: `mmbroker tier` can run here")
