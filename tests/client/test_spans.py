"""Spans: of clients through their process's OpenTelemetry, of the daemon through its own; else none."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import mmbroker
from mmbroker import spans
from mmbroker.proto import messages as m
from mmbroker.proto.errors import InvalidMessage, PoolFull
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, RawClient
from tests.server.items import an_item

ABOUT = {"client": "worker-0", "session": "1f2e3d4c", "engine": ""}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Of this process's spans, with an own provider: the global one can be set only once."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(spans, "_tracer", lambda: provider.get_tracer("test"))
    monkeypatch.setattr(spans, "budget", spans.Budget())
    yield kept
    provider.shutdown()


def made(exporter: InMemorySpanExporter) -> list[tuple[str, dict[str, Any]]]:
    return [(span.name, dict(span.attributes or {})) for span in exporter.get_finished_spans()]


# --- both sides -----------------------------------------------------------------------------------------------------


def told(log: str) -> list[dict[str, Any]]:
    """The spans in a daemon's log: objects over several lines, that end with one that has only a brace."""
    found, at = [], 0
    while (at := log.find("{\n", at)) >= 0:
        span, length = json.JSONDecoder().raw_decode(log[at:])
        found.append(span)
        at += length
    return found


def test_a_put_and_what_the_broker_did_for_it_are_one_trace(
    start_broker: StartBroker, exporter: InMemorySpanExporter
) -> None:
    """With what waited, and for what. The scheduler's own calls make no spans."""
    process = start_broker(host_mib=4, segment_mib=4, env={"OTEL_TRACES_EXPORTER": "console"})
    with (
        mmbroker.connect(process.directory, name="worker-0") as client,
        mmbroker.connect(process.directory, name="rank-0") as other,
    ):
        table = other.attach(engine="mine", access="readonly")
        held = client.put(torch.rand(64, 1176), to="mine")
        before = len(exporter.get_finished_spans())
        with table.take(held.ref.to_wire()) as use:
            assert use.tensor.shape == (64, 1176)
        assert len(exporter.get_finished_spans()) == before
        with pytest.raises(PoolFull):
            client.put(torch.zeros((4 << 20) - (1 << 16), dtype=torch.uint8), timeout=0.2)
        held.drop()
    process.stop()
    (put,) = [s for s in exporter.get_finished_spans() if s.name == "mmbroker.put" and s.status.is_ok]
    assert put.attributes is not None
    assert put.attributes["mmbroker.bytes"] == 64 * 1176 * 4 and put.attributes["mmbroker.to"] == "mine"
    digest, write = (put.attributes[f"mmbroker.{what}_seconds"] for what in ("digest", "write"))
    assert isinstance(digest, float) and isinstance(write, float) and digest > 0 and write > 0
    assert (
        "mmbroker.grant",
        {"mmbroker.engine": "mine", "mmbroker.rank": 0, "mmbroker.features": 1},
    ) in made(exporter)
    found = {
        span["name"]: span
        for span in told(process.log())
        if span["parent_id"] == f"0x{put.context.span_id:016x}"
    }
    assert found.keys() == {"mmbroker.broker.create", "mmbroker.broker.seal"}
    for span in found.values():
        assert span["context"]["trace_id"] == f"0x{put.context.trace_id:032x}"
        assert span["attributes"]["mmbroker.client"] == "worker-0"
        assert span["resource"]["attributes"]["service.name"] == "mmbroker"
    assert found["mmbroker.broker.create"]["attributes"]["mmbroker.leases"] == 1
    assert found["mmbroker.broker.seal"]["attributes"]["mmbroker.waited_for"] == "ranks"
    (failed,) = [span for span in told(process.log()) if span["status"]["status_code"] == "ERROR"]
    assert failed["attributes"]["mmbroker.waited_for"] == "room"
    assert failed["attributes"]["mmbroker.error"] == "PoolFull"


