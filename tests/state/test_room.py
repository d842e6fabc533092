"""Room: whatever fits the arena can be had once nothing in it is held, however it was cut up before."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from mmbroker.proto import messages as m

from .shell import PAGE, Shell, item

EXAMPLES = int(os.environ.get("MMBROKER_TEST_EXAMPLES", "150"))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    segment=st.sampled_from([2, 4, 8, 16]),
    before=st.lists(
        st.tuples(st.sampled_from("aab"), st.lists(st.integers(1, 9), min_size=1, max_size=3)), max_size=6
    ),
    held=st.booleans(),
    batch=st.lists(st.integers(0, 16), min_size=1, max_size=8).filter(lambda pages: sum(pages) <= 16),
)
def test_a_batch_that_fits_is_granted_when_nothing_is_held(
    segment: int, before: list[tuple[str, list[int]]], held: bool, batch: list[int]
) -> None:
    shell = Shell(segment=segment)
    peers = {namespace: shell.client(namespace=namespace) for namespace in "ab"}
    for number, (namespace, pages) in enumerate(before):
        peer = peers[namespace]
        seq = peer.create(*(item(f"{number}.{i}", n) for i, n in enumerate(pages)), timeout=0.0)
        answer = peer.answers[seq]
        if isinstance(answer, m.Created):
            leases = [result for result in answer.results if isinstance(result, m.Leased)]
            sealed = peer.answers[peer.seal(leases)]
            assert isinstance(sealed, m.Sealed)
            if not held:
                peer.drop(*sealed.refs)
    last = shell.client()
    seq = last.create(*(item(f"last.{i}", n) for i, n in enumerate(batch)))
    if held:
        for peer in peers.values():
            peer.end()
    shell.advance(1.0)
    assert isinstance(last.answers[seq], m.Created), last.answers[seq]


def test_what_cannot_be_had_evicts_nothing_from_others() -> None:
    """A segment with something held in it stays, and so does every cache whose loss would not be enough."""
    shell = Shell(segment=4)
    one, other = shell.client(), shell.client(namespace="b")
    held = one.put(item("held", 4))
    other.drop(*other.put(item("cached", 4)))
    other.drop(*other.put(item("cached too", 4)))
    seq = one.create(item("large", 13), timeout=1.0)
    shell.advance(1.0)
    failed = one.answers[seq]
    assert isinstance(failed, m.Failed) and failed.error == "PoolFull"
    assert failed.figures == {"requested": 13 * PAGE, "free": 12 * PAGE, "limit": 16 * PAGE}
    assert shell.report()["features_idle"] == 2
    one.drop(*held)
    assert isinstance(one.ask(m.Create([item("large", 13)])), m.Created)
