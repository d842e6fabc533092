"""The short form of the siege; `make fuzz` is the long one."""

from __future__ import annotations

from collections.abc import Callable

from tests.conftest import StartBroker
from tests.kit import Puppet

from .siege import MIB, SETTINGS, Siege


def test_a_broker_under_attack_serves_the_others(
    start_broker: StartBroker, puppet: Callable[..., Puppet]
) -> None:
    """15,000 damaged messages; `Siege` looks for failures of the honest, for wrong bytes and for leaks throughout."""
    siege = Siege(start_broker(**SETTINGS), puppet(), seed=1)
    for _ in range(60):
        siege.strike(250)
        siege.judge()
    after = siege.lift()
    assert after["daemon"]["rss"] - siege.before["daemon"]["rss"] < 32 * MIB
    assert after["daemon"]["counters"]["undecodable_messages"] > 1000
    assert {"calls", "noise", "frames", "hellos", "strangers", "words"} == siege.sent.keys()
    assert {
        "InvalidMessage",
        "UnknownSession",
        "Done",
        "Created",
        "Attached",
        "Granted",
    } <= siege.answers.keys()