def test_nothing_is_imported_and_nothing_is_sent_where_nobody_asked(broker: BrokerProcess) -> None:
    """Neither in a client, nor in the daemon."""
    program = (
        "import mmbroker, sys, torch; from mmbroker import spans\n"
        "with mmbroker.connect() as client, client.put(torch.zeros(9)): print(repr(spans.context()))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.stdout, done.stderr) == ("''\n[]\n", "")
    with open(f"/proc/{broker.pid}/maps") as maps:
        assert "opentelemetry" not in maps.read()
    assert told(broker.log()) == []


def test_a_trace_that_is_none_costs_nobody_anything(start_broker: StartBroker) -> None:
    process = start_broker(env={"OTEL_TRACES_EXPORTER": "console"})
    client = RawClient(process.directory)
    nonsense = ["nonsense", f"00-{0:032}-{0:016}-01", "\x1b[2J", "é" * m.TRACE_LENGTH]
    for trace in nonsense:
        assert client.call(m.Lookup([Key.caller(b"k" * 32)]), trace=trace) == m.Found([None])
    client.close()
    process.stop()
    assert [span["parent_id"] for span in told(process.log())] == [None] * len(nonsense)


def test_a_long_trace_is_refused(broker: BrokerProcess) -> None:
    client = RawClient(broker.directory)
    reply = client.call(m.Status(), trace="x" * (m.TRACE_LENGTH + 1))
    assert isinstance(reply, m.Failed) and reply.error == InvalidMessage.__name__
    client.close()


def test_without_its_extra_the_daemon_says_so_and_serves(start_broker: StartBroker) -> None:
    process = start_broker(env={"OTEL_TRACES_EXPORTER": "jaeger"})
    with RawClient(process.directory) as client:
        assert isinstance(client.call(m.Status()), m.Report)
    assert "no spans are made" in process.log() and "mmbroker[otel]" in process.log()


# --- the daemon's, without a daemon ---------------------------------------------------------------------------------


def calls(exporter: InMemorySpanExporter) -> spans.CallSpans:
    return spans.CallSpans(lambda session: ABOUT, spans._tracer())


def call(seq: int = 1, body: m.Body | None = None, trace: str = "") -> m.Call:
    return m.Call(1, b"b" * 16, 1, seq, 1.0, body or m.Create([an_item(100), an_item(200)], "mine"), trace)


def test_a_span_says_what_was_asked_and_what_came_of_it(exporter: InMemorySpanExporter) -> None:
    watch = calls(exporter)
    assert watch.called(1, call())
    watch.waits(1, 1, "flight")
    assert made(exporter) == []
    watch.answered(1, 1, m.Created([m.Leased(1, 1, 0, 1), m.Pending()]))
    watch.answered(1, 1, m.Done())
    assert made(exporter) == [
        (
            "mmbroker.broker.create",
            {
                "mmbroker.client": "worker-0",
                "mmbroker.session": "1f2e3d4c",
                "mmbroker.seq": 1,
                "mmbroker.to": "mine",
                "mmbroker.features": 2,
                "mmbroker.bytes": 300,
                "mmbroker.waited_for": "flight",
                "mmbroker.hits": 0,
                "mmbroker.leases": 1,
                "mmbroker.pending": 1,
            },
        )
    ]


def test_casts_and_other_calls_make_none(exporter: InMemorySpanExporter) -> None:
    watch = calls(exporter)
    assert not watch.called(1, call(seq=0)) and not watch.called(1, call(body=m.Status()))
    assert not spans.CallSpans(lambda session: ABOUT).called(1, call())
    watch.answered(1, 1, m.Done())
    assert made(exporter) == []


def test_calls_of_a_session_that_ended_are_forgotten(exporter: InMemorySpanExporter) -> None:
    watch = calls(exporter)
    watch.called(1, call())
    watch.called(2, call())
    watch.ended(1)
    watch.answered(1, 1, m.Done())
    assert made(exporter) == [] and len(watch._open) == 1


def test_what_waits_for_an_answer_is_bounded(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "_OPEN", 3)
    watch = calls(exporter)
    for seq in range(1, 10):
        watch.called(1, call(seq))
    assert [seq for _, seq in watch._open] == [7, 8, 9]


def test_so_many_a_second_and_the_rest_is_counted(exporter: InMemorySpanExporter) -> None:
    now = 10.0
    spans.budget = spans.Budget(2, lambda: now)
    for _ in range(5):
        with spans.span("put", features=1):
            pass
    now = 11.0
    with spans.span("put"):
        pass
    assert [attributes for _, attributes in made(exporter)] == [
        {"mmbroker.features": 1},
        {"mmbroker.features": 1},
        {"mmbroker.spans_dropped": 3},
    ]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "zipkin"),
    ],
)
def test_who_asks_for_spans(environ: dict[str, str], words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch = spans.set_up(lambda session: ABOUT, environ)
    assert not watch.called(1, call()) and words in caplog.text and bool(caplog.text) == bool(words)
    watch.close()


def test_an_exporter_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        spans.set_up(lambda session: ABOUT, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert "mmbroker[otel]" in caplog.text


# --- a broken one ---------------------------------------------------------------------------------------------------


class Pretender:
    """Something in OpenTelemetry's place: has every name, and every call gives it again, except one, which fails."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def __getattr__(self, name: str) -> Pretender:
        if name == self._fails:
            raise AttributeError(f"no {name} here")
        return self

    def __call__(self, *_: object, **__: object) -> Pretender:
        return self

    def __enter__(self) -> Pretender:
        if self._fails == "enter":
            raise RuntimeError("no context here")
        return self

    def __exit__(self, *_: object) -> None:
        if self._fails == "exit":
            raise RuntimeError("no way out")

    def __format__(self, _: str) -> str:
        raise TypeError("no number")


@pytest.mark.parametrize(
    "fails",
    [
        "get_tracer",
        "start_as_current_span",
        "enter",
        "exit",
        "set_attributes",
        "get_current_span",
        "is_valid",
        "",
    ],
)
def test_what_only_pretends_to_be_opentelemetry_harms_nobody(
    fails: str, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some engines run with stand-ins for packages that they lack. It is said once, and then let alone."""
    monkeypatch.setattr(spans, "tracing", type(spans.tracing)())
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", Pretender(fails))
    with mmbroker.connect(broker.directory) as client:
        for i in range(3):
            client.put(torch.full((4,), i)).drop()
        with pytest.raises(PoolFull):
            client.put(torch.zeros(128 << 20, dtype=torch.uint8))
    assert spans.tracing.broken
    assert sum("OpenTelemetry failed" in record.message for record in caplog.records) == 1
