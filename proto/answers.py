"""What the broker says on control: an answer to each call, and notices."""

from __future__ import annotations

from typing import Any

import msgspec

from .keys import Key
from .reference import Reference


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    pass


# --- what the broker answers ------------------------------------------------------------------------------------------


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
    """How many features were dropped, and the bytes on all tiers that this made free."""

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


# --- what the broker tells --------------------------------------------------------------------------------------------


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


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that is sought, and the promise of it: the reader's own, until the wait for it is over."""

    key: Key
    promise: int


class Sought(_Message, frozen=True, tag="sought"):
    """To the tier: somebody waits for these. Keep each promise (`Create` with `Item.promise`, and seal), or give it
    back (`Abort`) as soon as it is known that the store has not got it."""

    wanted: list[Wanted]


class Worth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A derived feature that somebody here has made: its bytes, the microseconds it took (None: not known), and how
    often it has been found since."""

    key: Key
    nbytes: int
    cost: int | None
    hits: int


class Fresh(_Message, frozen=True, tag="fresh"):
    """To the tier: features that could be stored. Some are never told of."""

    features: list[Worth]


Notice = Granted | Offered | Dismissed | Broken | Retired | Sought | Fresh
Downlink = Answer | Granted | Offered | Dismissed | Broken | Retired | Sought | Fresh
