"""Memory limits: the machine's, and every control group's from ours to the root, in both versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmbroker.arena import memory
from mmbroker.arena.memory import MemoryLimit
from tests.arena.machine import Machine

MIB = 1 << 20
GIB = 1 << 30
SMALL = 16 * MIB  # the margin of a small limit

Setup = Callable[[Machine, int, int, int], None]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, available=32 * GIB)


def v1(machine: Machine, limit: int, usage: int, cache: int = 0) -> None:
    machine.processes("4:memory:/job/worker", "3:cpu,cpuacct:/elsewhere")
    machine.mounts(
        ("/", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu,cpuacct"),
        ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
    )
    machine.v1("sys/fs/cgroup/memory", usage=usage)
    machine.v1("sys/fs/cgroup/memory/job", usage=usage)
    machine.v1("sys/fs/cgroup/memory/job/worker", limit=limit, usage=usage, cache=cache)


def v2(machine: Machine, limit: int, usage: int, cache: int = 0) -> None:
    machine.processes("0::/job/worker")
    machine.mounts(("/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"))
    machine.v2("sys/fs/cgroup/job", limit=None, usage=usage)
    machine.v2("sys/fs/cgroup/job/worker", limit=limit, usage=usage, cache=cache)


versions = pytest.mark.parametrize("setup", [v1, v2])


def test_a_machine_without_groups(machine: Machine) -> None:
    assert memory.headroom(machine.root) == (32 * GIB - 256 * MIB, "the machine's available memory")


@versions
def test_the_limit_of_the_own_group(machine: Machine, setup: Setup) -> None:
    setup(machine, 128 * MIB, 50 * MIB, 0)
    assert memory.headroom(machine.root) == (
        78 * MIB - SMALL,
        "the memory limit of control group /job/worker",
    )


@versions
def test_page_cache_is_room_unless_it_must_be_written_first(machine: Machine, setup: Setup) -> None:
    setup(machine, 128 * MIB, 120 * MIB, 60 * MIB)
    assert memory.headroom(machine.root)[0] == 68 * MIB - SMALL
    if setup is v1:
        machine.v1(
            "sys/fs/cgroup/memory/job/worker",
            limit=128 * MIB,
            usage=120 * MIB,
            cache=60 * MIB,
            dirty=30 * MIB,
        )
    else:
        machine.v2(
            "sys/fs/cgroup/job/worker", limit=128 * MIB, usage=120 * MIB, cache=60 * MIB, dirty=30 * MIB
        )
    assert memory.headroom(machine.root)[0] == 38 * MIB - SMALL


def test_an_ancestors_limit_v1(machine: Machine) -> None:
    v1(machine, 128 * MIB, 10 * MIB)
    machine.v1("sys/fs/cgroup/memory/job", limit=64 * MIB, usage=40 * MIB)
    assert memory.headroom(machine.root) == (24 * MIB - SMALL, "the memory limit of control group /job")


def test_an_ancestors_limit_v2(machine: Machine) -> None:
    v2(machine, 128 * MIB, 10 * MIB)
    machine.v2("sys/fs/cgroup/job", limit=64 * MIB, usage=40 * MIB)
    assert memory.headroom(machine.root) == (24 * MIB - SMALL, "the memory limit of control group /job")


def test_both_versions_at_once(machine: Machine) -> None:
    """The hybrid layout: memory may be limited in either hierarchy."""
    machine.processes("4:memory:/old", "0::/new")
    machine.mounts(
        ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
        ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
    )
    machine.v1("sys/fs/cgroup/memory/old", limit=GIB, usage=MIB)
    machine.v2("sys/fs/cgroup/unified/new", limit=100 * MIB, usage=MIB)
    assert memory.headroom(machine.root) == (99 * MIB - SMALL, "the memory limit of control group /new")
    machine.v1("sys/fs/cgroup/memory/old", limit=50 * MIB, usage=MIB)
    assert memory.headroom(machine.root) == (49 * MIB - SMALL, "the memory limit of control group /old")


def test_the_throttling_limit_counts(machine: Machine) -> None:
    v2(machine, 128 * MIB, 10 * MIB)
    machine.v2("sys/fs/cgroup/job/worker", limit=128 * MIB, high=50 * MIB, usage=10 * MIB)
    assert memory.headroom(machine.root)[0] == 40 * MIB - SMALL


@pytest.mark.parametrize("path", ["/kubepods/pod1/abc", "/", "/../../elsewhere"])
def test_a_container_sees_its_group_as_the_mounts_root(machine: Machine, path: str) -> None:
    """Version 1 without a namespace names the host's path; the mount shows the part below the container's group."""
    machine.processes(f"4:memory:{path}")
    machine.mounts(("/kubepods/pod1/abc", "/sys/fs/cgroup/memory", "cgroup", "ro,memory"))
    machine.v1("sys/fs/cgroup/memory", limit=128 * MIB, usage=28 * MIB)
    assert memory.headroom(machine.root) == (100 * MIB - SMALL, "the memory limit of control group /")


@versions
def test_over_the_limit_there_is_no_room(machine: Machine, setup: Setup) -> None:
    setup(machine, 128 * MIB, 130 * MIB, 0)
    assert memory.headroom(machine.root)[0] == 0


@versions
def test_a_group_that_vanishes_is_no_limit(machine: Machine, setup: Setup) -> None:
    setup(machine, 128 * MIB, 50 * MIB, 0)
    for file in machine.root.glob("sys/fs/cgroup/**/worker/*"):
        file.unlink()
    assert memory.headroom(machine.root)[1] == "the machine's available memory"


@versions
def test_check_names_the_limit_and_the_figures(machine: Machine, setup: Setup) -> None:
    setup(machine, 128 * MIB, 50 * MIB, 0)
    memory.check(62 * MIB, machine.root)
    with pytest.raises(MemoryLimit, match=r"control group /job/worker.*raise that limit") as caught:
        memory.check(62 * MIB + 1, machine.root)
    assert caught.value.figures == {"requested": 62 * MIB + 1, "free": 62 * MIB, "limit": 128 * MIB}


@pytest.mark.parametrize(
    ("limit", "margin"), [(128 * MIB, 16 * MIB), (GIB, 64 * MIB), (4 * GIB, 256 * MIB), (64 * GIB, 256 * MIB)]
)
def test_margin(machine: Machine, limit: int, margin: int) -> None:
    machine.set_available(64 * GIB)
    v2(machine, limit, 0)
    assert memory.headroom(machine.root)[0] == limit - margin


def test_this_machine() -> None:
    free, name = memory.headroom()
    assert free > 0 and name
