"""Hosts are network namespaces, which only the machine's owner can make, and a store whose libraries may be missing.

Where they cannot be had, their tests are not collected. All share one fleet, which every test leaves as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import Leaks, children

from .fleet import Fleet, can_run
from .network import possible

collect_ignore = [] if can_run() else ["test_hosts.py", "test_steps.py", "test_pictures.py"]
if not possible():
    collect_ignore.append("test_network.py")


@pytest.fixture(scope="package")
def made() -> Iterator[Fleet]:
    before = Leaks()
    fleet = Fleet()
    try:
        yield fleet
        for host in fleet.hosts.values():
            host.leave()
    finally:
        fleet.close()
    assert not children() - before.children and not before.shared_memory_left()


@pytest.fixture
def fleet(made: Fleet) -> Iterator[Fleet]:
    """What a test has broken is mended afterwards; then everything works, and nothing is left of it."""
    before = Leaks()
    yield made
    made.mend()
    made.serves()
    made.at_rest()
    made.refresh()
    for host in made.processes().values():  # others than before, where some were killed
        before.children |= host
    before.check()
