"""What is wrong with the store's library is said in one sentence, with what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmbroker.tier import doorman, store
from mmbroker.tier.store import Adrift, MooncakeStore, StoreError

COMMAND = ("tier", "remove", "--master", "127.0.0.1:1", "--store-namespace", "x")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmbroker", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (
            None,
            "Mooncake is not installed in this environment: pip install 'mooncake-transfer-engine-non-cuda==0.3",
        ),
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file')",
            "apt-get install libibverbs1 librdmacm1",
        ),
        ("", "this is another version of Mooncake"),
        (
            "class MooncakeDistributedStore:\n    def setup(self, config): pass",
            "this is another version of Mooncake",
        ),
        (
            "class MooncakeDistributedStore:\n    def setup(self, *_): return -1",
            "no Mooncake master of this version answers at 127.0.0.1:1",
        ),
    ],
    ids=["none", "no libibverbs", "nothing in it", "another signature", "no master"],
)
def test_what_to_install(tmp_path: Path, library: str | None, says: str) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    if library is not None:
        (package / "store.py").write_text(library)
    done = run(*COMMAND, "--address", "127.0.0.1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and says in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("mmbroker: "), done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tier",), "--master HOST:PORT is missing"),
        (("tier", "--master", "here"), "--master is HOST:PORT, not 'here'"),
        (("tier", "--master", "here:99999"), "--master is HOST:PORT, not 'here:99999'"),
        (("tier", "--master", "here:1"), "--address HOST is missing"),
    ],
)
def test_usage(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.parametrize("address", ["", "localhost", "::1", "224.0.0.1", "192.0.2.1", "0." * 3 + "0"])
def test_addresses_that_are_refused(address: str) -> None:
    done = run(*COMMAND, "--address", address)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("mmbroker: ") and "address" in done.stderr


def test_settings_come_from_the_environment() -> None:
    env = {"MMBROKER_TIER_MASTER": "here:1", "MMBROKER_TIER_ADDRESS": "192.0.2.1"}
    done = run("tier", "remove", "--store-namespace", "x", **env)
    assert done.returncode == 1 and "192.0.2.1 is no address of this machine" in done.stderr


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives the code of a bad parameter, which is not the master's fault."""
    client = SimpleNamespace(setup=lambda *_: -600)
    monkeypatch.setattr(store, "load", lambda: SimpleNamespace(MooncakeDistributedStore=lambda: client))
    monkeypatch.setattr(doorman, "guard", lambda _: None)
    with pytest.raises(
        store.StoreError, match=r"cannot lend 4,096 MiB to the store: give a smaller --store-mib"
    ):
        store.MooncakeStore("here:1", "127.0.0.1", 4096 << 20)


@pytest.mark.parametrize("devices", [FileNotFoundError(), []], ids=["no such class", "none"])
def test_rdma_without_a_device(devices: OSError | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would use TCP without a word."""

    def listdir(path: str) -> list[str]:
        assert path == "/sys/class/infiniband"
        if isinstance(devices, OSError):
            raise devices
        return devices

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", listdir)
        with pytest.raises(store.StoreError, match="say --protocol tcp"):
            store.MooncakeStore("here:1", "127.0.0.1", protocol="rdma")


@pytest.mark.parametrize("code", [-703, -704])
def test_what_another_machine_is_just_storing_is_not_there_yet(code: int) -> None:
    class Library:
        def get_into_ranges(self, *_: object) -> list[list[list[int]]]:
            return [[[code]]]

    store = MooncakeStore.__new__(MooncakeStore)
    store._store, store._master = Library(), "here:1"
    assert not store.read("mmb1/a", 0, 0, 8192)


@pytest.mark.parametrize(("seconds", "raised"), [(54.0, StoreError), (60.1, Adrift)])
def test_a_read_that_the_library_gives_up_is_not_over(
    monkeypatch: pytest.MonkeyPatch, seconds: float, raised: type[StoreError]
) -> None:
    now = [0.0]

    class Library:
        def get_into_ranges(self, *_: object) -> list[list[list[int]]]:
            now[0] += seconds
            return [[[-800]]]

    mooncake = MooncakeStore.__new__(MooncakeStore)
    mooncake._store, mooncake._master = Library(), "here:1"
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    with pytest.raises(StoreError) as failure:
        mooncake.read("mmb1/a", 0, 0, 50 << 20)
    assert type(failure.value) is raised
    assert (failure.value.settles < 60.0) == (raised is StoreError)
