"""What the state machine is told (events) and what it wants done (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from mmbroker.proto.messages import Body, Notice, Reply

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A client passed the handshake. `session` and `routing` are random and were never used in this boot."""

    session: int
    uid: int
    pid: int
    name: str
    namespace: str
    traceable: bool = True  # the shell will learn when the process is gone (it has a pidfd)


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The lifeline ended. `alive`: the process may still be running, and may still touch what it had."""

    session: int
    alive: bool


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The process behind an ended session has exited: nothing of it can touch anything."""

    session: int


@dataclass(frozen=True, slots=True)
class Called:
    """A decoded, addressed call. The shell has checked boot and session; `timeout` is in seconds."""

    session: int
    seq: int
    timeout: float
    body: Body


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """The segment that `Grow` asked for exists."""

    segment: int


@dataclass(frozen=True, slots=True)
class SegmentFailed:
    """The segment that `Grow` asked for cannot be had; `reason` is a sentence that names the limit."""

    segment: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: sent at `Broker.next_deadline()`, or earlier."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The broker shall end: no new leases; `Halt` follows when the open ones are sealed, or after `grace` seconds."""

    grace: float = 5.0


Event = SessionOpened | SessionEnded | ProcessGone | Called | SegmentReady | SegmentFailed | Tick | Drain

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer call `seq` of a session."""

    session: int
    seq: int
    body: Reply


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell a session something it did not ask for."""

    session: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class SendSegment:
    """Pass a segment's descriptor over the session's lifeline, before anything that follows in this batch."""

    session: int
    segment: int
    writable: bool


@dataclass(frozen=True, slots=True)
class Grow:
    """Allocate a segment of `nbytes` in the background; answer with `SegmentReady` or `SegmentFailed`."""

    segment: int
    tier: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Give a segment's memory back. Its number is never used again."""

    segment: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """Close the session's lifeline. `SessionEnded` follows from the shell as for any other end."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Drained: the broker may exit."""

    reason: str


Effect = Respond | Notify | SendSegment | Grow | Discard | EndSession | Halt


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of the broker, with its default. Bytes, seconds and counts."""

    host_bytes: int = 1 << 30
    segment_bytes: int = 64 << 20  # of one segment, unless a single feature is larger
    watermark: float = 0.10  # share of the arena kept free of idle features
    sessions: int = 64  # clients at once
    features_per_session: int = 4096  # leases, promises and holds of one session, and what it waits for
    session_bytes: int = 0  # leases and holds of one session, refused beyond
    client_budget_features: int = 0  # leases, promises and holds of one session; it waits for more
    client_budget_bytes: int = 0  # leases and holds of one session; it waits where it would have more
    features_per_engine: int = (
        65536  # in flight to one engine; who sends to it waits where it would have more
    )
    engine_bytes: int = 0  # in flight to one engine, if that is less than its share of the arena
    features_per_namespace: int = 1 << 18  # leases, promises and holds of one namespace
    namespace_bytes: int = 0  # of the host arena that one namespace has in use, beside its cache
    pending_per_session: int = 256  # calls of one session waiting for an answer
    items_per_call: int = 1024  # features of one call
    single_flight: float = 0.25  # how long a content key's second writer waits for the first
    lagging_after: float = 2.0  # a rank that has not acknowledged for so long is lagging
    stuck_after: float = 2.0  # health is bad when work is pending and nothing has finished for so long
    producer_grace: float = 30.0  # how long a dead producer's holds go on
    segment_linger: float = 10.0  # how long an empty segment is kept
    device: str = ""  # UUID of the GPU that is served; empty: none
    # The next requests' features, while others wait on the host: a GiB was no faster on an H200.
    device_bytes: int = 320 << 20
    device_reserve_bytes: int = 0  # taken at the start and never given back
    device_linger: float = 10.0  # how long a device replica without grants is kept
    device_segment_linger: float = 2.0  # how long an empty device segment is kept
    grow_retry: float = 1.0  # how long after a refused segment no other is asked for
    cached_features: int = 65536  # idle features that are remembered
    parts_per_call: int = 8192  # tensors of all features of one call together
    answers_kept: int = 256  # answers of one session that a repeated call gets again
    max_timeout: float = 3600.0  # longest deadline a call may ask for
