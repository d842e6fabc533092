"""The main job: the real SGLang serves pictures through a broker, and answers as it does without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

from mmbroker import profiling
from mmbroker.adapters.sglang import export
from tests.kit import eventually

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def scene() -> Iterator[kit.Scene]:
    with kit.running_scene(["--enable-metrics"]) as scene:
        yield scene


@pytest.fixture(scope="module")
def served(scene: kit.Scene) -> dict[str, Any]:
    """The workload, and the counters after it."""
    texts = kit.workload(scene.engine)
    return {"texts": texts, "tokenizer": scene.total("tokenizer"), "scheduler": scene.total("scheduler")}


def test_texts_equal_sglangs_own(served: dict[str, Any], reference: dict[str, Any]) -> None:
    assert served["texts"] == reference["texts"]
    assert len(set(served["texts"].values())) > 5, "the pictures make a difference"


def test_every_feature_went_through_the_broker(served: dict[str, Any]) -> None:
    tokenizer, scheduler = served["tokenizer"], served["scheduler"]
    assert tokenizer["features"] == kit.PICTURES + kit.SESSION + kit.WARM_UP
    assert tokenizer["requests"] == kit.REQUESTS + kit.SESSION + kit.WARM_UP
    assert scheduler["takes"] == kit.PICTURES + kit.SESSION + kit.WARM_UP
    assert not kit.fallbacks(tokenizer)
    assert not scheduler["misses"] and not scheduler["errors"]


def test_the_scheduler_never_hashes_or_rebuilds(served: dict[str, Any], reference: dict[str, Any]) -> None:
    scheduler, tokenizer = served["scheduler"], served["tokenizer"]
    for name in ("hash_calls", "shm_open_calls", "shm_read_calls", "reconstruct_calls"):
        assert scheduler[name] == 0, name
    assert tokenizer["shm_wrap_calls"] == 0
    # The same counters do count when SGLang's own transport serves.
    own = reference["counts"]["scheduler-0"]
    assert (
        own["items"]
        == own["hash_calls"]
        == own["shm_open_calls"]
        == own["shm_read_calls"]
        == scheduler["items"]
    )


def test_the_model_reads_the_brokers_own_memory(scene: kit.Scene, served: dict[str, Any]) -> None:
    """Mapped for reading only: a model that wrote into its input would have died of it."""
    (engine,) = scene.status()["engines"]
    assert [rank["access"] for rank in engine["ranks"]] == ["readonly"]


def test_holds_end_with_their_requests(scene: kit.Scene, served: dict[str, Any]) -> None:
    scene.at_rest()
    counts = scene.total("tokenizer")
    assert counts["holds"] == counts["dropped"] >= kit.PICTURES
    # What an encoder made before is taken and released beside the features.
    assert scene.total("scheduler")["releases"] == scene.total("scheduler")["takes"] + counts["outputs_found"]


def test_the_broker_knows_the_engines_counters(scene: kit.Scene, served: dict[str, Any]) -> None:
    """`mmbroker status` shows them; they are told at most once a second."""

    def told() -> bool:
        tallies = [session["tally"] for session in scene.status()["sessions"]]
        return all(
            any(tally.get(f"sglang_{name}", 0) >= kit.PICTURES for tally in tallies)
            for name in ("features", "takes")
        )

    eventually(told, "the counters are in the broker's report")


def test_the_same_picture_a_hundred_times(scene: kit.Scene, served: dict[str, Any]) -> None:
    picture = [kit.url(kit.pictures.generated(1000, 140, 140))]
    before = scene.status()
    with scene.change("tokenizer") as tokenizer, scene.change("scheduler") as scheduler:
        texts = {scene.engine.ask(picture, tokens=2).texts for _ in range(100)}
    after = scene.status()
    assert len(texts) == 1
    assert tokenizer["features"] == scheduler["takes"] == 100
    assert after["features"] - before["features"] == 2, "the feature, and what the encoder made of it"
    found = tokenizer["outputs_found"]
    assert 0 < found <= 99
    assert after["counters"]["hits"] - before["counters"].get("hits", 0) == 99 + found


def test_two_samples_are_three_takes_of_one_hold(scene: kit.Scene, served: dict[str, Any]) -> None:
    picture = [kit.album()[1]]
    alone = scene.engine.ask(picture, tokens=8).texts
    with scene.change("tokenizer") as tokenizer, scene.change("scheduler") as scheduler:
        both = scene.engine.ask(picture, tokens=8, n=2).texts
    assert both == alone * 2
    assert tokenizer["holds"] == 1 + tokenizer["outputs_found"] == 2
    assert scheduler["takes"] == 3, "the warm-up of the common prefix, and each sample"
    assert not scheduler.get("misses")
    scene.at_rest()


def test_a_stream_cut_off_by_its_client_ends_its_hold(scene: kit.Scene, served: dict[str, Any]) -> None:
    for _ in range(3):
        with scene.stream([kit.album()[0]], max_tokens=2000) as lines:
            next(lines)
            assert scene.status()["holds"] == 2, "of the feature, and of what the encoder made of it before"
    scene.at_rest()
    assert scene.engine.ask([kit.album()[0]], tokens=8).texts == served["texts"]["one-0"]


def test_an_answer_that_nobody_waits_for_ends_its_hold(scene: kit.Scene, served: dict[str, Any]) -> None:
    """Without streaming, the client's going shows only when SGLang looks for it."""
    with scene.request([kit.album()[0]], max_tokens=2000):
        eventually(lambda: scene.status()["holds"] == 2, "the request has its holds")
    scene.at_rest()


