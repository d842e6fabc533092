"""A peer that speaks the wire and does what it is told: for what a real broker never does."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from mmbroker.proto import messages as m
from mmbroker.proto.reference import PROTOCOL_VERSION

Handler = Callable[["Peer", m.Call], m.Reply | bytes | None]


class Peer:
    """Answers each call with what `handler` returns: a reply, raw bytes, or nothing."""

    def __init__(self, handler: Handler, welcome: Callable[[m.Welcome], m.Lifeline | bytes | None] = lambda w: w) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
        self.handler = handler
        self.welcome = welcome
        self.calls: list[m.Call] = []
        self.heard = threading.Condition()
        self.sessions = 0
        self.boot = os.urandom(16)
        self._lifelines: list[socket.socket] = []
        self._routing = b""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.directory / "lifeline.sock"))
        self._listener.listen()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.bind(f"ipc://{self.directory}/control.sock")
        self._stop_r, self._stop_w = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for thing in (self._listener, self._control, self._stop_r):
            poller.register(thing, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_r in ready:
                return
            if self._listener.fileno() in ready:
                self._shake_hands()
            if self._control in ready:
                routing, data = self._control.recv_multipart()
                call = m.decode_call(data)
                with self.heard:
                    self.calls.append(call)
                    self.heard.notify_all()
                reply = self.handler(self, call)
                if isinstance(reply, bytes):
                    self._control.send_multipart([routing, reply])
                elif reply is not None and call.seq:
                    self._control.send_multipart([routing, m.encode(m.Answer(call.seq, reply))])

    def _shake_hands(self) -> None:
        lifeline, _ = self._listener.accept()
        lifeline.recv(m.MAX_MESSAGE)
        self.sessions += 1
        self._routing = b"r" + os.urandom(15)
        answer = self.welcome(
            m.Welcome(PROTOCOL_VERSION, self.boot, self.sessions, self._routing, "control.sock", "test", "test")
        )
        if answer is not None:
            lifeline.send(answer if isinstance(answer, bytes) else m.encode(answer))
        self._lifelines.append(lifeline)

    # --- for handlers, in the peer's own thread ---------------------------------------------------------------------

    def tell(self, message: m.Notice | m.Answer | bytes) -> None:
        data = message if isinstance(message, bytes) else m.encode(message)
        self._control.send_multipart([self._routing, data])

    def segment(self, number: int, nbytes: int, writable: bool = True, descriptors: int = 1) -> None:
        fd = os.memfd_create("peer")
        os.truncate(fd, nbytes)
        socket.send_fds(self._lifelines[-1], [m.encode(m.SegmentFd(number, nbytes, writable))], [fd] * descriptors)
        os.close(fd)

    def hang_up(self) -> None:
        self._lifelines[-1].shutdown(socket.SHUT_RDWR)

    # --- for tests --------------------------------------------------------------------------------------------------

    def wait_for(self, kind: type[m.Body]) -> m.Call:
        """The first call of a kind."""
        with self.heard:
            assert self.heard.wait_for(lambda: any(isinstance(c.body, kind) for c in self.calls), 20), self.calls
            return next(call for call in self.calls if isinstance(call.body, kind))

    def close(self) -> None:
        os.write(self._stop_w, b"x")
        self._thread.join()
        for lifeline in self._lifelines:
            lifeline.close()
        self._listener.close()
        self._control.close(linger=0)
        self._context.term()
        os.close(self._stop_r)
        os.close(self._stop_w)
        shutil.rmtree(self.directory)
