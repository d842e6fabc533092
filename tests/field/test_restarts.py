"""Reports of kind R: what happens to everybody else when somebody hangs, dies, comes back or answers errors only."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import BrokerError, DigestConflict
from tests.client.peer import Peer
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, RawClient, eventually
from tests.rig import same, values
from tests.server.items import an_item, lease_one

MIB = 1 << 20


def test_memory_that_is_given_back_for_ever(start_broker: StartBroker, tmp_path: Path) -> None:
    """R5. The call that frees a segment hangs in the kernel: who needs no new memory is served as before, the status
    answers and says what is stuck, and all is well as soon as the call returns.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = (
        "import os, sys, mmbroker.arena.host as h\n"
        "close = h.HostSegment.close\n"
        "def hang(self):\n"
        "    if self.rw_fd >= 0: open(os.environ['GATE']).close()\n"
        "    close(self)\n"
        "h.HostSegment.close = hang\n"
        "from mmbroker.cli import main\n"
        "main(sys.argv[3:])\n"
    )
    broker = start_broker(
        prefix=["sh", "-c", f'exec "$0" -c "{code}" "$@"'],
        env={"GATE": str(gate)},
        host_mib=8,
        segment_mib=4,
        segment_linger=0.0,
        stuck_after=0.2,
    )
    with (
        RawClient(broker.directory, name="steady") as steady,
        RawClient(broker.directory, name="needy") as needy,
    ):
        item = an_item(MIB)
        created = steady.call(m.Create([item]))
        assert isinstance(created, m.Created) and isinstance(created.results[0], m.Leased)
        assert isinstance(steady.call(m.Seal([m.Sealing(created.results[0].lease)])), m.Sealed)
        large = lease_one(needy, 4 * MIB)
        needy.cast(m.Abort([large.lease]))  # its segment is empty, and is given back at once
        eventually(
            lambda: broker.status()["counters"].get("segments_discarded"), "a segment that is given back"
        )
        waits = needy.post(m.Create([an_item(4 * MIB)]), timeout=60.0)
        stuck = eventually(lambda: not (h := broker.status()["health"])["ok"] and h["stuck"], "a bad health")
        assert "'needy'" in stuck[0] and "the next segment is not there yet" in stuck[0]
        for _ in range(100):
            found = steady.call(m.Lookup([item.key]))
            assert isinstance(found, m.Found) and found.refs[0] is not None
            steady.cast(m.Drop([found.refs[0].hold]))
        with open(gate, "w"):
            pass
        assert isinstance(needy.answer(waits), m.Created)
        assert broker.status()["health"]["ok"]
    with open(os.open(gate, os.O_RDWR), "w"):  # whoever frees memory from now on does not wait
        assert broker.stop() == 0


def test_another_version_of_a_processor_is_a_miss(broker: BrokerProcess) -> None:
    """R8. What an engine of other configuration left behind is not found; under a careless key it is a conflict."""
    media = b"the picture's own bytes"

    def key(version: str) -> mmbroker.Key:
        return mmbroker.Key.derived(mmbroker.Key.caller(media + version.encode()).value)

    with mmbroker.connect(broker.directory) as before, mmbroker.connect(broker.directory) as after:
        with before.put(values(torch.float32, (4, 6)), key=key("processor 1")):
            assert after.lookup(key("processor 2")) is None
            with pytest.raises(DigestConflict):
                after.put(values(torch.bfloat16, (4, 6)), key=key("processor 1"))
        assert after.get_or_create(key("processor 2"), (4, 6), torch.bfloat16).held is None


def test_a_broker_that_answers_every_call_with_an_error(no_leaks: None) -> None:
    """R10. Each call gets it, and nothing of a call stays: not its waiter, not its payload."""
    peer = Peer(lambda peer, call: m.Failed("PoolFull", "full", {"requested": 2, "free": 0, "limit": 1}))
    try:
        client = mmbroker.connect(peer.directory)
        tensor = torch.zeros(64 * 1024)
        blocks: list[int] = []
        for calls in (500, 3000):
            for n in range(calls):
                with pytest.raises(BrokerError, match="full"):
                    client.put(tensor, key=str(n))
            peer.calls.clear()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert blocks[1] - blocks[0] < 500, "objects that stayed"
        assert not client._link._waiting
        client.close()
    finally:
        peer.close()


@pytest.mark.balanced
def test_the_same_name_comes_back_while_its_last_life_is_cleared_away(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    """R13. What the new one makes stays, what the old one had goes, whichever comes first."""
    name = "the same name"
    for life in range(5):
        old = puppet()
        old("from tests.server.items import an_item")
        old(f"c = RawClient(Path({str(broker.directory)!r}), name={name!r})")
        made = "[r.lease for r in c.call(m.Create([an_item(4096) for _ in range(500)])).results]"
        assert old(f"result = len({made}) + len({made})") == 1000
        old.process.kill()  # and the new one does not wait for its end
        with RawClient(broker.directory, name=name) as new:
            kept = [lease_one(new, 4096) for _ in range(20)]
            sealed = new.call(m.Seal([m.Sealing(lease.lease) for lease in kept]))
            assert isinstance(sealed, m.Sealed) and len(sealed.refs) == 20
            status = eventually(
                lambda: (s := broker.status()) and not s["leases"] and not s["quarantined"] and s,
                "the end of what the old one had",
            )
            assert (status["holds"], [s["name"] for s in status["sessions"] if s["name"] == name]) == (
                20,
                [name],
            ), life


@pytest.mark.parametrize("jump", [3600, -3600])
def test_the_wall_clock_jumps(start_broker: StartBroker, jump: int, tmp_path: Path) -> None:
    """R12. By an hour, in the middle: no lease ends early, no deadline late, no hold is dismissed."""
    flag = tmp_path / "jump"
    code = (
        "import os, sys, time\n"
        "real, flag = time.time, os.environ['FLAG']\n"
        f"time.time = lambda: real() + ({jump} if os.path.exists(flag) else 0)\n"
        "from mmbroker.cli import main\n"
        "main(sys.argv[3:])\n"
    )
    broker = start_broker(
        prefix=["sh", "-c", f'exec "$0" -c "{code}" "$@"'], env={"FLAG": str(flag)}, host_mib=8, segment_mib=8
    )
    with (
        mmbroker.connect(broker.directory, name="worker") as worker,
        mmbroker.connect(broker.directory, name="engine") as engine,
    ):
        table = engine.attach(engine="a", access="readonly")
        tensor = values(torch.uint8, (4 * MIB,))
        held = worker.put(tensor, to="a")
        with worker.get_or_create("being written", (2 * MIB,), torch.uint8).lease as lease:
            flag.touch()
            with RawClient(broker.directory) as asker:
                refused = asker.call(m.Create([an_item(3 * MIB)]), timeout=0.2)
            assert isinstance(refused, m.Failed) and refused.error == "PoolFull"
            lease.tensor.fill_(7)
            lease.seal().drop()
        with table.take(held.ref) as use:
            assert same(use.tensor, tensor)
        assert broker.status()["counters"].get("leases_broken", 0) == 0
        held.drop()