def test_a_rejected_request_makes_no_hold(scene: kit.Scene, served: dict[str, Any]) -> None:
    with scene.change("tokenizer") as tokenizer, pytest.raises(HTTPError) as refused:
        scene.engine.ask([kit.album()[0]], tokens=100_000)
    with refused.value as answer:
        assert answer.code == 400
    assert not tokenizer.get("holds")


def test_a_session_keeps_its_pictures(scene: kit.Scene, served: dict[str, Any]) -> None:
    """Its items outlive their requests, so the ranks keep copies and the broker nothing."""
    texts = kit.conversation(scene.engine, after_each_turn=scene.at_rest)
    assert tuple(texts) == served["texts"]["session"]
    scene.at_rest()


def test_aborted_requests_end_their_holds(scene: kit.Scene, served: dict[str, Any]) -> None:
    with scene.stream([kit.album()[3]], max_tokens=2000) as lines:
        next(lines)
        kit.post(scene.engine, "/abort_request", {"abort_all": True})
        for _ in lines:
            pass
    scene.at_rest()


def test_sglangs_own_metrics_have_the_engines_side(scene: kit.Scene, served: dict[str, Any]) -> None:
    """Of all processes, brought up to date once a second."""
    ranks = {"mmbroker_engine_takes_total": kit.PICTURES, "mmbroker_engine_requests_total": kit.REQUESTS}
    workers = {
        "mmbroker_engine_put_features_total": kit.PICTURES,
        "mmbroker_engine_request_pictures_sum": kit.PICTURES,
        "mmbroker_engine_picture_megapixels_count": kit.PICTURES,
    }

    def there() -> bool:
        found = kit.metrics(scene.engine)
        return all(found.get(name, 0) >= least for name, least in {**ranks, **workers}.items())

    eventually(there, "the engine's counters among SGLang's metrics")
    found = kit.metrics(scene.engine)
    assert set(export.NAMES) <= found.keys()
    assert found["mmbroker_engine_scheduler_seconds_total"] > 0
    assert found["mmbroker_engine_receiver_seconds_total"] > 0
    assert found["mmbroker_engine_take_misses_total"] == found["mmbroker_engine_worker_fallbacks_total"] == 0
    assert any(name.startswith("sglang:") for name in found), "beside SGLang's own"


def test_the_schedulers_thread_can_be_looked_at(scene: kit.Scene) -> None:
    """`mmbroker profile` finds the scheduler in the server's family, and knows what its thread does at rest."""
    (scheduler,) = profiling.schedulers(scene.engine.process.pid)
    assert "sglang::scheduler" in scheduler.title
    profile = profiling.record(scheduler.pid, 1.0, 50)
    assert profile.samples > 10
    assert profile.share("idle") > 0.5
    assert profile.share("schedule") < 0.2
