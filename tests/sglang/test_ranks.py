"""Engines of several ranks: each rank has its own table, and all of them agree about every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError

import pytest

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Shape:
    """`world`: the ranks that take. `faulty`: the one of them that a test breaks."""

    name: str
    arguments: tuple[str, ...]
    world: int
    takes_each: bool = True
    faulty: int = 0

    def __str__(self) -> str:
        return self.name


SHAPES = [
    Shape("tp", ("--tp-size", "2"), world=2, faulty=1),
    Shape("tp-broadcast", ("--tp-size", "2", "--enable-broadcast-mm-inputs-process"), world=2, faulty=1),
    Shape("pp", ("--pp-size", "2"), world=1),
    Shape("dp", ("--dp-size", "2"), world=2, takes_each=False),
]
#: The older release shares all code but the failing of a request: one shape is enough there.
SHORT = {"tp", "dp"} if kit.NEWEST else {"tp"}
TESTED = [pytest.param(shape, marks=[] if shape.name in SHORT else pytest.mark.long) for shape in SHAPES]


@pytest.fixture(scope="module", params=TESTED, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    shape: Shape = request.param
    return shape


@pytest.fixture(scope="module")
def scene(shape: Shape) -> Iterator[kit.Scene]:
    with kit.running_scene(shape.arguments) as scene:
        yield scene


@pytest.fixture(scope="module")
def served(scene: kit.Scene, shape: Shape) -> dict[str, Any]:
    # With replicas SGLang sends a session's second turn anywhere, and the replica that does not know it dies.
    return kit.workload(scene.engine, sessions=shape.takes_each)


def test_texts_equal_sglangs_own(
    shape: Shape, served: dict[str, Any], own_transport: Callable[..., dict[str, Any]]
) -> None:
    """Two halves of a layer are added in another order than one whole, so tensor parallelism has its own texts."""
    arguments = ("--tp-size", "2") if "--tp-size" in shape.arguments else ()
    texts = own_transport(*arguments)["texts"]
    assert served == {name: texts[name] for name in served}


def test_every_rank_takes(shape: Shape, scene: kit.Scene, served: dict[str, Any]) -> None:
    pictures = kit.PICTURES + kit.WARM_UP
    tokenizer = scene.total("tokenizer")
    assert tokenizer["features"] >= pictures
    assert not kit.fallbacks(tokenizer)
    schedulers = {role: counts for role, counts in scene.counts().items() if role.startswith("scheduler")}
    takes = [counts["takes"] for role, counts in schedulers.items() if "stage" not in role]
    assert len(takes) == shape.world
    assert takes == [tokenizer["features"]] * shape.world or (
        not shape.takes_each and sum(takes) == tokenizer["features"] and min(takes) > 0
    )
    for role, counts in schedulers.items():
        assert not counts["misses"] and not counts["errors"], role
        assert not counts["hash_calls"] and not counts["shm_open_calls"], role
        if "stage" in role:
            assert counts["inputs"] and not counts["takes"], "a later stage relays references"
    scene.at_rest()


def test_an_error_on_one_rank_fails_one_request_on_all(
    shape: Shape, scene: kit.Scene, served: dict[str, Any]
) -> None:
    """Without an agreement the other ranks would run the request, and wait for this one for ever."""
    picture = [kit.album()[0]]
    failed = 0
    with scene.broken(shape.faulty):
        for _ in range(1 if shape.takes_each else 4):
            try:
                scene.engine.ask(picture, tokens=4)
            except HTTPError as error:
                with error:
                    assert error.code == 500
                    assert "mmbroker: the features of this request cannot be had" in error.read().decode()
                failed += 1
    assert failed
    assert scene.engine.ask(picture, tokens=8).texts == served["one-0"]
    scene.at_rest()
