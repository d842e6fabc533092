"""Metrics: each is there, documented, named by the conventions, and bounded; the dashboard uses no others."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmbroker.adapters.sglang import export
from mmbroker.metrics import (
    CALLS,
    EVICTIONS,
    FALLBACKS,
    METRICS,
    WAITS,
    exposition,
)
from mmbroker.proto import messages as m
from mmbroker.proto.keys import Kind
from mmbroker.records import Wait
from tests.state.shell import Shell, form, item, key

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana.json"
REFERENCE = ROOT / "docs" / "metrics.md"

#: What the daemon adds to the state machine's report.
DAEMON = {
    "pid": 1,
    "version": "1.2.3",
    "instance": "cpu",
    "uptime": 5.0,
    "rss": 1 << 20,
    "descriptors": 20,
    "loop_lag": 0.001,
    "loop_lag_worst": 0.01,
    "counters": {"stray_calls": 7},
    "sessions_limit": 64,
    "outboxes": 0,
    "memory_headroom": 1 << 30,
}


def lived_in() -> Shell:
    """A broker that has seen something."""
    shell = Shell(pages=32)
    peer, other = shell.client(), shell.client()
    shell.engine()
    refs = peer.put(item("x", 2), item("y", 2), to="engine")
    peer.put(item("z", 3))
    other.ask(m.Create([item("z", 3)]))
    peer.drop(refs[0])
    peer.lease(item("open", 4))
    peer.cast(
        m.Tally({"sglang_fallback_full": 3, "table_takes": 5, "table_build_us": 2_500_000, "table_kept": 1})
    )
    other.cast(m.Tally({"sglang_fallback_full": 4, "sglang_inputs_ns": 7_000_000_000}))
    other.end()
    mover = shell.client("mover")
    mover.ask(m.Tier(True))
    for name in ("found", "absent", "waits"):
        shell.client().call(m.Lookup([key(name, Kind.DERIVED)]))
    (leased,) = mover.lease(
        m.Item(key("found", Kind.DERIVED), form(0), mover.sought[key("found", Kind.DERIVED)])
    )
    mover.seal([leased])
    mover.cast(m.Abort([mover.sought[key("absent", Kind.DERIVED)]]))
    peer.put(m.Item(key("made", Kind.DERIVED), form(0)))
    shell.client().create(item("large", 30), timeout=60.0)
    return shell


def report(shell: Shell) -> dict[str, Any]:
    return {**shell.report(), "daemon": DAEMON}


@pytest.fixture(scope="module")
def samples() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels."""
    text, kind = exposition(report(lived_in()))
    assert kind.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_values_are_the_reports(samples: dict[Any, float]) -> None:
    def value(name: str, **labels: str) -> float:
        return samples[f"mmbroker_{name}", tuple(sorted(labels.items()))]

    page = 4096
    assert value("slot_bytes", tier="host", state="in_use") == 9 * page
    assert value("slot_bytes", tier="host", state="cached") == 2 * page
    assert value("leased_bytes") == 4 * page
    assert value("features", state="held") == 4
    assert value("features", state="cached") == 1
    assert value("hits_total") == 2
    assert value("seals_total") == 5
    assert value("calls_total", call="seal") == 4
    assert value("waiting_calls", reason="room") == 1
    assert value("fallbacks_total", reason="full") == 7, "of a client that is gone, too"
    assert value("client_fallbacks_total", client="worker-1", reason="full") == 3
    assert value("table_takes_total") == 5
    assert value("receiver_seconds_total") == 2.5
    assert value("scheduler_seconds_total") == 7.0
    assert value("oddities_total", kind="stray_calls") == 7
    assert value("movers", state="open") == 1
    assert (
        value("sought")
        == value("seeks_total", outcome="found")
        == value("seeks_total", outcome="absent")
        == 1
    )
    assert value("fresh_total", outcome="told") == 1
    assert value("grant_seconds_count") == 2
    assert value("feature_bytes_bucket", le="16384.0") == 6
    assert value("info", version="1.2.3", instance="cpu") == 1
    assert value("healthy") == 1


def test_everything_is_there_from_the_start() -> None:
    """A counter that appears with its first event hides that event from a rate."""
    families = {
        f.name for f in text_string_to_metric_families(exposition(report(Shell()))[0].decode()) if f.samples
    }
    assert families == {metric.name for metric in METRICS} - {"mmbroker_client_fallbacks"}


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"mmbroker(_[a-z0-9]+)+", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_us", "_ns", "_mib"))
        assert metric.help.endswith(".")
        assert metric.kind != "histogram" or metric.name.endswith(("_seconds", "_bytes", "_items"))


def test_labels_are_bounded() -> None:
    """Whatever clients call themselves, and whatever they tell."""
    shell = lived_in()
    before = series(shell)
    for number in range(20):
        peer = shell.client(f"w{number}", namespace=f"n{number}")
        peer.cast(m.Tally({f"nonsense-{number}": 1, "sglang_fallback_nonsense": 1, "puts": 1}))
    assert series(shell) == before


