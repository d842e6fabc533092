"""What the smoke test of the real SGLang on a GPU finds wrong; the servers themselves need one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu_serve_smoke as smoke

ALIVE = SimpleNamespace(poll=lambda: None)


def judged(
    texts: list[str] | None = None, path: str = "device", on_the_device: int = 3, **tokenizer: int
) -> list[str]:
    """Of a run of two servers that all went well, unless told otherwise."""
    servers: list[Any] = [
        SimpleNamespace(name=name, answers=answers, process=ALIVE)
        for name, answers in (("own", ["a", "b"]), ("broker", texts or ["a", "b"]))
    ]
    result = {
        "paths": [
            {"engine": "e", "rank": 0, "path": path, "why": "", "device": "GPU-1", "access": "readonly"}
        ],
        "servers": {"broker": {"tokenizer": {"features": 3, **tokenizer}, "on_the_device": on_the_device}},
    }
    return smoke.judge(servers, result)


def test_all_is_well() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"texts": ["a", "c"]}, "differ in requests [1]"),
        ({"path": "pinned"}, "device path"),
        ({"on_the_device": 0}, "no encoder read"),
        ({"fallback_full": 2}, "own way"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], word: str) -> None:
    (problem,) = judged(**change)
    assert word in problem


def test_a_dozen_requests() -> None:
    bodies = smoke.requests()
    assert len(bodies) == 12
    pictures = [[part for part in body["messages"][0]["content"] if "image_url" in part] for body in bodies]
    assert [len(some) for some in pictures] == [*[1] * 8, 3, 3, 1, 3]
    assert pictures[10] == pictures[0] and bodies[10] != bodies[0]
