"""Each component killed at each step of the way from the store, and to it.

The mover on whose way it is stops itself at the step (`stops`); then one of the components is killed, and what is left
goes on. Every byte that a worker gets is checked, no request fails, nothing is left in any host's books, and everything
works again by itself (`conftest.fleet`).
"""

from __future__ import annotations

import signal

import pytest

from .fleet import Fleet
from .stops import FETCH, KEEP

pytestmark = pytest.mark.timeout(300)

NBYTES = 2_400_000
#: What the store's own processes can tell apart: nothing was read yet, a half of it, nothing was written yet.
FOR_STORE = ("find.before", "lease.after", "put.before")
CASES = [
    (victim, step)
    for victim in ("mover", "broker", "master", "store")
    for step in (*FETCH, *KEEP)
    if victim in ("mover", "broker") or step in FOR_STORE
]


@pytest.mark.parametrize(("victim", "step"), CASES, ids=[f"{victim}-{step}" for victim, step in CASES])
def test_killed_at(fleet: Fleet, victim: str, step: str) -> None:
    """``store``: the mover of the host whose memory the objects are in."""
    host = fleet.hosts["b" if step in FETCH else "a"]
    (seed,) = fleet.stored(1, NBYTES) if step in FETCH else fleet.seeds(1)
    assert host.mover is not None
    host.mover.stop_at(step)
    host.ask(seed, nbytes=NBYTES, patient=victim == "broker")
    host.mover.stopped(step)
    match victim:
        case "mover":
            host.mover.end()
        case "broker":
            host.restart_broker()
        case "master":
            fleet.end_master()
        case "store":
            holder = fleet.hosts["c"].mover
            assert holder is not None
            holder.end()
    if victim != "mover":
        host.mover.send(signal.SIGCONT)
    host.answer()
    for other in fleet.hosts.values():
        other.want(seed, nbytes=NBYTES)
