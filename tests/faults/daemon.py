"""A broker with a trap in it: the real command line, in a process that a zygote made."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import Any

from mmbroker import cli, lifeline, server

from .steps import install_broker, trap


def main(channel: socket.socket, settings: str, traceable: bool = True, **arm: Any) -> None:
    """`settings`: the settings file. `traceable` False: as on a kernel that gives no pidfd."""
    install_broker()
    trap.channel = channel
    if not traceable:
        lifeline._pidfd = lambda *_: -1
    if arm:
        trap.arm(**arm)
    start_up = server.Server._start_up

    async def ready(*arguments: Any) -> None:
        await start_up(*arguments)
        channel.send(json.dumps({"result": os.getpid()}).encode())

    server.Server._start_up = ready  # type: ignore[method-assign]
    threading.Thread(target=_listen, args=(channel,), daemon=True).start()
    cli.main(["start", "--cpu", "--config", settings])


def _listen(channel: socket.socket) -> None:
    """Arm and disarm on demand. Without anybody to ask for it, the broker ends."""
    while data := channel.recv(1 << 16):
        verb, arguments = json.loads(data)
        result: Any = None
        if verb == "arm":
            trap.arm(**arguments)
        elif verb == "disarm":
            result = trap.disarm()
        elif verb == "seen":
            result = sorted(trap.seen)
        channel.send(json.dumps({"result": result}).encode())
    os.kill(os.getpid(), signal.SIGTERM)
