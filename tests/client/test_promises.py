"""Promises as clients know them: one of several processes makes what all of them want."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.proto.errors import BrokerLost, DeadlineExceeded, LeaseClosed, PoolFull
from mmbroker.proto.keys import Key
from tests.kit import BrokerProcess, Puppet, eventually
from tests.rig import Rig, a_rig, same, values

PICTURE, OTHER = (Key.derived(bytes([n]) * 32) for n in (1, 2))
_CLIENT = """
import mmbroker, torch
from mmbroker.proto.keys import Key
client = mmbroker.connect({path!r})
"""
_WANT = """
(got,) = client.get_or_promise([Key.derived(bytes([1]) * 32)], timeout=60.0)
if isinstance(got, mmbroker.Promise):
    held = client.put(torch.full((64,), 7.0), key=got, extra=b"made")
    result = ["made", held.extra.decode()]
else:
    result = ["found", got.extra.decode()]
"""


def promise(client: mmbroker.Client, key: Key = PICTURE) -> mmbroker.Promise:
    (got,) = client.get_or_promise([key])
    assert isinstance(got, mmbroker.Promise)
    return got


def test_what_was_promised_is_put_and_found_with_what_is_beside_it(rig: Rig) -> None:
    made, listed = promise(rig.client), promise(rig.client, OTHER)
    feature, parts = values(torch.float32, (40, 3)), [values(torch.int64, (2,)), values(torch.uint8, (5,))]
    with (
        rig.client.put(feature, key=made, extra=b"grid", to="a") as held,
        rig.client.put_list(parts, key=listed) as many,
    ):
        assert held.key == PICTURE and held.extra == b"grid" and many.extra == b"" and not made.open
        hit, again = rig.client.get_or_promise([PICTURE, OTHER], to="a")
        assert isinstance(hit, mmbroker.Held) and isinstance(again, mmbroker.Held)
        assert (hit.extra, again.extra) == (b"grid", b"")
        with hit, again, rig.table.take(hit.ref) as use:
            assert same(use.tensor, feature)
        with rig.client.lookup(PICTURE) as found:  # type: ignore[union-attr]
            assert found.extra == b"grid"
        out = rig.client.get_or_create(PICTURE, (40, 3), torch.float32)
        assert isinstance(out, mmbroker.Hit) and out.held.extra == b"grid"
        out.held.drop()
    rig.settled()


def test_a_promise_is_kept_in_place() -> None:
    with a_rig("readonly") as rig:
        lease = rig.client.get_or_create(promise(rig.client), (8,), torch.int32).lease
        assert lease is not None
        with lease:
            lease.tensor.copy_(torch.arange(8))
            with lease.seal(extra=b"beside") as held:
                assert held.extra == b"beside"


@pytest.mark.balanced
@pytest.mark.parametrize("end", ["drop", "with", "lost"])
def test_a_promise_given_back_is_the_next_ones(broker: BrokerProcess, end: str) -> None:
    with mmbroker.connect() as one, mmbroker.connect() as two:
        first: Any = promise(one)
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.extend(two.get_or_promise([PICTURE], timeout=60.0)))
        waiting.start()
        eventually(lambda: broker.status()["waiting_for"] == {"flight": 1}, "a call that waits")
        if end == "drop":
            first.drop()
            first.drop()
        elif end == "with":
            with first:
                pass
        del first
        waiting.join(60)
        assert isinstance(got[0], mmbroker.Promise) and got[0].open
        got[0].drop()


def test_the_same_picture_in_many_processes_is_made_once(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    workers = [puppet() for _ in range(4)]
    for worker in workers:
        worker(_CLIENT.format(path=str(broker.directory)))
    for worker in workers:
        worker.post(_WANT)
    words = [worker.answer() for worker in workers]
    assert sorted(words) == [["found", "made"]] * 3 + [["made", "made"]]
    counters = broker.status()["counters"]
    assert (counters["promises"], counters["leases"]) == (1, 1)


def test_another_process_makes_what_a_killed_one_had_promised(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    maker, other = puppet(), puppet()
    for worker in (maker, other):
        worker(_CLIENT.format(path=str(broker.directory)))
    maker("(kept,) = client.get_or_promise([Key.derived(bytes([1]) * 32)])")
    other.post(_WANT)
    eventually(lambda: broker.status()["waiting_for"] == {"flight": 1}, "a call that waits")
    maker.signal(signal.SIGKILL)
    assert other.answer() == ["made", "made"]


def test_who_is_told_to_wait_asks_again_for_everything(broker: BrokerProcess) -> None:
    with mmbroker.connect() as one, mmbroker.connect() as two:
        first = promise(one)
        pending, mine = two.get_or_promise([PICTURE, OTHER])
        assert pending is None and isinstance(mine, mmbroker.Promise)
        one.put(torch.ones(4), key=first).drop()
        two.put(torch.ones(3), key=mine).drop()
        for held in two.get_or_promise([PICTURE, OTHER]):
            assert isinstance(held, mmbroker.Held)
            held.drop()


def test_a_promise_survives_a_put_that_finds_no_room(broker: BrokerProcess) -> None:
    with mmbroker.connect() as client:
        kept = promise(client)
        with pytest.raises(PoolFull):
            client.put(torch.empty(65 << 20, dtype=torch.uint8), key=kept)
        assert kept.open
        client.put(torch.ones(3), key=kept).drop()
        with pytest.raises(LeaseClosed, match="promise"):
            client.put(torch.ones(3), key=kept)


def test_the_wait_for_a_promise_ends_in_time(broker: BrokerProcess) -> None:
    with mmbroker.connect(name="maker") as one, mmbroker.connect() as two:
        kept = promise(one)
        with pytest.raises(DeadlineExceeded, match="maker"):
            two.get_or_promise([PICTURE], timeout=0.1)
        kept.drop()


def test_too_much_beside_a_feature_is_refused_before_anything_is_written(broker: BrokerProcess) -> None:
    with mmbroker.connect() as client:
        with pytest.raises(ValueError, match="4096"):
            client.put(torch.ones(3), extra=bytes(4097))
        assert broker.status()["counters"].get("leases", 0) == 0
        assert client.get_or_promise([]) == []


def test_a_promise_ends_with_its_session(broker: BrokerProcess) -> None:
    with mmbroker.connect() as client:
        kept = promise(client)
        assert broker.stop() == 0
        eventually(lambda: not kept.open, "the end of the session")
        with pytest.raises(BrokerLost):
            client.put(torch.ones(3), key=kept)
        kept.drop()
