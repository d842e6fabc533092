"""The same tests on both drivers, with a real broker: the fake by default, and the real GPU with ``pytest -m gpu``."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mmbroker import cuda
from mmbroker.cuda.fake_memory import VARIABLE, Machine, Make
from tests.conftest import StartBroker
from tests.cuda.conftest import warm_streams
from tests.cuda.rig import MIB
from tests.cuda.rig import Rig as Driven
from tests.gpu.bench import Bench
from tests.kit import Leaks, eventually

UUIDS = ("GPU-fa4e0000-0000-4000-8000-000000000000", "GPU-fa4e1111-0000-4000-8000-000000000001")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    """Two fake GPUs of 256 MiB, for this process and its children; everything must be given back at the end."""
    directory = tmp_path / "gpus"
    monkeypatch.setenv(VARIABLE, str(directory))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = Machine(directory, Make(uuids=UUIDS, total=256 * MIB))
    before = Leaks()
    driven = Driven(cuda.open_driver(), UUIDS[0])
    driver = driven.fake
    yield driven
    driver.faults.heal()
    gc.collect()
    driven.close()
    driver.close()
    del cuda._drivers[str(directory)]
    left = {
        "handles": driver.handles,
        "events": driver.events,
        "maps": driver.space._maps,
        "pins": driver.pins._pieces,
    }
    assert not any(left.values()), left
    before.check()
    assert [machine.free(uuid) for uuid in UUIDS] == [256 * MIB, 256 * MIB]
    shutil.rmtree(directory)


@pytest.fixture(scope="session", autouse=True)
def _warm_gpu(request: pytest.FixtureRequest) -> None:
    """Make what torch and the driver make once and keep, before any test is searched for leaks."""
    if "gpu" in str(request.config.option.markexpr):
        import torch

        assert torch.arange(1000, device="cuda").cpu().sum() == 499500
        # A kernel's code takes GPU memory from its first use on: those of the tests that write into tensors.
        for dtype in (torch.uint8, torch.float32):
            assert torch.ones(8, dtype=dtype, device="cuda").add_(1).clone().cpu().sum() == 16
        warm_streams()
        cuda.open_driver().free(cuda.open_driver().devices()[0].uuid)


@pytest.fixture
def real() -> Iterator[Driven]:
    """The first GPU of this machine."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    driver = cuda.open_driver()
    driven = Driven(driver, driver.devices()[0].uuid)
    before = driver.free(driven.uuid) - 64 * MIB  # torch loads a kernel's code when it is first used
    yield driven
    import torch

    try:
        gc.collect()
        torch.cuda.empty_cache()
        eventually(
            lambda: driver.free(driven.uuid) >= before,
            f"GPU memory given back; {before - driver.free(driven.uuid)} bytes are missing, torch keeps "
            f"{torch.cuda.memory_reserved()}",
        )
    finally:
        driven.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def driven(request: pytest.FixtureRequest) -> Driven:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Driven)
    return found


@pytest.fixture
def make_bench(broker_root: Path, start_broker: StartBroker) -> Iterator[Callable[..., Bench]]:
    """Makes a bench over a broker, and closes its clients."""
    with ExitStack() as stack:
        yield lambda driven, **settings: Bench(driven, start_broker, stack, settings)


@pytest.fixture
def bench(driven: Driven, make_bench: Callable[..., Bench]) -> Bench:
    return make_bench(driven)


@pytest.fixture
def faked(fake: Driven, make_bench: Callable[..., Bench]) -> Bench:
    """For what only the fake can be ordered to do."""
    return make_bench(fake)
