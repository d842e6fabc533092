"""The device's reserve: there when the broker says that it is ready, or there is no broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conftest import StartBroker
from tests.cuda.rig import MIB
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import SETTINGS, Bench
from tests.kit import eventually
from tests.rig import values


def test_it_is_there_when_the_broker_is_ready(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    """An engine that starts now sizes its own memory by what is left."""
    before = driven.driver.free(driven.uuid)
    bench = make_bench(driven, device_reserve_mib=10)
    assert driven.driver.free(driven.uuid) <= before - 10 * MIB
    device = bench.broker.status()["device"]
    assert device["capacity"] == 10 * MIB


def test_it_is_used_and_never_given_back(driven: Driven, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(driven, device_reserve_mib=8, device_linger=0.0, device_segment_linger=0.0)
    table = bench.attach()
    feature = values(torch.uint8, (10 * MIB,))
    with bench.client.put(feature, to="a") as held:
        bench.read_on_device(table, held, feature)
        assert bench.broker.status()["device"]["capacity"] > 8 * MIB
    eventually(lambda: bench.broker.status()["device"]["capacity"] == 8 * MIB, "the reserve alone")


def test_what_cannot_be_had_is_no_start(fake: Driven, start_broker: StartBroker) -> None:
    broker = start_broker(wait=False, **{**SETTINGS, "device_mib": 512, "device_reserve_mib": 300})
    assert broker.wait() == 1
    assert broker.output() == ""
    assert broker.log().count("\n") == 1
    for word in (
        "reserve of 300 MiB",
        fake.uuid,
        "MiB free",
        "--device-headroom-mib",
        "--device-reserve-mib",
    ):
        assert word in broker.log()
    assert fake.driver.free(fake.uuid) == 256 * MIB


def test_no_export_no_reserve(
    fake: Driven, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMBROKER_FAKE_CUDA_FAULTS", "cuMemExportToShareableHandle=CUDA_ERROR_NOT_SUPPORTED")
    broker = start_broker(wait=False, **{**SETTINGS, "device_reserve_mib": 4})
    assert broker.wait() == 1
    assert "cuMemExportToShareableHandle" in broker.log()
