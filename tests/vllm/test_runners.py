"""The connector in what vLLM's two model runners do around their encoder: the real code of both, a made-up encoder.

The second runner needs Triton, so no engine on the CPU has it; its connector and its encoder cache stand alone.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmbroker.adapters.vllm.saving import Saves
from mmbroker.adapters.vllm.worker import WorkerHalf
from mmbroker.proto.reference import Reference
from tests.kit import BrokerProcess, eventually

from .test_steps import ENGINE, key, output

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Imported with the warnings that its libraries have, and before any test is searched for leaks."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        import vllm.v1.worker.ec_connector_model_runner_mixin
        import vllm.v1.worker.gpu.ec_connector
        import vllm.v1.worker.gpu.mm.encoder_cache  # noqa: F401


#: A runner's encoder cache, and what it does around the encoder in a step.
Runner = tuple[dict[str, Any], Callable[[Any], AbstractContextManager[Any]], Callable[[str], None]]


def first() -> Runner:
    from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin as Mixin

    cache: dict[str, Any] = {}
    return (
        cache,
        lambda scheduled: Mixin.maybe_get_ec_connector_output(scheduled, cache),
        lambda identifier: Mixin.maybe_save_ec_to_connector(cache, identifier),
    )


def second() -> Runner:
    from vllm.v1.worker.gpu.ec_connector import ActiveECConnector, get_ec_connector
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

    cache = EncoderCache()
    config: Any = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=False))
    around = get_ec_connector(config, cache)
    assert isinstance(around, ActiveECConnector)
    return (
        cache.encoder_outputs,
        around.maybe_get_output,
        lambda identifier: None,
    )  # it finds the new ones itself


@pytest.fixture
def connector(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The one of this process, with a worker's half and the metadata's way to it, and no engine around it."""
    from vllm.distributed.ec_transfer import ec_transfer_state
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from mmbroker.adapters.vllm.connector import MMBrokerConnector

    config: Any = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            ec_connector_extra_config={}, is_ec_producer=True, is_ec_consumer=True, engine_id="x"
        ),
        model_config=SimpleNamespace(is_multimodal_model=False, model="text"),
    )
    connector = MMBrokerConnector(config, ECConnectorRole.WORKER)
    assert connector.worker is None  # such a model has none of its own
    saves = Saves(key, 64 << 20)
    connector.worker = WorkerHalf(str(broker.directory), ENGINE, 0, 1, "cpu", saves)
    eventually(lambda: connector.worker._joining.there, "a broker")
    monkeypatch.setattr(ec_transfer_state, "_EC_CONNECTOR_AGENT", connector)
    yield connector
    connector.shutdown()


class Steps:
    """Steps of one runner."""

    def __init__(self, runner: Runner) -> None:
        self.cache, self._around, self._saved = runner
        self.encoded: list[str] = []

    def step(self, *wanted: str, loads: list[tuple[str, Reference]]) -> Any:
        """What the connector told the scheduler."""
        from mmbroker.adapters.vllm.connector import Loads

        told = {identifier for identifier, _ in loads}
        todo = [identifier for identifier in wanted if identifier not in told]
        scheduled: Any = SimpleNamespace(
            ec_connector_metadata=Loads(loads, encodes=bool(todo)), finished_req_ids=set()
        )
        with self._around(scheduled) as answer:
            for identifier in todo:
                self.encoded.append(identifier)
                self.cache[identifier] = output(identifier)
                self._saved(identifier)
            for identifier in wanted:
                assert torch.equal(self.cache[identifier], output(identifier))
        return answer.ec_connector_worker_meta


@pytest.mark.balanced
@pytest.mark.parametrize("runner", [first, second])
def test_a_runner_saves_what_it_encodes_and_loads_what_it_is_told(
    runner: Callable[[], Runner], connector: Any
) -> None:
    steps = Steps(runner())
    saves = connector.worker._saves
    assert steps.step("a", "b", loads=[]) is None
    eventually(lambda: saves.counts["saved"] == 2, "saves")
    steps.cache.clear()
    client = connector.worker._joining.client
    held = client.lookup(key("a"), to=ENGINE)
    told = steps.step("a", "c", loads=[("a", held.ref)])
    assert told.identifiers == ["a"]
    held.drop()
    eventually(lambda: saves.counts["saved"] == 3, "the new one alone saved")
    assert steps.encoded == ["a", "b", "c"]
    for identifier in "bc":
        with client.lookup(key(identifier), to=ENGINE) as held, connector.worker._table.take(held.ref) as use:
            assert torch.equal(use.tensor, output(identifier))


def test_a_worker_names_its_gpu_in_the_thread_that_has_it(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's current GPU is a thread's own: in one that is new it is the first, whichever rank this is."""
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    from mmbroker.adapters.vllm import connector as module

    named: list[tuple[str, threading.Thread]] = []

    def spell_out(device: str) -> str:
        named.append((device, threading.current_thread()))
        return "cuda:1"

    group = SimpleNamespace(is_first_rank=True, rank_in_group=1, world_size=2)
    made: list[Any] = []
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda platform: True)
    monkeypatch.setattr(module, "spell_out", spell_out)
    monkeypatch.setattr(module.seams, "keep_weights", lambda: None)
    monkeypatch.setattr(module.settings, "replica_name", lambda config: ENGINE)
    monkeypatch.setattr(module, "WorkerHalf", lambda *arguments: made.append(arguments))
    worker, connector.worker = connector.worker, None
    connector._begin_worker(None, module.settings.read({}))
    connector.worker = worker
    assert made == [(None, ENGINE, 1, 2, "cuda:1", None)]
    assert named == [("cuda", threading.current_thread())]
