"""The answers: metrics, health, the page, and the feed that keeps the page up to date.

Once every two seconds a report becomes one row of the last fifteen minutes; only while somebody looks is anything more
made of it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from ..metrics import exposition
from ..overview import overview
from .http import Feed, Page

#: How often a row is made, in seconds, and how many are kept: fifteen minutes.
INTERVAL: Final = 2.0
ROWS: Final = 450
#: Stretches in the picture of a segment, and how many segments are drawn.
_CELLS: Final = 64
_SEGMENTS: Final = 256

_json = msgspec.json.Encoder()


class Site:
    """`report` gives the whole report, with the daemon's own part; `segments` draws them (`report.segments`)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[], dict[str, Any]],
        segments: Callable[[int, int], list[dict[str, Any]]],
        complain: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._report = report
        self._segments = segments
        self._complain = complain
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS)
        self._listeners: list[Callable[[bytes], None]] = []
        self._before: dict[str, Any] | None = None
        self._due = time.monotonic() + INTERVAL
        self._timer = loop.call_at(loop.time() + INTERVAL, self._tick)

    def close(self) -> None:
        self._timer.cancel()

    def get(self, path: str, reader: Callable[[], int | None]) -> Page | Feed | None:
        """Figures are for everybody on this machine; whose they are, only for whoever runs the broker."""
        if path in ("/", "/events") and reader() not in (os.geteuid(), 0):
            told = f"the page is for user {os.geteuid()} and root; others see what is theirs with `mmbroker status`\n"
            return Page(told.encode(), status=403)
        match path:
            case "/":
                return _page()
            case "/metrics":
                report = self._report()
                if (trouble := report["daemon"].get("unreadable")) is not None:
                    return Page(f"the broker cannot look at itself: {trouble}\n".encode(), status=503)
                return Page(*exposition(report))
            case "/healthz":
                health = self._report()["health"]
                return Page(_json.encode(health) + b"\n", "application/json", 200 if health["ok"] else 503)
            case "/events":
                return self
            case _:
                return None

    # --- the feed ---------------------------------------------------------------------------------------------------

    def join(self, send: Callable[[bytes], None]) -> Callable[[], None]:
        """All rows so far and the present; from now on, each new row and what is then."""
        report = self._report()
        if "unreadable" not in report["daemon"]:  # else there is nothing to say before the next tick
            now = self._now(report, overview(report, self._before))
            send(_event("hello", {"rows": list(self._rows), "now": now}))
        self._listeners.append(send)
        return lambda: self._listeners.remove(send)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(INTERVAL, self._tick)
        try:
            self._look()
        except Exception as error:  # a broker does not end because its page is broken
            self._complain("page_failures", f"the page cannot be kept up to date: {error!r}")

    def _look(self) -> None:
        report = self._report()
        if "unreadable" in report["daemon"]:  # no descriptors left
            return
        view = overview(report, self._before)
        self._before = report
        row = _row(view)
        self._rows.append(row)
        if self._listeners:
            told = _event("now", {"row": row, "now": self._now(report, view)})
            for send in list(self._listeners):
                send(told)

    def _now(self, report: dict[str, Any], view: dict[str, Any]) -> dict[str, Any]:
        return {
            **view,
            "segments": self._segments(_CELLS, _SEGMENTS),
            "segment_count": sum(arena["segments"] for arena in report["arenas"]),
        }


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _json.encode(data) + b"\n\n"


def _row(view: dict[str, Any]) -> dict[str, Any]:
    """One moment of the timelines."""
    tiers = {tier["tier"]: tier for tier in view["tiers"]}
    device = tiers.get("device", {"in_use": 0, "cached": 0})
    grant = view["latencies"]["grant to entry"]
    return {
        "at": round(time.monotonic(), 1),
        "in_use": tiers["host"]["in_use"],
        "cached": tiers["host"]["cached"],
        "device": device["in_use"] + device["cached"],
        "features": round(view["rates"]["features"], 2),
        "hits": round(view["rates"]["hits"], 2),
        "fallbacks": round(view["rates"]["fallbacks"], 2),
        "p50": grant["p50"],
        "p99": grant["p99"],
        "waiting": sum(view["waiting"].values()),
        "lag": view["loop_lag"],
        "ok": view["health"]["ok"],
    }


# --- the page -------------------------------------------------------------------------------------------------------


@cache
def _page() -> Page:
    """The one file, and a policy that lets it use nothing else: its own script and style, by their hashes."""
    html = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes('script', html)}; style-src {_hashes('style', html)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), "text/html; charset=utf-8", headers={"Content-Security-Policy": policy})


def _hashes(tag: str, html: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found
    )
