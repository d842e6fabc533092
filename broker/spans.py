"""OpenTelemetry spans: what a call waited for, where whoever runs the process wants to know.

In a client it is for the process to set OpenTelemetry up; nothing here imports it, and without it nothing is done. The
daemon sets it up for itself, when the usual variables name a receiver (``OTEL_EXPORTER_OTLP_ENDPOINT``, or
``OTEL_TRACES_EXPORTER=console``) and the extra ``otel`` is installed. A call carries its caller's context, so that the
broker's span lies within the client's.

A process makes at most `MOST` spans a second; those beyond are counted on the next one that is made. Never from a
scheduler's thread: `FeatureTable.take` and `Use` make none.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from mmbroker.proto.messages import (
    Call,
    Create,
    Created,
    Due,
    Failed,
    Found,
    Hit,
    Leased,
    Lookup,
    Promise,
    Promised,
    Reply,
    Seal,
)

log = logging.getLogger("mmbroker")

#: Spans a second, in one process.
MOST: Final = 500
#: Calls that are awaiting their answer and can become spans.
_OPEN: Final = 4096
#: How long the end of a daemon may wait for its last spans to be sent, in seconds.
_FAREWELL: Final = 1.0


class Budget:
    """So many spans each second. Threads may race for the last one."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._second = self._made = self._dropped = 0

    def take(self) -> int | None:
        """May another be made? Then how many were dropped since the last; else None."""
        if (second := int(self._clock())) != self._second:
            self._second, self._made = second, 0
        if self._made >= self._most:
            self._dropped += 1
            return None
        self._made += 1
        dropped, self._dropped = self._dropped, 0
        return dropped


budget = Budget()


# --- in clients -----------------------------------------------------------------------------------------------------


class _Tracing:
    """OpenTelemetry as this process has it. What is broken or only pretends to be it is let alone: it is somebody
    else's, and no feature is late for it."""

    def __init__(self) -> None:
        self.broken = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around everything that is OpenTelemetry's. Whatever fails there is said once, and ends all spans."""
        try:
            yield
        except Exception as error:
            if not self.broken:
                self.broken = True
                log.warning("no spans are made in this process any more: OpenTelemetry failed: %r", error)

    def trace(self) -> Any:
        """The module that the process has imported; None: it has not, or it is broken."""
        return None if self.broken else sys.modules.get("opentelemetry.trace")


tracing = _Tracing()


@cache
def _tracer_of(provider: Any) -> Any:
    return provider.get_tracer("mmbroker")


def _tracer() -> Any:
    """Of this process, if it has OpenTelemetry set up by now; else None."""
    trace = tracing.trace()
    if trace is None:
        return None
    with tracing.guard():
        provider = trace.get_tracer_provider()
        if type(provider).__name__ != "ProxyTracerProvider":  # imported, and not set up
            return _tracer_of(provider)
    return None


def span(name: str, **attributes: Any) -> AbstractContextManager[dict[str, Any]]:
    """Around one step of a client: text, numbers or None; more of them may be added to what this yields.

    An exception that leaves it is noted, as OpenTelemetry does.
    """
    tracer = _tracer()
    if tracer is None or (dropped := budget.take()) is None:
        return nullcontext({})
    return _recorded(tracer, name, attributes, dropped)


@contextmanager
def _recorded(tracer: Any, name: str, attributes: dict[str, Any], dropped: int) -> Iterator[dict[str, Any]]:
    stack = ExitStack()
    made = None
    with tracing.guard():
        made = stack.enter_context(tracer.start_as_current_span(f"mmbroker.{name}"))
    error: BaseException | None = None
    try:
        yield attributes
    except BaseException as raised:
        error = raised
        raise
    finally:
        with tracing.guard():
            if made is not None:
                made.set_attributes(_named(attributes, dropped))
            stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def context() -> str:
    """The caller's place in its trace, as W3C's ``traceparent``; empty: it has none, or is not recorded."""
    if _tracer() is not None:
        with tracing.guard():
            here = tracing.trace().get_current_span().get_span_context()
            if here.is_valid and here.trace_flags.sampled:
                return f"00-{here.trace_id:032x}-{here.span_id:016x}-01"
    return ""


def _named(attributes: Mapping[str, Any], dropped: int) -> dict[str, Any]:
    named = {f"mmbroker.{name}": value for name, value in attributes.items() if value not in (None, "")}
    return {**named, "mmbroker.spans_dropped": dropped} if dropped else named


# --- in the daemon --------------------------------------------------------------------------------------------------


@dataclass
class _Opened:
    """A call that is not answered yet."""

    call: Call
    waited_for: str | None = None
    began: int = field(default_factory=time.monotonic_ns)


