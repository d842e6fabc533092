"""Pictures that are known before they are decoded, where SGLang has no artifacts: requests come out as without us."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mmbroker.adapters.sglang import holding, hooks, known, undecoded
from mmbroker.demo import pictures
from mmbroker.proto import errors
from mmbroker.proto.reference import is_reference
from tests.kit import BrokerProcess

from . import kit

kit.schedule_batch()
with warnings.catch_warnings():  # of much that a machine without a GPU lacks
    warnings.simplefilter("ignore")
    import sglang.srt.multimodal.processors.qwen_vl
    import sglang.srt.server_args  # noqa: F401

from bench import alike, reuse  # noqa: E402
from bench.preprocessors import ByBytes  # noqa: E402

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


class Bench:
    """A processor with derived keys and without, and a rank that takes what the first one puts."""

    def __init__(self, broker: BrokerProcess, asking: Any, table: Any, threads: int = 0) -> None:
        self.broker, self.asking, self.table = broker, asking, table
        self.engine = ByBytes(alike.servers()[0], asking, threads)
        self.processor = self.engine.processor

    async def ask(self, *media: Any, prompt: Any = None, wait: float = 10.0, **others: Any) -> list[bool]:
        """Which features of a request are references; all of it is as it is without us."""
        prompt = "".join(PICTURE + f"and {n}" for n in range(len(media))) if prompt is None else prompt
        request = SimpleNamespace(video_data=None, audio_data=None, rid="one", **others)
        with holding.Turn(None, wait, True) as turn:
            got = await self.engine.hooked.process_mm_data_async(list(media), prompt, request)
            own = await self.processor.process_mm_data_async(list(media), prompt, request)
            assert (got.input_ids, got.padded_input_ids) == (own.input_ids, own.padded_input_ids)
            assert torch.equal(got.mrope_positions, own.mrope_positions)
            assert torch.equal(got.mrope_position_delta, own.mrope_position_delta)
            for one, other in zip(got.mm_items, own.mm_items, strict=True):
                assert (one.offsets, one.modality, one.hash, one.pad_value) == (
                    *(other.offsets, other.modality, other.hash, other.pad_value),
                )
                assert str(one.model_specific_data) == str(other.model_specific_data)
                if is_reference(one.feature):
                    with self.table.take(one.feature) as use:
                        assert torch.equal(use.tensor, other.feature)
                else:
                    assert torch.equal(one.feature, other.feature)
            named = {(i.feature["boot"], i.feature["hold"]) for i in got.mm_items if is_reference(i.feature)}
            helds = turn.taken(named)
            assert len(helds) == len(named), "what is referred to is held"
            for held in helds:
                held.drop()
        return [is_reference(item.feature) for item in got.mm_items]

    def at_rest(self) -> None:
        kit.at_rest(self.broker)


@pytest.fixture
def bench(broker: BrokerProcess) -> Iterator[Bench]:
    with reuse.joined(str(broker.directory)) as (asking, table):
        made = Bench(broker, asking, table)
        yield made
        made.engine.close()


def data(seed: int, size: tuple[int, int] = (112, 84), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    pictures.generated(seed, *size).save(file, kind)
    return file.getvalue()


def url(seed: int, size: tuple[int, int] = (112, 84)) -> str:
    return "data:image/png;base64," + base64.b64encode(data(seed, size)).decode()


# --- the way ----------------------------------------------------------------------------------------------------------


def test_a_request_is_put_together_as_sglang_does(bench: Bench) -> None:
    sizes = [(112, 84), (56, 140), (420, 280), (84, 84)]

    async def run() -> None:
        for count in (1, 2, 4):
            media = [url(seed, sizes[seed]) for seed in range(count)]
            for _ in range(2):
                assert await bench.ask(*media) == [True] * count
                assert await bench.ask(*reversed(media)) == [True] * count
        assert await bench.ask(url(0), url(3, sizes[3]), url(0)) == [True] * 3, "the same picture twice"
        assert await bench.ask(url(7), url(0), url(8)) == [True] * 3, "some are known, and some are not"

    asyncio.run(run())
    assert bench.broker.status()["counters"]["seals"] == 6
    bench.at_rest()


def test_the_prompt_may_be_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = bench.processor._tokenizer.encode(f"What is {PICTURE}, and {PICTURE}?")

    async def run() -> None:
        for keep in ("0", "1"):
            monkeypatch.setenv("SGLANG_MM_AVOID_RETOKENIZE", keep)
            for _ in range(2):
                assert await bench.ask(url(1), url(2, (420, 280)), prompt=tokens) == [True, True]

    asyncio.run(run())
    bench.at_rest()


def test_two_requests_at_once_make_a_picture_once(bench: Bench) -> None:
    async def run() -> None:
        pairs = [(1, 2), (2, 3), (3, 1), (2, 1)]
        for found in await asyncio.gather(*(bench.ask(url(a), url(b)) for a, b in pairs)):
            assert found == [True, True]

    asyncio.run(run())
    counters = bench.broker.status()["counters"]
    assert (counters["promises"], counters["seals"]) == (3, 3)
    bench.at_rest()


def test_processors_of_other_threads_are_used_as_sglang_does(broker: BrokerProcess) -> None:
    with reuse.joined(str(broker.directory)) as (asking, table):
        bench = Bench(broker, asking, table, threads=2)

        async def run() -> None:
            for _ in range(2):
                await asyncio.gather(*(bench.ask(url(n), url(n + 1, (140, 56))) for n in range(6)))

        asyncio.run(run())
        own = bench.processor._processor.image_processor
        assert type(own).__module__.startswith("transformers."), "and nothing of ours stays there"
        bench.at_rest()
        bench.engine.close()


def test_known_pictures_do_not_stand_in_line_behind_those_to_be_made(broker: BrokerProcess) -> None:
    """SGLang's only thread for preprocessing is busy until the known one has come."""
    with reuse.joined(str(broker.directory)) as (asking, table):
        bench = Bench(broker, asking, table, threads=1)
        come, busy = threading.Event(), threading.Event()

        def stay(processor: Any) -> None:
            busy.set()
            assert come.wait(30)

        async def run() -> None:
            assert await bench.ask(url(1)) == [True]
            waiting = asyncio.create_task(bench.processor.mm_processor_executor.run(stay))
            await asyncio.to_thread(busy.wait, 30)
            request = SimpleNamespace(video_data=None, audio_data=None, rid="one")
            with holding.Turn(None, 10.0, True):
                made = await bench.engine.hooked.process_mm_data_async([url(1)], PICTURE, request)
            assert is_reference(made.mm_items[0].feature)
            come.set()
            await waiting

        asyncio.run(run())
        bench.at_rest()
        bench.engine.close()


