"""The worker's half of vLLM's connector where vLLM's tensors are on a GPU: what it saves, and what it loads.

It needs no vLLM; the steps of its model runners are in `tests/vllm/test_runners.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.adapters.fingerprint import derived_key, fingerprint
from mmbroker.adapters.vllm.fetching import Fetching
from mmbroker.adapters.vllm.saving import MODALITY, Saves
from mmbroker.adapters.vllm.worker import WorkerHalf
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Key
from tests.cuda.rig import MIB
from tests.gpu.bench import Bench
from tests.gpu.test_table import in_thread
from tests.kit import RawClient, eventually
from tests.rig import same, values

ENGINE = "vllm-gpu"


def key(identifier: str) -> Key:
    return derived_key(fingerprint(kind="test"), identifier.encode())


def output(identifier: str, rows: int = 64) -> torch.Tensor:
    """What an encoder makes of it: 1 MiB, if it has 64 rows."""
    return values(torch.bfloat16, (rows, 8192), seed=sum(identifier.encode()))


class Worker:
    """The worker's half of a rank on the bench's GPU, its encoder cache, and what would be its scheduler's half."""

    def __init__(self, bench: Bench, budget: int = 64 * MIB, there: str = "") -> None:
        self.bench = bench
        self.saves = Saves(key, budget, Fetching("cuda:0"))
        self.half = WorkerHalf(
            str(bench.broker.directory), ENGINE, 0, 1, "cuda:0", self.saves, there or bench.driven.device
        )
        self.cache: dict[str, Any] = {}
        eventually(lambda: self.half._joining.there, "a broker")

    @property
    def table(self) -> mmbroker.FeatureTable:
        assert self.half._table is not None
        return self.half._table

    def encode(self, *identifiers: str) -> None:
        """One step whose encoder makes these."""
        self.half.encoding()
        for identifier in identifiers:
            self.cache[identifier] = self.bench.device_tensor(output(identifier))
            self.half.save(self.cache, identifier)
        self.half.encoded()

    def saved(self, count: int) -> None:
        eventually(lambda: self.saves.counts["saved"] == count, "saves")

    def held(self, identifier: str) -> mmbroker.Held:
        found = self.bench.client.lookup(key(identifier), to=ENGINE)
        assert found is not None
        return found

    def load(self, identifier: str) -> torch.Tensor:
        """One step that loads this; nothing but the cache holds it afterwards."""
        with self.held(identifier) as held:
            self.half.load(self.cache, [(identifier, held.ref)])
        found = self.cache[identifier]
        assert isinstance(found, torch.Tensor)
        return found

    def close(self) -> None:
        self.cache.clear()
        self.half.close()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(bench: Bench, **more: Any) -> Worker:
        made.append(Worker(bench, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
    gc.collect()


@pytest.fixture
def worker(bench: Bench, make_worker: Callable[..., Worker]) -> Worker:
    return make_worker(bench)


@pytest.fixture
def faulty(faked: Bench, make_worker: Callable[..., Worker]) -> Worker:
    """For what only the fake can be ordered to do."""
    return make_worker(faked)


def on_host(bench: Bench, identifier: str) -> torch.Tensor:
    """What the broker has, as a rank on the CPU reads it."""
    table = bench.attach("reader", device="cpu", access="copy")
    with bench.client.lookup(key(identifier), to="reader") as held, table.take(held.ref) as use:  # type: ignore[union-attr]
        found = use.tensor
    assert isinstance(found, torch.Tensor)
    return found


# --- saves ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_onto_the_device(worker: Worker) -> None:
    worker.encode("a", "b")
    worker.saved(2)
    worker.cache.clear()
    for identifier in ("a", "b"):
        loaded = worker.load(identifier)
        assert loaded.device == torch.device(worker.bench.driven.device)
        assert same(loaded.cpu(), output(identifier))
    assert worker.table.path == "device"
    assert worker.table.stats()["loads"] == 2 and not worker.table.stats()["load_failures"]
    assert worker.half.take_loaded() == ["a", "b"]
    assert worker.half.counts == {"worker_loads": 2, "worker_load_errors": 0}


def test_outputs_of_many_pieces_and_views(worker: Worker) -> None:
    """Larger than what is copied at once, cut from a batch's, transposed, or without a row."""
    whole = worker.bench.device_tensor(values(torch.float32, (3000, 1000)))
    made = {"large": whole, "cut": whole[7:19], "turned": whole[:100].T, "none": whole[:0]}
    for identifier, tensor in made.items():
        worker.half.save({identifier: tensor}, identifier)
    worker.half.encoded()
    worker.saved(4)
    for identifier, tensor in made.items():
        assert same(worker.load(identifier).cpu(), tensor.cpu().contiguous())


def test_a_save_waits_for_the_stream_that_writes_it_and_the_step_does_not(worker: Worker) -> None:
    driven, bench = worker.bench.driven, worker.bench
    made = output("late")
    with (
        driven.stream() as stream,
        driven.memory(2 * MIB) as address,
        driven.pinned(made.nbytes) as source,
    ):
        source.view[:] = made.view(torch.uint8).numpy().tobytes()
        tensor = bench.driver.tensor(address, made.dtype, made.shape, driven.uuid, None)
        with driven.blocked(stream):
            bench.driver.copy(address, source.address, made.nbytes, stream)
            with driven.current(stream):
                worker.half.save({"late": tensor}, "late")
                worker.half.encoded()  # comes back, though the encoder has not run
            assert worker.saves.pending == made.nbytes
            assert bench.client.lookup(key("late")) is None
        worker.saved(1)
        driven.finish(stream)
        driven.write(address, bytes(made.nbytes))  # it may be overwritten as soon as it is saved
        del tensor
        gc.collect()
    assert same(on_host(bench, "late"), made)


def test_no_step_waits_for_a_copy(faulty: Worker) -> None:
    """Not even if the GPU does nothing at all; what is beyond the budget is dropped meanwhile, and counted."""
    faulty.saves._budget = 2 * output("a").nbytes
    with faulty.bench.driven.fake.engine.held():
        end = in_thread(lambda: _in_context(faulty, lambda: faulty.encode("a", "b", "c")))
        end()
        assert faulty.saves.pending == 2 * output("a").nbytes
        assert faulty.saves.counts["save_over_budget"] == 1
    faulty.saved(2)
    assert faulty.bench.client.lookup(key("c")) is None


def _in_context(worker: Worker, job: Callable[[], None]) -> None:
    worker.bench.driver.use(worker.bench.driven.uuid)
    job()


def test_a_tensor_that_is_freed_right_after_the_step(worker: Worker) -> None:
    for round_ in range(20):
        worker.encode(f"freed-{round_}")
        worker.cache.clear()
        worker.bench.device_tensor(torch.zeros(64, 8192, dtype=torch.bfloat16)).add_(
            1
        )  # takes its memory, if it can
    worker.saved(20)
    for round_ in range(20):
        assert same(worker.load(f"freed-{round_}").cpu(), output(f"freed-{round_}"))


# --- loads ----------------------------------------------------------------------------------------------------------


def test_a_loaded_tensor_is_private(worker: Worker) -> None:
    """vLLM may write into it and keep it over the request's end and the entry's eviction; others see nothing of it."""
    worker.encode("a")
    worker.saved(1)
    worker.cache.clear()
    first = worker.load("a")
    first.zero_()
    del worker.cache["a"]
    assert same(worker.load("a").cpu(), output("a"))
    worker.bench.settled(worker.table)
    with RawClient(worker.bench.broker.directory, name="evict") as client:
        client.call(m.Evict(1024))
    assert worker.bench.client.lookup(key("a")) is None
    assert not first.any()
    assert same(worker.cache["a"].cpu(), output("a"))


def test_what_is_in_the_cache_is_not_loaded_again(worker: Worker) -> None:
    worker.encode("a")
    worker.saved(1)
    there = worker.cache["a"]
    assert worker.load("a") is there
    assert worker.half.counts["worker_loads"] == 0
    assert worker.half.take_loaded() == ["a"]


FAULTS = {
    "import refused": ("cuMemImportFromShareableHandle", "CUDA_ERROR_NOT_PERMITTED", "pinned"),
    "no room to map": ("cuMemMap", "CUDA_ERROR_OUT_OF_MEMORY", "pinned"),
    "nothing pinned": ("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", "host"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_where_the_device_cannot_be_reached_it_comes_from_the_host(
    fault: str, faked: Bench, make_worker: Callable[..., Worker]
) -> None:
    call, code, path = FAULTS[fault]
    filler = make_worker(faked)
    filler.encode("a")
    filler.saved(1)
    filler.close()
    faked.driven.fake.faults.fail(call, code)
    worker = make_worker(faked)
    assert worker.table.path == path
    assert call in faked.rank(ENGINE)["why"]
    loaded = worker.load("a")
    loaded.zero_()
    del worker.cache["a"]
    assert same(worker.load("a"), output("a"))
    assert worker.half.counts == {"worker_loads": 2, "worker_load_errors": 0}
    worker.encode("b")  # a save that cannot pin costs that output alone
    if path == "host":
        eventually(lambda: worker.saves.counts["save_errors"] == 1, "a save that fails")
        faked.driven.fake.faults.heal()
        worker.encode("b")
    worker.saved(1)
    assert worker.saves.pending == 0


def test_what_comes_from_the_host_is_brought_to_where_vllm_has_its_tensors(
    faked: Bench, make_worker: Callable[..., Worker]
) -> None:
    """The fake's GPU is no device of torch's, so another stands for it."""
    filler = make_worker(faked)
    filler.encode("a")
    filler.saved(1)
    filler.close()
    assert make_worker(faked, there="meta").load("a").device.type == "meta"


def test_a_device_that_is_full_when_it_is_loaded(faulty: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has no memory for stays on the host, is counted, and vLLM gets it from there."""
    faulty.encode("a")
    faulty.saved(1)
    faulty.cache.clear()
    full = threading.Event()
    empty = faulty.bench.driven.fake.empty

    def no_memory(*arguments: Any) -> torch.Tensor:
        if full.is_set():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*arguments)

    monkeypatch.setattr(faulty.bench.driven.fake, "empty", no_memory)
    full.set()
    assert same(faulty.load("a"), output("a"))
    assert faulty.table.stats()["load_failures"] == 1
    full.clear()
    del faulty.cache["a"]
    assert same(faulty.load("a"), output("a"))
    assert faulty.table.stats()["load_failures"] == 1
    assert faulty.half.counts == {"worker_loads": 2, "worker_load_errors": 0}


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuMemcpyAsync"])
def test_a_save_that_the_driver_refuses_costs_that_save_alone(call: str, faulty: Worker) -> None:
    faulty.encode("warm")
    faulty.saved(1)
    faulty.bench.driven.fake.faults.fail(call, "CUDA_ERROR_INVALID_VALUE", 1)
    faulty.encode("a")
    eventually(lambda: faulty.saves.counts["save_errors"] == 1, "a save that fails")
    assert faulty.saves.pending == 0
    faulty.encode("b")
    faulty.saved(2)
    assert same(faulty.load("b"), output("b"))


@pytest.mark.parametrize("fault", ["killed", "restarted"])
def test_the_broker_ends(fault: str, worker: Worker) -> None:
    """What vLLM has stays; what was promised by the dead broker is there; nothing is saved, until there is another."""
    bench = worker.bench
    worker.encode("a", "b")
    worker.saved(2)
    worker.cache.clear()
    there = worker.load("a")
    held = worker.held("b")
    bench.broker.kill()
    eventually(lambda: worker.half._joining.there is None, "the loss is noticed")
    worker.half.load(worker.cache, [("b", held.ref)])
    assert same(worker.cache["b"].cpu(), output("b"))
    assert same(there.cpu(), output("a"))
    worker.encode("c")
    assert worker.saves.counts["save_absent"] == 1
    if fault == "restarted":
        bench.start()
        eventually(lambda: worker.half._joining.there and bench.client.connected, "the next broker")
        worker.encode("c")
        worker.saved(3)
        worker.cache.clear()
        assert same(worker.load("c").cpu(), output("c"))
    held.drop()


def test_outputs_say_what_they_are(worker: Worker) -> None:
    worker.encode("a")
    worker.saved(1)
    with worker.held("a") as held:
        assert (held.ref.dtype, held.ref.shape) == ("bfloat16", (64, 8192))
    assert MODALITY == "encoder output"


def test_ends_with_saves_under_way(bench: Bench, make_worker: Callable[..., Worker]) -> None:
    """They are put, and everything that was pinned or made is given back."""
    worker = make_worker(bench)
    worker.encode(*"abcd")
    worker.close()
    assert worker.saves.counts["saved"] == 4
    assert worker.saves._fetching is not None and worker.saves._fetching._stage is None
