"""The messages, and how they become bytes.

Two channels carry them (design: lifeline and control). The lifeline carries a `Hello`, one `Welcome` or `Refused`, and
then `SegmentFd`s, each with one file descriptor. Control carries `Call`s from the client, `Answer`s and `Notice`s from
the broker. Everything is msgpack; unknown fields, unknown types and wrong sizes are refused with `InvalidMessage`.

A `Call` with `seq` 0 wants no answer. Every other `seq` is answered exactly once, at the latest when `timeout` seconds
have passed since the broker read it; a repeat of an answered `seq` gets the same answer again.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from .errors import InvalidMessage, VersionMismatch, plain
from .form import Form
from .keys import Key
from .reference import BOOT_BYTES, PROTOCOL_VERSION, Reference

#: Longest message on either channel, in bytes.
MAX_MESSAGE: Final = 1 << 20
#: Longest name of a caller's place in its trace, in characters.
TRACE_LENGTH: Final = 64
#: Most bytes that are sealed beside a feature (`Sealing.extra`).
MAX_EXTRA: Final = 4096


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    pass


# --- the lifeline ---------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """First words of a client. `namespace` None: the one of its own uid. Sent before anything else is."""

    v: int
    name: str
    namespace: str | None = None


class Welcome(_Message, frozen=True, tag="welcome"):
    """The session: `routing` is the control socket's identity, `control` its file name in the instance directory,
    `device` the UUID of the GPU that is served."""

    v: int
    boot: bytes
    session: int
    routing: bytes
    control: str
    namespace: str
    instance: str
    device: str = ""


class Refused(_Message, frozen=True, tag="refused"):
    """No session: an error by its name (`errors.BY_NAME`)."""

    error: str
    message: str
    figures: dict[str, int] = {}


class SegmentFd(_Message, frozen=True, tag="segment"):
    """Comes with one descriptor. `writable` says how it may be mapped; `nbytes` is the segment's size."""

    segment: int
    nbytes: int
    writable: bool
    tier: str = "host"


Lifeline = Hello | Welcome | Refused | SegmentFd


# --- control: what a client asks for --------------------------------------------------------------------------------


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feature to create: found under `key`, or to be written with this form. `promise`: the one
    (`Due.promise`) that is kept by it. If the call is refused it stays open."""

    key: Key
    form: Form
    promise: int = 0


class Create(_Message, frozen=True, tag="create"):
    """Get or create, a batch. Answered by `Created`, one result an item, in order.

    Equal keys in one batch get one lease: the first item is `Leased`, the others `Pending`. An item that somebody else
    is writing is `Pending` as well, if the batch got leases; a batch without leases waits for the writer instead.
    `to`: hits are granted to that engine before the answer. `private`: see `Seal`.
    """

    items: list[Item]
    to: str | None = None
    private: bool = False
    tier: str = "host"


class Lookup(_Message, frozen=True, tag="lookup"):
    """Holds on what exists. Answered by `Found`."""

    keys: list[Key]
    to: str | None = None
    private: bool = False


class Promise(_Message, frozen=True, tag="promise"):
    """Get what exists, or promise to make it: for features whose form is known only once they are made. A batch,
    answered by `Promised`, one result an item, in order.

    What nobody has or makes is `Due` from this client, of equal keys the first. If anything is, the answer comes at
    once, and what somebody else makes is `Pending`: keep the promises (`Create` with `Item.promise`, and seal) or give
    them back (`Abort`), then ask again. Otherwise the call waits for the others' promises and leases to be kept or to
    end, and holds nothing while it waits. Whoever waits here must hold no promise or lease of the same work.
    """

    keys: list[Key]
    to: str | None = None
    private: bool = False


class Sealing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lease to seal. `retained`: a tensor over the slot is still alive in the writer, so the slot stays its own
    after the last hold, until `Unpin`. `extra`: at most `MAX_EXTRA` bytes that come with every hit on the feature.
    `cost`: the microseconds it takes to make it again, if that is known; what costs more a byte stays longer as a
    cache."""

    lease: int
    retained: bool = False
    extra: bytes = b""
    cost: int | None = None


class Seal(_Message, frozen=True, tag="seal"):
    """Make leases' contents visible; one hold each. Answered by `Sealed` once every rank of `to` has acknowledged.

    `private`: ranks make a copy of their own that outlives the hold.
    """

    leases: list[Sealing]
    to: str | None = None
    private: bool = False


class Attach(_Message, frozen=True, tag="attach"):
    """This session is rank `rank` of `world` of an engine. `access`: ``readonly``, ``copy``. Answered by `Attached`.

    `device` is ``cpu`` or the UUID of the GPU on which its tensors shall be. `lazy`: it asks for a place on the device
    (`Want`) when a feature is first taken, instead of getting one with each grant. `path` is where the rank found that
    features can be, ``device``, ``pinned`` or ``host``, and `why` what failed. Said again, with nothing else changed,
    it moves the rank to the device.
    """

    engine: str
    rank: int
    world: int
    device: str = "cpu"
    access: str = "copy"
    lazy: bool = False
    path: str = "host"
    why: str = ""


