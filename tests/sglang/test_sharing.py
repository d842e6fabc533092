"""One copy for everyone: two real servers on one broker decode, preprocess and store each picture once, together."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError

import pytest
from PIL import Image

from mmbroker.demo import pictures
from mmbroker.demo.engine import Engine
from tests.kit import BrokerProcess, eventually

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@dataclass
class Pair:
    """Two engines that share a broker. `own`: what SGLang's own transport says to pictures, before there was one."""

    broker: BrokerProcess
    scenes: list[kit.Scene]
    own: dict[str, tuple[str, ...]]

    def made(self) -> tuple[int, int]:
        """Pictures decoded and preprocessed by both engines."""
        (a, b), (c, d) = (scene.made() for scene in self.scenes)
        return a + c, b + d

    def total(self, name: str, role: str = "tokenizer") -> int:
        return sum(scene.total(role)[name] for scene in self.scenes)

    def at_rest(self) -> None:
        kit.at_rest(self.broker)


def say(engine: Engine, *urls: str, **more: Any) -> tuple[str, ...]:
    return engine.ask(urls, tokens=4, **more).texts


def data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def encoded(picture: Image.Image, kind: str, **options: Any) -> str:
    data = io.BytesIO()
    picture.save(data, kind, **options)
    return data_url(data.getvalue(), kind.lower())


def alike() -> list[str]:
    """Pictures whose decoded pixels, or palette's indices, are the same, and which are not the same picture."""
    photograph = pictures.generated(77, 140, 84)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by a quarter
    indices = Image.frombytes("P", (112, 112), bytes(n % 7 for n in range(112 * 112)))
    found = [encoded(photograph, "JPEG", quality=95), encoded(photograph, "JPEG", quality=95, exif=turned)]
    for seed, transparency in ((1, None), (2, None), (2, 3)):
        indices.putpalette(random.Random(seed).randbytes(21))
        found.append(
            encoded(indices, "PNG", **({} if transparency is None else {"transparency": transparency}))
        )
    return found


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with kit.scratch() as directory:
        scenes = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            scenes.append(kit.Scene(directory / name, ("--mm-broker-wait", "5"), path=directory / "cpu"))
        with scenes[0].engine as one, scenes[1].engine:
            own = {url: say(one, url) for url in [*kit.album()[:6], *alike()]}
            with kit.running_broker(directory) as broker:
                eventually(lambda: _joined(broker), "both engines have joined")
                yield Pair(broker, scenes, own)


def _joined(broker: BrokerProcess) -> bool:
    status = broker.status()
    tokenizers = [s for s in status["sessions"] if s["name"].endswith("/tokenizer")]
    return len(tokenizers) == 2 == sum(engine["complete"] for engine in status["engines"])


def test_a_picture_a_hundred_times_through_two_servers_is_made_once(pair: Pair) -> None:
    picture, before = kit.album()[0], pair.made()
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: say(pair.scenes[n % 2].engine, picture), range(100)))
    assert set(texts) == {pair.own[picture]}
    decoded, preprocessed = (now - then for now, then in zip(pair.made(), before, strict=True))
    assert (decoded, preprocessed) == (1, 1)
    assert (pair.total("derived_made"), pair.total("derived_hits")) == (1, 99)
    counters = pair.broker.status()["counters"]
    assert counters["promises"] == 1
    # What the encoder made, too: by both engines, if each had the picture before the other's was there.
    assert 1 <= pair.total("outputs_published", "scheduler") <= 2 and counters["seals"] == 2
    pair.at_rest()


def test_an_encoder_runs_once_for_both(pair: Pair) -> None:
    """A hundred times, the first of which was answered before the others came."""
    picture, (one, two), before = kit.url(pictures.generated(700, 140, 112)), pair.scenes, pair.made()
    encoded, published = (pair.total(name, "scheduler") for name in ("encoded", "outputs_published"))
    first = say(one.engine, picture)
    eventually(
        lambda: pair.total("outputs_published", "scheduler") == published + 1, "what was made is published"
    )
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: say((one, two)[n % 2].engine, picture), range(99)))
    assert set(texts) == {first}
    assert pair.total("encoded", "scheduler") == encoded + 1
    assert [now - then for now, then in zip(pair.made(), before, strict=True)] == [1, 1]
    pair.at_rest()


