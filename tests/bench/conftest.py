from __future__ import annotations

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def _tracker() -> None:
    """A process of Python's own, which the first worker of all starts and the last one does not end: no leak."""
    resource_tracker.ensure_running()
