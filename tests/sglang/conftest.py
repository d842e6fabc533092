"""Every test here starts the real SGLang, or imports it; what several of them compare with is made once."""

from __future__ import annotations

from typing import Any

import pytest

from . import kit


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """What SGLang's own transport answers, and what its scheduler paid for it."""
    with kit.scratch() as directory:
        scene = kit.Scene(directory)
        with scene.engine as engine:
            texts = kit.workload(engine)
            return {"texts": texts, "counts": scene.counts()}
