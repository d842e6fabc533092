"""Who has whose features: what `status` says of engines that have something in common."""

from __future__ import annotations

from typing import Any

from mmbroker import holds
from mmbroker.proto import messages as m

from .shell import PAGE, Peer, Shell, item, key


def engine(shell: Shell, name: str) -> dict[str, Any]:
    (found,) = [one for one in shell.report()["engines"] if one["engine"] == name]
    return found


def find(peer: Peer, name: str, to: str) -> int:
    (ref,) = peer.ask(m.Lookup([key(name)], to)).refs
    return ref.hold


def test_an_engine_that_is_alone_shares_nothing() -> None:
    shell = Shell()
    peer = shell.client()
    shell.engine("a")
    peer.put(item("x", 2), to="a")
    assert engine(shell, "a")["granted"] == {"features": 1, "bytes": 2 * PAGE}
    assert engine(shell, "a")["reused"] == engine(shell, "a")["shares"] == []


def test_what_is_in_use_with_others_and_what_was_theirs_first() -> None:
    shell = Shell()
    peer = shell.client()
    for name in ("a", "b"):
        shell.engine(name)
    refs = peer.put(item("x", 2), item("y"), to="a")
    held = [find(peer, "x", "b"), find(peer, "x", "b")]
    assert engine(shell, "a")["shares"] == [{"engine": "b", "features": 1, "bytes": 2 * PAGE}]
    assert engine(shell, "b")["shares"] == [{"engine": "a", "features": 1, "bytes": 2 * PAGE}]
    assert engine(shell, "b")["reused"] == [{"engine": "a", "features": 2, "bytes": 4 * PAGE}]
    assert engine(shell, "b")["granted"] == {"features": 2, "bytes": 4 * PAGE}
    assert engine(shell, "a")["reused"] == []
    peer.drop(*refs, *held)
    assert engine(shell, "a")["shares"] == engine(shell, "b")["shares"] == []
    assert engine(shell, "b")["reused"][0]["features"] == 2, "so far"


def test_what_a_rank_puts_is_its_engines() -> None:
    """An encoder's output, for whoever wants it."""
    shell = Shell()
    peer = shell.client()
    (rank,) = shell.engine("a")
    shell.engine("b")
    rank.drop(*rank.put(item("output")))
    find(peer, "output", "b")
    assert engine(shell, "b")["reused"] == [{"engine": "a", "features": 1, "bytes": PAGE}]


def test_engines_of_two_namespaces_have_nothing_in_common() -> None:
    shell = Shell()
    for namespace in ("a", "b"):
        shell.engine("engine", namespace=namespace)
        shell.client(namespace=namespace).put(item("x"), to="engine")
    assert all(not one["shares"] and not one["reused"] for one in shell.report()["engines"])


def test_engines_that_come_and_go_are_not_remembered_for_ever() -> None:
    shell = Shell(pages=256, segment=64, features_per_session=1000)
    peer = shell.client()
    shell.engine("stays")
    for number in range(holds._MAKERS + 3):
        (rank,) = shell.engine(f"goes-{number}")
        refs = peer.put(item(number), to=f"goes-{number}")
        peer.drop(*refs, find(peer, str(number), "stays"))
        rank.end()
    makers = [one["engine"] for one in engine(shell, "stays")["reused"]]
    assert makers == [f"goes-{number}" for number in range(3, holds._MAKERS + 3)]