class Detach(_Message, frozen=True, tag="detach"):
    """No further grants to this rank; what it has, it settles as usual. Answered by `Done`."""


class Released(_Message, frozen=True, tag="released"):
    """This process holds nothing any more of its earlier session of the same boot. Answered by `Done`."""

    session: int


class Status(_Message, frozen=True, tag="status"):
    """Answered by `Report` with everything an operator may ask; `features` most features are listed."""

    features: int = 0


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """Drain and exit. Only the broker's own user and root may. Answered by `Done`."""


class Drain(_Message, frozen=True, tag="drain"):
    """Take no new work (`on`), or take it again. What is held goes on. As `Shutdown`; answered by `Done`."""

    on: bool = True


class Evict(_Message, frozen=True, tag="evict"):
    """Drop cached features that nobody holds, the oldest first, at most `most` of them; of one namespace, or of all.
    As `Shutdown`. Answered by `Evicted`: ask again until it is nothing."""

    most: int
    namespace: str | None = None


# --- control: what a client tells (seq 0) ---------------------------------------------------------------------------


class Abort(_Message, frozen=True, tag="abort"):
    """Give leases back unwritten, and promises unkept."""

    leases: list[int]


class Drop(_Message, frozen=True, tag="drop"):
    """Producer: these holds are over."""

    holds: list[int]


class Unpin(_Message, frozen=True, tag="unpin"):
    """Writer: no tensor over these sealed leases' slots is alive any more (see `Sealing.retained`)."""

    leases: list[int]


class Ack(_Message, frozen=True, tag="ack"):
    """Rank: the entries of these holds are in the table. `failed`: they could not be made, with the reason. `settled`:
    as by a `Settle` right after it."""

    holds: list[int]
    failed: list[int] = []
    reason: str = ""
    settled: list[int] = []


class Settle(_Message, frozen=True, tag="settle"):
    """Rank: it can no longer touch the features of these dismissed holds."""

    holds: list[int]


class Kept(_Message, frozen=True, tag="kept"):
    """Rank that attached anew: it still has entries of these holds, which were granted to sessions that it lost. Each
    comes back in a `Dismissed`: at once if the hold is over or is not this engine's, else when it ends."""

    holds: list[int]


class Loaded(_Message, frozen=True, tag="loaded"):
    """Rank: the copies to the device that these holds' grants or offers asked for are complete."""

    holds: list[int]


class Park(_Message, frozen=True, tag="park"):
    """Rank: it does not touch the device replicas of these holds for now; the host's stay."""

    holds: list[int]


class Want(_Message, frozen=True, tag="want"):
    """Rank: it would have these holds' features on the device. Answered by an `Offered` when there is room."""

    holds: list[int]


class Tally(_Message, frozen=True, tag="tally"):
    """Client: its own counters (cumulative, by name), for `status`. Sent at most once a second, when they changed."""

    counts: dict[str, int]


Body = (
    Create | Lookup | Promise | Seal | Attach | Detach | Released | Status | Shutdown
    | Abort | Drop | Unpin | Ack | Settle | Kept | Loaded | Park | Want | Tally | Drain | Evict
)  # fmt: skip


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Envelope of everything a client sends on control. `trace`: W3C's traceparent, if the caller is traced."""

    v: int
    boot: bytes
    session: int
    seq: int
    timeout: float
    body: Body
    trace: Annotated[str, msgspec.Meta(max_length=TRACE_LENGTH)] = ""


# --- control: what the broker answers -------------------------------------------------------------------------------


class Hit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="hit"):
    """The feature exists; the hold is yours. `extra`: what was sealed beside it."""

    ref: Reference
    extra: bytes = b""


class Leased(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="leased"):
    """A slot to write: `offset` and the form's size are bytes within `segment`, whose descriptor is on the lifeline."""

    lease: int
    segment: int
    offset: int
    generation: int
    tier: str = "host"


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="pending"):
    """Somebody is writing it: seal what you have, then ask again for this one."""


class Due(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="due"):
    """Nobody has it, and it is yours to make: others who ask wait for you. Promises are numbered with leases."""

    promise: int


Result = Hit | Leased | Pending


class Created(_Message, frozen=True, tag="created"):
    results: list[Result]


class Found(_Message, frozen=True, tag="found"):
    """One `Reference` or None for each key. `extras`: what was sealed beside each; empty if there is nothing."""

    refs: list[Reference | None]
    extras: list[bytes] = []


class Promised(_Message, frozen=True, tag="promised"):
    results: list[Hit | Due | Pending]


class Sealed(_Message, frozen=True, tag="sealed"):
    """One reference for each lease, in order."""

    refs: list[Reference]


class Attached(_Message, frozen=True, tag="attached"):
    """`complete`: every rank of the engine is attached. `tier`: where its grants will be, ``host`` or ``device``."""

    complete: bool
    tier: str = "host"


class Done(_Message, frozen=True, tag="done"):
    pass


