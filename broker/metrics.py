"""Metrics: everything the broker's report knows, as Prometheus wants it.

One list says which metrics there are. They are made from a report when somebody asks, so nothing is done for them
meanwhile; `prometheus_client` writes them. Labels come from closed lists, but for a client's name, of which there are
as many as living sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from mmbroker.proto.messages import Body

Report = Mapping[str, Any]
#: Label values and the value; a histogram's value is what `figures.Histogram.report` gives.
Samples = Iterable[tuple[tuple[str, ...], Any]]

CALLS: Final = tuple(kind.__name__.lower() for kind in get_args(Body))
WAITS: Final = ("room", "budget", "client", "flight")
EVICTIONS: Final = ("watermark", "count", "room", "retired", "linger", "request")
REFUSALS: Final = ("pool_full", "quota_refusals", "engine_lagging", "no_such_engine", "conflicts")
QUOTAS: Final = (
    *(
        "pending_per_session",
        "items_per_call",
        "parts_per_call",
        "features_per_session",
        "features_per_engine",
    ),
    *(
        "client_budget_features",
        "client_budget_mib",
        "session_mib",
        "features_per_namespace",
        "namespace_mib",
        "seal",
    ),
)
SEEKS: Final = ("found", "absent", "late", "busy")
FRESH: Final = {"told": "tier_fresh", "dropped": "tier_fresh_dropped"}
LOSSES: Final = (
    "leases_broken",
    "promises_broken",
    "holds_orphaned",
    "slots_abandoned",
    "grants_failed",
    "loads_lost",
)
ODDITIES: Final = (
    *("unknown_holds", "unknown_leases", "unanswerable_calls", "repeated_calls", "tallies_refused"),
    *("undecodable_messages", "stray_calls", "unroutable_messages", "refusals_dropped", "segments_refused"),
    *("peers_denied", "peers_refused", "accepts_failed", "sessions_ended", "page_failures"),
)
#: Why features went an engine's own way. The adapters have the same list; a test compares them.
FALLBACKS: Final = (
    *("late", "absent", "unresponsive", "not_attached", "lagging", "full", "too_large", "refused", "failed"),
)


@dataclass(frozen=True)
class Metric:
    """`name` without the final ``_total`` of a counter. `scale`: what to multiply by, to get to base units."""

    name: str
    kind: str
    help: str
    read: Callable[[Report], Samples]
    labels: tuple[str, ...] = ()
    scale: float = 1


def told(report: Report) -> Counter[str]:
    """The sum of what clients have told, of those who are gone too."""
    total: Counter[str] = Counter(report["told_before"])
    for session in report["sessions"]:
        total.update(session["tally"])
    return total


def fallbacks(counts: Mapping[str, int]) -> dict[str, int]:
    """By reason, of what a client or all clients told."""
    return {reason: counts.get(f"sglang_fallback_{reason}", 0) for reason in FALLBACKS}


# --- how they are read ----------------------------------------------------------------------------------------------


def _at(*path: str) -> Callable[[Report], Samples]:
    def read(report: Report) -> Samples:
        value: Any = report
        for name in path:
            value = value[name]
        yield (), float(value)

    return read


def _counted(names: Iterable[str], spell: str = "{}") -> Callable[[Report], Samples]:
    """Counters of the broker, one for each label; those of its shell too."""

    def read(report: Report) -> Samples:
        for name in names:
            key = spell.format(name)
            yield (name,), report["counters"].get(key, 0) + report["daemon"]["counters"].get(key, 0)

    return read


def _count(name: str) -> Callable[[Report], Samples]:
    return lambda report: [((), report["counters"].get(name, 0))]


def _told(name: str) -> Callable[[Report], Samples]:
    return lambda report: [((), told(report).get(name, 0))]


def _figure(name: str) -> Callable[[Report], Samples]:
    return lambda report: [((), report["figures"][name])]


def _tiers(report: Report) -> list[Mapping[str, Any]]:
    return [report[pool] for pool in ("pool", "device") if report[pool] is not None]


def _by_tier(name: str) -> Callable[[Report], Samples]:
    return lambda report: [((pool["tier"],), pool[name]) for pool in _tiers(report)]


def _slots(report: Report) -> Samples:
    for pool in _tiers(report):
        yield (pool["tier"], "in_use"), pool["held"]
        yield (pool["tier"], "cached"), pool["idle"]


def _gaps(report: Report) -> Samples:
    for pool in _tiers(report):
        gaps = [arena["largest_free"] for arena in report["arenas"] if arena["tier"] == pool["tier"]]
        yield (pool["tier"],), max(gaps, default=0)


def _segments(report: Report) -> Samples:
    for pool in _tiers(report):
        arenas = [arena for arena in report["arenas"] if arena["tier"] == pool["tier"]]
        growing, retired = (sum(arena[state] for arena in arenas) for state in ("growing", "retired"))
        yield (pool["tier"], "growing"), growing
        yield (pool["tier"], "retired"), retired
        yield (pool["tier"], "ready"), sum(arena["segments"] for arena in arenas) - growing - retired


def _features(report: Report) -> Samples:
    yield ("held",), report["features"] - report["features_idle"]
    yield ("cached",), report["features_idle"]


def _replicas(report: Report) -> Samples:
    device = report["device"] or {"replicas": 0, "loading": 0}
    yield ("ready",), device["replicas"] - device["loading"]
    yield ("loading",), device["loading"]


def _holds(report: Report) -> Samples:
    yield ("open",), report["holds"] - report["holds_dismissed"]
    yield ("dismissed",), report["holds_dismissed"]


def _ranks(report: Report) -> Samples:
    ranks = [rank for engine in report["engines"] for rank in engine["ranks"]]
    for path in ("host", "pinned", "device"):
        yield (path,), sum(rank["path"] == path for rank in ranks)


def _lagging(report: Report) -> Samples:
    yield (), sum(rank["lagging"] for engine in report["engines"] for rank in engine["ranks"])


def _engines(report: Report) -> Samples:
    complete = [engine["complete"] for engine in report["engines"] if not engine["mover"]]
    yield ("complete",), sum(complete)
    yield ("incomplete",), len(complete) - sum(complete)


def _movers(report: Report) -> Samples:
    is_open = [mover["open"] for mover in report["movers"]]
    yield ("open",), sum(is_open)
    yield ("closed",), len(is_open) - sum(is_open)


def _clients(report: Report) -> Samples:
    counts: Counter[tuple[str, str]] = Counter()
    for session in report["sessions"]:
        for reason, count in fallbacks(session["tally"]).items():
            if count:
                counts[session["name"], reason] += count
    yield from counts.items()


def _info(report: Report) -> Samples:
    yield (report["daemon"]["version"], report["daemon"]["instance"]), 1


# --- the list -------------------------------------------------------------------------------------------------------


def _metric(kind: str) -> Callable[..., Metric]:
    return lambda name, *rest, **more: Metric(f"mmbroker_{name}", kind, *rest, **more)


_gauge, _counter = _metric("gauge"), _metric("counter")


def _histogram(name: str, text: str) -> Metric:
    return Metric(f"mmbroker_{name}", "histogram", text, _figure(name))


METRICS: Final = (
    # memory
    _gauge("limit_bytes", "Most memory for features.", _by_tier("limit"), ("tier",)),
    _gauge("segment_bytes", "Memory taken from the system.", _by_tier("capacity"), ("tier",)),
    _gauge("slot_bytes", "Memory in slots: in_use is leased, held or quarantined; cached can be evicted.",
        _slots, ("tier", "state")),
    _gauge("largest_free_bytes", "The longest free run in any segment.", _gaps, ("tier",)),
    _gauge("segments", "Segments.", _segments, ("tier", "state")),
    _gauge("leased_bytes", "Slots that are being written.", _at("leased_bytes")),
    _gauge("quarantined_bytes", "Slots that wait for the end of a process that may still write there.",
        _at("quarantined")),
    _gauge("memory_headroom_bytes", "What the machine's tightest memory limit leaves.",
        _at("daemon", "memory_headroom")),
    # what there is
    _gauge("features", "Sealed features.", _features, ("state",)),
    _gauge("device_replicas", "Copies of features on the device.", _replicas, ("state",)),
    _gauge("leases", "Leases that are open.", _at("leases")),
    _gauge("promises", "Keys that a client has promised to write, and has not.", _at("promises")),
    _gauge("holds", "Holds; dismissed ones wait for a rank to settle.", _holds, ("state",)),
    _gauge("sessions", "Clients; ended ones whose process may still touch features.",
        lambda report: [(("living",), len(report["sessions"])), (("ended",), len(report["ghosts"]))], ("state",)),
    _gauge("sessions_limit", "Most clients at once.", _at("daemon", "sessions_limit")),
    _gauge("engines", "Engines; incomplete ones lack a rank.", _engines, ("state",)),
    _gauge("movers", "Clients that serve their namespace as a tier, by whether they are asked.", _movers, ("state",)),
    _gauge("sought", "Keys that are sought beyond this machine.",
        lambda report: [((), sum(mover["sought"] for mover in report["movers"]))]),
    _gauge("ranks", "Ranks, by where they read features.", _ranks, ("path",)),
    _gauge("ranks_lagging", "Ranks that have not acknowledged for too long.", _lagging),
    # what happened
    _counter("calls", "Messages from clients.", _counted(CALLS, "{}_calls"), ("call",)),
    _counter("hits", "Features that were there already.", _count("hits")),
    _counter("misses", "Features that had to be written, or were looked up in vain.", _count("misses")),
    _counter("leases_granted", "Slots given to writers.", _count("leases")),
    _counter("aborts", "Leases given back unwritten.", _count("aborts")),
    _counter("promises_given", "Keys that a client was left to write, before it asked for room.", _count("promises")),
    _counter("promises_dropped", "Of these, given back unwritten.", _count("promises_dropped")),
    _counter("seeks", "Keys that nobody here had and a tier could have had, by what came of it.",
        _counted(SEEKS, "tier_{}"), ("outcome",)),
    _counter("fresh", "Features that a tier was told of, and that were too many.",
        lambda report: [((what,), report["counters"].get(name, 0)) for what, name in FRESH.items()], ("outcome",)),
    _counter("seals", "Features made visible.", _count("seals")),
    _counter("seals_second", "Of these, keys that another writer had sealed first.", _count("seals_second")),
    _counter("holds_opened", "Claims on features.", _count("holds")),
    _counter("grants", "Features announced to ranks.", _count("grants")),
    _counter("dismissals", "Holds that were over.", _count("dismissals")),
    _counter("settled", "Grants that a rank let go.", _count("settled")),
    _counter("device_too_large", "Grants of features larger than any place there.", _count("device_too_large")),
    _counter("device_full", "Grants that found no room on the device.", _count("device_full")),
    _counter("offers", "Places on the device that came free later.", _count("offers")),
    _counter("parked", "Device copies that a rank let go for a while.", _count("parked")),
    _counter("loads", "Copies to the device that were completed.", _count("loads")),
    _counter("evictions", "Cached features dropped.", _counted(EVICTIONS, "evictions_{}"), ("reason",)),
    _counter("replica_evictions", "Device copies dropped.",
        _counted(EVICTIONS, "replicas_evicted_{}"), ("reason",)),
    _counter("sessions_opened", "Clients that connected.", _count("sessions")),
    _counter("segments_grown", "Segments asked for.", _count("segments_grown")),
    _counter("segments_discarded", "Segments given back.", _count("segments_discarded")),
    # what waits and what fails
    _gauge("waiting_calls", "Calls that wait, by what for.",
        lambda report: [((reason,), report["waiting_for"].get(reason, 0)) for reason in WAITS], ("reason",)),
    _counter("waits", "Calls that had to wait.", _counted(WAITS, "waits_{}"), ("reason",)),
    _counter("expired", "Waits that ended at their deadline.", _counted(WAITS, "expired_{}"), ("reason",)),
    _counter("refusals", "Calls refused, by the error.", _counted(REFUSALS), ("reason",)),
    _counter("quota_refusals", "Of these, by the setting.", _counted(QUOTAS, "quota_refusals_{}"), ("setting",)),
    _counter("losses", "What deaths and failures cost.", _counted(LOSSES), ("kind",)),
    _counter("oddities", "What should be rare: races and nonsense.", _counted(ODDITIES), ("kind",)),
    _counter("fallbacks", "Features that went an engine's own way, told by all clients ever.",
        lambda report: [((reason,), count) for reason, count in fallbacks(told(report)).items()], ("reason",)),
    _counter("client_fallbacks", "The same, of each living client that had any.",
        _clients, ("client", "reason")),
    # how long and how large
    _histogram("wait_seconds", "Calls that had to wait, until they were served."),
    _histogram("lease_seconds", "From a lease to its seal."),
    _histogram("grant_seconds", "From a grant to the rank's word."),
    _histogram("hold_seconds", "From a hold to its end."),
    _histogram("settle_seconds", "From a dismissal until a rank let go."),
    _histogram("load_seconds", "From a place on the device until it is loaded."),
    _histogram("create_items", "Features of one create."),
    _histogram("feature_bytes", "Sizes of features that were written."),
    # told by engines and workers
    _counter("table_takes", "Features taken by schedulers.", _told("table_takes")),
    _counter("table_misses", "Takes that found nothing.", _told("table_misses")),
    _counter("table_stale", "Takes with an outdated reference.", _told("table_stale")),
    _counter("table_copied_bytes", "Private copies made by ranks.", _told("table_bytes_copied")),
    _counter("receiver_seconds", "Time that receiver threads spent on making entries.",
        _told("table_build_us"), scale=1e-6),
    _gauge("table_kept", "Entries kept by tensors that outlived their use.", _told("table_kept")),
    _counter("scheduler_seconds", "Time of schedulers' threads on the inputs of requests with features.",
        _told("sglang_inputs_ns"), scale=1e-9),
    _counter("scheduler_requests", "Requests with features at schedulers.", _told("sglang_inputs")),
    _counter("scheduler_items", "Their items.", _told("sglang_items")),
    _counter("put_seconds", "Time from a request's arrival at a worker until its references were there.",
        _told("sglang_put_ns"), scale=1e-9),
    _counter("put_requests", "Requests with features at workers.", _told("sglang_requests")),
    # the broker itself
    _gauge("healthy", "1, or 0 when work is pending that does not get on.", _at("health", "ok")),
    _gauge("oldest_pending_seconds", "Age of the oldest pending work.", _at("health", "oldest_pending_s")),
    _gauge("last_finished_seconds", "How long ago work was last finished.", _at("health", "last_finished_s")),
    _gauge("draining", "1 while no new work is taken.", _at("draining")),
    _gauge("loop_lag_seconds", "How late the event loop ran a timer, last.", _at("daemon", "loop_lag")),
    _gauge("loop_lag_worst_seconds", "The same, at worst.", _at("daemon", "loop_lag_worst")),
    _gauge("outbox_messages", "Messages that clients have not read yet.", _at("daemon", "outboxes")),
    _gauge("resident_bytes", "The broker's own memory, without features.", _at("daemon", "rss")),
    _gauge("descriptors", "The broker's open descriptors.", _at("daemon", "descriptors")),
    _gauge("uptime_seconds", "Time since the start.", _at("daemon", "uptime")),
    _gauge("info", "1; the version is a label.", _info, ("version", "instance")),
)  # fmt: skip


def exposition(report: Report) -> tuple[bytes, str]:
    """A report in Prometheus's text format, and the content type of that."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(_Collected(report)), CONTENT_TYPE_LATEST


class _Collected:
    """A registry of one moment."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        families = {
            "gauge": GaugeMetricFamily,
            "counter": CounterMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        for metric in METRICS:
            family: Any = families[metric.kind](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(self._report):
                if metric.kind == "histogram":
                    family.add_metric(labels, list(_cumulated(value)), value["sum"])
                else:
                    family.add_metric(labels, value * metric.scale)
            yield family


def _cumulated(histogram: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    total = 0
    for bound, count in zip([*histogram["bounds"], float("inf")], histogram["counts"], strict=True):
        total += count
        yield ("+Inf" if bound == float("inf") else repr(bound)), total


def reference() -> str:
    """The table of `docs/metrics.md`."""
    lines = ["| metric | kind | labels | what |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        lines.append(f"| `{name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |")
    return "\n".join(lines)
