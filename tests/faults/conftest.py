"""The seed of this run's faults, and the stage on which they are tried."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .campaign import Theatre

#: ``MMBROKER_TEST_SEED`` chooses another campaign; five seeds in a row try everything.
SEED = int(os.environ.get("MMBROKER_TEST_SEED", "0"))


def pytest_report_header() -> str:
    return f"faults: MMBROKER_TEST_SEED={SEED}"


@pytest.fixture(scope="module")
def theatre() -> Iterator[Theatre]:
    """One stage for all faults, as long as none fails."""
    found = Theatre()
    yield found
    found.close()
