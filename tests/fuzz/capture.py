"""Real traffic for the corpus: `python -m tests.fuzz.capture` runs a broker and its clients, and keeps what they say.

Messages that look alike are kept once, so that the corpus stays small enough to be read in a review.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

import mmbroker
from mmbroker.link import Link
from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from tests.kit import BrokerProcess, RawClient
from tests.proto.samples import REF, REF_PARTS, SAMPLES

from .mutator import CHANNELS, CORPUS

#: Messages of one shape that are kept.
_ALIKE = 3


class Recorder:
    """Keeps messages by channel, a few of each shape."""

    def __init__(self) -> None:
        self.kept: dict[str, list[bytes]] = {channel: [] for channel in CHANNELS}
        self._shapes: Counter[tuple[str, str]] = Counter()

    def keep(self, channel: str, data: bytes) -> None:
        shape = (channel, _shape(msgspec.msgpack.decode(data)))
        self._shapes[shape] += 1
        if self._shapes[shape] <= _ALIKE and len(data) <= 4096 and data not in self.kept[channel]:
            self.kept[channel].append(data)

    def listen(self) -> None:
        """Overhear this process's clients from now on."""
        encode, downlink, lifeline = m.encode, m.decode_downlink, m.decode_lifeline

        def encoding(message: msgspec.Struct) -> bytes:
            data = encode(message)
            self.keep("call" if isinstance(message, m.Call) else "lifeline", data)
            return data

        def heard(channel: str, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
            def decoding(data: bytes) -> Any:
                message = decode(data)
                if not isinstance(getattr(message, "body", None), m.Report):  # which describes this machine
                    self.keep(channel, data)
                return message

            return decoding

        m.encode = encoding
        m.decode_downlink = heard("downlink", downlink)
        m.decode_lifeline = heard("lifeline", lifeline)

    def write(self) -> None:
        for channel, messages in self.kept.items():
            (CORPUS / f"{channel}.hex").write_text("".join(f"{data.hex()}\n" for data in messages))


def _shape(tree: Any) -> str:
    """What a message is made of: names and types, no values but the tags."""
    if isinstance(tree, dict):
        return "{" + ",".join(f"{k}:{v if k == 't' else _shape(v)}" for k, v in sorted(tree.items())) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(sorted({_shape(v) for v in tree})) + "]"
    return type(tree).__name__


def work(directory: Path, recorder: Recorder) -> None:
    """Something of everything that clients do."""
    with (
        mmbroker.connect(directory, name="engine") as engine,
        mmbroker.connect(directory, name="worker-0") as worker,
    ):
        table = engine.attach(engine="engine-a", access="readonly")
        x = torch.arange(6000, dtype=torch.float32).reshape(2, 3000)
        helds = worker.put_many([x, x + 1, x], to="engine-a")
        helds += [
            worker.put_list([x, x.to(torch.bfloat16)], to="engine-a", modality="audio"),
            worker.put(x + 2, to="engine-a", private=True, key="a name"),
            worker.put(torch.empty(0)),
        ]
        for held in helds:
            recorder.keep("reference", msgspec.msgpack.encode(held.ref.to_wire()))
        for held in helds[:4]:
            with table.take(held.ref) as use:
                assert use.tensors
        worker.lookup_many([held.key for held in helds] + [mmbroker.Key.derived(b"d" * 32)], to="engine-a")
        with worker.get_or_create("in place", (10,), torch.int64).lease as lease:
            kept = lease.tensor
            lease.seal()
        worker.get_or_create("aborted", (10,), torch.int64).lease.abort()
        del kept
        for make in (lambda: worker.put(x, to="nobody"), lambda: worker.put(x, key="a name")):
            with suppress(mmbroker.BrokerError):
                make()
        for held in helds:
            held.drop()
        table.close()
    tier(directory)
    link = Link(directory, "operator", None)
    link.call(m.Status(3))
    link.call(m.Released(1))
    link.close()


def tier(directory: Path) -> None:
    """What one client asks for, a tier brings, or has not got either; and reads what was made here."""
    mover = Link(directory, "mover")
    mover.on_granted = lambda grants, _: mover.cast(m.Ack([grant.ref.hold for grant in grants]))
    mover.on_dismissed = lambda holds: mover.cast(m.Settle(holds))

    def bring(wanted: list[m.Wanted]) -> None:
        found, *absent = wanted
        mover.call(m.Tier(False, 1.0))
        created = mover.call(
            m.Create([m.Item(found.key, tensor_form("uint8", (0,), "image"), found.promise)])
        )
        assert isinstance(created, m.Created) and isinstance(created.results[0], m.Leased)
        mover.call(m.Seal([m.Sealing(created.results[0].lease, cost=7)]))
        mover.cast(m.Abort([one.promise for one in absent]))

    mover.on_sought = bring
    mover.call(m.Tier(True, 1.0))
    mover.call(m.Attach("tier", 0, 1, access="readonly"))
    keys = [mmbroker.Key.derived(name * 32) for name in (b"f", b"a")]
    with mmbroker.connect(directory, name="worker-1") as worker:
        worker.lookup_many(keys)
        with worker.put(torch.arange(9), key=mmbroker.Key.derived(b"m" * 32)):
            mover.call(m.Lookup([keys[0], mmbroker.Key.derived(b"m" * 32)], "tier"))
    mover.call(m.Tier(True))
    mover.close()


def main() -> None:
    recorder = Recorder()
    for (channel, _), message in SAMPLES.items():
        recorder.keep(channel, m.encode(message))
    for ref in (REF, REF_PARTS):
        recorder.keep("reference", msgspec.msgpack.encode(ref.to_wire()))
    root = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
    broker = BrokerProcess(root, {"host_mib": 64, "segment_mib": 4, "name": "corpus"}, [], {})
    try:
        broker.wait_ready()
        recorder.listen()
        work(broker.directory, recorder)
        with RawClient(broker.directory) as client:
            client.call(m.Shutdown())
        broker.wait()
    finally:
        broker.kill()
        broker.clean_up()
        shutil.rmtree(root)
    recorder.write()
    print({channel: len(messages) for channel, messages in recorder.kept.items()})


if __name__ == "__main__":
    main()
