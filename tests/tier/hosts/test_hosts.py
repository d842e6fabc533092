"""Three hosts and a store between them: what one has made is found on the others, and no fault costs a request.

Whatever a test does, workers check every byte of what they get, and `want` fails if a request does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from mmbroker.tier import objects
from mmbroker.tier.mover import HEALTH
from tests.kit import Puppet, eventually

from .fleet import LENT, MASTER, RECOVERY, Fleet
from .worker import key_of

pytestmark = pytest.mark.timeout(300)

SMALL, LARGE = 600_000, 9_600_000
#: Long enough for 22 small objects and no longer than the store's patience.
SOON = ("--wait-ms", "20")


@pytest.mark.parametrize("nbytes", [8, SMALL, LARGE, 38_400_000])
def test_what_one_host_has_made_the_others_find(fleet: Fleet, nbytes: int) -> None:
    """Made once in all, though they ask at the same time; and a second time nobody asks the store."""
    (seed,) = fleet.stored(1, nbytes)
    for name in "bc":
        fleet.hosts[name].ask(seed, nbytes=nbytes)
    for name in "bc":
        assert fleet.hosts[name].answer() == ["found"]
    asked = {name: fleet.hosts[name].sought() for name in "abc"}
    for host in fleet.hosts.values():
        assert host.want(seed, nbytes=nbytes) == ["found"]
    assert {name: fleet.hosts[name].sought() for name in "abc"} == asked


def test_many_workers_of_a_host_ask_the_store_once(fleet: Fleet) -> None:
    """Single flight over the machine: who comes later waits behind the first."""
    (seed,) = fleet.stored(1, LARGE)
    host = fleet.hosts["b"]
    before = host.sought()
    workers = [Puppet(fleet.network.prefix["b"]) for _ in range(3)]
    try:
        for worker in workers:
            worker(
                "from tests.tier.hosts.worker import Worker\n"
                f"worker = Worker({str(host.broker.directory)!r}, 'engine-{worker.pid}')"
            )
        for worker in workers:
            worker.post(f"result = worker.want([{seed}], {LARGE})")
        assert [worker.answer() for worker in workers] == [["found"]] * 3
        for worker in workers:
            worker("worker.close()")
    finally:
        for worker in workers:
            worker.kill()
    assert host.sought() == before + 1


# --- the network, and the store ---------------------------------------------------------------------------------------


def _freeze(fleet: Fleet) -> None:
    assert fleet.master is not None
    fleet.master.send(signal.SIGSTOP)


FAULTS: dict[str, Callable[[Fleet], None]] = {
    "cut off": lambda fleet: fleet.network.cut("b"),
    "slow": lambda fleet: fleet.network.set(delay=0.5),
    "no master": lambda fleet: fleet.end_master(),
    "a master that stands still": _freeze,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails_for_want_of_the_store(fleet: Fleet, fault: str) -> None:
    """Some ask while it happens, others when the store is left alone; each gets what it asked for."""
    host = fleet.hosts["b"]
    host.start_mover(*SOON)
    host.ready()
    stored, new = fleet.stored(12, SMALL), fleet.seeds(12)
    FAULTS[fault](fleet)
    for pair in zip(stored[:6], new[:6], strict=True):
        host.want(*pair, nbytes=SMALL)
    eventually(lambda: not host.tier()["open"], "the store is left alone", RECOVERY)
    before = host.sought()
    assert host.want(*stored[6:], *new[6:], nbytes=SMALL) == ["made"] * 12
    assert host.sought() == before, "nobody waits for it"
    fleet.mend_all_but_movers()
    eventually(lambda: host.tier()["open"], "the store is asked again", RECOVERY)


def _stop_who_has_it(fleet: Fleet) -> None:
    mover = fleet.hosts["c"].mover
    assert mover is not None
    mover.send(signal.SIGSTOP)


TROUBLES: dict[str, Callable[[Fleet], None]] = {
    "cut off from who has it": lambda fleet: fleet.network.set(("b", "c"), ("c", "b"), cut=True),
    "cut in one direction": lambda fleet: fleet.network.set(("c", "b"), cut=True),
    "who has it stands still": _stop_who_has_it,
    "lossy": lambda fleet: fleet.network.set(loss=0.2),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_request_fails_and_nothing_is_lost_where_only_transfers_fail(fleet: Fleet, trouble: str) -> None:
    """The master says what there is, and it cannot be had: no reason to believe that it is damaged."""
    b, c = fleet.hosts["b"], fleet.hosts["c"]
    b.start_mover(*SOON)
    b.ready()
    stored, new = fleet.stored(3, SMALL), fleet.seeds(3)
    TROUBLES[trouble](fleet)
    for pair in zip(stored, new, strict=True):
        b.want(*pair, nbytes=SMALL)
    if trouble.startswith("cut"):  # what hangs comes to its end before anything is mended
        eventually(
            lambda: {"tier_failed", "tier_altered"} & b.tally().keys(), "a transfer has failed", RECOVERY
        )
    fleet.mend_all_but_movers()
    eventually(lambda: not b.imbalance(), "all is over", RECOVERY)
    assert "tier_altered" not in b.tally()
    assert c.want(*stored, nbytes=SMALL) == ["found"] * len(stored)


@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_transfer_that_is_cut_in_its_midst(fleet: Fleet, direction: str) -> None:
    """Then the mover is killed, too: nothing of it is ever served."""
    host = fleet.hosts["b" if direction == "get" else "a"]
    if direction == "get":
        (seed,) = fleet.stored(1, LARGE)
        fleet.network.trip("c", "b", LARGE // 2)
    else:
        (seed,) = fleet.seeds(1)
        fleet.network.trip("a", "c", LARGE // 2)
    host.ask(seed, nbytes=LARGE)
    assert fleet.network.answer() is True
    assert host.mover is not None
    host.mover.end()
    assert host.answer() == ["made"]
    fleet.mend()
    fleet.hosts["c"].want(seed, nbytes=LARGE)


def test_a_store_that_is_full(fleet: Fleet) -> None:
    """Twice what it has room for."""
    seeds = fleet.seeds(22)
    a, b = fleet.hosts["a"], fleet.hosts["b"]

    def handled() -> int:
        tally = a.tally()
        return sum(tally.get(f"tier_{name}", 0) for name in ("puts", "full", "put_failed", "put_skipped"))

    before = handled()
    for seed in seeds:
        assert a.want(seed, nbytes=LARGE) == ["made"]
    eventually(lambda: handled() >= before + len(seeds), "all were stored or refused", RECOVERY)
    for seed in seeds:
        b.want(seed, nbytes=LARGE)


# --- trust ------------------------------------------------------------------------------------------------------------

_STORE = """
import ctypes
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup({address!r}, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", {master!r}) == 0
def replace(name, change):
    data = bytes(store.get(name))
    assert data and store.remove(name, True) == 0, name
    assert store.put(name, change(data)) == 0
"""
#: What somebody, or an accident, may make of an object.
ALTERATIONS = {
    "a bit of the bytes": "lambda d: d[:100_000] + bytes([d[100_000] ^ 1]) + d[100_001:]",
    "the last byte": "lambda d: d[:-1] + bytes([d[-1] ^ 255])",
    "a bit of the header": "lambda d: d[:60] + bytes([d[60] ^ 1]) + d[61:]",
    "another version": "lambda d: b'mmbtier9' + d[8:]",
    "half of it": "lambda d: d[:len(d) // 2]",
    "less than a header": "lambda d: d[:100]",
    "nothing but zeros": "lambda d: bytes(len(d))",
    "another one's": "lambda d: other",
}


def test_an_altered_object_is_never_served(fleet: Fleet) -> None:
    """It is a miss, it is counted and removed, and whoever has made the feature anew stores it anew."""
    host = fleet.hosts["b"]
    other, *seeds = fleet.stored(1 + len(ALTERATIONS), SMALL)
    namespace = fleet.namespace
    before, puts = (host.tally().get(f"tier_{name}", 0) for name in ("altered", "puts"))
    stranger = Puppet(fleet.network.prefix[MASTER])
    try:
        stranger(_STORE.format(address=fleet.network.address[MASTER], master=fleet.master_at))
        stranger(f"other = bytes(store.get({objects.name_of(namespace, key_of(other))!r}))")
        for seed, change in zip(seeds, ALTERATIONS.values(), strict=True):
            stranger(f"replace({objects.name_of(namespace, key_of(seed))!r}, {change})")
        stranger("store.close()")
    finally:
        stranger.kill()
    assert host.want(*seeds, nbytes=SMALL) == ["made"] * len(seeds)
    eventually(lambda: host.tally().get("tier_altered", 0) == before + len(seeds), "each was counted")
    host.has_stored(puts + len(seeds))
    assert fleet.hosts["c"].want(*seeds, nbytes=SMALL) == ["found"] * len(seeds)


# --- at rest ----------------------------------------------------------------------------------------------------------


def test_an_idle_tier_only_asks_whether_the_store_is_there(fleet: Fleet) -> None:
    """Until a host has asked twice: nothing between hosts, and little to the master. A host that lends memory tells the
    master each second that it lives."""
    network = fleet.network
    fleet.at_rest()
    network.watch("a", MASTER, 1)
    assert network.answer() is True
    before, started = network.counts(), time.monotonic()
    network.watch("a", MASTER, 2)  # the rest of this check, and the beginning of the next
    assert network.answer() is True
    after, seconds = network.counts(), time.monotonic() - started
    spoken = {
        line: (after[line][0] - before[line][0], after[line][1] - before[line][1])
        for line in after
        if after[line] != before[line]
    }
    assert not [line for line in spoken if MASTER not in line], spoken
    for name in fleet.hosts:
        checks = 2 + seconds / (1 if name in LENT else HEALTH)
        for what, most in ((0, 8), (1, 800)):  # frames, bytes
            assert sum(spoken.get(line, (0, 0))[what] for line in network.lines_of(name)) <= most * checks, (
                spoken
            )