class Evicted(_Message, frozen=True, tag="evicted"):
    """How many features were dropped, and the bytes of their slots on all tiers."""

    features: int
    nbytes: int


class Report(_Message, frozen=True, tag="report"):
    status: dict[str, Any]


class Failed(_Message, frozen=True, tag="failed"):
    """The call failed: an error by its name (`errors.BY_NAME`)."""

    error: str
    message: str
    figures: dict[str, int] = {}


Reply = Created | Found | Promised | Sealed | Attached | Done | Report | Evicted | Failed


class Answer(_Message, frozen=True, tag="answer"):
    seq: int
    body: Reply


# --- control: what the broker tells ---------------------------------------------------------------------------------


class DevicePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place on the device: the bytes are there, or (`load`) this rank is to copy them there and say `Loaded`."""

    segment: int
    offset: int
    load: bool


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hold on the engine's side. The bytes are at `offset` of `segment`, which is of `tier`; and at `device`."""

    ref: Reference
    modality: str
    segment: int
    offset: int
    private: bool = False
    tier: str = "host"
    device: DevicePlace | None = None


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place on the device for a hold that was granted without one, or had parked it."""

    hold: int
    place: DevicePlace


class Granted(_Message, frozen=True, tag="granted"):
    """To a rank: make entries, then `Ack`. `dismissed`: as by a `Dismissed` right after it."""

    grants: list[Grant]
    dismissed: list[int] = []


class Offered(_Message, frozen=True, tag="offered"):
    """To a rank: places on the device. `Park` those that are of no use any more."""

    offers: list[Offer]


class Dismissed(_Message, frozen=True, tag="dismissed"):
    """To a rank: these holds are over; `Settle` each as soon as nothing can touch it."""

    holds: list[int]


class Broken(_Message, frozen=True, tag="broken"):
    """To a writer: these leases are no longer yours."""

    leases: list[int]


class Retired(_Message, frozen=True, tag="retired"):
    """These segments will never be used again: unmap them when no tensor is alive in them."""

    segments: list[int]


Notice = Granted | Offered | Dismissed | Broken | Retired
Downlink = Answer | Granted | Offered | Dismissed | Broken | Retired


# --- bytes ----------------------------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    v: int = -1


_encoder = msgspec.msgpack.Encoder()
_lifeline = msgspec.msgpack.Decoder(Lifeline)
_call = msgspec.msgpack.Decoder(Call)
_downlink = msgspec.msgpack.Decoder(Downlink)
_version = msgspec.msgpack.Decoder(_Version)


def encode(message: msgspec.Struct) -> bytes:
    """Any message as bytes."""
    return _encoder.encode(message)


def _refusal(data: bytes, error: Exception, what: str) -> Exception:
    """Why `data` was refused: another version's message is told apart from nonsense."""
    try:
        version = _version.decode(data).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        version = -1
    if version not in (-1, PROTOCOL_VERSION):
        return VersionMismatch(
            f"the two sides speak protocol versions {min(version, PROTOCOL_VERSION)} and "
            f"{max(version, PROTOCOL_VERSION)}: upgrade mmbroker where version {min(version, PROTOCOL_VERSION)} is "
            "spoken, and restart what runs there",
            theirs=version,
            ours=PROTOCOL_VERSION,
        )
    return InvalidMessage(f"{what} of {len(data)} bytes cannot be decoded: {plain(error)}", nbytes=len(data))


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, what: str) -> Any:
    if len(data) > MAX_MESSAGE:
        raise InvalidMessage(
            f"{what} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}: send fewer items at once",
            nbytes=len(data),
            limit=MAX_MESSAGE,
        )
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(data, error, what) from None
    if getattr(message, "v", PROTOCOL_VERSION) != PROTOCOL_VERSION:
        raise _refusal(data, ValueError("version"), what)
    return message


def decode_lifeline(data: bytes) -> Lifeline:
    """A message from the lifeline; raises `InvalidMessage` or `VersionMismatch`."""
    message: Lifeline = _decode(_lifeline, data, "a lifeline message")
    return message


def decode_call(data: bytes) -> Call:
    """A message from a client; raises `InvalidMessage` or `VersionMismatch`."""
    call: Call = _decode(_call, data, "a call")
    if len(call.boot) != BOOT_BYTES:
        raise InvalidMessage(f"a boot id has {BOOT_BYTES} bytes, not {len(call.boot)}")
    if not 0 <= call.timeout < math.inf:  # not a number, too
        raise InvalidMessage(f"a call's timeout is a number of seconds from 0, not {call.timeout}")
    return call


def decode_downlink(data: bytes) -> Downlink:
    """A message from the broker; raises `InvalidMessage` or `VersionMismatch`."""
    message: Downlink = _decode(_downlink, data, "a broker message")
    return message


class _Seq(msgspec.Struct):
    seq: int = 0


_seq = msgspec.msgpack.Decoder(_Seq)


def seq_of(data: bytes) -> int:
    """The `seq` of a call that could not be decoded, so that its sender can be told; 0 if there is none."""
    try:
        return _seq.decode(data).seq
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
