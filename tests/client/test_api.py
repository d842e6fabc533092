"""The public names, and how a broker is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmbroker
from mmbroker.proto import errors
from mmbroker.proto.errors import BrokerUnavailable, ConnectTimeout
from tests.conftest import StartBroker
from tests.kit import BrokerProcess


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout.strip()


def test_every_public_name_is_there() -> None:
    for name in mmbroker.__all__:
        assert getattr(mmbroker, name) is not None
        assert name in dir(mmbroker)
    assert set(errors.BY_NAME) <= set(mmbroker.__all__)
    assert all(getattr(mmbroker, name) is cls for name, cls in errors.BY_NAME.items())
    assert list(mmbroker.__all__) == sorted(mmbroker.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mmbroker.no_such_name  # type: ignore[attr-defined]


def test_the_error_tree_is_drawn_as_it_is() -> None:
    """In both docstrings: each class below its parent, with its name and nothing missing."""
    for text in (errors.__doc__, mmbroker.__doc__):
        assert text is not None
        parents: dict[int, str] = {}
        drawn: dict[str, str | None] = {}
        for line in text.splitlines():
            name = line.lstrip(" │├└─").split(" ")[0]
            if name in errors.BY_NAME and line.startswith("    "):
                depth = len(line) - len(line.lstrip(" │├└─"))
                parents[depth] = name
                drawn[name] = parents.get(depth - 4)
        assert drawn.keys() == errors.BY_NAME.keys()
        for name, parent in drawn.items():
            assert parent in (None, *[base.__name__ for base in errors.BY_NAME[name].__bases__])


def test_importing_needs_no_torch() -> None:
    program = "import sys, mmbroker, mmbroker.link, mmbroker.find, mmbroker.buffers; mmbroker.BrokerError; {}"
    loaded = program.format("print([m for m in ('torch', 'numpy') if m in sys.modules])")
    assert run(loaded) == "[]"
    assert (
        run("import mmbroker; print(mmbroker.aio.connect.__name__, mmbroker.Client.__name__)")
        == "connect Client"
    )


# --- finding a broker -----------------------------------------------------------------------------------------------


def test_the_only_broker_is_found(broker: BrokerProcess) -> None:
    with mmbroker.connect() as client:
        assert client.directory == broker.directory
        assert client.connected
    for path in (broker.directory, str(broker.directory), os.path.relpath(broker.directory)):
        with mmbroker.connect(path) as client:
            assert client.directory == broker.directory


def test_several_brokers_are_listed(broker: BrokerProcess, start_broker: StartBroker) -> None:
    other = start_broker(name="other")
    with pytest.raises(BrokerUnavailable) as caught:
        mmbroker.connect()
    assert str(broker.directory) in str(caught.value)
    assert str(other.directory) in str(caught.value)
    with mmbroker.connect(other.directory) as client:
        assert client.put(torch.ones(1)).ref.nbytes == 4


@pytest.mark.parametrize("there", [True, False], ids=["empty directory", "no directory"])
def test_no_broker_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    root = tmp_path if there else tmp_path / "none"
    monkeypatch.setenv("MMBROKER_DIR", str(root))
    with pytest.raises(ConnectTimeout, match="mmbroker start --cpu") as caught:
        mmbroker.connect(timeout=0.05)
    assert str(root) in str(caught.value)


def test_connecting_before_the_broker_is_there(start_broker: StartBroker, broker_root: Path) -> None:
    """A worker that starts first waits for the broker, as long as its time-out allows."""
    process = start_broker(wait=False)
    with mmbroker.connect(process.directory, timeout=20) as client:
        assert client.lookup("k") is None
    process.wait_ready()


@pytest.mark.parametrize("namespace", [None, "shared"])
def test_namespaces(broker: BrokerProcess, namespace: str | None) -> None:
    with (
        mmbroker.connect(broker.directory, namespace=namespace) as client,
        mmbroker.connect(broker.directory, namespace="elsewhere") as other,
    ):
        assert client.namespace == (namespace or f"uid-{os.getuid()}")
        held = client.put(torch.arange(5), key="k")
        assert other.lookup("k") is None
        assert other.lookup(mmbroker.digest(torch.arange(5))) is None
        assert other.get_or_create("k", (5,), torch.int64).held is None
        held.drop()


def test_statistics(broker: BrokerProcess) -> None:
    with mmbroker.connect(broker.directory, name="counted") as client:
        client.put_many([torch.ones(4), torch.ones(4), torch.ones(5)])
        stats = client.stats()
        assert (stats["puts"], stats["hits"], stats["leases"], stats["bytes_written"]) == (3, 1, 2, 36)
        assert (stats["holds"], stats["open_leases"], stats["calls"]) == (3, 0, 3)
        assert all(isinstance(value, int) for value in stats.values())
        assert len(stats) < 64  # as many as the broker takes
