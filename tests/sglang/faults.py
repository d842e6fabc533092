"""A second plugin, for tests only: it breaks the first one in the engine's processes when a file says so, and has
schedulers on the CPU believe that they are on a GPU.

It is copied into a directory of its own with the metadata of an installed distribution, so that SGLang finds it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    """The entry point."""
    import mmbroker
    from mmbroker.adapters.sglang import consumer

    if os.environ.get("TEST_ACCESS") == "copy":
        consumer.READS_ONLY = frozenset()  # type: ignore[misc]
    if device := os.environ.get("TEST_DEVICE"):
        consumer.device_of = lambda scheduler: device
    orders = Path(os.environ["TEST_FAULTS"])
    take = mmbroker.FeatureTable.take

    def broken(table: mmbroker.FeatureTable, reference: Any) -> mmbroker.Use:
        if (orders / f"take-{table.rank}").exists():
            raise RuntimeError("a fault made on purpose")
        return take(table, reference)

    mmbroker.FeatureTable.take = broken  # type: ignore[method-assign]
