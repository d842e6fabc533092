"""What a broker is told its GPU is called: it serves that one, or ends with one sentence that names what exists."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import StartBroker
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import SETTINGS, Bench
from tests.gpu.conftest import UUIDS


def refused(start_broker: StartBroker, gpu: str, env: dict[str, str] | None = None) -> str:
    """What a broker says that does not start."""
    broker = start_broker(wait=False, **{**SETTINGS, "gpu": gpu}, env=env)
    assert broker.wait() == 1
    assert broker.output() == ""
    assert broker.log().count("\n") == 1
    assert "without --gpu" in broker.log()
    return broker.log()


@pytest.mark.parametrize(
    "name", ["99", "GPU-00000000-dead-4000-8000-000000000000", "MIG-1", "all", "0,1", "-1"]
)
def test_there_is_no_such_gpu(driven: Driven, start_broker: StartBroker, name: str) -> None:
    said = refused(start_broker, name)
    assert name in said and all(device.uuid in said for device in driven.driver.devices())


@pytest.mark.parametrize("shown", ["", "1", "1,9,0", "MIG-1", UUIDS[1]])
def test_a_gpu_that_is_not_shown(fake: Driven, start_broker: StartBroker, shown: str) -> None:
    said = refused(start_broker, UUIDS[0], {"CUDA_VISIBLE_DEVICES": shown})
    assert "CUDA_VISIBLE_DEVICES" in said and UUIDS[0] in said


def test_an_empty_list(driven: Driven, start_broker: StartBroker) -> None:
    said = refused(start_broker, "0", {"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES=(empty)" in said
    assert driven.uuid in said


@pytest.mark.parametrize(
    ("shown", "gpu"), [("1,0", "1"), (UUIDS[0], "0"), ("GPU-fa4e1,0", UUIDS[0].lower()), ("1,0", "fa4e0")]
)
def test_any_order(
    fake: Driven, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, shown: str, gpu: str
) -> None:
    """An index counts what the broker sees; an engine that sees other GPUs finds the same one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    bench = make_bench(fake, gpu=gpu)
    assert bench.broker.status()["device"]["uuid"] == UUIDS[0]
    assert bench.attach(device="cuda:0").path == "device"