class CallSpans:
    """Creates, lookups, promises and seals, from the moment the broker read them until it answered.

    `about` says whose a session is, in the words of the log. `tracer` None: nothing is done.
    """

    def __init__(self, about: Callable[[int], Mapping[str, Any]], tracer: Any = None) -> None:
        self._about = about
        self._tracer = tracer
        self._open: dict[tuple[int, int], _Opened] = {}

    def called(self, session: int, call: Call) -> bool:
        """A call is about to be handled. Is it one that becomes a span?"""
        if (
            self._tracer is None
            or not call.seq
            or not isinstance(call.body, Create | Lookup | Promise | Seal)
        ):
            return False
        if len(self._open) >= _OPEN:
            del self._open[next(iter(self._open))]
        self._open.setdefault((session, call.seq), _Opened(call))  # a repeat is no other call
        return True

    def waits(self, session: int, seq: int, what_for: str) -> None:
        """It was handled, and is not answered yet."""
        if (opened := self._open.get((session, seq))) is not None:
            opened.waited_for = what_for or None

    def answered(self, session: int, seq: int, reply: Reply) -> None:
        opened = self._open.pop((session, seq), None)
        if opened is None or tracing.broken or (dropped := budget.take()) is None:
            return
        with tracing.guard():
            self._make(session, opened, reply, dropped)

    def _make(self, session: int, opened: _Opened, reply: Reply, dropped: int) -> None:
        call = opened.call
        took = time.monotonic_ns() - opened.began
        end = time.time_ns()
        about = {**self._about(session), "waited_for": opened.waited_for, **_asked(call), **_got(reply)}
        made = self._tracer.start_span(
            f"mmbroker.broker.{type(call.body).__name__.lower()}",
            context=_parent(call.trace),
            attributes=_named(about, dropped),
            start_time=end - took,
        )
        if isinstance(reply, Failed):
            from opentelemetry.trace import Status, StatusCode

            made.set_status(Status(StatusCode.ERROR, reply.message))
        made.end(end)

    def ended(self, session: int) -> None:
        """Its calls will not be answered."""
        for key in [key for key in self._open if key[0] == session]:
            del self._open[key]

    def close(self) -> None:
        """Send what was made, for a moment."""
        if self._tracer is not None:
            from opentelemetry import trace

            sender = threading.Thread(target=trace.get_tracer_provider().shutdown, daemon=True)  # type: ignore[attr-defined]
            sender.start()
            sender.join(_FAREWELL)


def _asked(call: Call) -> Mapping[str, str | int | None]:
    match call.body:
        case Create(items=items, to=to):
            nbytes = sum(item.form.nbytes for item in items)
            return {"seq": call.seq, "to": to, "features": len(items), "bytes": nbytes}
        case Lookup(keys=keys, to=to) | Promise(keys=keys, to=to):
            return {"seq": call.seq, "to": to, "features": len(keys)}
        case Seal(leases=leases, to=to):
            return {"seq": call.seq, "to": to, "features": len(leases)}
    return {"seq": call.seq}


def _got(reply: Reply) -> Mapping[str, str | int | None]:
    match reply:
        case Created(results=results):
            hits, leases = (sum(isinstance(result, kind) for result in results) for kind in (Hit, Leased))
            return {"hits": hits, "leases": leases, "pending": len(results) - hits - leases}
        case Promised(results=results):
            hits, dues = (sum(isinstance(result, kind) for result in results) for kind in (Hit, Due))
            return {"hits": hits, "promises": dues, "pending": len(results) - hits - dues}
        case Found(refs=refs):
            return {"hits": sum(ref is not None for ref in refs)}
        case Failed(error=error):
            return {"error": error}
    return {}


def _parent(trace: str) -> Any:
    """The context that a call came with; nonsense is none."""
    if not trace:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace})


def set_up(about: Callable[[int], Mapping[str, Any]], environ: Mapping[str, str]) -> CallSpans:
    """The daemon's spans, to wherever the environment says; none if it names no receiver."""
    wanted = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if wanted == "none" or (wanted == "otlp" and not any(environ.get(name) for name in endpoints)):
        return CallSpans(about)
    try:
        return CallSpans(about, _provide(wanted).get_tracer("mmbroker"))
    except (ImportError, ValueError) as error:
        log.warning(
            "no spans are made, though OTEL_ variables ask for them (%s): `pip install 'mmbroker[otel]'`",
            error,
        )
        return CallSpans(about)


def _provide(wanted: str) -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    exporter: SpanExporter
    if wanted == "console":
        exporter = ConsoleSpanExporter(out=sys.stderr)
    elif wanted == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    else:
        raise ValueError(f"OTEL_TRACES_EXPORTER is otlp, console or none, not {wanted!r}")
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {"service.name": "mmbroker"})
    provider = TracerProvider(
        resource=resource, shutdown_on_exit=False
    )  # `close` does, and does not wait for long
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider
