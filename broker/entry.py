"""What a rank's table keeps for a grant, and how schedulers use it without locks, messages or system calls.

Two kinds of threads meet at an entry. The receiver thread enters it when a grant comes, and takes it out when the hold
is dismissed; schedulers take it and release it, from any thread:

* a *take* looks the entry up, marks itself in the entry's `uses`, and looks again: if the entry is `gone`, it was
  dismissed in between, and the take unmarks itself and misses;
* a *release* notes which stream has read, lets go of its tensors, and unmarks itself;
* a *dismissal* makes the entry `gone`, one atomic step, and only then looks at its `uses`. A take whose second look
  came before has left its mark; one whose second look comes after will miss. So once there is no mark, there is no
  user, and there will be none: the grant is settled as soon as no tensor handed out is alive, and no stream reads.

Every use has an exporter of its own, what its tensors lie over, which is watched by a weak reference.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from mmbroker.proto.errors import FeatureMissing
from mmbroker.proto.reference import Reference

from .fences import Fence
from .gpu import Gpu, Place, raw_stream
from .mapping import Mapping
from .tensors import Layout, build, export, layout

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from .residence import Residence

#: A use that reads nothing at present, and does not keep a feature on the device.
PAUSED: Final = False

#: So many fences are kept for one entry; with more, everything on the GPU is waited for in the end.
_MOST_FENCES: Final = 64

Key = tuple[bytes, int]  # boot and hold
#: A weak reference to what lives exactly as long as an entry's tensors.
Watch = weakref.ref[Any]
#: Tensors, the watch on their exporter, and where on the device they are.
Built = tuple[list["torch.Tensor"], Watch | None, Place | None]


class Entry:
    """What the table keeps for one grant."""

    __slots__ = (
        "asked", "buffer", "exporters", "fences", "gone", "key", "layout", "memory", "outlived", "place", "private",
        "ready", "ref", "residence", "session", "single", "streams", "uses", "wire",
    )  # fmt: skip

    def __init__(self, residence: Residence, ref: Reference, session: int, private: bool) -> None:
        self.residence = residence
        self.key: Key = (ref.boot, ref.hold)
        self.ref = ref
        self.wire = ref.to_wire()
        self.session = session
        self.private = private
        self.layout: Layout = layout(ref)
        self.single = ref.parts is None  # one tensor
        self.memory = memoryview(b"")
        self.buffer: Mapping | None = None
        self.gone = False  # out of the table
        self.uses: dict[int, bool | None] = {}  # or `PAUSED`
        self.exporters: dict[int, Watch] = {}
        self.ready: list[Built] = []
        self.place: Place | None = None  # on the device
        self.streams: dict[int, None] = {}  # that have read it, and where that ends is not known yet
        self.fences: list[Fence] = []  # where it ends
        self.outlived = False  # a tensor was kept beyond its use: any stream may have read it
        self.asked = False  # for a place on the device

    def build(self) -> Built:
        """Tensors over an exporter of their own: on the device, if the feature is there, or will be in a moment."""
        if not self.ref.nbytes:
            return build(self.layout, self.memory), None, None
        place, gpu = self.place, self.residence.gpu
        watch: Watch
        if place is not None and gpu is not None:
            tensors, watch = gpu.build(self.layout, place)
        else:
            tensors, exporter = export(self.layout, self.memory)
            watch = weakref.ref(exporter)
        self.exporters[id(watch)] = watch
        return tensors, watch, place

    def make_ready(self) -> None:
        """Build ahead of a take. For the receiver thread."""
        self.ready.append(self.build())
        if self.gone:  # perhaps by now, and whoever took it out of the table did not see this
            self.ready.clear()

    def let_go(self) -> None:
        """The client is closed: what nobody uses goes now, what is in use goes with its last tensor."""
        self.ready.clear()
        if not self.uses:
            self.place, self.memory = None, memoryview(b"")

    @property
    def kept(self) -> bool:
        """Is a tensor that was handed out still alive?"""
        exporters = self.exporters  # mostly none: those of uses that ended are taken out
        return bool(exporters) and any(watch() is not None for watch in list(exporters.values()))


def _note(entry: Entry, gpu: Gpu, stream: object) -> None:
    """What is in this stream by now may read the entry. If it cannot be told which stream that is, any may.

    In a stream that lasts, the receiver thread makes one fence for all that it has read. One that somebody has made may
    be destroyed by then, and CUDA crashes if it is told of it: its fence is made here.
    """
    try:
        raw = gpu.current_stream() if stream is None else raw_stream(stream)
        if raw in gpu.streams or gpu.lasts(raw, stream):
            entry.streams[raw] = None
            return
        if gpu.closed:
            return  # its memory is unmapped once everything is done, and goes to nobody before this process ends
        if gpu.quiet or len(entry.fences) >= _MOST_FENCES:
            entry.outlived = True
        else:
            entry.fences.append(gpu.fence(raw))
    except BaseException as error:
        entry.outlived = True
        if not isinstance(error, Exception):
            raise


class Use:
    """One use of an entry by the scheduler, from `FeatureTable.take` to `release`. Also a context manager."""

    __slots__ = ("_built", "_entry", "_watch")

    def __init__(self, entry: Entry) -> None:
        self._entry: Entry | None = entry
        self._built: list[torch.Tensor] | None = None
        self._watch: Watch | None = None
        entry.uses[id(self)] = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The feature's tensors; one, unless it was put as a list. The same objects each time."""
        built = self._built
        return self._open(self._live()) if built is None else built

    @property
    def tensor(self) -> Any:
        """The feature's tensor, or the list of them if it was put as a list.

        Not to be written, unless the table was attached with ``access="copy"``.
        """
        entry, built = self._entry or self._live(), self._built
        if built is None:
            built = self._open(entry)
        return built[0] if entry.single else built

    def _open(self, entry: Entry) -> list[torch.Tensor]:
        """Tensors, which the receiver thread has made for the first use, unless that came at once; they are read after
        their loading."""
        if entry.uses[id(self)] is PAUSED:
            entry.uses[id(self)] = None  # before it is looked where the feature is: see `Residence.park`
        try:
            built, self._watch, place = entry.ready.pop()
        except IndexError:
            built, self._watch, place = entry.build()
        self._built = built
        if place is not None and (place.event or place.private) and entry.residence.gpu is not None:
            entry.residence.gpu.wait(place)
        return built

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the feature's key."""
        return self._live().ref.digest

    @property
    def ref(self) -> Reference:
        return self._live().ref

    def _live(self) -> Entry:
        if self._entry is None:
            raise FeatureMissing("this use was released: take the reference again")
        return self._entry

    def release(self, stream: object = None) -> None:
        """No longer in use. Idempotent. A tensor kept beyond this stays valid, and its memory stays in use.

        `stream`: the device stream that last read it, as torch's object or its raw number; None: the current one. The
        memory stays in use until what is in that stream by now is done. For one of torch's own, given as its object or
        as the current one, this costs less than for others. Of no meaning on the CPU.
        """
        entry, self._entry = self._entry, None
        if entry is None:
            return
        gpu = entry.residence.gpu
        try:
            if gpu is not None and self._built is not None:
                place = entry.place
                if place is None or not place.private:  # else torch minds its own memory
                    _note(entry, gpu, stream)
            self._built = None
            watch = self._watch
            if watch is None or watch() is None:
                entry.exporters.pop(id(watch), None)
            else:
                entry.outlived = True
        finally:
            entry.uses.pop(id(self), None)
        if gpu is not None and gpu.closed:
            entry.let_go()

    def park(self, stream: object = None) -> None:
        """A release, and the feature is not needed on the device for now. A later take has the host's copy at once, and
        the device's again when there is room. `stream`: see `release`. On the CPU: a release."""
        entry = self._entry
        self.release(stream)
        if entry is not None:
            entry.residence.may_park(entry)

    def pause(self, stream: object = None) -> None:
        """As `park`, but the use goes on: its tensors can be had again, on the host if the device has let them go."""
        entry = self._live()
        entry.uses[-id(self)] = PAUSED  # so that it is never unused
        self.release(stream)
        self._entry, self._watch = entry, None
        entry.uses[id(self)] = PAUSED
        del entry.uses[-id(self)]
        entry.residence.may_park(entry)

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        entry = self._entry
        if entry is not None:
            entry.outlived = True  # this thread is any, and its stream need not be the one that read
            self._built, self._entry = None, None
            entry.uses.pop(id(self), None)
