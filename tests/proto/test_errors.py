"""The error tree: as drawn, complete, and the same on both sides of the wire."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from mmbroker.proto import errors
from mmbroker.proto.errors import BY_NAME, BrokerError


def drawn() -> dict[str, str]:
    """Each error's parent, from the drawing in the module's docstring."""
    parents: dict[str, str] = {}
    path: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if (found := re.match(r"    ([│ ├└─]*)([A-Z]\w+)", line)) and (found[1] or found[2] == "BrokerError"):
            depth = len(found[1]) // 4
            path[depth] = found[2]
            parents[found[2]] = path.get(depth - 1, "")
    return parents


def test_the_tree_is_as_drawn() -> None:
    real = {name: cls.__bases__[0].__name__ for name, cls in BY_NAME.items()}
    assert drawn() == {**real, "BrokerError": ""}


def test_every_error_says_what_it_is() -> None:
    assert all((cls.__doc__ or "").rstrip().endswith(".") for cls in BY_NAME.values())


def test_a_deadline_is_a_timeout_too() -> None:
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.EngineLagging, TimeoutError)


@pytest.mark.parametrize("name", BY_NAME)
def test_an_error_crosses_the_wire(name: str) -> None:
    made = errors.make(name, "what happened", {"limit": 3})
    assert type(made) is BY_NAME[name]
    assert (str(made), made.figures) == ("what happened", {"limit": 3})


def test_an_error_of_another_version_is_still_an_error() -> None:
    assert type(errors.make("FromTheFuture", "x", {})) is BrokerError


@pytest.mark.parametrize("name", BY_NAME)
def test_an_error_survives_copies_between_processes(name: str) -> None:
    """Engines and process pools pickle exceptions."""
    made = errors.make(name, "what happened", {"requested": 3, "free": 2, "limit": 1})
    for twin in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert type(twin) is type(made)
        assert (str(twin), twin.figures) == (str(made), made.figures)


def test_figures_by_name() -> None:
    full = errors.PoolFull("no room", requested=3, free=2, limit=1)
    assert (full.requested, full.free, full.limit) == (3, 2, 1)
    quota = errors.QuotaExceeded("too many", requested=3, used=2, limit=1)
    assert (quota.requested, quota.used, quota.limit) == (3, 2, 1)
    assert errors.PoolFull("no figures").limit == 0
