"""A broker that lacks something: memory, descriptors, locked memory, a disk for its log.

What it cannot do it says by a typed error that names the limit, and everything else goes on. It never ends, and nobody
waits for ever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

import mmbroker
from mmbroker.proto.errors import PoolFull
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import same, values
from tests.server.test_memory_limit import FilesGroup, Group, KernelGroup, kernel_groups

MIB = 1 << 20


def run(broker: BrokerProcess, features: int = 24, nbytes: int = 4 * MIB) -> PoolFull | None:
    """Put features to an engine until there is no room for more, read them all, and let them go; twice, because what
    was given back must be of use. What was said when the room was over, if it ever was."""
    full: PoolFull | None = None
    with (
        mmbroker.connect(broker.directory, name="producer") as client,
        mmbroker.connect(broker.directory, name="engine") as engine,
    ):
        table = engine.attach(engine="a", access="readonly")
        for turn in range(2):
            held: list[tuple[mmbroker.Held, torch.Tensor]] = []
            for seed in range(features):
                feature = values(torch.uint8, (nbytes,), seed + 1000 * turn)
                try:
                    held.append((client.put(feature, to="a", key=f"{turn}/{seed}", timeout=3.0), feature))
                except PoolFull as error:
                    full = error
                    break
            assert held, full
            for one, feature in held:
                with table.take(one.ref) as use:
                    assert same(use.tensor, feature)
                one.drop()
            eventually(lambda: not (table.stats()["entries"] or table.stats()["unsettled"]), "an empty table")
    return full


@pytest.fixture
def group(tmp_path: Path, broker_root: Path) -> Iterator[Group]:
    """256 MiB of memory for the broker, by the kernel's rule where this process may make one."""
    if not kernel_groups():
        found: Group = FilesGroup(tmp_path)
        found.set_limit(256 * MIB)
        yield found
        return
    made = KernelGroup()
    made.set_limit(256 * MIB)
    yield made
    with suppress(FileNotFoundError):
        eventually(lambda: not (made.directory / "cgroup.procs").read_text(), "the group's last process")
    made.close()


def test_256_mib_of_memory(group: Group, start_broker: StartBroker) -> None:
    broker = start_broker(prefix=group.prefix, host_mib=1024, segment_mib=16, grow_retry=0.05)
    full = run(broker, features=80)
    assert full is not None and f"the memory limit of control group {group.name}" in str(full)
    assert group.kills() == 0
    assert broker.stop() == 0


def test_64_descriptors(start_broker: StartBroker) -> None:
    """Segments and sessions take descriptors: first no segment more, then no client; both say why."""
    broker = start_broker(prefix=["prlimit", "--nofile=64:64"], host_mib=256, segment_mib=4, grow_retry=0.05)
    full = run(broker, features=64)
    assert full is not None and "Too many open files" in str(full)
    with ExitStack() as crowd:
        for _ in range(
            40
        ):  # who gets in and who does not is the kernel's choice; those who are in are served
            knock = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            knock.connect(str(broker.directory / "lifeline.sock"))
    run(broker, features=4)
    assert broker.stop() == 0


def test_no_locked_memory(start_broker: StartBroker, puppet: Callable[..., Puppet]) -> None:
    powerless = ["setpriv", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []  # root has no such limit
    none = [*powerless, "prlimit", "--memlock=0:0"]
    broker = start_broker(prefix=none)
    client = puppet(prefix=none)
    code = f"""
        from tests.kit import BrokerProcess
        from tests.server.test_scarcity import run
        broker = object.__new__(BrokerProcess)
        broker.directory = Path({str(broker.directory)!r})
        result = run(broker, features=3) is None
    """
    assert client(code)
    assert broker.stop() == 0


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_full_disk_for_logs(start_broker: StartBroker, style: str) -> None:
    broker = start_broker(prefix=["sh", "-c", 'exec "$0" "$@" 2>/dev/full'], log_format=style)
    for _ in range(3):  # something to complain of
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(broker.directory / "lifeline.sock"))
            stranger.send(b"nonsense")
            assert stranger.recv(1 << 16)
    run(broker, features=4)
    assert broker.status()["daemon"]["counters"]["peers_refused"] == 3
    assert broker.stop() == 0
