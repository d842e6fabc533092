"""Several tokenizer workers that stay on the CPU, SGLang's message channel without pickle, prompts in small chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), *kit.ONCE]

CHUNKED = ("--chunked-prefill-size", "32")


@pytest.fixture(scope="module")
def scene() -> Iterator[kit.Scene]:
    with kit.running_scene(
        (*CHUNKED, "--tokenizer-worker-num", "2", "--mm-broker-preprocess", "cpu"),
        {"SGLANG_USE_PICKLE_IPC": "0", "TEST_ACCESS": "copy"},
    ) as scene:
        yield scene


@pytest.fixture(scope="module")
def served(scene: kit.Scene) -> dict[str, Any]:
    return kit.workload(scene.engine)


def test_texts_equal_sglangs_own(
    served: dict[str, Any], own_transport: Callable[..., dict[str, Any]]
) -> None:
    assert served == own_transport(*CHUNKED)["texts"]


def test_all_workers_put(scene: kit.Scene, served: dict[str, Any]) -> None:
    workers = [s for s in scene.status()["sessions"] if s["name"].endswith("/tokenizer")]
    assert len(workers) == 2
    tokenizer, scheduler = scene.total("tokenizer"), scene.total("scheduler")
    assert tokenizer["features"] == scheduler["takes"] >= kit.PICTURES + kit.SESSION
    assert not kit.fallbacks(tokenizer) and not scheduler["misses"]
    assert not scheduler["hash_calls"] and not scheduler["shm_open_calls"] and not tokenizer["shm_wrap_calls"]
    scene.at_rest()


def test_a_model_that_is_not_known_to_leave_its_input_alone_gets_copies(
    scene: kit.Scene, served: dict[str, Any]
) -> None:
    (engine,) = scene.status()["engines"]
    assert [rank["access"] for rank in engine["ranks"]] == ["copy"]
    (rank,) = [s for s in scene.status()["sessions"] if s["engine"]]
    assert rank["tally"]["table_bytes_copied"] > 0


def test_streams_of_both_workers_end_their_holds(scene: kit.Scene, served: dict[str, Any]) -> None:
    for _ in range(4):
        with scene.stream([kit.album()[1]], max_tokens=200) as lines:
            next(lines)
    scene.at_rest()
