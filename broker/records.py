"""What the state machine remembers: one class for each thing it keeps books on."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key
from mmbroker.proto.messages import DevicePlace, Grant, Item, Reply
from mmbroker.proto.reference import Reference

from .pool import Slot
from .timers import Timer

#: How a feature is found: its namespace and key.
Place = tuple[str, Key]


@dataclass(slots=True, eq=False)
class Lease:
    """A writer's right to one slot."""

    number: int
    session: int
    place: Place
    form: Form
    slot: Slot
    since: float
    engine: Engine | None  # charged for it while it is written
    awaited: bool = True  # who wants the same key waits for it


@dataclass(slots=True, eq=False)
class Promise:
    """A client's word that it will make the feature of a key, before its form is known. A lease takes its place."""

    number: int
    session: int
    place: Place
    awaited: bool = True


@dataclass(slots=True, eq=False)
class Mover:
    """What moves features between its namespace and a store beyond this machine (`Tier`)."""

    session: Session
    open: bool = False
    wait: float = 0.0
    most: int = 1
    reuse: int = 1
    sought: dict[Place, Seek] = field(
        default_factory=dict
    )  # what it was asked for, until it has done with it
    vain: int = 0  # keys that were sought in vain since it last said anything
    told: int = 0  # features that it was told of since then
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Seek:
    """A key that a mover was asked for. Others wait for its writer until it is `due`."""

    mover: Mover
    writer: Promise | Lease
    due: float
    timer: Timer


@dataclass(slots=True, eq=False)
class Feature:
    """Sealed, immutable content in a slot."""

    number: int
    place: Place
    form: Form
    slot: Slot
    extra: bytes = b""  # sealed with it
    cost: int | None = None  # us to make it again, if its producer said so
    holds: set[int] = field(default_factory=set)
    pins: set[int] = field(default_factory=set)  # leases whose writer still has a tensor over the slot
    hits: int = 0
    fetched: bool = False  # it comes from beyond this machine
    maker: str = ""  # the engine that had it first, or whose rank put it
    tainted: bool = False  # a process that cannot be traced may read it for ever: its slot is never reused
    replica: Replica | None = None  # its copy on the device, if its own slot is on the host

    @property
    def pinned(self) -> bool:
        return bool(self.holds or self.pins)


@dataclass(slots=True, eq=False)
class Replica:
    """The device copy of a host feature. `loader` copies it; the others get it when it is loaded."""

    feature: Feature
    slot: Slot
    loader: int  # session
    since: float
    ready: bool = False
    pins: set[tuple[int, int]] = field(default_factory=set)  # (hold, session) of the grants that name it
    waiting: list[tuple[Hold, int]] = field(default_factory=list)  # grants held back until it is loaded
    tainted: bool = False
    timer: Timer | None = None


class Rank(enum.Enum):
    """What a rank has said about a grant. A rank that has settled is struck off the hold."""

    DEFERRED = "deferred"  # not granted yet: another session is loading the replica
    GRANTED = "granted"
    ACKED = "acked"
    DETACHED = (
        "detached"  # its session is over, its process may live: nobody waits for its word, the slot does
    )


@dataclass(slots=True, eq=False)
class Hold:
    """One producer's claim on a feature for one engine (or for itself)."""

    number: int
    feature: Feature
    engine: Engine | None
    owner: int | None  # session; None: the producer is gone, and the hold goes on for a grace time
    private: bool
    since: float
    ranks: dict[int, Rank] = field(default_factory=dict)  # by session
    over: bool = False
    ended: float = 0.0  # when it was over
    ticket: Ticket | None = None
    expiry: Timer | None = None

    def reference(self, boot: bytes) -> Reference:
        form, slot = self.feature.form, self.feature.slot
        key = self.feature.place[1]
        return Reference(
            boot, self.number, self.feature.number, slot.generation, key.value, form.dtype, form.shape, form.nbytes,
            form.parts,
        )  # fmt: skip

    def grant(self, boot: bytes, place: DevicePlace | None) -> Grant:
        slot, modality = self.feature.slot, self.feature.form.modality
        return Grant(
            self.reference(boot), modality, slot.segment, slot.offset, self.private, slot.tier, place
        )


