"""However much one event causes, every message fits."""

from __future__ import annotations

import msgspec

from mmbroker.proto import messages as m

from .shell import Peer, Shell, item


def test_notices_fit_however_many_calls_one_event_answers() -> None:
    """Eight batches of a thousand hits wait for one key, and are granted together; then all their holds end at once."""
    shell = Shell(pages=2048, segment=2048, producer_grace=1.0)
    shell.checks = False
    (rank,) = shell.engine("engine")
    sizes: list[int] = []
    hear = rank.hear

    def measure(notice: m.Notice) -> None:
        sizes.append(len(m.encode(notice)))
        hear(notice)

    rank.hear = measure  # type: ignore[method-assign]
    writer = shell.client()
    features = [item(n, 1) for n in range(1023)]
    writer.put(*features)
    leases = writer.lease(item("last"))
    waiting: list[tuple[Peer, int]] = []
    for _ in range(8):
        peer = shell.client()
        waiting.append((peer, peer.create(*features, item("last"), to="engine")))
    assert not sizes
    writer.seal(leases)
    assert all(isinstance(peer.answers.get(seq), m.Created) for peer, seq in waiting)
    assert len(rank.entries) == 8 * 1024
    for peer, _ in waiting:
        peer.end()
    shell.advance(1.0)
    assert shell.report()["holds"] == 1024, "the writer's own"
    assert max(sizes) <= m.MAX_MESSAGE
    assert sum(sizes) > m.MAX_MESSAGE


def test_a_call_that_fits_has_notices_that_fit() -> None:
    """The largest batch of the simplest items, told to an engine's rank."""
    shell = Shell(pages=2048, segment=2048)
    shell.checks = False
    (rank,) = shell.engine("engine", prompt=False)
    peer = shell.client()
    leases = peer.lease(*(item(n, 1) for n in range(1024)))
    peer.seal(leases, "engine")
    grants = list(rank.granted.values())
    assert len(grants) == 1024
    assert len(m.encode(m.Granted(grants))) <= m.MAX_MESSAGE
    assert msgspec.msgpack.decode(m.encode(m.Granted(grants)))["t"] == "granted"
