"""A rank's side of the GPU: device segments mapped, host segments pinned, features loaded. For the receiver thread.

A device segment is imported once and mapped twice: at a read-write address that only our copies use, and at a read-only
one under the tensors. A host segment is pinned once, in pieces. A feature is loaded by one copy on a stream of our own
and one event; the stream that first reads it waits for that event, and only if it has not completed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mmbroker.proto.messages import DevicePlace

from . import mapping
from .cuda import Driver, DriverError
from .mapping import Mapping
from .tensors import Layout

if TYPE_CHECKING:
    import torch

    from .link import Link

_log = logging.getLogger("mmbroker")

#: Host memory is pinned in pieces, so that other threads get at the address space in between.
PIECE: Final = 8 << 20


class DeviceMaps:
    """One segment at its two addresses; unmapped by `Gpu.sweep` when nothing refers to it any more."""

    def __init__(self, driver: Driver, fd: int, nbytes: int, bury: Callable[[int, int, int], None]) -> None:
        """`bury` is told both addresses and the size when nothing refers to this any more."""
        self.nbytes = nbytes
        handle = driver.import_(fd, nbytes)
        try:
            self.writable = driver.map(handle, nbytes, writable=True)
            try:
                self.readable = driver.map(handle, nbytes, writable=False)
            except BaseException:
                driver.unmap(self.writable, nbytes)
                raise
        finally:
            driver.release(handle)
        weakref.finalize(self, bury, self.writable, self.readable, nbytes).atexit = False


class Exporter:
    """Watched by a weak reference, like the memoryview under a host tensor: it lives as long as tensors over it."""

    __slots__ = ("__weakref__", "maps")

    def __init__(self, maps: object) -> None:
        self.maps = maps


class Place:
    """Where an entry's bytes are on the device. `event` is that of their copy, until it is known to be complete."""

    __slots__ = ("address", "event", "hold", "maps", "private", "source")

    def __init__(
        self, maps: DeviceMaps | torch.Tensor, address: int, hold: int, event: int, source: object
    ) -> None:
        self.maps = maps
        self.private = not isinstance(maps, DeviceMaps)  # memory of torch's, for this entry alone
        self.address = address
        self.hold = hold
        self.event = event
        self.source = source  # the host memory that is being read


