"""A client's side of the GPU: device segments mapped, host segments pinned, features loaded and written.

A device segment is imported once and mapped twice: at a read-write address that only our copies use, and at a read-only
one under the tensors. A host segment is pinned once, whole. A feature is loaded by one copy on a stream of our own
and one event; the stream that first reads it waits for that event, and only if it has not completed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from typing import TYPE_CHECKING, Any, Final

from mmbroker.proto.errors import BrokerLost
from mmbroker.proto.messages import DevicePlace

from . import mapping
from .cuda import Driver, DriverError
from .fences import Drain, Fence
from .mapping import Mapping
from .tensors import Layout

if TYPE_CHECKING:
    import torch

    from .link import Link

_log = logging.getLogger("mmbroker")

#: With fewer loads on their way, the next one does not wait for the GPU: it takes about a thousand copies of a stream.
_FEW: Final = 64


class DeviceMaps:
    """One segment at its two addresses; unmapped by `Gpu.sweep` when nothing refers to it any more."""

    def __init__(
        self, driver: Driver, fd: int, nbytes: int, session: int, bury: Callable[[int, int, int], None]
    ) -> None:
        """`bury` is told both addresses and the size when nothing refers to this any more."""
        self.nbytes = nbytes
        self.session = session
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
    """Where bytes are on the device. `event` is that of their copy, until it is known to be complete."""

    __slots__ = ("address", "event", "hold", "maps", "private", "session", "source")

    def __init__(
        self,
        maps: DeviceMaps | torch.Tensor,
        address: int,
        hold: int = 0,
        session: int = 0,
        event: int = 0,
        source: object = None,
    ) -> None:
        self.maps = maps
        self.private = not isinstance(maps, DeviceMaps)  # memory of torch's, for this entry alone
        self.address = address
        self.hold = hold
        self.session = session
        self.event = event
        self.source = source  # the memory that is being read


class Gpu:
    """One client's use of one GPU, over all its sessions. What is below `any thread` is for other threads, too."""

    def __init__(self, driver: Driver, uuid: str, link: Link) -> None:
        self.driver = driver
        self.uuid = uuid
        self._link = link
        self._stream = 0
        self._here = threading.local()
        self._ready = False
        self.closed = False
        #: The raw number of the calling thread's current stream, as torch has it.
        self.current_stream: Callable[[], int] = driver.current_stream(uuid)
        self._maps: dict[int, DeviceMaps] = {}
        self._pinned: set[int] = set()  # addresses of maps
        self._dead: deque[tuple[int, int, int]] = deque()
        self._events: deque[int] = deque()
        self._loading: deque[Place] = deque()  # in the order of their copies
        self.quiet = 0  # > 0: graphs are being captured; nothing is to be mapped, pinned, loaded or queried
        self.imports = self.loads = self.bytes_loaded = 0
        self.streams: dict[int, None] = {}  # that have read, and are known to live as long as the process
        self._fences: dict[int, Fence] = {}  # by event, that have not been passed as far as is known
        self._drain = Drain(self._finish, lambda: self.quiet > 0)
        self.unpinned = ""  # why host memory could not be pinned

    # --- the receiver thread ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make the receiver thread ready, once. Raises `DriverError`."""
        if not self._ready:
            self._use(create=True)
            self.driver.relaxed_capture()
            self._stream = self.driver.stream(high_priority=True)
            self.streams[self._stream] = None
            self._ready = True

    def maps(self, number: int) -> DeviceMaps:
        """A device segment, imported when it is first named."""
        found = self._maps.get(number)
        if found is None:
            self.enter()
            fd, nbytes = self._link.descriptor(number)
            found = DeviceMaps(self.driver, fd, nbytes, self._link.session, self._bury)
            self._maps[number] = found
            self.imports += 1
            self._link.descriptor_used(number)
        return found

    def retire(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._maps.pop(number, None)

    def pin(self, host: Mapping) -> None:
        """Let the GPU read a host segment by itself. Where that is refused, copies are slower, and the log says why.

        Its pages are brought in piece by piece, so that other threads get at the address space in between. It is
        registered whole: CUDA refuses a copy, torch's of a tensor too, that goes from one registration into the next.
        """
        if host.address in self._pinned or self.unpinned:
            return
        self.enter()
        host.view(0, host.nbytes)
        try:
            self.driver.pin(host.address, host.nbytes, read_only=not host.writable)
        except DriverError as error:
            self.unpinned = str(error)
            _log.warning("mmbroker: host memory stays unpinned, copies to the GPU are slower: %s", error)
            return
        host.pinned()
        self._pinned.add(host.address)
        address = host.address
        host.before_unmap(lambda: self._unpin(address))

    def _unpin(self, address: int) -> None:
        """By whichever receiver thread of this process takes the map apart."""
        self._pinned.discard(address)
        try:
            self._use()
            self.driver.unpin(address)
        except DriverError as error:  # the map goes anyway
            _log.warning("mmbroker: host memory could not be unpinned: %s", error)

    def load(self, place: DevicePlace, hold: int, source: memoryview) -> Place:
        """Copy host bytes to their place. What is returned may be used at once: readers wait for its event."""
        maps = self.maps(place.segment)
        at, into = maps.readable + place.offset, maps.writable + place.offset
        return self._copy(
            Place(maps, at, hold, self._link.session, source=source),
            into,
            mapping.address_of(source),
            source.nbytes,
        )

    def load_private(self, hold: int, source: memoryview | Place, nbytes: int) -> Place:
        """Copy bytes into device memory of this process's own, which outlives the entry."""
        self.enter()
        own = self.driver.empty(nbytes, self.uuid, self._stream)
        start = source.address if isinstance(source, Place) else mapping.address_of(source)
        place = Place(own, own.data_ptr(), hold, self._link.session, source=source)
        return self._copy(place, own.data_ptr(), start, nbytes)

    def _copy(self, place: Place, into: int, source: int, nbytes: int) -> Place:
        event = self._event()
        try:
            self.driver.copy(into, source, nbytes, self._stream, room=len(self._loading) < _FEW)
            self.driver.record(event, self._stream)
        except BaseException:
            self._events.append(event)
            raise
        place.event = event
        self._loading.append(place)
        self.loads += 1
        self.bytes_loaded += nbytes
        return place

    def share(self, place: DevicePlace, hold: int) -> Place:
        """Bytes that are there already."""
        maps = self.maps(place.segment)
        return Place(maps, maps.readable + place.offset, hold, self._link.session)

    def loaded(self) -> list[Place]:
        """The places whose copies are complete by now, each told once. Raises `DriverError`."""
        done: list[Place] = []
        while self._loading:  # copies complete in order
            try:
                if not self.driver.query(self._loading[0].event):
                    break
            except DriverError:
                if done:
                    break
                raise
            place = self._loading.popleft()
            event, place.event, place.source = place.event, 0, None
            self._events.append(event)
            done.append(place)
        return done

    def await_copies(self) -> None:
        """Wait until nothing is being copied any more; `loaded` tells what was."""
        if self._loading:
            self.driver.synchronize(self._loading[-1].event)

    def await_readers(self) -> None:
        """Wait for everything that this process has told the GPU to do, also in streams that we do not know."""
        if self._ready:
            self.driver.finish()

    def drain(self) -> Fence:
        """A fence behind all that. For any thread, also in a finaliser."""
        return self._drain.fence()

    def await_quiet(self, timeout: float) -> None:
        """Wait until nothing is waited for. To be called with `quiet` > 0, so that nothing is begun either."""
        self._drain.idle.wait(timeout)

    def _finish(self) -> None:
        self._use()
        self.driver.relaxed_capture()
        self.driver.finish()

    def echo(self, place: Place, offset: int, written: memoryview, read: memoryview) -> None:
        """Host bytes to a place through its writable address, and back through the readable one. Waits."""
        assert isinstance(place.maps, DeviceMaps)
        event, nbytes = self._event(), written.nbytes
        self.driver.copy(place.maps.writable + offset, mapping.address_of(written), nbytes, self._stream)
        self.driver.copy(mapping.address_of(read), place.address, nbytes, self._stream)
        self.driver.record(event, self._stream)
        self.driver.synchronize(event)
        self._events.append(event)

    def forget(self) -> None:
        """The session is over: segments of the next one may have the same numbers. What is in use stays mapped."""
        self._maps.clear()

    @property
    def busy(self) -> bool:
        return bool(self._loading)

    def _bury(self, writable: int, readable: int, nbytes: int) -> None:
        """The last tensor of a segment died, in whatever thread: leave the work to the receiver thread, if it lives."""
        self._dead.append((writable, readable, nbytes))
        if self.closed:
            self._use()
            self.await_readers()  # the tensor is dead, but not the work that reads it
            self.sweep()
            self._destroy_events()

    def sweep(self) -> None:
        """Unmap what has died."""
        while self._dead and not self.quiet:
            writable, readable, nbytes = self._dead.popleft()
            self.driver.unmap(writable, nbytes)
            self.driver.unmap(readable, nbytes)

    def close(self) -> None:
        """Let go of everything that nothing refers to. The receiver thread ends after this."""
        if not self._ready:
            return
        self.quiet = 0
        self.await_copies()
        self.await_readers()
        self._drain.close()
        self.loaded()
        self._maps.clear()
        self.sweep()
        self.closed = True
        self.streams.pop(self._stream, None)
        self._events.extend(self._fences)  # passed by now
        self._fences.clear()
        self._destroy_events()
        self.driver.destroy_stream(self._stream)

    def _destroy_events(self) -> None:
        while self._events:
            self.driver.destroy_event(self._events.popleft())

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

    def _recorded(self, stream: int) -> int:
        """An event behind everything that is in a stream by now."""
        self._use()
        event = self._event()
        try:
            self.driver.record(event, stream)
        except BaseException:
            self._events.append(event)
            raise
        return event

    def lasts(self, raw: int, stream: object) -> bool:
        """Is a stream known to live as long as the process? Then a fence can be made in it later, for all that it has
        read. `stream`: as torch's object, its raw number, or None: the calling thread's current one."""
        if not self.driver.lasting(stream, self.uuid):
            return False
        self.streams[raw] = None
        return True

    def fence(self, stream: int) -> Fence:
        """A new fence in a stream, which exists. Raises `DriverError`."""
        fence = Fence(self._recorded(stream))
        self._fences[fence.event] = fence
        return fence

    def passed(self, fences: MutableSequence[Fence]) -> bool:
        """Whether everything before these fences is done; those that are known to be passed are taken out."""
        while fences and self._passed(fences[0]):
            del fences[0]
        return not fences

    def _passed(self, fence: Fence) -> bool:
        if (event := fence.recorded) and self.driver.query(event):
            fence.event = 0
            if self._fences.pop(event, None) is not None:
                self._events.append(event)
        return not fence.event

    def wait(self, place: Place) -> None:
        """Have torch's current stream wait until a place is loaded, if it is not."""
        self._use()
        event = place.event
        try:
            if event and not self.driver.query(event):
                self.driver.wait(self.current_stream(), event)
        except DriverError:
            if place.event:  # else it was complete, and its event was given back
                raise
        if place.private:
            self.driver.used_by_current(place.maps)  # type: ignore[arg-type]

    # --- writers, in their own threads ------------------------------------------------------------------------------

    def mapped(self, number: int, offset: int, session: int) -> Place:
        """A place to write, in a segment that the receiver thread has imported in that session."""
        found = self._maps.get(number)
        if found is None or found.session != session:
            raise BrokerLost("the session ended before its lease was written; the client reconnects")
        self._use()
        return Place(found, found.writable + offset)

    def write(self, place: Place, tensors: list[torch.Tensor], layout: Layout) -> None:
        """Copy tensors of this GPU to their place, after what is in torch's current stream by now. Waits, without the
        GIL: afterwards the tensors may be changed."""
        self._use()
        plain = [tensor.contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        ready = self._recorded(self.current_stream())
        self.driver.wait(self._stream, ready)
        self._events.append(ready)
        for tensor, (_, _, _, offset) in zip(plain, layout, strict=True):
            if tensor.nbytes:
                self.driver.copy(place.address + offset, tensor.data_ptr(), tensor.nbytes, self._stream)
        self._wait_for(self._recorded(self._stream))

    def finish(self) -> None:
        """Wait, without the GIL, for what is in torch's current stream by now."""
        self._wait_for(self._recorded(self.current_stream()))

    def _wait_for(self, event: int) -> None:
        self.driver.synchronize(event)
        self._events.append(event)

    def build(self, layout: Layout, place: Place) -> tuple[list[torch.Tensor], weakref.ref[Exporter]]:
        """Tensors over a place, and the exporter that they keep alive."""
        exporter = Exporter(place.maps)
        tensors = [
            self.driver.tensor(place.address + offset, dtype, shape, self.uuid, exporter)
            if elements
            else self.driver.empty(0, self.uuid, self._stream).view(dtype).view(shape)
            for dtype, shape, elements, offset in layout
        ]
        return tensors, weakref.ref(exporter)


def raw_stream(stream: object) -> int:
    """A stream's number: it may be torch's object."""
    number: Any = getattr(stream, "cuda_stream", stream)
    return int(number)
