"""The scheduler-like loop, without processes."""

from __future__ import annotations

import pytest
import torch

from bench.loop import LoopScheduler
from bench.peers import END
from bench.processes import Board


class Flood(LoopScheduler):
    """Its inbox always has one more message, until the loop says stop."""

    def __init__(self, board: str) -> None:
        self.board = Board(board)

    def inbox(self) -> Flood:  # type: ignore[override]
        return self

    def recv(self, size: int, flags: int) -> bytes:
        return END if self.board.numbers[Board.STOP] else b"one more"

    def opener(self, way: str) -> Flood:  # type: ignore[override]
        return self

    def open(self, message: bytes) -> list[tuple[torch.Tensor, object, object]]:
        return [(torch.ones(1), None, None)]

    def close(self, use: object = None) -> None:
        pass


@pytest.mark.timeout(60)
def test_a_round_ends_though_arrivals_never_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    flood = Flood(str(tmp_path_factory.mktemp("loop") / "board"))
    figures = flood.run("any", 0.01)
    assert figures["rate"] > 0
    assert figures["us"] > 0
    flood.board.close()
