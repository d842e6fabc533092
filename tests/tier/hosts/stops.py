"""A mover that stops itself (SIGSTOP) at a step that it was told, once, and says so: then a test does something bad.

Steps are named from outside, as in `tests.faults.steps`: methods of the library that are one step are wrapped in this
process, and only here; one that no longer exists makes it fail. Run as ``python -m tests.tier.hosts.stops DESCRIPTOR
OPTION...``; the options are those of `mmbroker tier`, and what is received on the descriptor is the step to stop at.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any

#: Of the way from the store, and to it, in order. The midst of ``read_bytes`` and ``put`` is the network's to stop at.
FETCH = (
    "find.before",
    "lease.before",
    "lease.after",
    "read_bytes.after",
    "verify.after",
    "seal.after",
)
KEEP = ("keep.before", "hash.before", "put.before", "put.after", "keep.after")


class Stop:
    """The step to stop at, and whom to tell."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._step = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while step := self._channel.recv(100):
            with self._lock:
                self._step = step.decode()
            self._channel.send(step)

    def _reached(self, step: str) -> None:
        with self._lock:
            if step != self._step:
                return
            self._step = ""
        self._channel.send(step.encode())
        os.kill(os.getpid(), signal.SIGSTOP)

    def wrap(self, owner: Any, attribute: str) -> None:
        """``NAME.before`` and ``NAME.after`` a method."""
        original, name = getattr(owner, attribute), attribute.removeprefix("_")

        def wrapped(*arguments: Any, **named: Any) -> Any:
            self._reached(f"{name}.before")
            result = original(*arguments, **named)
            self._reached(f"{name}.after")
            return result

        setattr(owner, attribute, wrapped)


def main() -> None:
    descriptor, *options = sys.argv[1:]
    stop = Stop(socket.socket(fileno=int(descriptor)))
    from mmbroker.tier import desk
    from mmbroker.tier.fetch import Fetcher
    from mmbroker.tier.keep import Keeper

    for name in ("_find", "_read_bytes", "_verify", "_seal"):
        stop.wrap(Fetcher, name)
    stop.wrap(desk.Desk, "lease")
    for name in ("keep", "_hash", "_put"):
        stop.wrap(Keeper, name)
    desk._TALLY = 0.05  # tests wait for its counters
    from mmbroker import cli

    cli.main(["tier", *options], prog_name="mmbroker")


if __name__ == "__main__":
    main()
