"""Room: whatever fits the arena can be had once nothing in it is held, however it was cut up before."""

from __future__ import annotations

import os

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmbroker.proto import messages as m

from .shell import PAGE, Shell, item


@st.composite
def batches(draw: st.DrawFn) -> list[int]:
    """Pages that fill the arena, or nearly."""
    cuts = sorted(draw(st.lists(st.integers(1, 15), max_size=5)))
    pages = [end - start for start, end in zip([0, *cuts], [*cuts, 16], strict=True)]
    pages[draw(st.integers(0, len(pages) - 1))] -= draw(st.sampled_from([0, 0, 1, 2]))
    return draw(st.permutations([max(n, 0) for n in pages]))


EXAMPLES = int(os.environ.get("MMBROKER_TEST_EXAMPLES", "150"))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    segment=st.sampled_from([2, 4, 8, 16]),
    before=st.lists(
        st.tuples(st.sampled_from("aab"), st.lists(st.integers(1, 9), min_size=1, max_size=3)), max_size=6
    ),
    held=st.booleans(),
    batch=batches(),
)
@example(segment=8, before=[], held=False, batch=[6, 6, 4])
@example(segment=4, before=[("b", [3, 3])], held=True, batch=[1, 14])
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
    """Segments are given up for a larger one only if that one can be had then."""
    shell = Shell(segment=8)
    one, other = shell.client(), shell.client(namespace="b")
    held = one.put(item("held", 4))
    other.drop(*other.put(item("cached", 4)))
    seq = one.create(item("large", 12), timeout=1.0)
    shell.advance(1.0)
    failed = one.answers[seq]
    assert isinstance(failed, m.Failed) and failed.error == "PoolFull"
    assert failed.figures == {"requested": 12 * PAGE, "free": 12 * PAGE, "limit": 16 * PAGE}
    assert other.ask(m.Lookup([item("cached").key])).refs[0] is not None
    one.drop(*held)
    other.end()
    seq = one.create(item("large", 12), timeout=1.0)
    assert isinstance(one.answers[seq], m.Created)


def test_small_items_do_not_sit_in_the_way_of_large_ones() -> None:
    """Two empty segments of four pages, and one of eight that is half held: room for eight and four."""
    shell = Shell(segment=4)
    peer = shell.client()
    small = peer.lease(item("small", 4)) + peer.lease(item("small too", 4))
    peer.drop(*peer.put(item("large", 8)))
    (held,) = peer.lease(item("held", 4))
    peer.abort(*small)
    seq = peer.create(item("four", 4), item("eight", 8))
    answer = peer.answers.get(seq)
    assert isinstance(answer, m.Created)
    assert held.segment in {result.segment for result in answer.results if isinstance(result, m.Leased)}