@dataclass(slots=True, eq=False)
class Engine:
    """The ranks attached under one name in one namespace."""

    name: str
    namespace: str
    world: int
    mover: bool = False  # it reads for a store beyond this machine, and no request is for it
    ranks: dict[int, int] = field(default_factory=dict)  # rank -> session
    #: Bytes by tier of the features that it holds, each counted once, and of leases meant for it.
    in_flight: Counter[str] = field(default_factory=Counter)
    uses: dict[int, int] = field(default_factory=dict)  # feature number -> holds
    leases: int = 0  # meant for it
    granted: Counter[str] = field(default_factory=Counter)  # features and bytes, since it attached
    reused: dict[str, Counter[str]] = field(
        default_factory=dict
    )  # of these, what other engines made, by engine

    @property
    def features(self) -> int:
        """That it has in flight, each counted once, and leases meant for it."""
        return len(self.uses) + self.leases

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world


@dataclass(slots=True, eq=False)
class Ticket:
    """An answer that waits until ranks have acknowledged grants."""

    session: int
    seq: int
    engine: Engine
    holds: list[Hold]
    answer: Callable[[], Reply]
    undo: Callable[[float], None]  # takes back what the answer would have given beside the holds
    since: float
    missing: int = 0  # grants not acknowledged yet
    failure: str = ""
    timer: Timer | None = None


class Wait(enum.Enum):
    """What a create or lookup waits for."""

    ROOM = "room"
    BUDGET = "budget"  # of its engine
    CLIENT = "client"  # its client's own budget
    FLIGHT = "flight"


@dataclass(slots=True, eq=False)
class Request:
    """A create that has not been served yet, or a call for what exists: items without a form."""

    number: int
    session: int
    seq: int
    namespace: str
    items: list[Item]
    engine: Engine | None
    private: bool
    since: float
    nbytes: int  # whole pages of its distinct items
    tier: str
    lookup: bool = False
    promise: bool = False  # what is missing is promised, or waited for
    patient: bool = True  # False: it has waited for content keys' writers long enough
    reason: Wait = Wait.ROOM
    wants: tuple[int, int] = (0, 0)  # leases and holds that it would take now, and their bytes
    waited: bool = False
    flights: list[Place] = field(default_factory=list)
    timer: Timer | None = None
    patience: Timer | None = None


@dataclass(slots=True, eq=False)
class Session:
    """A connected client, or what is left of one whose process may still live (`ended`)."""

    number: int
    uid: int
    pid: int
    name: str
    namespace: str
    traceable: bool
    since: float
    ended: bool = False
    released: bool = False  # its process said that it holds nothing of it any more
    leases: dict[int, Lease] = field(default_factory=dict)
    promises: dict[int, Promise] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)  # that it owns
    nbytes: int = 0  # of its leases' and holds' slots
    grants: dict[int, Hold] = field(default_factory=dict)  # that it has as a rank
    kept: set[int] = field(default_factory=set)  # holds granted to its rank's earlier sessions, to be told of
    unacked: dict[int, float] = field(default_factory=dict)  # hold -> when it was granted
    pins: dict[int, Feature | Slot] = field(default_factory=dict)  # sealed leases it still has tensors over
    quarantine: list[Slot] = field(default_factory=list)
    segments: set[tuple[int, bool]] = field(default_factory=set)  # (number, writable) it was sent
    engine: Engine | None = None
    engine_name: str = ""  # stays when it has ended, as its rank does
    rank: int = 0
    device: str = ""
    access: str = ""
    path: str = ""
    why: str = ""  # what failed on a better path
    gpu: bool = False  # its tensors are on the device that this broker serves
    lazy: bool = False  # loads at the first take
    replicas: dict[int, Replica] = field(default_factory=dict)  # by hold, of its grants
    mover: Mover | None = None  # it serves its namespace as a tier
    requests: dict[int, Request] = field(default_factory=dict)  # by seq
    tickets: dict[int, Ticket] = field(default_factory=dict)  # by seq
    answers: OrderedDict[int, Reply] = field(default_factory=OrderedDict)
    forgotten: int = 0  # highest seq whose answer is no longer kept
    tally: dict[str, int] = field(default_factory=dict)

    @property
    def features(self) -> int:
        """Leases, promises and holds."""
        return len(self.leases) + len(self.promises) + len(self.holds)

    @property
    def process(self) -> tuple[int, int, str]:
        """Tells whose session it is: a client that comes back is the same process in the same namespace."""
        return self.uid, self.pid, self.namespace
