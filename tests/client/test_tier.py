"""A tier as its processes know it: one client fetches what the others ask for, and reads what they have made."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.link import Link
from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import Rig, bits, same, values

PICTURE, OTHER = (Key.derived(bytes([n]) * 32) for n in (1, 2))
PATIENCE = 60.0


class Mover:
    """What it is asked for and told, in order; it acknowledges what it is granted, and settles what is over."""

    def __init__(self, directory: Path) -> None:
        self.sought: queue.Queue[m.Wanted] = queue.Queue()
        self.fresh: queue.Queue[m.Worth] = queue.Queue()
        self.granted: queue.Queue[bytes] = queue.Queue()
        self.link = Link(directory, "mover")
        self.link.on_sought = lambda wanted: [self.sought.put(one) for one in wanted] and None
        self.link.on_fresh = lambda features: [self.fresh.put(one) for one in features] and None
        self.link.on_granted = self._read
        self.link.on_dismissed = lambda holds: self.link.cast(m.Settle(holds))

    def _read(self, grants: list[m.Grant], _: list[int]) -> None:
        for grant in grants:
            mapping = self.link.segment(grant.segment, False)
            self.granted.put(bytes(mapping.view(grant.offset, grant.ref.nbytes)))
        self.link.cast(m.Ack([grant.ref.hold for grant in grants]))

    def bring(self, wanted: m.Wanted, feature: torch.Tensor, extra: bytes = b"") -> None:
        form = tensor_form(str(feature.dtype).removeprefix("torch."), tuple(feature.shape), "image")
        created = self.link.call(m.Create([m.Item(wanted.key, form, wanted.promise)]))
        assert isinstance(created, m.Created)
        (leased,) = created.results
        assert isinstance(leased, m.Leased)
        mapping = self.link.segment(leased.segment, True)
        mapping.view(leased.offset, form.nbytes)[:] = bits(feature)
        sealed = self.link.call(m.Seal([m.Sealing(leased.lease, extra=extra)]))
        assert isinstance(sealed, m.Sealed)
        self.link.cast(m.Drop([ref.hold for ref in sealed.refs]))


@contextmanager
def a_mover(directory: Path, wait: float = 10.0, attached: bool = False) -> Iterator[Mover]:
    mover = Mover(directory)
    try:
        mover.link.call(m.Tier(True, wait))
        if attached:
            mover.link.call(m.Attach("tier", 0, 1, access="readonly"))
        yield mover
    finally:
        mover.link.close()


@contextmanager
def asking(ask: Callable[[], Any]) -> Iterator[list[Any]]:
    """What a call in another thread returns, once the block is done."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(ask()))
    thread.start()
    try:
        yield got
    finally:
        thread.join(PATIENCE)
    assert got, "the call has not returned"


@pytest.mark.parametrize("verb", ["lookup", "promise"])
def test_a_worker_gets_what_the_mover_brings(rig: Rig, verb: str) -> None:
    key, feature = Key.derived(verb.encode().ljust(32)), values(torch.float32, (40, 3))
    ask = rig.client.lookup_many if verb == "lookup" else rig.client.get_or_promise
    with a_mover(rig.broker.directory) as mover:
        with asking(lambda: ask([key], to="a", timeout=PATIENCE)) as got:
            mover.bring(mover.sought.get(timeout=PATIENCE), feature, b"grid")
        (held,) = got[0]
        assert isinstance(held, mmbroker.Held) and held.extra == b"grid"
        with held, rig.table.take(held.ref) as use:
            assert same(use.tensor, feature)
        assert mover.fresh.empty() and mover.sought.empty()
    rig.settled()


def test_it_reads_what_is_made_here(rig: Rig) -> None:
    key, feature = Key.derived(rig.access.encode().ljust(32)), values(torch.int64, (9, 7))
    with a_mover(rig.broker.directory, attached=True) as mover:
        rig.client.put(feature, key=key).drop()
        worth = mover.fresh.get(timeout=PATIENCE)
        assert (worth.key, worth.nbytes, worth.hits) == (key, feature.nbytes, 0)
        found = mover.link.call(m.Lookup([key], "tier"))
        assert isinstance(found, m.Found) and found.refs[0] is not None
        assert mover.granted.get(timeout=PATIENCE) == bits(feature)
        mover.link.cast(m.Drop([found.refs[0].hold]))
        eventually(lambda: rig.broker.status()["holds"] == 0, "its hold's end")
        rig.client.lookup(key).drop()  # type: ignore[union-attr]
        assert mover.fresh.get(timeout=PATIENCE).hits == 1


_MOVER = """
from mmbroker.link import Link
from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
import queue
link, sought = Link({path!r}, "mover"), queue.Queue()
link.on_sought = lambda wanted: [sought.put(one) for one in wanted]
link.call(m.Tier(True, {wait}, {most}))
"""
_LEASE = """
wanted = sought.get(timeout=60)
link.call(m.Create([m.Item(wanted.key, tensor_form("uint8", (4096,), "image"), wanted.promise)]))
"""


@pytest.mark.balanced
@pytest.mark.parametrize("step", ["sought", "leased"])
def test_a_movers_death_ends_the_wait(
    broker: BrokerProcess, puppet: Callable[..., Puppet], step: str
) -> None:
    mover = puppet()
    mover(_MOVER.format(path=str(broker.directory), wait=10.0, most=8))
    with mmbroker.connect() as worker:
        with asking(lambda: worker.get_or_promise([PICTURE, OTHER], timeout=PATIENCE)) as got:
            mover(_LEASE if step == "leased" else "sought.get(timeout=60)")
            mover.signal(signal.SIGKILL)
        assert all(isinstance(one, mmbroker.Promise) for one in got[0])
        counters = broker.status()["counters"]
        assert (counters["tier_sought"], counters["tier_absent"]) == (2, 2) and "tier_late" not in counters
        assert broker.status()["movers"] == []
        for one in got[0]:
            worker.put(torch.ones(3), key=one).drop()


@pytest.mark.balanced
def test_a_mover_that_stands_still_costs_a_few_waits(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    mover = puppet()
    mover(_MOVER.format(path=str(broker.directory), wait=0.001, most=2))
    mover.stop()
    with mmbroker.connect() as worker:
        for name in range(5):
            assert worker.lookup(Key.derived(bytes([name]) * 32)) is None
    counters = broker.status()["counters"]
    assert (counters["tier_late"], counters["tier_busy"]) == (2, 3)
    assert broker.status()["health"]["ok"]
    mover.signal(signal.SIGCONT)
