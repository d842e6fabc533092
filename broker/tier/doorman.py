"""Keeps what a library listens on to one address, where the library itself listens on all.

Mooncake's client opens two listeners, and has no setting for their address. A socket filter is attached to each: the
kernel drops what was not sent to our address before anybody sees it, also on connections that are accepted later.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from mmbroker.proto.errors import BrokerError

_SO_ATTACH_FILTER: Final = 26
#: Where the network header begins, for a filter whose packets begin after it.
_NETWORK: Final = 0xFFF00000
_DESTINATION: Final = 16
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06


def _program(address: str) -> bytes:
    """Instructions that keep packets of IPv4 for one address, and drop all others."""
    wanted = int(ipaddress.IPv4Address(address))
    steps = (
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 0, 3, 4),  # the version
        (_LOAD_WORD, 0, 0, _NETWORK + _DESTINATION),
        (_IF_EQUAL, 0, 1, wanted),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    )
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def check(address: str) -> None:
    """Raise `BrokerError` unless it is an IPv4 address of this machine."""
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        raise BrokerError(
            f"{address!r} is no IPv4 address: --address is the one address of this machine that other machines "
            "reach it by, such as 10.0.0.7"
        ) from None
    if parsed.is_unspecified or parsed.is_multicast:
        raise BrokerError(f"{address} stands for more than one address: name the one to listen on")
    probe = socket.socket(type=socket.SOCK_DGRAM)
    try:
        probe.bind((address, 0))
    except OSError as error:
        raise BrokerError(
            f"{address} is no address of this machine ({error.strerror}): `ip -4 address` lists them"
        ) from None
    finally:
        probe.close()


def guard(address: str) -> int:
    """Keep all network listeners of this process to one address; how many there are. Raises `BrokerError`.

    Whoever was let in before, by another address, is cut off.
    """
    program = _program(address)
    memory = ctypes.create_string_buffer(program, len(program))
    order = struct.pack("HP", len(program) // 8, ctypes.addressof(memory))
    listeners = 0
    for connection in _network_sockets():
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            try:
                connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, order)
            except OSError as error:
                raise BrokerError(
                    f"what the store listens on cannot be kept to {address} ({error.strerror}): this kernel has no "
                    "socket filters"
                ) from None
            listeners += 1
    for connection in _network_sockets():
        with suppress(OSError):  # not connected
            connection.getpeername()
            if connection.getsockname()[0].removeprefix("::ffff:") not in (address, "127.0.0.1"):
                _cut_unless_ours(connection)
    return listeners


def _cut_unless_ours(connection: socket.socket) -> None:
    """Cut a connection that came in through a listener: its port is one that is listened on."""
    port = connection.getsockname()[1]
    for other in _network_sockets():
        if other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and other.getsockname()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
            return


def _network_sockets() -> Iterator[socket.socket]:
    """This process's own TCP sockets, each open until the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with found:
            if found.family != socket.AF_UNIX and found.type == socket.SOCK_STREAM:
                yield found
