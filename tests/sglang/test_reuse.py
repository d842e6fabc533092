"""What is nearly the same is never taken for each other: the bench that tries ten thousand, in its short form."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator

import pytest

from mmbroker.adapters.sglang import shaping
from tests.kit import BrokerProcess

from . import kit

kit.schedule_batch()
with warnings.catch_warnings():  # of much that a machine without a GPU lacks
    warnings.simplefilter("ignore")
    import sglang.srt.multimodal.processors.qwen_vl
    import sglang.srt.server_args  # noqa: F401

from bench import alike, preprocessors, reuse  # noqa: E402

pytestmark = [
    pytest.mark.sglang,
    # SGLang hands the image processor of transformers what that will not take for ever.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # So does Pillow numpy, where it is older.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("ERROR"):
        yield


def test_what_is_nearly_the_same_is_not_taken_for_each_other(broker: BrokerProcess) -> None:
    found = asyncio.run(reuse.run(str(broker.directory), 160, alike.servers()[::9]))
    assert (found["wrong"], found["pictures"], found["keys"]) == (0, 160, 80)
    assert found["through_broker"] + found["refused"] == 160
    assert found["outputs"] > 20, "settings and pictures make a difference"
    # Those of an engine are there for the other one.
    assert broker.status()["counters"]["seals"] == found["through_broker"] // 2


def test_keys_that_say_too_little_are_found_out(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaping, "fingerprint_of", lambda processor, args: bytes(32))
    assert asyncio.run(reuse.run(str(broker.directory), 160, alike.servers()[::9]))["wrong"]


def test_a_processor_that_cannot_be_described_keeps_content_keys(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is strange about it: it works, and the log says why its pictures are made before they are found."""

    def strange(*args: object) -> bytes:
        raise TypeError("a setting that has no words")

    monkeypatch.setattr(shaping, "fingerprint_of", strange)
    if kit.NEWEST:  # and SGLang's own
        monkeypatch.setattr("sglang.srt.multimodal.cache.build_processor_fingerprint", strange)
    with (
        reuse.joined(str(broker.directory)) as (asking, _),
        caplog.at_level("WARNING"),
        pytest.raises(RuntimeError, match="has no derived keys"),
    ):
        preprocessors.engine(alike.servers()[0], asking)
    assert "has content keys (TypeError: a setting that has no words)" in caplog.text
