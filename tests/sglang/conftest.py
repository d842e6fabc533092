"""Every test here starts the real SGLang, or imports it; what several of them compare with is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import kit

#: The older version has no artifacts, and the newer needs no substitute for them.
collect_ignore = ["test_undecoded.py"] if kit.NEWEST else ["test_artifacts.py"]


@pytest.fixture(scope="session")
def own_transport() -> Callable[..., dict[str, Any]]:
    """What SGLang's own transport answers to the workload, and what it counted, by the server's arguments."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def serve(*arguments: str) -> dict[str, Any]:
        if arguments not in known:
            with kit.scratch() as directory:
                scene = kit.Scene(directory, arguments)
                with scene.engine as engine:
                    texts = kit.workload(engine)
                    known[arguments] = {"texts": texts, "counts": scene.counts()}
        return known[arguments]

    return serve


@pytest.fixture(scope="session")
def reference(own_transport: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The same for a server without arguments."""
    return own_transport()
