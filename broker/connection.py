"""One session, as its client sees it: the lifeline with its descriptors, and the control socket.

Any thread may post, also from a finaliser or a signal handler: `post` never waits. Whoever has the lock sends what all
have posted, so a thread that does not get the lock need not come back. Only the receiver thread receives.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmbroker.proto import messages
from mmbroker.proto.errors import (
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    ConnectTimeout,
    InvalidMessage,
    PermissionDenied,
    make,
)
from mmbroker.proto.messages import MAX_MESSAGE, Body, Call, Hello, Refused, SegmentFd, Welcome
from mmbroker.proto.reference import BOOT_BYTES, PROTOCOL_VERSION

from .instance import LIFELINE, check_length
from .mapping import Mapping
from .quick import Quick

_FD_BYTES: Final = struct.calcsize("i")
#: As a plain number: arithmetic with pyzmq's own takes several times as long.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
#: Most messages handled in one go, so that the receiver thread gets to its other duties.
_BATCH: Final = 256
#: How long a message that names a segment may wait for the segment's descriptor, in seconds.
_DESCRIPTOR_PATIENCE: Final = 5.0


def start_command(directory: Path) -> str:
    """The command that starts a broker at `directory`."""
    name = "" if directory.name == "cpu" else f" --name {directory.name}"
    return f"MMBROKER_DIR={directory.parent} mmbroker start --cpu{name}"


class Connection:
    """`boot`, `session` and `namespace` are the broker's words; `mappings` are the segments it has sent."""

    def __init__(
        self,
        directory: Path,
        name: str,
        namespace: str | None,
        deadline: float,
        context: zmq.Context[zmq.Socket[bytes]],
        wake_fd: int,
    ) -> None:
        self._lost = False
        self._wake_fd = wake_fd
        self._lock = Lock()
        self._outbox: deque[bytes] = deque()
        self._segments: dict[tuple[int, bool], Mapping | tuple[int, int]] = {}  # or descriptor and size
        self._fresh: list[int] = []
        self._cold: deque[weakref.ref[Mapping]] = deque()  # mapped, and not populated as a whole
        check_length(directory)
        self.lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._dealer: zmq.Socket[bytes] | None = None
        self._quick: Quick | None = None  # the same, once it is connected
        self._monitor: zmq.Socket[bytes] | None = None
        self._cut = False
        self._control = (-1, -1)  # descriptor and inode of the socket under the dealer
        try:
            welcome = self._shake_hands(directory, name, namespace, deadline)
            self.boot, self.session, self.namespace = welcome.boot, welcome.session, welcome.namespace
            self.device = welcome.device
            self.control_fd = self._open_control(directory, welcome, deadline, context)
        except BaseException:
            self.close()
            raise

    # --- opening ----------------------------------------------------------------------------------------------------

    def _shake_hands(self, directory: Path, name: str, namespace: str | None, deadline: float) -> Welcome:
        path = directory / LIFELINE
        try:
            self._patience(deadline)
            self.lifeline.connect(os.fspath(path))
            self._patience(deadline)
            self.lifeline.send(messages.encode(Hello(PROTOCOL_VERSION, name, namespace)))
            self._patience(deadline)
            data = self.lifeline.recv(MAX_MESSAGE)
        except TimeoutError:
            raise ConnectTimeout(
                f"the broker at {directory} did not answer in time: see whether its process is stopped or overloaded"
            ) from None
        except PermissionError:
            raise PermissionDenied(
                f"user {os.geteuid()} may not use the broker at {directory}: start it with --allow-uid {os.geteuid()}, "
                "or start one of your own"
            ) from None
        except OSError as error:
            raise BrokerUnavailable(f"no broker answers at {directory} ({error.strerror})") from None
        if not data:
            raise BrokerUnavailable(f"the broker at {directory} ended the connection during the handshake")
        answer = messages.decode_lifeline(data)
        if isinstance(answer, Refused):
            raise make(answer.error, answer.message, answer.figures)
        if (
            not isinstance(answer, Welcome)
            or len(answer.boot) != BOOT_BYTES
            or not answer.routing
            or "/" in answer.control
        ):
            raise InvalidMessage(
                f"what listens at {path} does not answer like a broker: remove it, start a broker"
            )
        self.lifeline.setblocking(False)
        return answer

    def _patience(self, deadline: float) -> None:
        """How long the handshake's next step may take: what the steps before have left of its time."""
        self.lifeline.settimeout(max(0.001, deadline - time.monotonic()))

    def _open_control(
        self, directory: Path, welcome: Welcome, deadline: float, context: zmq.Context[zmq.Socket[bytes]]
    ) -> int:
        dealer = context.socket(zmq.DEALER)
        self._dealer = dealer
        dealer.linger = 0
        dealer.routing_id = welcome.routing
        # A socket that reconnects by itself would speak to the next broker under this session's name.
        dealer.reconnect_ivl = -1
        dealer.immediate = 1
        # Nor would it say that it was cut off: it would wait for a peer that never comes.
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        #: Readable once there may be something for `read_monitor`.
        self.monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        dealer.connect(f"ipc://{directory / welcome.control}")
        self._await_control(directory, dealer, self._monitor, deadline)
        self.read_monitor()
        self._quick = Quick(dealer, MAX_MESSAGE)
        return int(dealer.get(zmq.FD))

    def _await_control(
        self, directory: Path, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], deadline: float
    ) -> None:
        """Wait until the control socket is connected, or the broker has gone, which the socket alone would not tell."""
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLOUT)
        poller.register(monitor, zmq.POLLIN)
        poller.register(self.lifeline, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(max(1, int((deadline - time.monotonic()) * 1000))))
            if dealer in ready:
                return
            if not ready:
                raise ConnectTimeout(
                    f"the broker at {directory} shook hands, but its control socket did not answer in time: "
                    "see whether its process is stopped or overloaded"
                )
            self.read_monitor()
            if self._cut or self.lifeline.fileno() in ready:
                raise BrokerUnavailable(
                    f"the broker at {directory} ended the connection during the handshake"
                )

    def read_monitor(self) -> None:
        """See how the control connection is: once it was cut, nothing comes or goes any more, and `receive` says so."""
        monitor = self._monitor
        while monitor is not None and int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            news = recv_monitor_message(monitor)
            if news["event"] != zmq.EVENT_CONNECTED:
                self._cut = True
                return
            with suppress(OSError):  # cut already, which is the next news
                self._control = (news["value"], os.fstat(news["value"]).st_ino)

    # --- control ----------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        return self._lost

    def encode(self, seq: int, timeout: float, body: Body, trace: str = "") -> bytes:
        """A call as bytes; raises `InvalidMessage` for one that the broker would not read."""
        data = messages.encode(Call(PROTOCOL_VERSION, self.boot, self.session, seq, timeout, body, trace))
        if len(data) > MAX_MESSAGE:
            raise InvalidMessage(
                f"a call of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}: send fewer items at once",
                nbytes=len(data),
                limit=MAX_MESSAGE,
            )
        return data

    def post(self, data: bytes) -> None:
        """Send, now or as soon as the broker reads again. Never waits; forgotten if the session is over."""
        self._outbox.append(data)
        while self._outbox and self._lock.acquire(blocking=False):
            try:
                sent = self._flush()
                # Sending, and looking, may have taken in the signal of what came meanwhile: pass on that of a message;
                # that of room for more is for us.
                events = 0 if self._quick is None else self._quick.events()
                if events & _POLLIN:
                    self._wake()
            finally:
                self._lock.release()
            if not (sent or events & _POLLOUT):
                return

    def _flush(self) -> bool:
        """Send what was posted, under the lock; False if the broker takes no more for now."""
        outbox, quick = self._outbox, self._quick
        while outbox:
            try:
                data = outbox.popleft()
            except IndexError:
                break
            if not (quick is None or quick.send(data)):
                outbox.appendleft(data)
                return False
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """What the broker has sent, up to a batch, and whether there may be more now; if not, `control_fd` becomes
        readable, or the wake descriptor, when there is. Raises `BrokerLost` if the connection was cut."""
        if self._cut:
            raise BrokerLost("the control connection to the broker was cut")
        batch: list[bytes] = []
        more = room = False
        with self._lock:
            quick = self._quick
            if quick is None:
                return batch, False
            sent = not self._outbox or self._flush()
            while (data := quick.recv()) is not None:
                batch.append(data)
                if more := len(batch) == _BATCH:
                    break
            if self._outbox:  # receiving takes in the signal of room for more, too
                room = bool(quick.events() & _POLLOUT)
        if self._outbox and (sent or room):  # or posted by somebody who found us at it
            self._wake()
        return batch, more

    @property
    def backlog(self) -> int:
        """Messages that the broker has not taken yet."""
        return len(self._outbox)

    def _wake(self) -> None:
        """Let the receiver thread look again. Only under the lock, or in that thread: the descriptor lives so long."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    # --- the lifeline -----------------------------------------------------------------------------------------------

    def read_lifeline(self) -> None:
        """Take in descriptors. Raises `BrokerLost` at the session's end."""
        while True:
            try:
                data, extra, flags, _ = self.lifeline.recvmsg(
                    4096, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                raise BrokerLost(f"the connection to the broker broke ({error.strerror})") from None
            if not data:
                raise BrokerLost("the broker ended the session, or its process is gone")
            fds = [
                fd
                for level, kind, payload in extra
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                for (fd,) in struct.iter_unpack("i", payload)
            ]
            try:
                self._take_segment(messages.decode_lifeline(data), fds, flags)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise

    def _take_segment(self, message: object, fds: list[int], flags: int) -> None:
        if not isinstance(message, SegmentFd):
            raise InvalidMessage(f"a {type(message).__name__} does not belong on the lifeline")
        if flags & socket.MSG_CTRUNC and not fds:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise BrokerLost(
                f"the descriptor of a segment was lost, because this process is at its limit of {limit} open files "
                "(RLIMIT_NOFILE): raise it with `ulimit -n`, or close files",
                limit=limit,
            )
        key = (message.segment, message.writable)
        if len(fds) != 1 or message.nbytes <= 0 or key in self._segments:
            raise InvalidMessage(f"segment {message.segment} came with {len(fds)} descriptors, or twice")
        self._segments[key] = (fds[0], message.nbytes)
        if message.tier == "host" and not message.writable:
            self._fresh.append(message.segment)

    def mapping(self, segment: int, writable: bool) -> Mapping:
        """A segment that the broker has sent. For the receiver thread: it reads the lifeline, and maps."""
        key = (segment, writable)
        if key not in self._segments:
            self._await_descriptor(key)
        found = self._segments[key]
        if isinstance(found, Mapping):
            return found
        fd, nbytes = found
        try:
            mapping = Mapping.of(fd, nbytes, writable)
        except OSError as error:
            raise BrokerError(
                f"segment {segment} cannot be mapped ({error}): see the limits on this process's address space "
                "(`ulimit -v`) and number of maps (vm.max_map_count)",
                nbytes=nbytes,
            ) from None
        self._segments[key] = mapping
        self._cold.append(weakref.ref(mapping))
        os.close(fd)
        return mapping

    @property
    def cold(self) -> bool:
        """Is anything mapped that is not populated? See `warm_ahead`."""
        return bool(self._cold)

    def warm_ahead(self) -> None:
        """Populate some more of what is mapped."""
        mapping = self._cold[0]()
        if mapping is None or not mapping.warm_ahead():
            self._cold.popleft()

    def descriptor(self, segment: int) -> tuple[int, int]:
        """Descriptor and size of a device segment. For the receiver thread."""
        key = (segment, True)
        if key not in self._segments:
            self._await_descriptor(key)
        found = self._segments[key]
        if isinstance(found, Mapping):
            raise InvalidMessage(f"segment {segment} is on the host")
        return found

    def descriptor_used(self, segment: int) -> None:
        """A device segment was imported: its descriptor is of no use any more."""
        os.close(self._segments.pop((segment, True))[0])  # type: ignore[index]

    def fresh_segments(self) -> list[int]:
        """Host segments that have come since the last call."""
        fresh, self._fresh = self._fresh, []
        return [number for number in fresh if (number, False) in self._segments]

    def mapped(self, segment: int) -> Mapping:
        """A segment that the receiver thread has mapped for writing. For any thread."""
        found = self._segments.get((segment, True))
        if not isinstance(found, Mapping):
            raise BrokerLost("the session ended before its lease was written; the client reconnects")
        return found

    def _await_descriptor(self, key: tuple[int, bool]) -> None:
        deadline = time.monotonic() + _DESCRIPTOR_PATIENCE
        poller = select.poll()
        poller.register(self.lifeline, select.POLLIN)
        self.read_lifeline()
        while key not in self._segments:
            left = deadline - time.monotonic()
            if left <= 0:
                raise InvalidMessage(
                    f"the broker named segment {key[0]}, but did not send its descriptor within "
                    f"{_DESCRIPTOR_PATIENCE:.0f} s"
                )
            poller.poll(left * 1000)
            self.read_lifeline()

    def forget(self, segments: list[int]) -> None:
        """Retired segments: their maps go when nothing of them is alive any more. For the receiver thread."""
        self.read_lifeline()  # a descriptor that came before the word, and was not read yet, would stay for good
        self._fresh = [number for number in self._fresh if number not in segments]
        for segment in segments:
            for writable in (False, True):
                found = self._segments.pop((segment, writable), None)
                if isinstance(found, tuple):
                    os.close(found[0])

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session. For the receiver thread, or before there is one. Idempotent."""
        self._lost = True
        with self._lock:
            dealer, self._dealer, self._quick = self._dealer, None, None
            if dealer is not None:
                if self._monitor is not None:
                    dealer.disable_monitor()
                    self._monitor.close(linger=0)
                    self._monitor = None
                dealer.close(linger=0)
        self.lifeline.close()
        self._close_descriptors()
        self._outbox.clear()

    def _close_descriptors(self) -> None:
        """Those of segments that were not mapped, and the maps that nothing else uses."""
        while self._segments:
            _, found = self._segments.popitem()  # first, since a process may be forked in between
            if isinstance(found, tuple):
                os.close(found[0])

    def leave_to_parent(self) -> None:
        """In a forked child: close our copies of the descriptors, so that neither the connections nor any memory lives
        as long as we do."""
        self._lost = True
        self.lifeline.close()
        self._close_descriptors()
        fd, inode = self._control
        with suppress(OSError):
            if (
                os.fstat(fd).st_ino == inode
            ):  # else the parent has closed it, and uses its number for something else
                os.close(fd)
