"""What the examples of the state machine say often, on top of the `Shell`."""

from __future__ import annotations

from collections.abc import Iterable

from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.reference import Reference

from .shell import Peer, Shell


def results(peer: Peer, seq: int) -> list[m.Result]:
    """What a create got, item by item."""
    answer = peer.answers[seq]
    assert isinstance(answer, m.Created), answer
    return answer.results


def kinds(peer: Peer, seq: int) -> list[str]:
    return [type(result).__name__ for result in results(peer, seq)]


def refs(peer: Peer, seq: int) -> list[Reference]:
    """What a seal got."""
    answer = peer.answers[seq]
    assert isinstance(answer, m.Sealed), answer
    return answer.refs


def failed(peer: Peer, seq: int, error: str) -> m.Failed:
    answer = peer.answers[seq]
    assert isinstance(answer, m.Failed), answer
    assert answer.error == error, answer
    return answer


def hit(peer: Peer, item: m.Item, to: str | None = None) -> Reference:
    """A hold on something that is there, at once."""
    (result,) = results(peer, peer.create(item, to=to))
    assert isinstance(result, m.Hit), result
    return result.ref


def cache(peer: Peer, *items: m.Item) -> None:
    """Put and let go."""
    for each in items:
        peer.drop(*peer.put(each))


def exists(shell: Shell, *items: m.Item, namespace: str = "a") -> list[bool]:
    """Is it there? Asked by a client that holds nothing afterwards, but its features are the most recently used."""
    peer = shell.client("asker", namespace)
    answer = peer.ask(m.Lookup([item.key for item in items]))
    assert isinstance(answer, m.Found)
    peer.end()
    return [ref is not None for ref in answer.refs]


def of_type(effects: Iterable[e.Effect], kind: type) -> list[e.Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]