class Site(BaseHTTPRequestHandler):
    """Pictures for a browser, by number."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        found = data(int(self.path[1:]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *_: Any) -> None: ...


def test_media_are_read_as_sglang_reads_them(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same picture in every form that has bytes is one picture, and a site is asked once for a request."""
    from sglang.srt.utils.common import ImageData

    file = tmp_path / "a picture.png"
    file.write_bytes(data(3))
    monkeypatch.setattr(Site, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        Thread(target=site.serve_forever).start()
        try:
            web = f"http://127.0.0.1:{site.server_address[1]}/3"
            forms = [data(3), url(3), base64.b64encode(data(3)).decode(), f"file://{file}", str(file), web]

            async def run() -> None:
                for form in forms:
                    assert await bench.ask(form) == [True]
                assert await bench.ask(ImageData(url=url(3))) == [True]

            asyncio.run(run())
        finally:
            site.shutdown()
    assert Site.asked == ["/3"] * 2, "once by each processor"
    assert bench.broker.status()["counters"]["seals"] == 2, "with the options of a request, and without"
    bench.at_rest()


def test_what_has_no_bytes_has_no_derived_key(bench: Bench) -> None:
    picture = Image.open(io.BytesIO(data(5)))

    async def run() -> None:
        assert await bench.ask(picture, data(5)) == [False, True]
        assert await bench.ask(picture) == [False]
        with holding.Turn(None, 1.0, False):
            request = SimpleNamespace(video_data=None, audio_data=None, rid="one")
            found = await bench.engine.hooked.process_mm_data_async([url(1)], PICTURE, request)
        assert not is_reference(found.mm_items[0].feature), "it was not to be found by derived keys"

    asyncio.run(run())
    bench.at_rest()


def test_what_is_processed_already_goes_untouched(bench: Bench) -> None:
    done = bench.processor._processor(
        images=[pictures.generated(1, 112, 84)], text=[PICTURE], return_tensors="pt"
    )
    ids = done["input_ids"][0].tolist()

    async def run() -> None:
        assert await bench.ask({**done, "format": "processor_output"}, prompt=ids) == [False]

    asyncio.run(run())
    bench.at_rest()


# --- every step fails -------------------------------------------------------------------------------------------------


def both(bench: Bench, media: Sequence[Any], prompt: str) -> list[str]:
    """What SGLang says to a request that it refuses, with derived keys and without."""

    async def ask(processor: Any) -> str:
        request = SimpleNamespace(video_data=None, audio_data=None, rid="one")
        with holding.Turn(None, 5.0, True), pytest.raises(Exception) as caught:
            await processor.process_mm_data_async(list(media), prompt, request)
        return f"{caught.type.__name__}: {caught.value}"

    return [asyncio.run(ask(processor)) for processor in (bench.engine.hooked, bench.processor)]


@pytest.mark.parametrize(
    "media",
    [
        [b"\x89PNG\r\n\x1a\n" + bytes(100)],
        ["data:image/png;base64,AAAA"],
        ["no base64!"],
        ["file:///is/not/there.png"],
        ["http://127.0.0.1:9/refused.png"],
        [b"", data(1)],
        [3],
        [data(1), {"format": "processor_output"}],
    ],
    ids=lambda media: str(media[0])[:20],
)
def test_what_sglang_refuses_it_refuses_in_its_own_words(bench: Bench, media: list[Any]) -> None:
    ours, own = both(bench, media, PICTURE * len(media))
    assert (
        ours.split(" at 0x")[0] == own.split(" at 0x")[0]
    )  # some messages have an address of an object in them
    bench.at_rest()


def test_what_sglang_would_not_read_is_not_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pictures than places; and those that are there are fetched once, if others cannot be had."""
    monkeypatch.setattr(Site, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        Thread(target=site.serve_forever).start()
        web = f"http://127.0.0.1:{site.server_address[1]}"
        try:
            request = SimpleNamespace(video_data=None, audio_data=None, rid="one")
            with holding.Turn(None, 5.0, True):
                media = [f"{web}/1", f"{web}/2"]
                asyncio.run(bench.engine.hooked.process_mm_data_async(media, PICTURE, request))
            assert Site.asked == ["/1"]
            Site.asked.clear()
            with holding.Turn(None, 5.0, True), pytest.raises(RuntimeError, match="not/there"):
                media = [f"{web}/3", "file:///is/not/there.png", "file:///is/not/there.jpg"]
                asyncio.run(bench.engine.hooked.process_mm_data_async(media, PICTURE * 3, request))
            assert Site.asked == ["/3"]
        finally:
            site.shutdown()
    bench.at_rest()


def test_what_a_broker_cannot_carry_is_not_made_in_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known.packing, "portable", lambda feature: False)
    ask, asked = bench.asking.client.get_or_promise, list[int]()

    def counted(keys: Sequence[Any], **options: Any) -> Any:
        asked.append(len(keys))
        return ask(keys, **options)

    monkeypatch.setattr(bench.asking.client, "get_or_promise", counted)

    async def run() -> None:
        assert await bench.ask(url(1)) == [False]
        assert await bench.ask(url(1), url(2)) == [False, False]

    asyncio.run(run())
    assert asked == [1], "and then no more"
    bench.at_rest()


def test_nobody_complains_of_what_nobody_waits_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A put that fails when its request is gone, and pictures of which several cannot be had."""
    begun, go_on = threading.Event(), threading.Event()

    def fails(*args: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait(30)
        raise errors.BrokerLost("x")

    async def run() -> None:
        monkeypatch.setattr(bench.asking.client, "put_many", fails)
        task = asyncio.create_task(bench.ask(url(1)))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        with pytest.raises(RuntimeError, match="not there"):
            await bench.ask("file:///not there 1", "file:///not there 2", "file:///not there 3")

    with caplog.at_level("ERROR"):
        asyncio.run(run())
        gc.collect()
    assert [r for r in caplog.records if r.name == "asyncio"] == []
    bench.at_rest()


@pytest.mark.parametrize("prompt", [PICTURE, PICTURE * 3])
def test_pictures_and_places_that_are_not_as_many(bench: Bench, prompt: str) -> None:
    """SGLang leaves some of either out, or refuses: whichever it is, ours is the same."""

    async def ask(processor: Any) -> str:
        request = SimpleNamespace(video_data=None, audio_data=None, rid="one")
        with holding.Turn(None, 5.0, True):
            try:
                made = await processor.process_mm_data_async([url(1), url(2)], prompt, request)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return f"{made.input_ids} {[(item.offsets, item.model_specific_data) for item in made.mm_items]}"

    assert asyncio.run(ask(bench.engine.hooked)) == asyncio.run(ask(bench.processor))
    bench.at_rest()


@pytest.mark.parametrize(
    "error", [errors.BrokerLost("x"), errors.DeadlineExceeded("x"), errors.QuotaExceeded("x"), TypeError("x")]
)
@pytest.mark.parametrize("step", ["get_or_promise", "put_many"])
def test_an_error_leaves_it_to_sglang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise error

    async def run() -> None:
        assert await bench.ask(url(1)) == [True]
        monkeypatch.setattr(bench.asking.client, step, broken)
        assert await bench.ask(url(1), url(2)) == [False, False]

    asyncio.run(run())
    bench.at_rest()


def test_a_broker_that_is_killed_while_a_picture_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = undecoded.Undecoded._make

    async def killed(*args: Any) -> Any:
        bench.broker.kill()
        return await make(*args)

    monkeypatch.setattr(undecoded.Undecoded, "_make", killed)
    assert asyncio.run(bench.ask(url(1))) == [False]
    assert asyncio.run(bench.ask(url(1))) == [False]


def test_a_cancelled_request_gives_everything_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    make = undecoded.Undecoded._make

    async def run() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(*args: Any) -> Any:
            begun.set()
            await go_on.wait()
            return await make(*args)

        monkeypatch.setattr(undecoded.Undecoded, "_make", slow)
        task = asyncio.create_task(bench.ask(url(1), url(2)))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await bench.ask(url(1), url(2)) == [True, True]

    asyncio.run(run())
    bench.at_rest()


# --- who has derived keys ---------------------------------------------------------------------------------------------


def _another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = type(bench.processor)
    bench.processor.__class__ = type("Another", (kind,), {"__module__": kind.__module__})
    return "Another has content keys"


def _hashed_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SGLANG_MM_PRECOMPUTE_HASH", "1")
    return "SGLANG_MM_PRECOMPUTE_HASH"


def _strange(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    bench.processor.image_config = {"hook": object()}
    return "settings.*hook"


@pytest.mark.parametrize("change", [_another, _hashed_first, _strange])
def test_others_keep_content_keys_and_it_is_said(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Bench, pytest.MonkeyPatch], str],
) -> None:
    why = change(bench, monkeypatch)
    args = bench.processor.server_args
    with caplog.at_level("INFO"):
        assert undecoded.enable(bench.processor, args, bench.asking) is None
    assert any(re.search(why, record.getMessage()) for record in caplog.records)


@pytest.mark.parametrize("finder", [False, True])
def test_who_combines_by_keywords_is_let_alone(bench: Bench, finder: bool) -> None:
    """As some of SGLang's processors do, which have no derived keys."""
    processor = SimpleNamespace()
    setattr(processor, hooks._OURS, SimpleNamespace(finder=bench.engine.finder if finder else None))

    async def begin(processor: Any, base_output: Any, mm_tokens: Any) -> tuple[Any, Any]:
        return base_output, mm_tokens

    def combine(processor: Any, base_output: Any, mm_tokens: Any) -> tuple[Any, Any]:
        return base_output, mm_tokens

    async def load(processor: Any, prompt: str, multimodal_tokens: Any) -> tuple[Any, Any]:
        return prompt, multimodal_tokens

    assert asyncio.run(hooks.begin_combining(begin, processor, base_output=1, mm_tokens=2)) == (1, 2)
    assert hooks.combine_media(combine, processor, base_output=1, mm_tokens=2) == (1, 2)
    assert asyncio.run(hooks.load_media(load, processor, "text", multimodal_tokens=2)) == ("text", 2)
    assert asyncio.run(hooks.load_media(load, processor, prompt="text", multimodal_tokens=2)) == ("text", 2)
