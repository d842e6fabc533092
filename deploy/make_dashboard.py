"""Write `grafana.json` beside this file: `python deploy/make_dashboard.py`.

Requests, the scheduler's thread, the GPU and preprocessing stand above each other on one time axis, with one cursor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Rows of panels: title, then each panel's title, unit, and queries with their legends.
ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Is it well?",
        [
            ("Healthy", "none", [("min(mmbroker_healthy)", "healthy")]),
            ("Oldest pending work", "s", [("max(mmbroker_oldest_pending_seconds)", "oldest pending")]),
            (
                "Fallbacks: features that went the engine's own way",
                "ops",
                [("sum by (reason) (rate(mmbroker_fallbacks_total[1m]))", "{{reason}}")],
            ),
        ],
    ),
    (
        "Requests",
        [
            (
                "Requests at SGLang",
                "reqps",
                [
                    ("sum(rate(mmbroker_engine_requests_total[1m]))", "with pictures"),
                    ("sum(sglang:num_running_reqs)", "running"),
                    ("sum(sglang:num_queue_reqs)", "queued"),
                ],
            ),
            (
                "Features",
                "ops",
                [
                    ("sum(rate(mmbroker_seals_total[1m]))", "written"),
                    ("sum(rate(mmbroker_hits_total[1m]))", "found"),
                    ("sum(rate(mmbroker_engine_takes_total[1m]))", "taken"),
                ],
            ),
            (
                "Time to first token",
                "s",
                [
                    (
                        "histogram_quantile(0.5, sum by (le) (rate(sglang:time_to_first_token_seconds_bucket[1m])))",
                        "p50",
                    ),
                    (
                        "histogram_quantile(0.99, sum by (le) (rate(sglang:time_to_first_token_seconds_bucket[1m])))",
                        "p99",
                    ),
                ],
            ),
        ],
    ),
    (
        "The scheduler",
        [
            (
                "Share of its thread that inputs take",
                "percentunit",
                [
                    (
                        "sum by (engine, rank) (rate(mmbroker_engine_scheduler_seconds_total[1m]))",
                        "{{engine}} {{rank}}",
                    )
                ],
            ),
            (
                "Share of a core that its receiver thread takes",
                "percentunit",
                [
                    (
                        "sum by (engine, rank) (rate(mmbroker_engine_receiver_seconds_total[1m]))",
                        "{{engine}} {{rank}}",
                    )
                ],
            ),
            (
                "From a grant to the entry",
                "s",
                [
                    ("histogram_quantile(0.5, sum by (le) (rate(mmbroker_grant_seconds_bucket[1m])))", "p50"),
                    (
                        "histogram_quantile(0.99, sum by (le) (rate(mmbroker_grant_seconds_bucket[1m])))",
                        "p99",
                    ),
                ],
            ),
        ],
    ),
    (
        "The GPU",
        [
            ("Busy", "percent", [("avg by (gpu) (DCGM_FI_DEV_GPU_UTIL)", "GPU {{gpu}}")]),
            (
                "Loading",
                "s",
                [
                    (
                        "histogram_quantile(0.99, sum by (le) (rate(mmbroker_load_seconds_bucket[1m])))",
                        "p99 of a load",
                    )
                ],
            ),
            (
                "Device arena",
                "bytes",
                [
                    ('sum by (state) (mmbroker_slot_bytes{tier="device"})', "{{state}}"),
                    ('sum(mmbroker_limit_bytes{tier="device"})', "limit"),
                ],
            ),
        ],
    ),
    (
        "Preprocessing and putting",
        [
            (
                "A request's way into the broker, mean",
                "s",
                [
                    (
                        "sum(rate(mmbroker_engine_put_seconds_total[1m])) "
                        "/ sum(rate(mmbroker_engine_put_requests_total[1m]))",
                        "put",
                    )
                ],
            ),
            (
                "From a lease to its seal",
                "s",
                [
                    ("histogram_quantile(0.5, sum by (le) (rate(mmbroker_lease_seconds_bucket[1m])))", "p50"),
                    (
                        "histogram_quantile(0.99, sum by (le) (rate(mmbroker_lease_seconds_bucket[1m])))",
                        "p99",
                    ),
                ],
            ),
            (
                "Waiting calls",
                "none",
                [("sum by (reason) (mmbroker_waiting_calls)", "{{reason}}")],
            ),
            (
                "Pictures of a request, mean",
                "none",
                [
                    (
                        "sum(rate(mmbroker_engine_request_pictures_sum[1m])) "
                        "/ sum(rate(mmbroker_engine_request_pictures_count[1m]))",
                        "pictures",
                    )
                ],
            ),
            (
                "Sizes of pictures, megapixels",
                "none",
                [
                    (
                        f"histogram_quantile({share}, "
                        "sum by (le) (rate(mmbroker_engine_picture_megapixels_bucket[1m])))",
                        name,
                    )
                    for share, name in ((0.5, "p50"), (0.99, "p99"))
                ],
            ),
        ],
    ),
    (
        "Memory",
        [
            (
                "Host arena",
                "bytes",
                [
                    ('sum by (state) (mmbroker_slot_bytes{tier="host"})', "{{state}}"),
                    ('sum(mmbroker_segment_bytes{tier="host"})', "taken from the system"),
                    ('sum(mmbroker_limit_bytes{tier="host"})', "limit"),
                ],
            ),
            ("Evictions", "ops", [("sum by (reason) (rate(mmbroker_evictions_total[1m]))", "{{reason}}")]),
            (
                "The broker",
                "s",
                [
                    ("max(mmbroker_loop_lag_seconds)", "the loop is late"),
                    ("max(mmbroker_last_finished_seconds)", "since work was finished"),
                ],
            ),
        ],
    ),
]


def panel(
    number: int, x: int, y: int, title: str, unit: str, queries: list[tuple[str, str]]
) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 2}}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(65 + at), "datasource": source, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for at, (name, unit, queries) in enumerate(row):
            panels.append(panel(len(panels) + 1, 8 * at, y + 1, name, unit, queries))
        y += 8
    return {
        "uid": "mmbroker",
        "title": "mmbroker",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "tags": ["mmbroker", "sglang"],
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


if __name__ == "__main__":
    target = Path(__file__).with_name("grafana.json")
    target.write_text(json.dumps(dashboard(), indent=1) + "\n")
