"""The log: for people or for machines, never flooded, and joined with the clients' by tags."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mmbroker import logs
from mmbroker.link import Link
from mmbroker.proto import messages as m
from mmbroker.proto.errors import PoolFull
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from mmbroker.proto.tags import boot_tag, session_tag
from tests.conftest import StartBroker
from tests.kit import RawClient, eventually


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, logging.StreamHandler[io.StringIO]]]:
    """A logger with a handler like the daemon's, and nothing of the test's own logging."""
    logger = logging.Logger("mmbroker")
    handler = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    yield logger, handler


def test_text_is_a_sentence_with_its_fields(log: Any) -> None:
    logger, handler = log
    handler.setFormatter(logs.Text())
    logger.warning("%d things", 3, extra=logs.about(client="worker-0", held_back=2, engine=""))
    assert handler.stream.getvalue().endswith(" mmbroker WARNING: 3 things (client worker-0, held back 2)\n")


def test_json_is_one_object_a_line(log: Any) -> None:
    logger, handler = log
    handler.setFormatter(logs.Json())
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it\nbroke", extra=logs.about(client="a\u2028b", figures={"limit": 3}))
    (line,) = handler.stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["level"], told["message"], told["client"], told["figures"]) == (
        "error",
        "it\nbroke",
        "a\u2028b",
        {"limit": 3},
    )
    assert "ValueError: two" in told["exception"] and re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4}", told["time"]
    )


def test_a_flood_is_held_back_and_counted(log: Any) -> None:
    logger, handler = log
    now = [0.0]
    handler.addFilter(logs.Limiter(lambda: now[0]))
    handler.setFormatter(logs.Json())
    for number in range(1000):
        logger.warning("flood %d", number)
        logger.info("another %d", number)
    for _ in range(2 * logs.BURST):
        logger.critical("the end")
    now[0] = logs.WINDOW
    logger.warning("flood %d", 1000)
    told = [json.loads(line) for line in handler.stream.getvalue().splitlines()]
    messages = [record["message"] for record in told]
    assert messages.count("the end") == 2 * logs.BURST
    assert sum(message.startswith("flood") for message in messages) == logs.BURST + 1
    assert sum(message.startswith("another") for message in messages) == logs.BURST
    assert told[-1]["message"] == "flood 1000" and told[-1]["held_back"] == 1000 - logs.BURST


def test_kinds_are_bounded() -> None:
    limiter = logs.Limiter(lambda: 0.0)
    for number in range(5000):
        limiter.filter(logging.LogRecord("x", logging.INFO, "", 0, f"made of {number}", (), None))
    assert len(limiter._kinds) <= 256


# --- the daemon's ---


def test_a_story_is_told_with_tags_that_the_client_has_too(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker(log_level="info", log_format="json", host_mib=4)
    with caplog.at_level(logging.INFO, "mmbroker"):
        link = Link(broker.directory, "worker-7")
    tag = session_tag(link.boot, link.session)
    link.call(m.Attach("engine-a", 0, 1))
    with pytest.raises(PoolFull):
        link.call(m.Create([m.Item(Key.caller("x"), tensor_form("uint8", (5 << 20,), "image"))]))
    (session,) = [s for s in broker.status()["sessions"] if s["name"] == "worker-7"]
    assert session["tag"] == tag
    link.close()
    eventually(lambda: "has ended" in broker.log() or "has left" in broker.log(), "the end in the log")
    told = [json.loads(line) for line in broker.log().splitlines()]
    ours = [record for record in told if record.get("session") == tag]
    assert [record["message"].split(":")[0] for record in ours][:3] == [
        "a client has connected",
        "a rank has attached",
        "a call failed",
    ]
    assert {record["client"] for record in ours} == {"worker-7"}
    assert ours[1]["engine"] == "engine-a"
    assert (ours[2]["error"], ours[2]["limit"]) == ("PoolFull", 4 << 20)
    assert told[0]["message"] == "ready" and told[0]["boot"] == boot_tag(link.boot)
    (said,) = [record.getMessage() for record in caplog.records if "is connected" in record.getMessage()]
    assert f"session {tag} of broker {boot_tag(link.boot)}" in said
    assert str(link.session) not in broker.log() + said, "who knows it can speak for the session"
    assert link.boot.hex() not in broker.log() + said


def test_nothing_is_logged_for_each_feature(start_broker: StartBroker) -> None:
    broker = start_broker(log_level="info")
    with RawClient(broker.directory, name="worker") as client:
        before = broker.log().count("\n")
        for number in range(100):
            created = client.call(
                m.Create([m.Item(Key.caller(str(number)), tensor_form("uint8", (1,), "x"))])
            )
            assert isinstance(created, m.Created) and isinstance(created.results[0], m.Leased)
            client.call(m.Seal([m.Sealing(created.results[0].lease)]))
        assert broker.log().count("\n") <= before + 1


@pytest.mark.parametrize(("setting", "value"), [("log_format", "xml"), ("log_level", "loud")])
def test_other_logs_are_refused(setting: str, value: str) -> None:
    from mmbroker.config import ConfigError, Settings

    with pytest.raises(ConfigError, match=setting):
        Settings.resolve({setting: value}, {})
