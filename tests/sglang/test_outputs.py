"""Three real servers on one broker: two of one model, which share what its encoder makes, and one with other weights.

The two know their model by its content. On the older SGLang they have copies of it, as two machines would; on the newer
one the keys of features name the model's path. The second one prefills in chunks and caches nothing that its encoder
makes, so each chunk asks for it again.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from mmbroker.adapters.sglang.settings import SHARE_OUTPUTS
from mmbroker.adapters.weights import WEIGHTS_BY
from mmbroker.demo.model import tiny_model
from tests.kit import eventually

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), *kit.ONCE]


class Trio(NamedTuple):
    first: kit.Scene
    second: kit.Scene
    other: kit.Scene  # another model


def other_model(directory: Path) -> Path:
    """The tiny model with another encoder: the same files, as long and with the same headers."""
    shutil.copytree(tiny_model(), directory)
    (weights,) = directory.glob("*.safetensors")
    tensors = load_file(weights)
    save_file(
        {name: t.flip(0).contiguous() if "visual" in name else t for name, t in tensors.items()},
        weights,
        {"format": "pt"},
    )
    return directory


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    chunks = ("--chunked-prefill-size", "32")
    with (
        kit.scratch() as one,
        kit.scratch() as two,
        kit.scratch() as three,
        kit.running_broker(one) as broker,
    ):
        sharing = {SHARE_OUTPUTS: "1", WEIGHTS_BY: "content", "XDG_CACHE_HOME": str(one / "cache")}
        copy = tiny_model() if kit.NEWEST else shutil.copytree(tiny_model(), two / "model")
        scenes = Trio(
            kit.Scene(one, environment=sharing, broker=broker),
            kit.Scene(two, chunks, {**sharing, "SGLANG_VLM_CACHE_SIZE_MB": "0"}, broker, model=copy),
            kit.Scene(three, environment=sharing, broker=broker, model=other_model(three / "model")),
        )
        try:
            with scenes.first.engine, scenes.second.engine, scenes.other.engine:
                for scene in scenes:
                    published(scene)
                yield scenes
        finally:
            for scene in scenes:
                scene.engine.stop()


def published(scene: kit.Scene) -> None:
    """Wait until all that its encoder has made can be found by others."""

    def done() -> bool:
        counts = scene.total("scheduler")
        assert not counts["outputs_dropped"] and not counts["outputs_failed"]
        return counts["outputs_published"] == counts["outputs_offered"]

    eventually(done, "encoder outputs are published")


def picture(seed: int) -> str:
    return kit.url(kit.pictures.generated(seed, 280 + 28 * (seed % 3), 224))


def test_one_picture_through_two_servers_is_encoded_once(trio: Trio) -> None:
    url = [picture(2001)]
    with trio.first.change("scheduler") as first, trio.second.change("scheduler") as second:
        texts = trio.first.engine.ask(url).texts
        published(trio.first)
        for _ in range(5):
            assert trio.second.engine.ask(url).texts == texts
            assert trio.first.engine.ask(url).texts == texts
    assert first["encoded"] == first["outputs_published"] == 1
    assert not second.get("encoded"), "the second server's encoder had nothing to do"
    assert second["outputs_used"] > 1, "it has read it for each chunk"
    assert not first.get("outputs_refused") and not second.get("outputs_refused")


def test_a_request_of_which_some_is_known(trio: Trio) -> None:
    """What is known and what is new come in the order of the prompt, whichever server encodes what."""
    known, new = [picture(n) for n in (2010, 2011)], [picture(n) for n in (2012, 2013)]
    for url in known:
        trio.first.engine.ask([url], tokens=1)
    published(trio.first)
    mixed = [new[0], known[0], new[1], known[1], new[0]]
    with trio.second.change("scheduler") as second:
        texts = trio.second.engine.ask(mixed).texts
    assert second["outputs_used"] and second["encoded"]
    published(trio.second)
    with trio.first.change("scheduler") as first:
        assert trio.first.engine.ask(mixed).texts == texts
        assert trio.first.engine.ask(known[::-1]).texts != trio.first.engine.ask(known).texts
    assert first["outputs_used"] == 2 and not first.get("encoded")


def test_requests_that_queue_are_given_what_the_first_one_made(trio: Trio) -> None:
    """They have all arrived before the encoder ran for any of them, so that none of them could find anything."""
    common = picture(2015)
    urls = [[picture(2100 + number), common] for number in range(6)]  # no prompt begins as another one does
    with trio.second.change("scheduler") as second, ThreadPoolExecutor(len(urls)) as senders:
        texts = [answer.texts for answer in senders.map(trio.second.engine.ask, urls)]
    assert second["outputs_given"] and second["outputs_used"]
    assert not second.get("outputs_refused") and not second.get("outputs_failed")
    with trio.first.change("scheduler") as first:
        assert [trio.first.engine.ask(url).texts for url in urls] == texts
    assert not first.get("encoded")


def test_texts_are_those_of_an_encoder_that_ran(trio: Trio) -> None:
    """Bit for bit: what is used again has the same bits, and the model does the same with it."""
    urls = [picture(n) for n in range(2020, 2026)]
    made = [trio.first.engine.ask([url], tokens=16).texts for url in urls]
    published(trio.first)
    with trio.second.change("scheduler") as second:
        assert [trio.second.engine.ask([url], tokens=16).texts for url in urls] == made
    assert not second.get("encoded")
    assert len(set(made)) > 3, "the pictures make a difference"


def test_other_weights_have_an_encoder_of_their_own(trio: Trio) -> None:
    """Whether or not the feature is shared, what the encoder makes of it is not."""
    url = [picture(2030)]
    first = trio.first.engine.ask(url, tokens=16).texts
    published(trio.first)
    with trio.other.change("scheduler") as other, trio.other.change("tokenizer") as tokenizer:
        assert trio.other.engine.ask(url, tokens=16).texts != first
    assert other["encoded"] == 1 and not other.get("outputs_used")
    assert tokenizer["features"] == 1 and not tokenizer.get("outputs_found")
    published(trio.other)


def test_the_status_says_who_has_whose_features(trio: Trio) -> None:
    engines = trio.first.status()["engines"]
    assert len(engines) == 3
    assert all(engine["granted"]["features"] and engine["granted"]["bytes"] for engine in engines)
    sources = {engine["engine"]: {one["engine"] for one in engine["reused"]} for engine in engines}
    assert any(others for others in sources.values())
    assert all(one in sources and one != engine for engine, others in sources.items() for one in others)


def test_a_server_whose_weights_were_changed_shares_nothing_more(trio: Trio) -> None:
    """Its keys name the ones that it was started with. It is the one with the other weights, and the last to ask."""
    url = [picture(2040)]
    kit.post(
        trio.other.engine,
        "/update_weights_from_disk",
        {"model_path": str(tiny_model())},
    )
    texts = trio.first.engine.ask(url).texts
    published(trio.first)
    with trio.other.change("scheduler") as other:
        assert trio.other.engine.ask(url).texts == texts, "it has the first one's weights now"
    assert other["encoded"] == 1
    assert not other.get("outputs_used") and not other.get("outputs_offered")


def test_a_server_that_is_killed_is_missed_by_nobody(trio: Trio) -> None:
    """While the other one uses the same feature, and what the dead one's encoder made of it."""
    url = [picture(2050)]
    texts = trio.first.engine.ask(url, tokens=64).texts
    published(trio.first)
    with (
        trio.second.change("scheduler") as second,
        trio.first.stream(url, max_tokens=2000) as dying,
        trio.second.stream(url, max_tokens=2000) as living,
    ):
        next(dying)
        next(living)
        shared = [engine["shares"] for engine in trio.first.status()["engines"] if engine["shares"]]
        assert len(shared) == 2, "both have it in use"
        os.killpg(trio.first.engine.process.pid, signal.SIGKILL)
        eventually(lambda: len(trio.second.status()["engines"]) == 2, "the broker has noticed")
        assert "[DONE]" in list(living)[-1], "and it went on to its end"
        assert trio.second.engine.ask(url, tokens=64).texts == texts
    assert not second.get("encoded") and second["outputs_used"]
    eventually(lambda: kit.balanced(trio.second.status()), "nothing of the dead one is left")
