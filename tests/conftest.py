"""Fixtures for everybody.

`start_broker(**settings)` starts real brokers in a short directory of their own and ends them; `broker` is one with the
defaults of a small test. Every test that uses them is searched for leaks afterwards: descriptors, child processes,
``/dev/shm``, what brokers leave in their directory. With the marker ``balanced`` the books of every broker that still
runs must come to zero leases and holds, too.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import uvloop
import zmq

from tests.kit import BrokerProcess, Leaks, Puppet, eventually
from tests.tier import mooncake
from tests.web import browser

# A runner that was started with `nohup` would hand its deafness on to every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


class StartBroker(Protocol):
    """Starts a broker; `wait` for its ready line unless told otherwise. `prefix` goes before its command line."""

    def __call__(
        self,
        *,
        wait: bool = True,
        prefix: list[str] | None = None,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> BrokerProcess: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "balanced: every broker's leases and holds must come to zero at the end"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are chosen only by name: `-m gpu`, or an expression with it, but no other.

    So are the long ones, by `-m long`, as `make test-long` does: each shows with more parts, or in another place, what
    others show as well.

    Tests that need a browser are chosen where there is one: it cannot be installed without the machine's owner. Those
    that need the real vLLM run in its own environment.
    """
    absent = {name for name in ("gpu", "long") if name not in str(config.option.markexpr)}
    if importlib.util.find_spec("vllm") is None:
        absent.add("vllm")
    if not os.environ.get("MMBROKER_SGLANG"):
        absent.add("both")
    if browser.find() is None:
        absent.add("browser")
    if not mooncake.installed():
        absent.add("mooncake")
    out = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Make what a process makes once and keeps, before any test is searched for leaks."""
    zmq.Context.instance().socket(zmq.DEALER).close(linger=0)
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def _leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before the brokers' fixtures, so it looks after they are done."""
    if not {"broker_root", "no_leaks"} & set(request.fixturenames):
        yield
        return
    gc.collect()
    gc.freeze()  # most of what lives is engines' libraries, and to look through it after each test takes half a second
    before = Leaks()
    yield
    before.check()


@pytest.fixture
def no_leaks() -> None:
    """For tests without a broker that want to be searched for leaks."""


@pytest.fixture
def broker_root() -> Iterator[Path]:
    """A short directory for brokers, as MMBROKER_DIR; nothing of them may be in it at the end."""
    root = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
    yield root
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    shutil.rmtree(root)
    assert not left, f"left in the instance directory: {left}"


@pytest.fixture
def start_broker(broker_root: Path, request: pytest.FixtureRequest) -> Iterator[StartBroker]:
    started: list[BrokerProcess] = []

    def start(
        *,
        wait: bool = True,
        prefix: list[str] | None = None,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> BrokerProcess:
        settings = {"host_mib": 64, "segment_mib": 4, **settings}
        process = BrokerProcess(broker_root, settings, prefix or [], env or {})
        started.append(process)
        return process.wait_ready() if wait else process

    yield start
    try:
        for process in started:
            if process.process.poll() is None and request.node.get_closest_marker("balanced"):
                _balance(process)
            process.stop()
    finally:
        for process in started:
            process.kill()
            process.clean_up()
            if process.process.returncode == -signal.SIGKILL:
                shutil.rmtree(process.directory, ignore_errors=True)  # nobody else can


@pytest.fixture
def broker(start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch) -> BrokerProcess:
    """A broker of 64 MiB in segments of 4 MiB, which `mmbroker.connect()` without a path finds."""
    process = start_broker()
    monkeypatch.setenv("MMBROKER_DIR", os.fspath(process.root))
    return process


@pytest.fixture
def puppet(no_leaks: None) -> Iterator[Callable[..., Puppet]]:
    """Starts client processes, and kills them at the end."""
    started: list[Puppet] = []

    def start(prefix: list[str] | None = None, env: dict[str, str] | None = None) -> Puppet:
        started.append(Puppet(prefix, env))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def _balance(process: BrokerProcess) -> None:
    """Leases and holds of a broker come to nothing once its clients are gone."""

    def balanced() -> bool:
        status = process.status()
        return not status["leases"] and not status["holds"]

    eventually(balanced, "books in balance")
