"""The handshake's time: of one deadline, whatever its steps take."""

from __future__ import annotations

import itertools
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mmbroker
from mmbroker import connection
from mmbroker.proto.errors import ConnectTimeout


class Recorded(socket.socket):
    """Notes what each of its steps may take."""

    patience: list[float]

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is not None
        self.patience.append(round(seconds, 3))
        super().settimeout(0.01)


def test_each_step_has_what_is_left(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert mmbroker.connect  # the module that everybody has is as it was