def test_requests_with_several_pictures_share_each_of_them(pair: Pair) -> None:
    """All at once, each with two of six pictures in any order: some are there, some are being made, some are not."""
    chosen = kit.album()[2:6] + [kit.url(pictures.generated(500 + n, 112, 84)) for n in range(2)]
    draw, before = random.Random(3), pair.made()
    requests = [(draw.choice(pair.scenes), draw.sample(chosen, 2)) for _ in range(40)]
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda one: (tuple(one[1]), say(one[0].engine, *one[1])), requests))
    for urls in {urls for urls, _ in texts}:
        assert len({text for other, text in texts if other == urls}) == 1, "the same answer from both engines"
    assert [now - then for now, then in zip(pair.made(), before, strict=True)] == [6, 6]
    pair.at_rest()


def test_pictures_that_are_alike_are_not_taken_for_each_other(pair: Pair) -> None:
    before = pair.made()
    for engine in (scene.engine for scene in pair.scenes):
        assert [say(engine, url) for url in alike()] == [pair.own[url] for url in alike()]
    assert [now - then for now, then in zip(pair.made(), before, strict=True)] == [5, 5]


def test_other_options_are_other_pictures(pair: Pair) -> None:
    picture, engine = kit.album()[2], pair.scenes[0].engine
    made = pair.total("derived_made")
    for detail in ("low", "high", "low"):
        content = [{"type": "image_url", "image_url": {"url": picture, "detail": detail}}]
        content.append({"type": "text", "text": "Describe the image"})
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
        kit.post(engine, "/v1/chat/completions", {**body, "max_tokens": 4})
    assert pair.total("derived_made") == made + 2


def test_a_picture_that_cannot_be_decoded_fails_everybody_who_waits_for_it(pair: Pair) -> None:
    broken = data_url(b"\x89PNG\r\n\x1a\n" + bytes(100), "png")

    def refused(n: int) -> int:
        with pytest.raises(HTTPError) as error:
            say(pair.scenes[n % 2].engine, broken)
        with error.value:
            return error.value.code

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(refused, range(6))) <= {400, 500}
    pair.at_rest()


def test_requests_that_nobody_waits_for_leave_nothing(pair: Pair) -> None:
    fresh = [kit.url(pictures.generated(900 + n, 420, 280)) for n in range(6)]
    for n, picture in enumerate(fresh):
        with pair.scenes[n % 2].request([picture], max_tokens=4):
            pass  # its client goes away as soon as it is sent
    pair.at_rest()
    for picture in fresh[:2]:
        assert say(pair.scenes[0].engine, picture) == say(pair.scenes[1].engine, picture)
    pair.at_rest()


def test_status_tells_who_has_derived_keys(pair: Pair) -> None:
    def told() -> bool:
        tallies = [session["tally"] for session in pair.broker.status()["sessions"]]
        return sum(tally.get("sglang_derived", 0) for tally in tallies) == 2

    eventually(told, "both tokenizers tell that their processor has derived keys")


def test_a_killed_engine_is_not_noticed_by_the_other(pair: Pair) -> None:
    one, two = pair.scenes
    picture = kit.album()[1]
    with two.stream([picture], max_tokens=60) as theirs, one.stream([picture], max_tokens=40) as mine:
        next(theirs)
        next(mine)
        os.killpg(two.engine.process.pid, signal.SIGKILL)
        words = [json.loads(line[5:]) for line in mine if "[DONE]" not in line]
    assert words[-1]["choices"][0]["finish_reason"] == "length"
    assert say(one.engine, picture) == pair.own[picture]
    assert say(one.engine, kit.album()[0]) == pair.own[kit.album()[0]]
    assert not one.total("scheduler")["errors"]


def test_a_killed_broker_is_not_noticed_either(pair: Pair) -> None:
    """After it, because this one has no broker any more."""
    engine, picture = pair.scenes[0].engine, kit.album()[0]
    pair.broker.kill()
    made = pair.scenes[0].made()
    assert say(engine, picture) == pair.own[picture]
    assert pair.scenes[0].made() == (made[0] + 1, made[1] + 1), "SGLang's own way"