def series(shell: Shell) -> int:
    text = exposition(report(shell))[0].decode()
    return sum(not line.startswith("#") for line in text.splitlines())


def test_a_name_cannot_break_the_format() -> None:
    shell = Shell()
    peer = shell.client('a"} 1\nmmbroker_healthy 0')
    peer.cast(m.Tally({"sglang_fallback_full": 1}))
    families = list(text_string_to_metric_families(exposition(report(shell))[0].decode()))
    (sample,) = [s for f in families if f.name == "mmbroker_client_fallbacks" for s in f.samples]
    assert sample.labels["client"].startswith('a"} 1\nmmbroker_healthy 0')


def test_the_closed_lists_are_the_codes() -> None:
    """Every counter that the code counts is in a metric, and every name in a metric is counted somewhere."""
    code = "\n".join(
        path.read_text() for path in sorted((ROOT / "broker").rglob("*.py")) if path.stem != "metrics"
    )
    counted = set(re.findall(r"counters\[f?\"([a-z_]+)", code)) | set(
        re.findall(r"complain\(\s*\"([a-z_]+)\"", code)
    )
    asked: set[str] = set()

    class Counters(dict[str, int]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

    found = {**Shell().report(), "daemon": DAEMON, "counters": Counters()}
    for metric in METRICS:
        list(metric.read(found))
    assert asked == {name for name in asked if name in counted or name.startswith(PREFIXES)}
    untold = counted - asked - set(PREFIXES)
    assert untold == UNTOLD
    reasons = set(re.findall(r"evict\([^)]*\"([a-z]+)\"", code)) | set(
        re.findall(r"empty\([^)]*\"([a-z]+)\"", code)
    )
    assert reasons <= set(EVICTIONS)
    assert {f"waits_{wait.value}" for wait in Wait} == {f"waits_{name}" for name in WAITS}


#: Counters whose names end with what was counted.
PREFIXES = (
    "evictions_",
    "replicas_evicted_",
    "waits_",
    "expired_",
    "quota_refusals_",
    "tier_",
    *(f"{call}_" for call in CALLS),
)
#: Sums of others.
UNTOLD = {"evictions", "replicas_evicted", "waits"}


def test_the_adapters_reasons_are_the_metrics() -> None:
    from mmbroker.adapters.sglang import measure

    assert measure.REASONS == FALLBACKS


# --- documents ---


def test_every_metric_is_documented_and_no_other() -> None:
    rows = re.findall(
        r"^\| `(mmbroker_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", REFERENCE.read_text(), re.MULTILINE
    )
    engines = [row for row in rows if row[0].startswith("mmbroker_engine_")]
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    samples = {name + end for name, kind, _, _ in engines for end in ends.get(kind, ("",))}
    assert samples == set(export.NAMES)
    rows = rows[len(engines) :]
    assert [row[0] for row in rows] == [
        metric.name + ("_total" if metric.kind == "counter" else "") for metric in METRICS
    ]
    for (_, kind, labels, text), metric in zip(rows, METRICS, strict=True):
        assert (kind, labels, text) == (metric.kind, ", ".join(metric.labels), metric.help)


def expressions(panel: Any) -> list[str]:
    """All queries in a dashboard."""
    if isinstance(panel, dict):
        own = [panel["expr"]] if "expr" in panel else []
        return own + [found for value in panel.values() for found in expressions(value)]
    return [found for value in panel for found in expressions(value)] if isinstance(panel, list) else []


#: Of others, on the same time axis: SGLang's own, DCGM's for the GPU.
STRANGERS = ("sglang:", "DCGM_FI_")


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = expressions(dashboard)
    assert len(asked) > 15
    here = {
        metric.name + end
        for metric in METRICS
        for end in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            metric.kind, ("",)
        )
    }
    here |= set(export.NAMES)
    labels = {label for metric in METRICS for label in metric.labels} | {"le", "engine", "rank", "gpu"}
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        used = set(re.findall(r"\bmmbroker_\w+", expression))
        assert used or any(stranger in expression for stranger in STRANGERS), expression
        assert used <= here, used - here
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", group)) <= labels, expression
    assert {stranger for stranger in STRANGERS for e in asked if stranger in e} == set(STRANGERS)


def test_the_dashboards_panels_share_one_time_axis() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    assert dashboard["graphTooltip"] == 1, "one cursor for all"
    assert all("timeFrom" not in panel and "timeShift" not in panel for panel in panels)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboard_is_its_makers() -> None:
    maker = runpy.run_path(str(DASHBOARD.with_name("make_dashboard.py")))
    assert json.loads(DASHBOARD.read_text()) == maker["dashboard"]()
