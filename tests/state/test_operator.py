"""What whoever runs the broker may ask of it: to take no new work, and to drop its cache."""

from __future__ import annotations

import pytest

from mmbroker.proto import messages as m
from mmbroker.report import segments

from .shell import PAGE, Shell, item, key


def evict(shell: Shell, most: int = 1000, namespace: str | None = None) -> tuple[int, int]:
    answer = shell.client("operator", "op").ask(m.Evict(most, namespace))
    assert isinstance(answer, m.Evicted)
    return answer.features, answer.nbytes


def test_draining_gives_nothing_new_and_goes_on_with_what_there_is() -> None:
    shell = Shell(pages=8, segment=8)
    peer, other, operator = shell.client(), shell.client(), shell.client("operator")
    shell.engine()
    held = peer.put(item("x", 4), to="engine")
    (lease,) = peer.lease(item("y", 4))
    waiting = other.create(item("z", 4), timeout=60.0)
    assert operator.ask(m.Drain()) == m.Done()
    assert shell.report()["draining"] and not shell.report()["halting"]
    refused = other.answers[waiting]
    assert isinstance(refused, m.Failed) and refused.error == "BrokerLost" and "draining" in refused.message
    other.failure(m.Create([item("new")]), "BrokerLost")
    other.failure(m.Create([item("x", 4)]), "BrokerLost")
    other.failure(m.Lookup([key("x")]), "BrokerLost")
    assert other.ask(m.Lookup([])) == m.Found([]), "a client's last words"
    assert isinstance(peer.answers[peer.seal([lease], "engine")], m.Sealed)
    peer.drop(*held)
    peer.end()
    shell.advance(60.0)
    assert (shell.report()["holds"], shell.report()["leases"]) == (0, 0)
    assert not shell.halted, "it waits for whoever drained it"


def test_draining_can_be_undone() -> None:
    shell = Shell()
    operator = shell.client("operator")
    for _ in range(2):
        operator.ask(m.Drain())
    operator.ask(m.Drain(False))
    assert not shell.report()["draining"]
    shell.client().put(item("x"))


def test_an_end_cannot_be_undone() -> None:
    shell = Shell()
    peer, operator = shell.client(), shell.client("operator")
    peer.lease(item("x"))
    operator.ask(m.Shutdown())
    operator.ask(m.Drain(False))
    assert shell.report()["draining"]
    peer.failure(m.Create([item("y")]), "BrokerLost")


def test_evicting_drops_what_nobody_holds() -> None:
    shell = Shell()
    peer = shell.client()
    refs = peer.put(item("a", 2), item("b", 3), item("c"))
    peer.drop(refs[0], refs[1])
    assert evict(shell) == (2, 5 * PAGE)
    assert evict(shell) == (0, 0)
    assert (shell.report()["features"], shell.report()["pool"]["used"]) == (1, PAGE)
    assert shell.counters()["evictions_request"] == 2
    peer.lease(item("a", 2))


def test_evicting_begins_with_the_oldest_and_stops_when_told() -> None:
    shell = Shell()
    peer = shell.client()
    refs = peer.put(*(item(name) for name in "abcd"))
    for ref in reversed(refs):
        peer.drop(ref)
    assert evict(shell, most=3) == (3, 3 * PAGE)
    assert isinstance(peer.ask(m.Create([item("a")])), m.Created)
    assert shell.counters()["hits"] == 1
    assert evict(shell, most=-1) == (0, 0)


@pytest.mark.parametrize(("namespace", "dropped"), [("a", 1), ("b", 2), ("none", 0)])
def test_evicting_from_one_namespace(namespace: str, dropped: int) -> None:
    shell = Shell()
    for name, count in (("a", 1), ("b", 2)):
        peer = shell.client(namespace=name)
        peer.drop(*peer.put(*(item(number) for number in range(count))))
    assert evict(shell, namespace=namespace)[0] == dropped


@pytest.mark.parametrize("held", [False, True])
def test_what_a_feature_takes_along_is_counted(held: bool) -> None:
    """Who cannot be traced may read it for ever: its segment is given back, once nothing in it is held."""
    shell = Shell()
    peer, ghost = shell.client(), shell.client(traceable=False)
    ghost.attach("engine")
    ghost.prompt = True
    read = peer.put(item("read", 2), to="engine")
    beside = peer.put(item("beside", 3))
    neighbour = peer.put(item("held")) if held else []
    ghost.end(alive=True)
    peer.drop(*read, *beside)
    assert evict(shell, most=1) == (2, 3 * PAGE if held else 5 * PAGE), "what it may read does not come free"
    assert evict(shell) == (0, 0)
    assert shell.report()["pool"]["held"] == 3 * PAGE * held
    peer.drop(*neighbour)
    assert shell.report()["pool"]["capacity"] == 0


def test_room_that_is_evicted_goes_to_who_waits() -> None:
    """And empty segments go back to the system."""
    shell = Shell(pages=8, segment=4, segment_linger=10.0)
    peer = shell.client()
    peer.drop(*peer.put(item("a", 4), item("b", 4)))
    assert evict(shell)[0] == 2
    shell.advance(11.0)
    assert shell.report()["pool"]["capacity"] == 0


def test_a_segments_picture_tells_the_cache_from_what_is_held() -> None:
    """Halves of cells count as used: a picture must not show memory as free that is not."""
    shell = Shell(segment=8)
    peer = shell.client()
    peer.put(item("held", 2))
    (cached,) = peer.put(item("cached", 3))
    peer.drop(cached)
    peer.lease(item("leased", 0.5))
    (drawn,) = segments(shell.broker, 8, 5)
    assert (drawn["cells"], drawn["held"]) == ("aaaaaa00", "aa000a00")
    (drawn,) = segments(shell.broker, 4, 5)
    assert (drawn["cells"], drawn["held"]) == ("aaa0", "a050")
    assert segments(shell.broker, 4, 0) == []
