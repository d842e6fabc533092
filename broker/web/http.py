"""HTTP for a few readers on this machine: GET, one answer a connection, everything bounded. `h11` parses.

Loopback alone keeps no browser out: a page from elsewhere may have its own name resolve to 127.0.0.1. So the Host
header must name this machine. Nothing a request says changes anything.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Protocol, cast

import h11

from mmbroker.proto.errors import BrokerError

from .address import Address

log = logging.getLogger("mmbroker")

#: Connections at once, and how many of them may be feeds: some are left for whoever collects metrics.
CONNECTIONS: Final = 32
FEEDS: Final = 16
#: Longest request, in bytes.
_HEAD: Final = 8192
#: How long a request may take to arrive, and an answer to be read, in seconds.
_PATIENCE: Final = 10.0
#: A feed whose reader is this far behind, in bytes, gets nothing until it has caught up.
_BEHIND: Final = 256 << 10
#: Names of this machine. Any port: a tunnel may have another one.
_HOSTS: Final = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_HEADERS: Final = (
    ("Connection", "close"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
)


@dataclass(frozen=True)
class Page:
    """A whole answer."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Feed(Protocol):
    """An answer that goes on: server-sent events."""

    def join(self, send: Callable[[bytes], None]) -> Callable[[], None]:
        """Send from now on, the first words at once; returns how to leave."""


class Site(Protocol):
    def get(self, path: str, reader: Callable[[], int | None]) -> Page | Feed | None:
        """What is at a path, if anything. `reader` tells who asks, as a user id; None: that cannot be seen."""


def owner(ours: tuple[str, int], theirs: tuple[str, int]) -> int | None:
    """The user whose socket is at `ours` and connected to `theirs`, both on this machine, as the kernel lists it."""
    places = [_listed(place) for place in (ours, theirs)]
    with open("/proc/net/tcp6" if ":" in ours[0] else "/proc/net/tcp") as table:
        for line in table:
            fields = line.split()
            if fields[1:3] == places:
                return int(fields[7])
    return None


def _listed(place: tuple[str, int]) -> str:
    """An address as the kernel lists it: words of four bytes in this machine's order, then the port."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, place[0])
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{place[1]:04X}"


class Listener:
    """Serves a site at an address until it is closed. Raises `BrokerError` if the address cannot be had."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, site: Site) -> None:
        self.loop = loop
        self.site = site
        self.connections: set[Connection] = set()
        self.feeds = 0
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(CONNECTIONS)
        except OSError as error:
            self._socket.close()
            raise BrokerError(
                f"cannot listen at {address.url}: {error.strerror}; choose another port with --http"
            ) from None
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._starting = loop.create_task(loop.create_server(lambda: Connection(self), sock=self._socket))

    def close(self) -> None:
        """Cut everybody off. Idempotent."""
        if self._starting.done() and not self._starting.cancelled() and not self._starting.exception():
            self._starting.result().close()
        self._starting.cancel()
        self._socket.close()
        for connection in list(self.connections):
            connection.cut()


class Connection(asyncio.Protocol):
    """One request, one answer."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._leave: Callable[[], None] | None = None
        self._answered = False
        self._crowded = False  # too many were here before: it is told so, if there is room for that
        self._behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not of its family
        self._transport.set_write_buffer_limits(high=_BEHIND)
        self._listener.connections.add(self)
        self._arm(lambda: self._refuse(HTTPStatus.REQUEST_TIMEOUT))
        crowd = len(self._listener.connections)
        self._crowded = crowd > CONNECTIONS
        if crowd > 2 * CONNECTIONS:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.connections.discard(self)
        self._disarm()
        if self._leave is not None:
            self._leave()
            self._leave = None
            self._listener.feeds -= 1

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        try:
            self._receive(data)
        except Exception:  # a broker does not end because its page is broken
            log.exception("a request to the page failed")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "the broker's log says why")

    def _receive(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(HTTPStatus(error.error_status_hint), str(error))
            return
        if isinstance(event, h11.Request):
            self._answer(event)

    def _answer(self, request: h11.Request) -> None:
        host = dict(request.headers).get(b"host", b"")
        if self._crowded:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{CONNECTIONS} connections are open, which is the limit"
            )
        elif not _HOSTS.fullmatch(host):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this is for 127.0.0.1 and localhost only")
        elif request.method != b"GET":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "GET only", {"Allow": "GET"})
        else:
            path = request.target.partition(b"?")[0].decode("ascii", "replace")
            found = self._listener.site.get(path, self._reader)
            if found is None:
                self._refuse(HTTPStatus.NOT_FOUND, "there is /, /metrics, /healthz and /events")
            elif isinstance(found, Page):
                self._send(found)
            elif self._listener.feeds >= FEEDS:
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{FEEDS} pages are open, which is the limit")
            else:
                self._feed(found)

    def _reader(self) -> int | None:
        peer, own = self._transport.get_extra_info("peername"), self._transport.get_extra_info("sockname")
        return owner(peer[:2], own[:2])

    # --- answers ----------------------------------------------------------------------------------------------------

    def _refuse(self, status: HTTPStatus, why: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._send(Page(f"{status.phrase}: {why}\n".encode(), status=status, headers=headers or {}))

    def _send(self, page: Page) -> None:
        """Answer, and hang up once it is read, or after a while."""
        if self._begin(page.status, {"Content-Length": str(len(page.body)), **page.headers}, page.kind):
            self._write(h11.Data(data=page.body))
            self._write(h11.EndOfMessage())
        self._transport.close()
        self._arm(self.cut)

    def _feed(self, feed: Feed) -> None:
        self._disarm()
        if self._begin(HTTPStatus.OK, {}, "text/event-stream"):
            self._leave = feed.join(self._tell)
            self._listener.feeds += 1
            if self._behind:
                self._arm(self.cut)

    def _begin(self, status: int, headers: Mapping[str, str], kind: str) -> bool:
        """The head of the answer; False if there can be none any more."""
        self._answered = True
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self._transport.is_closing():
            return False
        every = [*_HEADERS, ("Content-Type", kind), *headers.items()]
        reason = HTTPStatus(status).phrase.encode()
        self._write(h11.Response(status_code=status, headers=every, reason=reason))
        return True

    def _tell(self, data: bytes) -> None:
        if not self._behind and not self._transport.is_closing():
            self._write(h11.Data(data=data))

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._transport.write(data)

    # --- patience ---------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._behind = True
        if self._leave is not None:
            self._arm(self.cut)

    def resume_writing(self) -> None:
        self._behind = False
        if self._leave is not None:
            self._disarm()

    def _arm(self, then: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._listener.loop.call_later(_PATIENCE, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cut(self) -> None:
        self._transport.abort()
