"""Where and when a measurement was made: what a reader needs to judge its figures."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

PACKAGES = ("mmbroker", "torch", "sglang", "pyzmq", "msgspec", "uvloop")


def date() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe() -> dict[str, object]:
    """Processor, cores this process may use, memory, kernel, huge pages. Sizes in GiB."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "kernel": platform.release(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shm": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _field(path: str, name: str) -> str:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _chosen(path: str) -> str:
    """Of `always [madvise] never` the word in brackets."""
    return _text(path).partition("[")[2].partition("]")[0] or "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
