"""The same tests on both drivers: `rig` is the fake by default, and the real GPU with ``pytest -m gpu``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mmbroker.cuda import open_driver
from mmbroker.cuda.fake import FakeDriver
from mmbroker.cuda.fake_memory import VARIABLE, Machine, Make
from tests.cuda.rig import MIB, Rig


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two fake GPUs of 256 MiB, which child processes find, too."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    uuids = ("GPU-fa4e0000-0000-4000-8000-000000000000", "GPU-fa4e1111-0000-4000-8000-000000000001")
    return Machine(tmp_path / "gpus", Make(uuids=uuids, total=256 * MIB))


@pytest.fixture
def fake(machine: Machine, no_leaks: None) -> Iterator[Rig]:
    """The fake driver; everything must be given back at the end."""
    rig = Rig(FakeDriver(machine), machine.existing[0].uuid)
    driver = rig.fake
    yield rig
    rig.close()
    driver.close()
    assert not driver.handles and not driver.events and not len(driver.space) and not len(driver.pins)
    assert [machine.free(device.uuid) for device in machine.existing] == [256 * MIB, 256 * MIB]
    assert not list(machine.directory.glob("GPU-*/*"))


def warm_streams() -> None:
    """torch makes its streams by the dozen when one is asked for, and each takes memory when it is first used."""
    import torch

    for priority in (0, -1):
        for _ in range(32):
            with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                torch.zeros(8, device="cuda").add_(1)
    torch.cuda.synchronize()


@cache
def _warm() -> None:
    """Make what torch and the driver make once and keep, before memory is compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        values = torch.arange(1000, dtype=torch.int32, device="cuda")
        assert (values * 2).float().view(10, 100).cpu().sum() == 999000
        warm_streams()


@pytest.fixture
def real() -> Iterator[Rig]:
    """The first GPU of this machine."""
    # Streams that share a channel wait for each other, and tests stop streams.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    driver = open_driver()
    _warm()
    rig = Rig(driver, driver.devices()[0].uuid)
    before = driver.free(rig.uuid)
    yield rig
    import torch

    torch.cuda.empty_cache()
    rig.free_again(before)
    rig.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Rig:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Rig)
    return found
