"""What a client says on control: calls, which are answered, and casts, which are not."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from .form import Form
from .keys import Key

#: Longest name of a caller's place in its trace, in characters.
TRACE_LENGTH: Final = 64
#: Most bytes that are sealed beside a feature (`Sealing.extra`).
MAX_EXTRA: Final = 4096


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    pass


# --- what a client asks for -------------------------------------------------------------------------------------------


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
    """Holds on what exists. Answered by `Found`, at once unless a tier is asked first (`Tier`)."""

    keys: list[Key]
    to: str | None = None
    private: bool = False


class Promise(_Message, frozen=True, tag="promise"):
    """Get what exists, or promise to make it: for features whose form is known only once they are made. A batch,
    answered by `Promised`, one result an item, in order.

    What nobody has or makes is `Due` from this client, of equal keys the first. If anything is, the answer comes at
    once, and what somebody else makes is `Pending`: keep the promises (`Create` with `Item.promise`, and seal) or give
    them back (`Abort`), then ask again. Otherwise the call waits for the others' promises and leases to be kept or to
    end, and holds nothing while it waits. Whoever waits here must hold no promise or lease of the same work. In any
    case it waits, for a moment, for what a tier is asked (`Tier`).
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


class Tier(_Message, frozen=True, tag="tier"):
    """This session moves features between its namespace and a store beyond this machine. Answered by `Done`; said
    again, it changes the figures. One a namespace, until its session ends; to read as a rank, say it before `Attach`.

    While it is `open`, a derived key that is asked for (`Lookup`, `Promise`) and that nobody has is `Sought`: who asks
    goes on as without a tier after `wait` seconds at the latest. At most `most` keys are sought at once. It is told of
    features that could be stored (`Fresh`), again when they have been found `reuse` times.
    """

    open: bool
    wait: float = 0.02
    most: int = 64
    reuse: int = 1


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
    One that a process may read which cannot be traced takes along what is cached in its segment. As `Shutdown`.
    Answered by `Evicted`: ask again until it is nothing."""

    most: int
    namespace: str | None = None


# --- what a client tells (seq 0) --------------------------------------------------------------------------------------


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
    """Rank: the entries of these holds are in the table. `failed`: they could not be made, with the reason. `loaded`:
    as by a `Loaded` right before it; `settled`: as by a `Settle` right after it."""

    holds: list[int]
    failed: list[int] = []
    reason: str = ""
    settled: list[int] = []
    loaded: list[int] = []


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
    Create | Lookup | Promise | Seal | Attach | Tier | Detach | Released | Status | Shutdown
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
