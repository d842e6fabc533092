"""The network between the hosts: a program that carries each frame from one host's cable to another's.

Each cable ends in this program's namespace, where nothing has an address and the kernel forwards nothing: what arrives
anywhere has come through here. So a frame can be late, lost or stopped, by a seed and on every kernel, and each is
counted. Frames keep the kernel's own header for large packets and unfinished checksums (PACKET_VNET_HDR).

Run as ``python -m tests.tier.hosts.wire DESCRIPTOR PORT...``; `network.Network` is the other end of the descriptor.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: Of Linux: asm-generic/socket.h, linux/if_packet.h and linux/if_ether.h.
_RCVBUFFORCE = 33
_SOL_PACKET, _VNET_HDR, _EVERYTHING, _OUTGOING = 263, 15, 3, 4
#: The kernel's header before each frame, then the hardware address of whom it is for.
_HEADER, _ADDRESS = 10, 6
#: Frames that one cable may have waiting for this program, in bytes.
_BUFFER = 64 << 20

Pair = tuple[str, str]


def mac(number: int) -> str:
    """The hardware address of the host at cable `number`."""
    return f"02:00:00:00:00:{number:02x}"


@dataclass
class Line:
    """From one host to another: `delay` in seconds, `loss` a share of frames, `room` in bytes until it is cut."""

    delay: float = 0.0
    loss: float = 0.0
    cut: bool = False
    room: int | None = None


class Wire:
    def __init__(self, control: socket.socket, names: list[str]) -> None:
        self._control = control
        self._cables: dict[str, socket.socket] = {}
        for name in names:
            cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING))
            cable.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BUFFER)
            cable.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
            cable.bind((name, _EVERYTHING))
            cable.setblocking(False)
            self._cables[name] = cable
        self._home = {
            bytes.fromhex(mac(number).replace(":", "")): name for number, name in enumerate(names, start=1)
        }
        self._lines = {(one, other): Line() for one in names for other in names if one != other}
        self._frames, self._bytes = Counter[Pair](), Counter[Pair]()
        self._late: list[tuple[float, int, Pair, bytes]] = []
        self._order = 0
        self._random = random.Random(0)
        self._watched: tuple[Pair, int] | None = None
        self._buffer = bytearray(1 << 17)

    def run(self) -> None:
        """Until the other end hangs up."""
        poll = select.epoll()
        poll.register(self._control, select.EPOLLIN)
        names = {cable.fileno(): name for name, cable in self._cables.items()}
        for number in names:
            poll.register(number, select.EPOLLIN)
        self._tell(True)
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1
            for number, _ in poll.poll(wait):
                if number == self._control.fileno():
                    if not (order := self._control.recv(1 << 16)):
                        return
                    self._obey(**json.loads(order))
                else:
                    self._receive(names[number])
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, (_, to), frame = heapq.heappop(self._late)
                self._send(to, frame)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, verb: str, pairs: list[list[str]] | None = None, **figures: Any) -> None:
        chosen = [(one, other) for one, other in pairs] if pairs is not None else list(self._lines)
        match verb:
            case "set":
                for pair in chosen:
                    for name, value in figures.items():
                        setattr(self._lines[pair], name, value)
                self._tell(True)
            case "counts":
                self._tell([[*pair, self._frames[pair], self._bytes[pair]] for pair in self._lines])
            case "seed":
                self._random.seed(figures["seed"])
                self._tell(True)
            case "watch":  # answered when that many more frames have come
                self._watched = (chosen[0], self._frames[chosen[0]] + figures["frames"])
            case "trip":  # answered when the line is cut
                self._lines[chosen[0]].room = figures["room"]

    def _tell(self, answer: Any) -> None:
        self._control.send(json.dumps(answer).encode())

    # --- frames -----------------------------------------------------------------------------------------------------

    def _receive(self, sender: str) -> None:
        cable = self._cables[sender]
        while True:
            try:
                size, where = cable.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            if where[2] == _OUTGOING:
                continue
            frame = bytes(memoryview(self._buffer)[:size])
            to = self._home.get(frame[_HEADER : _HEADER + _ADDRESS])
            for other in [to] if to else [name for name in self._cables if name != sender]:
                self._pass((sender, other), frame)

    def _pass(self, pair: Pair, frame: bytes) -> None:
        line, size = self._lines[pair], len(frame) - _HEADER
        self._frames[pair] += 1
        self._bytes[pair] += size
        if self._watched and self._watched[0] == pair and self._frames[pair] >= self._watched[1]:
            self._watched = None
            self._tell(True)
        if line.room is not None:
            line.room -= size
            if line.room < 0:
                line.cut, line.room = True, None
                self._tell(True)
        if line.cut or (line.loss and self._random.random() < line.loss):
            return
        if line.delay:
            self._order += 1
            heapq.heappush(self._late, (time.monotonic() + line.delay, self._order, pair, frame))
        else:
            self._send(pair[1], frame)

    def _send(self, to: str, frame: bytes) -> None:
        with suppress(OSError):  # a full queue: the frame is lost, as in any switch
            self._cables[to].send(frame)


def main() -> None:
    descriptor, *names = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as control:
        Wire(control, names).run()


if __name__ == "__main__":
    main()
