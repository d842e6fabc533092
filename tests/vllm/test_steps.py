"""Both halves of the connector with a real broker, and a made-up vLLM that goes through their steps: whatever goes
wrong at whichever step, a load that was promised is there, and a request is served or fails alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmbroker.adapters.fingerprint import derived_key, fingerprint
from mmbroker.adapters.span import Span
from mmbroker.adapters.vllm.joining import Joining
from mmbroker.adapters.vllm.lookups import Lookups
from mmbroker.adapters.vllm.saving import Saves
from mmbroker.adapters.vllm.scheduler import SchedulerHalf
from mmbroker.adapters.vllm.worker import WorkerHalf
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, RawClient, eventually

from .fakes import Request, is_bare, request

TOKENS = 4
ENGINE = "vllm-test"


def key(identifier: str) -> Key:
    return derived_key(fingerprint(kind="test"), identifier.encode())


def output(identifier: str, tokens: int = TOKENS) -> torch.Tensor:
    """What the encoder makes of it."""
    generator = torch.Generator().manual_seed(sum(identifier.encode()))
    return torch.rand(tokens, 4096, generator=generator)


class Engine:
    """The connector of one engine, both halves in this process, and an encoder that counts."""

    def __init__(self, path: Path, name: str = ENGINE, budget: int = 1 << 20, wait: float = 0.25) -> None:
        self.joining = joining = Joining(str(path), f"{name}/scheduler", says=True)
        self.lookups = Lookups(lambda: joining.there, name, key)
        self.half = SchedulerHalf(self.lookups, is_bare, wait)
        self.saves = Saves(key, budget)
        self.worker = WorkerHalf(str(path), name, 0, 1, "cpu", self.saves)
        self.cache: dict[str, Any] = {}
        self.encoded: list[str] = []

    def joined(self) -> Engine:
        eventually(lambda: self.joining.there and self.worker._joining.there, "a broker")
        return self

    def serve(self, one: Request, at: Callable[[str], None] = lambda step: None) -> bool:
        """Steps of one request; False if it failed alone. `at` is called before each."""
        at("arrival")
        self.lookups.expect([feature.identifier for feature in one.mm_features])
        at("lookup")
        outcome: list[str] = []

        def decided() -> bool:
            if self.half.ensure_cache_available(one, 0):
                outcome.append("ready")
            elif one.request_id in self.half.take_unavailable_requests():
                outcome.append("unavailable")
            return bool(outcome)

        eventually(decided, "a request that is scheduled, or fails")
        if outcome == ["unavailable"]:
            self.half.request_finished(one.request_id)
            return False
        todo = []
        for index, feature in enumerate(one.mm_features):  # one pass of vLLM's scheduler
            if not self.half.has_cache_item(feature.identifier):
                assert not is_bare(feature), (
                    "a request without pixels reached the encoder: the engine is dead"
                )
                todo.append(feature.identifier)
            self.half.update_state_after_alloc(one, index)
        loads = self.half.build_loads([])
        at("load")
        self.worker.load(self.cache, loads)
        self.worker.encoding()
        for identifier in todo:
            if identifier not in self.cache:
                self.encoded.append(identifier)
                self.cache[identifier] = output(identifier)
                self.worker.save(self.cache, identifier)
        self.worker.encoded()
        at("use")
        for feature in one.mm_features:
            assert torch.equal(self.cache[feature.identifier], output(feature.identifier))
        self.half.loaded(self.worker.take_loaded())
        at("end")
        self.half.request_finished(one.request_id)
        freed = list(self.cache)
        self.cache.clear()
        self.half.build_loads(freed)
        return True

    def close(self) -> None:
        self.lookups.close()
        self.joining.close()
        self.worker.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(path: Path, **more: Any) -> Engine:
        made.append(Engine(path, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def saved(one: Engine, count: int) -> None:
    eventually(lambda: one.saves.counts["saved"] == count, "saves")


def evict(broker: BrokerProcess) -> None:
    with RawClient(broker.directory, name="evict") as client:
        client.call(m.Evict(1024))


def at_rest(broker: BrokerProcess) -> None:
    def rests() -> bool:
        status = broker.status()
        return not status["holds"] and not any(session["grants"] for session in status["sessions"])

    eventually(rests, "no hold and no grant is left")


@pytest.mark.balanced
def test_what_one_engine_encoded_another_loads(broker: BrokerProcess, engine: Callable[..., Engine]) -> None:
    first = engine(broker.directory, name="vllm-a").joined()
    assert first.serve(request("r", "a", "b"))
    saved(first, 2)
    second = engine(broker.directory, name="vllm-b").joined()
    assert second.serve(request("r", "a", "b"))
    assert second.serve(request("s", "b", bare=True))
    assert (first.encoded, second.encoded) == (["a", "b"], [])
    at_rest(broker)


STEPS = ("arrival", "lookup", "load", "use", "end")


@pytest.mark.parametrize("bare", [False, True], ids=["pixels", "bare"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["evicted", "killed", "restarted"])
def test_whatever_happens_at_whichever_step(
    fault: str, step: str, bare: bool, start_broker: StartBroker, engine: Callable[..., Engine]
) -> None:
    broker = start_broker()
    one = engine(broker.directory).joined()
    assert one.serve(request("fill", "a"))
    saved(one, 1)
    running = [broker]

    def strike(now: str) -> None:
        if now != step:
            return
        if fault == "evicted":
            evict(running[-1])
            return
        running[-1].kill()
        if fault == "restarted":
            running.append(start_broker())

    served = one.serve(request("struck", "a", bare=bare), strike)
    assert served or bare, "a request that has its pixels is served"
    if not served:
        assert one.serve(request("struck", "a")), "sent again with its pixels, it is"
    if fault != "killed":
        one.joined()
        assert one.serve(request("later", "a"))
        at_rest(running[-1])
    assert set(one.encoded) == {"a"}


def test_the_next_life_of_an_engine_finds_what_the_last_one_left(
    broker: BrokerProcess, engine: Callable[..., Engine]
) -> None:
    last = engine(broker.directory).joined()
    last.serve(request("r", "a"))
    saved(last, 1)
    last.close()
    fresh = engine(broker.directory).joined()
    assert fresh.serve(request("r", "a")) and not fresh.encoded


def test_saves_beyond_the_budget_are_dropped_and_counted(
    broker: BrokerProcess, engine: Callable[..., Engine]
) -> None:
    one = engine(broker.directory, budget=output("a").nbytes).joined()
    one.saves._stop, thread = True, one.saves._thread
    one.saves._bell.set()
    assert thread is not None
    thread.join()  # nothing is taken off the line now
    one.serve(request("r", "a", "b"))
    assert one.saves.pending == output("a").nbytes
    assert one.saves.counts["save_over_budget"] == 1


def test_a_pool_that_is_full_costs_the_save_alone(
    start_broker: StartBroker, engine: Callable[..., Engine]
) -> None:
    broker = start_broker(host_mib=4)
    one = engine(broker.directory, budget=64 << 20).joined()
    one.worker.save({"large": torch.zeros(2 << 20)}, "large")
    one.worker.encoded()
    eventually(lambda: one.saves.counts["save_errors"] == 1, "a save that fails")
    assert one.saves.pending == 0
    assert one.serve(request("r", "a"))
    saved(one, 1)


def test_what_the_encoder_took_is_stated_with_each_output(
    broker: BrokerProcess, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the broker keeps longer what is dearer to make again: its share in what made all of the step's."""
    monkeypatch.setattr(Span, "seconds", lambda span: 0.5)
    one = engine(broker.directory).joined()
    client, stated = one.worker._joining.client, []
    assert client is not None
    put_many = client.put_many

    def noted(tensors: Any, **options: Any) -> Any:
        stated.extend(options["cost"])
        return put_many(tensors, **options)

    monkeypatch.setattr(client, "put_many", noted)
    one.worker.encoding()
    for identifier, tokens in (("a", 3), ("b", 1)):
        one.worker.save({identifier: output(identifier, tokens)}, identifier)
    one.worker.encoded()
    one.worker.save({"c": output("c")}, "c")  # nobody has said that the encoder runs
    one.worker.encoded()
    saved(one, 3)
    assert stated == [375_000, 125_000, None]


def test_without_a_broker_it_says_so_once_and_joins_later(
    start_broker: StartBroker,
    engine: Callable[..., Engine],
    broker_root: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = engine(broker_root / "cpu")

    def said() -> int:
        return sum("has no broker" in record.getMessage() for record in caplog.records)

    assert one.serve(request("r", "a"))
    assert one.saves.counts["save_absent"] == 1
    eventually(said, "a warning")
    start_broker()
    one.joined()
    assert one.serve(request("r", "a"))
    saved(one, 1)
    assert said() == 1
