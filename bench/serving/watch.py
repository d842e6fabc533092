"""Looks on from outside: GPU memory and processor time of every process of a server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from mmbroker import cuda
from mmbroker.cuda.nvml import Nvml

#: Seconds between two looks.
PERIOD: Final = 0.2
_MIB: Final = 1 << 20
_TICKS: Final = os.sysconf("SC_CLK_TCK")
#: What a process of SGLang does, by a word of its command line. What is neither tokenizes.
_ROLES: Final = {"sglang::scheduler": "scheduler", "sglang::detokenizer": "detokenizer"}
_HELPERS: Final = ("resource_tracker", "compile_worker", "forkserver")


class Gpu:
    """The GPU's books, or why there are none."""

    def __init__(self, gpu: str) -> None:
        self.why = "" if gpu else "no GPU"
        self._nvml: Nvml | None = None
        self._uuid = ""
        self._total = 0
        if gpu:
            try:
                self._nvml = Nvml()
                device = cuda.find(gpu, self._nvml.existing())
                self._uuid, self._total = device.uuid, device.total
            except (cuda.NoDriver, cuda.DriverError, cuda.NoSuchDevice) as error:
                self._nvml, self.why = None, str(error)

    def used(self) -> dict[int, int]:
        """Bytes by process; -1 where the driver does not tell."""
        return {} if self._nvml is None else self._nvml.processes(self._uuid)

    def free(self) -> int | None:
        return None if self._nvml is None else self._nvml.free(self._uuid)

    def busy(self) -> float | None:
        """The share of the last moments in which kernels ran; None where the driver does not tell, as beside MIG."""
        try:
            return None if self._nvml is None else self._nvml.busy(self._uuid)
        except cuda.DriverError:
            return None

    def unattributed(self) -> int | None:
        """Bytes that are taken, and that the driver counts for no process: its own, and those of processes without a
        context, as brokers are. None where it does not tell, or where memory was taken while it was asked."""
        before = self.free()
        used = self.used()
        if before is None or before != self.free() or -1 in used.values():
            return None
        return self._total - before - sum(used.values())


class Watch:
    """A context manager: what the processes took while it lasted. `found` says it afterwards.

    `brokers`: pids that are not of the servers.
    """

    def __init__(self, gpu: Gpu, pids: list[int], brokers: Sequence[int]) -> None:
        self._gpu = gpu
        self._roles = {pid: role(pid) for pid in pids} | dict.fromkeys(brokers, "broker")
        self._first: dict[int, int] = {}
        self._peaks: dict[int, int] = {}
        self._unattributed: list[int] = []
        self._busy: list[float] = []
        self._least_free: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.found: dict[str, Any] = {}

    def __enter__(self) -> Watch:
        self._free_before = self._gpu.free()
        self._first = self._gpu.used()
        self._look()
        self._before = self._seconds()
        self._clock = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        wall = max(1e-6, time.monotonic() - self._clock)
        after = self._seconds()
        processes = [
            {
                "pid": pid,
                "role": name,
                "cores": round((after.get(pid, 0.0) - self._before.get(pid, 0.0)) / wall, 3),
                "gpu_mib": _mib(self._peaks.get(pid)),
                "gpu_before_mib": _mib(self._first.get(pid)),
            }
            for pid, name in self._roles.items()
        ]
        strangers = [
            {"pid": pid, "role": "other", "cores": None, "gpu_mib": round(peak / _MIB, 1)}
            for pid, peak in self._peaks.items()
            if pid not in self._roles and peak >= 0
        ]
        self.found = {
            "seconds": round(wall, 3),
            "processes": [one for one in processes if one["role"] != "helper"] + strangers,
            "gpu_left_out": self._gpu.why,
        }
        if self._free_before is not None and self._least_free is not None:
            self.found["gpu_free_before_mib"] = round(self._free_before / _MIB, 1)
            self.found["gpu_free_least_mib"] = round(self._least_free / _MIB, 1)
        if self._busy:
            self.found["gpu_busy"] = round(sum(self._busy) / len(self._busy), 3)
        if self._unattributed:
            self.found["gpu_unattributed_before_mib"] = _mib(self._unattributed[0])
            self.found["gpu_unattributed_most_mib"] = _mib(max(self._unattributed))

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            self._look()

    def _look(self) -> None:
        for pid, nbytes in self._gpu.used().items():
            self._peaks[pid] = max(nbytes, self._peaks.get(pid, -1))
        free = self._gpu.free()
        if free is not None:
            self._least_free = min(free, free if self._least_free is None else self._least_free)
        if (busy := self._gpu.busy()) is not None:
            self._busy.append(busy)
        if (unattributed := self._gpu.unattributed()) is not None:
            self._unattributed.append(unattributed)

    def _seconds(self) -> dict[int, float]:
        """Processor time of each, user and system."""
        found = {}
        for pid in self._roles:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
        return found


def _mib(nbytes: int | None) -> float | None:
    """None, too, where the driver does not tell."""
    return round(nbytes / _MIB, 1) if nbytes is not None and nbytes >= 0 else None


def role(pid: int) -> str:
    """What a process of the server does."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "helper"
    for word, name in _ROLES.items():
        if word in title:
            return name
    return "helper" if any(word in title for word in _HELPERS) else "tokenizer"
