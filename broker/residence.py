"""Which of a rank's entries are on the device: loads, offers of places, and places that are let go of.

For the receiver thread, except where it says otherwise. Everything here goes through the rank's `Gpu`; where that is
None, every entry is on the host, and there is nothing to do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mmbroker.proto.errors import BrokerError, FeatureMissing
from mmbroker.proto.messages import DevicePlace, Grant, Loaded, Offer, Park, Want

from .cuda import DriverError
from .entry import Entry
from .fences import Fence
from .gpu import Gpu

if TYPE_CHECKING:
    from .link import Link

_log = logging.getLogger("mmbroker")

#: How often it says that features could not be loaded, in seconds.
_COMPLAINT: Final = 60.0


class Residence:
    """Of one table. `shared`: the broker gives places on our device."""

    def __init__(self, link: Link, engine: str) -> None:
        self.gpu: Gpu | None = None
        self.shared = False
        self.failures = 0
        self._link = link
        self._engine = engine
        self._parking: deque[Entry] = deque()
        self._wanting: deque[Entry] = deque()
        self._declined: list[int] = []
        self._unready: list[Entry] = []
        self._failing = False  # the GPU does not tell what is complete
        self._next_complaint = 0.0

    # --- any thread -------------------------------------------------------------------------------------------------

    def want(self, entry: Entry) -> None:
        """Ask for a place on the device; the model copies by itself if it reads before there is one."""
        if self.shared and not entry.asked and entry.memory.nbytes:
            entry.asked = True
            self._wanting.append(entry)
            self._link.wake()

    def may_park(self, entry: Entry) -> None:
        """The entry is not needed on the device for now."""
        place = entry.place
        if place is not None and not place.private:
            self._parking.append(entry)

    # --- grants and offers ------------------------------------------------------------------------------------------

    def enter(self, entry: Entry, grant: Grant, private: bool) -> None:
        """A feature that is nowhere but on the device; `private`: copied to memory of our own. Raises `FeatureMissing`
        where the device cannot be reached."""
        if self.gpu is None:
            raise FeatureMissing(f"this rank of engine {self._engine!r} is not on that device")
        hold, nbytes = grant.ref.hold, grant.ref.nbytes
        entry.place = self.gpu.share(DevicePlace(grant.segment, grant.offset, False), hold)
        if private:
            entry.place = self.gpu.load_private(hold, entry.place, nbytes)

    def load(self, entry: Entry, place: DevicePlace | None) -> bool:
        """To a place of the broker's, or (None) into private memory. If that fails, the host's copy has to do."""
        gpu, hold = self.gpu, entry.ref.hold
        assert gpu is not None
        try:
            if place is None:
                entry.place = gpu.load_private(hold, entry.memory, entry.ref.nbytes)
            else:
                entry.place = gpu.load(place, hold, entry.memory) if place.load else gpu.share(place, hold)
        except (BrokerError, RuntimeError, OSError) as error:  # torch's allocator raises RuntimeErrors
            entry.asked = True  # not again
            self.failures += 1
            if place is not None:
                self._declined.append(hold)
            self._complain(f"{self.failures} feature(s) stayed on the host", error)
            return False
        return True

    def make_ready(self, entry: Entry) -> None:
        """Have the tensor that is taken first made, together with those of other entries: the first of several takes as
        long as ten more. A scheduler that takes the entry before that makes its own."""
        self._unready.append(entry)

    def make_none_ready(self) -> None:
        """Nobody takes any more. From any thread."""
        self._unready.clear()

    def _make_ready(self) -> None:
        unready, self._unready = self._unready, []
        for entry in unready:
            taken = entry.uses or entry.streams  # or was, and was read
            if not (entry.gone or taken or entry.ready):
                with suppress(Exception):  # then it is made when it is read, and says why it cannot be
                    entry.make_ready()

    def offered(self, offers: Iterable[tuple[Offer, Entry | None]]) -> None:
        """Places for entries that had none; they are declined where there is no use for them any more."""
        for offer, entry in offers:
            if entry is None or entry.place is not None:
                self._declined.append(offer.hold)
            elif self.load(entry, offer.place):
                entry.ready.clear()
                self.make_ready(entry)
        self.tell_declined()

    def tell_declined(self) -> None:
        if self._declined:
            declined, self._declined = self._declined, []
            self._link.cast(Park(declined))

    # --- chores -----------------------------------------------------------------------------------------------------

    def chores(self, gpu: Gpu) -> None:
        """Tell what is loaded, ask for what is wanted, let go of what is parked."""
        for number in self._link.fresh_segments():
            gpu.pin(self._link.segment(number, False))
        session = self._link.session
        if loaded := self.loaded(gpu):  # before anything of it is parked
            self._link.cast(Loaded(loaded), session)
        if self._wanting:
            wanted = [self._wanting.popleft() for _ in range(len(self._wanting))]
            self._link.cast(Want([e.ref.hold for e in wanted if e.session == session]), session)
        if self._parking:
            self._park(gpu)
        self._make_ready()

    @property
    def unfinished(self) -> bool:
        return bool(self._parking)

    @property
    def loading(self) -> bool:
        """Is a copy on its way, of which we shall know when it is complete?"""
        return self.gpu is not None and self.gpu.busy and not self._failing

    def loaded(self, gpu: Gpu) -> list[int]:
        """The holds whose copies are complete by now, each once: the broker is to be told of them."""
        session = self._link.session
        try:
            places = gpu.loaded()
        except DriverError as error:
            # The context is lost. Whoever waits for a copy finds that out by themselves.
            self._complain("features stay unloaded", error)
            self._failing = True
            return []
        self._failing = False
        return [place.hold for place in places if place.session == session and not place.private]

    def _park(self, gpu: Gpu) -> None:
        """Let go of places on the device. As with a dismissal: first out of sight, and only then a look at the uses."""
        session = self._link.session
        parked: list[int] = []
        for _ in range(len(self._parking)):
            entry = self._parking.popleft()
            place = entry.place
            if place is None or entry.gone or not entry.memory.nbytes:
                continue  # parked already, over, or without a replica on the host
            entry.place = None
            entry.ready.clear()
            if None in list(entry.uses.values()):
                entry.place = place  # in use again, and parked again when that is over
                continue
            self.fence([entry], gpu)
            if place.event or not self.unread(entry, gpu):
                entry.place = place
                self._parking.append(entry)
            else:
                entry.asked = False
                entry.make_ready()
                if entry.session == session:
                    parked.append(entry.ref.hold)
        if parked and self.shared:
            self._link.cast(Park(parked), session)

    # --- who still reads --------------------------------------------------------------------------------------------

    def fence(self, entries: Iterable[Entry], gpu: Gpu) -> bool:
        """Find out where the reading of entries ends that nobody uses: one event a stream for all of them. False if
        that was known of all.

        First it is collected which streams have read them, and only then the events are recorded: behind every release.
        """
        read: list[tuple[Entry, dict[int, None]]] = []
        drained = False
        for entry in entries:
            if entry.kept:
                continue
            if entry.outlived:  # in whatever stream the tensors that outlived their uses were read
                entry.outlived = False
                entry.fences.append(gpu.drain())
                drained = True
            if entry.streams:
                streams, entry.streams = entry.streams, {}
                read.append((entry, streams))
        fences: dict[int, Fence] = {}
        for stream in {s: None for _, streams in read for s in streams}:
            try:
                fences[stream] = gpu.fence(stream)
            except DriverError as error:
                self._complain("a stream cannot be asked, all others are waited for", error)
                gpu.streams.pop(stream, None)
                fences[stream] = gpu.drain()
        for entry, streams in read:
            entry.fences += [fences[stream] for stream in streams]
        return drained or bool(read)

    def _complain(self, what: str, error: Exception) -> None:
        """At most once a minute."""
        now = time.monotonic()
        if now >= self._next_complaint:
            self._next_complaint = now + _COMPLAINT
            _log.warning("mmbroker: engine %s: %s: %s", self._engine, what, str(error))  # no frames

    def unread(self, entry: Entry, gpu: Gpu) -> bool:
        """Whether nothing reads tensors that were handed out and let go of, here or on the GPU."""
        try:
            return not (entry.streams or entry.outlived or entry.kept) and gpu.passed(entry.fences)
        except DriverError as error:
            self._complain("features stay unsettled", error)
            return False

    def untouchable(self, entry: Entry) -> bool:
        """Can nothing here touch the entry's memory any more: no use, no tensor, no work on the GPU? After `fence`."""
        place, gpu = entry.place, self.gpu
        if gpu is None:
            return entry.private or not (entry.uses or entry.kept)
        if gpu.quiet or (place is not None and place.event):
            return False
        if entry.private and entry.buffer is not None:
            return True
        if place is not None and place.private:
            return True
        return not entry.uses and self.unread(entry, gpu)
