"""What a feature and a lookup cost a broker: bytes of its books, and features a second of one core's time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

import mmbroker
from mmbroker import events as e
from mmbroker.proto import messages as m
from mmbroker.proto.digest import tree_hash
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key
from mmbroker.state import Broker

from .operators import cpu_s
from .processes import Workshop
from .producer import IdleRank

#: Patches of a picture of 1024x768 as the Qwen-VL family has it, and floats in each.
SHAPE = (3996, 1176)
#: Bytes that an adapter seals beside a feature: where its tokens are, and the like.
EXTRA = 200
BATCH = 64
ENGINE = "engine-readonly"
KEYS = 8
#: Processes that ask; the first of them has the books before.
WORKERS = ("first", "second")

#: What is asked, by name: keys of a call, and what comes of it.
ASKED = {
    "lookup, nobody has it": ("absent", 1),
    "lookup of 8, nobody has them": ("absent", KEYS),
    "lookup of 8, hits, dropped": ("here", KEYS),
    "lookup of 8, hits, granted to a rank, dropped": ("granted", KEYS),
    "promise, given back": ("promised", 1),
}


class Books:
    """The broker's real state machine, without its sockets and segments: what is kept in memory is the same."""

    def __init__(self) -> None:
        limits = e.Limits(
            host_bytes=1 << 50, segment_bytes=1 << 44, cached_features=1 << 40, features_per_session=1 << 40,
            features_per_engine=1 << 40, features_per_namespace=1 << 40,
        )  # fmt: skip
        self._broker = Broker(limits, b"boot" * 4)
        self._seqs = count(1)
        self._keys = count()
        for session, name in ((1, "worker"), (2, "scheduler")):
            self._broker.handle(e.SessionOpened(session, 0, session, name, "bench"), 0.0)
        self._call(2, m.Attach(ENGINE, 0, 1))

    def _call(self, session: int, body: m.Body) -> m.Reply:
        """The answer; a rank acknowledges what it is granted, and segments are there at once."""
        todo = self._broker.handle(e.Called(session, next(self._seqs), 5.0, body), 0.0)
        answer: m.Reply | None = None
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, e.Grow):
                todo += self._broker.handle(e.SegmentReady(effect.segment), 0.0)
            elif isinstance(effect, e.Notify) and isinstance(effect.notice, m.Granted):
                holds = [grant.ref.hold for grant in effect.notice.grants]
                todo += self._broker.handle(e.Called(2, 0, 0.0, m.Ack(holds)), 0.0)
            elif isinstance(effect, e.Respond):
                answer = effect.body
        assert answer is not None and not isinstance(answer, m.Failed), answer
        return answer

    def fill(self, features: int, held: bool) -> float:
        """Bytes of memory that each of so many more features takes: `held` for an engine, or cached."""
        form = Form("float32", SHAPE, SHAPE[0] * SHAPE[1] * 4, "image")
        before = _resident()
        for _ in range(features // BATCH):
            items = [m.Item(Key.derived(next(self._keys).to_bytes(32, "big")), form) for _ in range(BATCH)]
            created = self._call(1, m.Create(items, to=ENGINE if held else None))
            assert isinstance(created, m.Created)
            leases = [each.lease for each in created.results if isinstance(each, m.Leased)]
            sealing = [m.Sealing(lease, extra=os.urandom(EXTRA), cost=40_000) for lease in leases]
            sealed = self._call(1, m.Seal(sealing, to=ENGINE if held else None))
            assert isinstance(sealed, m.Sealed)
            if not held:
                self._call(1, m.Drop([ref.hold for ref in sealed.refs]))
        return (_resident() - before) / (features // BATCH * BATCH)

    def close(self) -> None:
        pass


def _resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Asker:
    """A client that asks as fast as it is answered."""

    def __init__(self, broker: str, number: int) -> None:
        self._client = mmbroker.connect(broker, name=f"bench-asker-{number}", timeout=30.0)
        self._here = [Key.derived(f"{number}/{each}".encode().rjust(32)) for each in range(KEYS)]
        self._number = number
        for key in self._here:
            self._client.put(torch.zeros(1024), key=key).drop()

    def ask(self, kind: str, keys: int, seconds: float) -> int:
        """Ask for so long; how many keys that were."""
        return _until(seconds, self._asking(kind, keys)) * keys

    def _asking(self, kind: str, keys: int) -> Callable[[], object]:
        client, absent = self._client, [Key.derived(bytes([self._number, each] * 16)) for each in range(keys)]

        def hit(to: str | None) -> None:
            for held in client.lookup_many(self._here, to=to):
                assert held is not None
                held.drop()

        def promise() -> None:
            (promised,) = client.get_or_promise(absent)
            assert isinstance(promised, mmbroker.Promise)
            promised.drop()

        asking: dict[str, Callable[[], object]] = {
            "absent": lambda: client.lookup_many(absent),
            "here": lambda: hit(None),
            "granted": lambda: hit(ENGINE),
            "promised": promise,
        }
        return asking[kind]

    def close(self) -> None:
        self._client.close()


def hashing(seconds: float) -> float:
    """GB of a feature that one core hashes in a second."""
    data = memoryview(os.urandom(8 << 20))
    start = time.thread_time()
    done = _until(seconds, lambda: tree_hash(data))
    return round(done * len(data) / 1e9 / (time.thread_time() - start), 3)


def _until(seconds: float, act: Callable[[], object]) -> int:
    """Do it again and again for so long; how often it was."""
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        act()
        done += 1
    return done


def books(shop: Workshop, features: int) -> dict[str, Any]:
    """Bytes of the broker's books, for each feature of a cache and for each that an engine has."""
    with shop.worker("first").make(Books) as made:
        return {
            "features": features,
            "extra_bytes": EXTRA,
            "cached_bytes": round(made.call("fill", features, False)),
            "held_bytes": round(made.call("fill", features, True)),
        }


def lookups(shop: Workshop, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Features a second of all clients, and of one core's time of the broker."""
    lines = []
    with shop.broker(host_mib=64) as broker, shop.worker("rank").make(IdleRank, broker.path, "readonly"):
        askers = [shop.worker(name).make(Asker, broker.path, n) for n, name in enumerate(WORKERS)]
        for name, (kind, keys) in ASKED.items():
            say(f"broker: {name}")
            before, start = cpu_s(broker.pid), time.perf_counter()
            for asker in askers:
                asker.start("ask", kind, keys, seconds)
            asked = sum(asker.result() for asker in askers)
            took, busy = time.perf_counter() - start, cpu_s(broker.pid) - before
            lines.append(
                {
                    "what": name,
                    "kind": kind,
                    "keys": keys,
                    "clients": len(askers),
                    "per_second": round(asked / took),
                    "per_core_second": round(asked / busy),
                }
            )
        for asker in askers:
            asker.call("close")
    return lines
