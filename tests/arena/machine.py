"""A machine's memory limits as files: a stand-in for ``/proc`` and ``/sys``."""

from __future__ import annotations

from pathlib import Path

UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


class Machine:
    """Writes what `mmbroker.arena.memory` reads, under `root`. `groups` are added with `v1` and `v2`."""

    def __init__(self, root: Path, *, available: int, total: int = 64 << 30) -> None:
        self.root = root
        self.total = total
        self._write("proc/self/cgroup", "")
        self._write("proc/self/mountinfo", "")
        self.set_available(available)

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def set_available(self, nbytes: int) -> None:
        self._write(
            "proc/meminfo",
            f"MemTotal: {self.total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {nbytes >> 10} kB\n",
        )

    def processes(self, *lines: str) -> None:
        """Lines of ``/proc/self/cgroup``."""
        self._write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mounts(self, *mounts: tuple[str, str, str, str]) -> None:
        """Root, mount point, type and super options of each mount."""
        lines = [
            f"{number} 1 0:{number} {root} {point} rw,relatime shared:{number} - {kind} {kind} {options}\n"
            for number, (root, point, kind, options) in enumerate(mounts, 20)
        ]
        self._write("proc/self/mountinfo", "".join(lines))

    def v1(
        self, directory: str, *, limit: int = UNLIMITED_V1, usage: int, cache: int = 0, dirty: int = 0
    ) -> None:
        self._write(f"{directory}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{directory}/memory.usage_in_bytes", f"{usage}\n")
        stat = (
            f"cache {cache}\nactive_file 7\ninactive_file 7\ntotal_active_file {cache // 2}\n"
            f"total_inactive_file {cache - cache // 2}\ntotal_dirty {dirty}\ntotal_writeback 0\n"
        )
        self._write(f"{directory}/memory.stat", stat)

    def v2(
        self,
        directory: str,
        *,
        limit: int | None,
        usage: int,
        cache: int = 0,
        dirty: int = 0,
        high: int | None = None,
    ) -> None:
        self._write(f"{directory}/memory.max", "max\n" if limit is None else f"{limit}\n")
        self._write(f"{directory}/memory.high", "max\n" if high is None else f"{high}\n")
        self._write(f"{directory}/memory.current", f"{usage}\n")
        stat = (
            f"anon 1\nfile {cache}\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}\n"
            f"file_dirty {dirty}\nfile_writeback 0\n"
        )
        self._write(f"{directory}/memory.stat", stat)
