"""The handshake: whatever answers there, the caller gets a typed error in time."""

from __future__ import annotations

import itertools
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import mmbroker
from mmbroker import connection
from mmbroker.proto import messages as m
from mmbroker.proto.errors import (
    BrokerError,
    ConnectTimeout,
    InvalidMessage,
    PermissionDenied,
    QuotaExceeded,
    VersionMismatch,
)
from mmbroker.proto.reference import PROTOCOL_VERSION
from tests.client.peer import Peer
from tests.kit import BrokerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


class Recorded(socket.socket):
    """Notes what each of its steps may take."""

    patience: list[float]

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is not None
        self.patience.append(round(seconds, 3))
        super().settimeout(0.01)


def test_each_step_has_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever listens says nothing, and a second has passed whenever somebody looks."""
    Recorded.patience = []
    library: Any = SimpleNamespace(**{**vars(socket), "socket": Recorded})
    ticks = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent,
    ):
        silent.bind(f"{directory}/lifeline.sock")
        silent.listen()
        monkeypatch.setattr(connection, "socket", library)
        monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
        with pytest.raises(ConnectTimeout, match="did not answer in time"):
            connection.Connection(Path(directory), "a", None, 2.5, None, -1)  # type: ignore[arg-type]
    assert Recorded.patience == [2.5, 1.5, 0.5]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda w: m.Refused("PermissionDenied", "not you"), PermissionDenied),
        (lambda w: m.Refused("QuotaExceeded", "64 sessions", {"limit": 64}), QuotaExceeded),
        (lambda w: m.Refused("FromTheFuture", "a new kind"), BrokerError),
        (lambda w: m.Hello(1, "me too"), InvalidMessage),
        (lambda w: b"\xc1 nonsense", InvalidMessage),
        (lambda w: m.encode(w).replace(b"\xa1v\x01", b"\xa1v\x07"), VersionMismatch),
        (lambda w: m.Welcome(1, b"short", 1, b"r", "control.sock", "n", "i"), InvalidMessage),
        (lambda w: m.Welcome(1, w.boot, 1, w.routing, "../control.sock", "n", "i"), InvalidMessage),
        (lambda w: m.Welcome(1, w.boot, 1, w.routing, "elsewhere.sock", "n", "i"), ConnectTimeout),
        (lambda w: b"", ConnectTimeout),
        (lambda w: None, ConnectTimeout),
    ],
    ids=[
        "denied", "full", "unknown refusal", "hello", "nonsense", "version", "boot", "path", "control", "empty", "mute",
    ],
)  # fmt: skip
def test_handshakes_that_fail(peer: Callable[..., Peer], answer: Any, error: type[BrokerError]) -> None:
    it = peer(welcome=answer)
    with pytest.raises(error) as caught:
        mmbroker.connect(it.directory, timeout=0.3 if error is ConnectTimeout else 20)
    assert type(caught.value) is error
    if error is ConnectTimeout:
        assert str(it.directory) in str(caught.value)


@pytest.mark.parametrize("there", ["nothing", "no socket", "nobody listens", "another kind of socket"])
def test_no_broker_there(peer: Callable[..., Peer], there: str) -> None:
    it = peer()
    directory = it.directory / "x"
    if there != "nothing":
        directory.mkdir()
    if there == "nobody listens":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
            gone.bind(str(directory / "lifeline.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        if there == "another kind of socket":
            stream.bind(str(directory / "lifeline.sock"))
        with pytest.raises(ConnectTimeout, match="mmbroker start --cpu") as caught:
            mmbroker.connect(directory, timeout=0.05)
    assert str(directory) in str(caught.value)


def test_a_path_too_long_for_a_socket() -> None:
    with pytest.raises(BrokerError, match="107"):
        mmbroker.connect("/tmp/" + "x" * 120, timeout=0.1)


def test_a_broker_that_goes_between_the_two_handshakes(peer: Callable[..., Peer]) -> None:
    """It said welcome, and was gone before its control socket answered; the next one is found at once."""

    def welcome(w: m.Welcome) -> m.Welcome:
        return w if w.session > 1 else msgspec.structs.replace(w, control="nowhere.sock")

    one = peer(welcome=welcome)
    clients: list[mmbroker.Client] = []
    thread = threading.Thread(target=lambda: clients.append(mmbroker.connect(one.directory, timeout=600)))
    thread.start()
    eventually(lambda: one._lifelines, "the first handshake")
    one.hang_up()
    thread.join(20)
    assert clients and one.sessions == 2
    clients[0].close()


@pytest.mark.parametrize("apart", [-1, 1])
def test_a_client_one_version_older_or_newer_is_refused_by_name(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, apart: int
) -> None:
    """It is told at once, with both versions and what to upgrade; and others are served."""
    other = PROTOCOL_VERSION + apart
    older, newer = sorted((other, PROTOCOL_VERSION))
    with monkeypatch.context() as changed:
        changed.setattr(connection, "PROTOCOL_VERSION", other)
        with pytest.raises(VersionMismatch) as caught:
            mmbroker.connect(broker.directory)
    assert f"protocol versions {older} and {newer}: upgrade mmbroker where version {older} is" in str(
        caught.value
    )
    assert caught.value.figures == {"theirs": other, "ours": PROTOCOL_VERSION}
    with mmbroker.connect(broker.directory) as client:
        assert client.connected
    assert broker.status()["daemon"]["counters"]["peers_refused"] == 1
