"""Near a memory limit the arena stops growing: clients are told which limit, and the broker lives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mmbroker.proto import messages as m
from tests.arena.machine import Machine
from tests.conftest import StartBroker
from tests.kit import RawClient, eventually
from tests.server.items import an_item

MIB = 1 << 20

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class Group:
    """A memory limit for one broker: `prefix` starts it there."""

    name: str
    prefix: list[str]
    counts = True  # it knows what the broker takes

    def set_limit(self, nbytes: int) -> None:
        raise AssertionError

    def kills(self) -> int:
        raise AssertionError


class KernelGroup(Group):
    """A control group of the kernel's, of whichever version limits memory here."""

    def __init__(self) -> None:
        self.version = 1 if (V1 / "memory.limit_in_bytes").exists() else 2
        self.name = f"/mmbroker-test-{os.getpid()}"
        self.directory = Path(f"{V1 if self.version == 1 else V2}{self.name}")
        self.directory.mkdir()
        join = f'echo $$ > {self.directory}/cgroup.procs && exec "$0" "$@"'
        self.prefix = ["sh", "-c", join]

    def set_limit(self, nbytes: int) -> None:
        file = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.directory / file).write_text(str(nbytes))

    def kills(self) -> int:
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in (self.directory / file).read_text().splitlines())
        return int(fields["oom_kill"])

    def close(self) -> None:
        self.directory.rmdir()


class FilesGroup(Group):
    """Where no group may be made: files that say the same, read by a broker that is told to read them. What they say
    does not change with what it takes: it is always 150 MiB."""

    counts = False

    def __init__(self, root: Path) -> None:
        self.machine = Machine(root, available=8 << 30)
        self.machine.processes("4:memory:/test")
        self.machine.mounts(("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"))
        self.name = "/test"
        code = (
            "import sys, pathlib, mmbroker.arena.memory as memory\n"
            f"memory.MACHINE = pathlib.Path('{root}')\n"
            "from mmbroker.cli import main\n"
            "main(sys.argv[3:])\n"
        )
        self.prefix = ["sh", "-c", f'exec "$0" -c "{code}" "$@"']

    def set_limit(self, nbytes: int) -> None:
        self.machine.v1("sys/fs/cgroup/memory/test", limit=nbytes, usage=150 * MIB)

    def kills(self) -> int:
        return 0


def kernel_groups() -> bool:
    """May this process limit memory by control groups?"""
    try:
        group = KernelGroup()
    except OSError:
        return False
    try:
        group.set_limit(1 << 30)
    except OSError:
        return False
    finally:
        group.close()
    return True


@pytest.fixture(params=["kernel", "files"])
def group(request: pytest.FixtureRequest, tmp_path: Path, broker_root: Path) -> Iterator[Group]:
    if request.param == "files" or not kernel_groups():
        yield FilesGroup(tmp_path)
        return
    made = KernelGroup()
    yield made
    with suppress(FileNotFoundError):
        eventually(lambda: not (made.directory / "cgroup.procs").read_text(), "the group's last process")
    made.close()


def test_the_limit_is_named_and_nobody_dies(group: Group, start_broker: StartBroker) -> None:
    group.set_limit(160 * MIB)
    broker = start_broker(prefix=group.prefix, host_mib=1024, segment_mib=16, grow_retry=0.05)
    with RawClient(broker.directory) as client:
        leases: list[int] = []
        while isinstance(reply := client.call(m.Create([an_item(16 * MIB)]), timeout=0.2), m.Created):
            (leased,) = reply.results
            assert isinstance(leased, m.Leased)
            leases.append(leased.lease)
            assert len(leases) < 10
        assert bool(leases) == group.counts
        assert isinstance(reply, m.Failed) and reply.error == "PoolFull"
        assert f"the memory limit of control group {group.name}" in reply.message
        at_once = client.call(m.Create([an_item(512 * MIB)]), timeout=60.0)
        assert isinstance(at_once, m.Failed) and at_once.error == "PoolFull"
        assert group.kills() == 0
        status = broker.status()
        assert status["leases"] == len(leases)
        assert status["daemon"]["memory_limit"] == f"the memory limit of control group {group.name}"
        assert status["daemon"]["memory_headroom"] < 16 * MIB
        assert f"the memory limit of control group {group.name}" in broker.log()

        group.set_limit(512 * MIB)  # and it goes on once there is room
        eventually(lambda: isinstance(client.call(m.Create([an_item(16 * MIB)])), m.Created), "growth")


def test_the_default_arena_fits_the_limit(group: Group, start_broker: StartBroker) -> None:
    group.set_limit(512 * MIB)
    broker = start_broker(prefix=group.prefix, host_mib=None)
    limit = broker.status()["pool"]["limit"]
    assert 64 * MIB <= limit <= 128 * MIB
