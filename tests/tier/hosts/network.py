"""Hosts with addresses of their own, in network namespaces that this process makes and that end with it.

A namespace belongs to a process that does nothing (`_Room`) and has no name: when the last process in it is gone, the
kernel takes it and its cables back, whatever has happened to the test. Nothing in it leads anywhere but to the other
hosts: there is no route, no name server, and no cable to the machine's own network.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tests.kit import PATIENCE

from .wire import mac

ROOT = Path(__file__).resolve().parents[3]
#: No address for IPv6 is made up for an interface: kernels tell the others of it, unasked.
_QUIET = "echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/default/addr_gen_mode"


def possible() -> bool:
    """May this process make network namespaces with cables between them?"""
    tools = ("unshare", "nsenter", "setpriv", "ip")
    if os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return False
    probe = ["unshare", "--net", "ip", "link", "add", "probe", "type", "veth", "peer", "name", "other"]
    return subprocess.run(probe, capture_output=True).returncode == 0


class _Room:
    """A network namespace, as long as its process reads from us."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", f"{_QUIET}; echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == b"\n"
        self.pid = self._process.pid
        #: Goes before the command line of what is to run in it; such a process ends with this one.
        self.prefix = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "setpriv", "--pdeathsig", "KILL", "--"]

    def ip(self, commands: Iterable[str]) -> None:
        done = subprocess.run(
            [*self.prefix, "ip", "-batch", "-"],
            input="\n".join(commands),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr

    def members(self) -> set[int]:
        """Processes that live in it, beside its own."""
        found = set()
        mine = os.stat(f"/proc/{self.pid}/ns/net").st_ino
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{pid}/ns/net").st_ino == mine:
                    found.add(int(pid))
            except OSError:
                continue  # it has ended meanwhile
        return found - {self.pid}

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


class Network:
    """`names` are the hosts; each has an address, and a `prefix` for the command lines of what runs there."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.address = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        self._stack = ExitStack()
        with ExitStack() as stack:
            middle = stack.enter_context(closing(_Room()))
            self._rooms = {name: stack.enter_context(closing(_Room())) for name in names}
            self.prefix = {name: room.prefix for name, room in self._rooms.items()}
            for number, name in enumerate(names, start=1):
                self._lay(middle, name, number)
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self._control.close)
            self._control.settimeout(PATIENCE)
            with theirs:
                command = [sys.executable, "-m", "tests.tier.hosts.wire", str(theirs.fileno()), *names]
                wire = subprocess.Popen([*middle.prefix, *command], cwd=ROOT, pass_fds=[theirs.fileno()])
            stack.callback(wire.wait, PATIENCE)
            stack.callback(self._control.shutdown, socket.SHUT_RDWR)
            assert self.answer() is True
            self._stack = stack.pop_all()

    def _lay(self, middle: _Room, name: str, number: int) -> None:
        """A cable from a host to the wire; everybody's address is known, so that nobody asks."""
        room = self._rooms[name]
        middle.ip(
            [
                f"link add name {name} type veth peer name eth0 netns {room.pid}",
                f"link set dev {name} up",
            ]
        )
        others = [other for other in self.names if other != name]
        room.ip(
            [
                "link set lo up",
                f"link set eth0 address {mac(number)}",
                f"address add {self.address[name]}/24 dev eth0",
                "link set eth0 up",
                *(
                    f"neighbour add {self.address[other]} lladdr {mac(self.names.index(other) + 1)} dev eth0"
                    for other in others
                ),
            ]
        )

    # --- what is between them ---------------------------------------------------------------------------------------

    def set(self, *pairs: tuple[str, str], **figures: Any) -> None:
        """`delay` (seconds), `loss` (a share) or `cut` of these directions; of all without any."""
        self._ask("set", pairs=pairs or None, **figures)

    def cut(self, *names: str) -> None:
        """Nothing to and from these hosts."""
        self.set(*self.lines_of(*names), cut=True)

    def heal(self) -> None:
        """As new."""
        self.set(delay=0.0, loss=0.0, cut=False, room=None)

    def lines_of(self, *names: str) -> list[tuple[str, str]]:
        """Directions that begin or end at one of these hosts."""
        lines = [(one, other) for one in self.names for other in self.names if one != other]
        return [line for line in lines if set(line) & set(names)]

    def seed(self, seed: int) -> None:
        """Chooses which frames are lost from now on."""
        self._ask("seed", seed=seed)

    def counts(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Frames and bytes that each direction was given so far, whether or not they arrived."""
        return {(one, other): (frames, nbytes) for one, other, frames, nbytes in self._ask("counts")}

    def trip(self, sender: str, receiver: str, room: int) -> None:
        """Cut that direction when `room` more bytes have passed, and then `answer`."""
        self._post("trip", pairs=[(sender, receiver)], room=room)

    def watch(self, sender: str, receiver: str, frames: int) -> None:
        """`answer` when so many more frames have come that way."""
        self._post("watch", pairs=[(sender, receiver)], frames=frames)

    def answer(self) -> Any:
        return json.loads(self._control.recv(1 << 16))

    def _post(self, verb: str, **figures: Any) -> None:
        self._control.send(json.dumps({"verb": verb, **figures}).encode())

    def _ask(self, verb: str, **figures: Any) -> Any:
        self._post(verb, **figures)
        return self.answer()

    # --- the end ----------------------------------------------------------------------------------------------------

    def members(self) -> dict[str, set[int]]:
        """Processes in each host's namespace."""
        return {name: room.members() for name, room in self._rooms.items()}

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