class Gpu:
    """One rank's use of one GPU. Only `fence`, `wait` and `build` are for other threads."""

    def __init__(self, driver: Driver, uuid: str, link: Link) -> None:
        self.driver = driver
        self.uuid = uuid
        self._link = link
        self._stream = 0
        self._here = threading.local()
        self._ready = False
        self._closed = False
        self._maps: dict[int, DeviceMaps] = {}
        self._pinned: dict[int, list[int]] = {}  # by address of the map
        self._dead: deque[tuple[int, int, int]] = deque()
        self._events: deque[int] = deque()
        self._loading: dict[int, Place] = {}  # by hold
        self.imports = self.loads = self.bytes_loaded = 0
        self._streams: dict[int, None] = {}  # on which our tensors were read
        self.unpinned = ""  # why host memory could not be pinned

    # --- the receiver thread ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make the receiver thread ready, once. Raises `DriverError`."""
        if not self._ready:
            self._use(create=True)
            self.driver.relaxed_capture()
            self._stream = self.driver.stream(high_priority=True)
            self._ready = True

    def maps(self, number: int) -> DeviceMaps:
        """A device segment, imported when it is first named."""
        found = self._maps.get(number)
        if found is None:
            self.enter()
            fd, nbytes = self._link.descriptor(number)
            found = self._maps[number] = DeviceMaps(self.driver, fd, nbytes, self._bury)
            self.imports += 1
            self._link.descriptor_used(number)
        return found

    def retire(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._maps.pop(number, None)

    def pin(self, host: Mapping) -> None:
        """Let the GPU read a host segment by itself. Where that is refused, copies are slower, and the log says why."""
        address = mapping.address_of(host.view(0, host.nbytes))
        if address in self._pinned or self.unpinned:
            return
        self.enter()
        pieces: list[int] = []
        try:
            for offset in range(0, host.nbytes, PIECE):
                size = min(PIECE, host.nbytes - offset)
                self.driver.pin(address + offset, size, read_only=not host.writable)
                pieces.append(address + offset)
        except DriverError as error:
            self.unpinned = str(error)
            _log.warning("mmbroker: host memory stays unpinned, copies to the GPU are slower: %s", error)
        self._pinned[address] = pieces
        host.before_unmap(lambda: self._unpin(address))

    def _unpin(self, address: int) -> None:
        for piece in self._pinned.pop(address, ()):
            self.driver.unpin(piece)

    def load(self, place: DevicePlace, hold: int, source: memoryview) -> Place:
        """Copy host bytes to their place. What is returned may be used at once: readers wait for its event."""
        maps = self.maps(place.segment)
        return self._copy(maps, maps.writable + place.offset, maps.readable + place.offset, hold, source)

    def load_private(self, hold: int, source: memoryview) -> Place:
        """Copy host bytes into device memory of this process's own, which outlives the entry."""
        self.enter()
        own = self.driver.empty(source.nbytes, self.uuid, self._stream)
        return self._copy(own, own.data_ptr(), own.data_ptr(), hold, source)

    def _copy(
        self, maps: DeviceMaps | torch.Tensor, into: int, address: int, hold: int, source: memoryview
    ) -> Place:
        event = self._event()
        self.driver.copy(into, mapping.address_of(source), source.nbytes, self._stream)
        self.driver.record(event, self._stream)
        found = self._loading[hold] = Place(maps, address, hold, event, source)
        self.loads += 1
        self.bytes_loaded += source.nbytes
        return found

    def share(self, place: DevicePlace, hold: int) -> Place:
        """Bytes that another process has loaded."""
        maps = self.maps(place.segment)
        return Place(maps, maps.readable + place.offset, hold, 0, None)

    def loaded(self) -> list[int]:
        """The holds whose copies are complete by now, each told once."""
        done: list[int] = []
        for hold, place in self._loading.items():
            if not self.driver.query(place.event):
                break  # copies complete in order
            done.append(hold)
        for hold in done:
            place = self._loading.pop(hold)
            event, place.event, place.source = place.event, 0, None
            self._events.append(event)
        return done

    def echo(self, place: Place, offset: int, written: memoryview, read: memoryview) -> None:
        """Host bytes to a place through its writable address, and back through the readable one. Waits."""
        assert isinstance(place.maps, DeviceMaps)
        event, nbytes = self._event(), written.nbytes
        self.driver.copy(place.maps.writable + offset, mapping.address_of(written), nbytes, self._stream)
        self.driver.copy(mapping.address_of(read), place.address, nbytes, self._stream)
        self.driver.record(event, self._stream)
        self.driver.synchronize(event)
        self._events.append(event)

    def completed(self, place: Place) -> bool:
        """Whether the place is loaded."""
        event = place.event
        return not event or self.driver.query(event)

    def forget(self) -> None:
        """The session is over: segments of the next one have other numbers. What is in use stays mapped."""
        self._maps.clear()

    @property
    def busy(self) -> bool:
        return bool(self._loading)

    def passed(self, fences: deque[int]) -> bool:
        """Whether the work that was recorded when uses ended is done."""
        while fences and self.driver.query(fences[0]):
            self._events.append(fences.popleft())
        return not fences

    def _bury(self, writable: int, readable: int, nbytes: int) -> None:
        """The last tensor of a segment died, in whatever thread: leave the work to the receiver thread, if it lives."""
        self._dead.append((writable, readable, nbytes))
        if self._closed:
            self._use()
            self.sweep()

    def sweep(self) -> None:
        """Unmap what has died."""
        while self._dead:
            writable, readable, nbytes = self._dead.popleft()
            self.driver.unmap(writable, nbytes)
            self.driver.unmap(readable, nbytes)

    def close(self) -> None:
        """Let go of everything that nothing refers to. The thread ends after this."""
        self._closed = True
        for place in self._loading.values():
            self.driver.synchronize(place.event)
        self.loaded()
        self._maps.clear()
        self.sweep()
        while self._events:
            self.driver.destroy_event(self._events.popleft())
        if self._ready:
            self.driver.destroy_stream(self._stream)

    def _use(self, create: bool = False) -> None:
        """Each thread says once which GPU it uses."""
        if not getattr(self._here, "uses", False):
            self.driver.use(self.uuid, create=create)
            self._here.uses = True

    # --- any thread -------------------------------------------------------------------------------------------------

    def _event(self) -> int:
        try:
            return self._events.popleft()
        except IndexError:
            return self.driver.event()

    def fence(self, stream: object) -> int:
        """An event behind everything that is in a stream by now; None: in torch's current one."""
        self._use()
        raw = (
            self.driver.current_stream(self.uuid)
            if stream is None
            else getattr(stream, "cuda_stream", stream)
        )
        event = self._event()
        self.driver.record(event, int(raw))  # type: ignore[call-overload]
        self._streams[int(raw)] = None  # type: ignore[call-overload]
        return event

    def fences(self) -> list[int]:
        """As `fence`, behind every stream that was ever named."""
        return [self.fence(stream) for stream in list(self._streams)]

    def wait(self, place: Place) -> None:
        """Have torch's current stream wait until a place is loaded, if it is not."""
        self._use()
        event = place.event
        if event and not self.driver.query(event):
            self.driver.wait(self.driver.current_stream(self.uuid), event)
        if place.private:
            self.driver.used_by_current(place.maps)  # type: ignore[arg-type]

    def build(
        self, layout: Layout, place: Place, nbytes: int
    ) -> tuple[list[torch.Tensor], weakref.ref[Exporter]]:
        """Tensors over a place, and the exporter that they keep alive."""
        import torch

        exporter = Exporter(place.maps)
        whole = self.driver.tensor(place.address, nbytes, self.uuid, exporter)
        tensors = [
            whole[offset : offset + elements * dtype.itemsize].view(dtype).view(shape)
            if elements
            else torch.empty(shape, dtype=dtype, device=whole.device)
            for dtype, shape, elements, offset in layout
        ]
        return tensors, weakref.ref(exporter)
