"""A process that does with its own driver what a test tells it: each public method of `Agent` is a verb."""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import Any

from mmbroker.cuda import DriverError, open_driver
from tests.cuda.rig import Rig, receive, send


class Agent:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.driver = open_driver()
        self.fd = -1
        self.sizes: dict[int, int] = {}  # address -> size
        self._rig: Rig | None = None

    @property
    def rig(self) -> Rig:
        """Makes a context."""
        if self._rig is None:
            self._rig = Rig(self.driver, self.uuid)
        return self._rig

    def ready(self) -> None:
        """Make everything that it keeps."""
        _ = self.rig

    def export(self, nbytes: int) -> int:
        """The descriptor goes with the answer, and stays open here."""
        self.fd = self.driver.export(self.uuid, nbytes)
        return self.fd

    def close(self) -> None:
        os.close(self.fd)

    def context(self) -> bool:
        return self.driver.context(self.uuid)

    def torch(self) -> bool:
        return "torch" in sys.modules

    def use(self, create: bool) -> None:
        self.driver.use(self.uuid, create)

    def map(self, nbytes: int, writable: bool) -> int:
        """Import the descriptor that came, and map it."""
        _ = self.rig
        handle = self.driver.import_(self.fd, nbytes)
        try:
            address = self.driver.map(handle, nbytes, writable)
        finally:
            self.driver.release(handle)
        self.sizes[address] = nbytes
        return address

    def unmap(self, address: int) -> None:
        self.driver.unmap(address, self.sizes.pop(address))

    def read(self, address: int, nbytes: int) -> str:
        return self.rig.read(address, nbytes).hex()

    def write(self, address: int, data: str) -> None:
        self.rig.write(address, bytes.fromhex(data))

    def compute_into(self, address: int, nbytes: int) -> None:
        """What a model does that writes into its input: torch, through a map that may be read-only."""
        import torch

        tensor = self.driver.tensor(address, torch.uint8, (nbytes,), self.uuid, None)
        tensor.add_(1)
        self.rig.finish(self.driver.current_stream(self.uuid)())

    def query_after_fault(self) -> bool:
        return self.driver.query(self.driver.event())

    def fork(self) -> list[str]:
        """What a forked child gets from calls of its parent's driver, and from asking for its own."""
        _ = self.rig
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            found = []
            for call in (open_driver, self.driver.event, lambda: self.driver.export(self.uuid, 1 << 21)):
                try:
                    call()
                    found.append("nothing")
                except DriverError as error:
                    found.append(f"{type(error).__name__} {error.code}")
            os.write(writable, ",".join(found).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writable)
        with os.fdopen(readable) as stream:
            return stream.read().split(",")

    def capture(self, relaxed: bool) -> dict[str, Any]:
        """Capture a graph in this thread while another one loads a feature, as a receiver does."""
        result: dict[str, Any] = {"broken": False, "problems": []}
        try:
            self._capture(relaxed, result)
        except DriverError:
            if not result["broken"]:  # otherwise nothing works here any more
                raise
        return result

    def _capture(self, relaxed: bool, result: dict[str, Any]) -> None:
        rig, driver = self.rig, self.driver
        with (
            rig.stream() as captured,
            rig.stream() as own,
            rig.event() as event,
            rig.memory(2 << 20) as address,
        ):

            def load() -> None:
                try:
                    driver.use(self.uuid)
                    if relaxed:
                        driver.relaxed_capture()
                    with rig.pinned(4096) as host:
                        host.view[:] = b"\x77" * 4096
                        driver.copy(address, host.address, 4096, own)
                        driver.record(event, own)
                        driver.query(event)
                        driver.synchronize(event)
                except DriverError as error:
                    result["problems"].append(error.code)

            states = [driver.capturing(captured)]
            try:
                with rig.capture(captured):
                    states.append(driver.capturing(captured))
                    thread = threading.Thread(target=load)
                    thread.start()
                    thread.join()
            except Exception:
                result["broken"] = True
            states.append(driver.capturing(captured))
            result["capturing"] = states
            result["loaded"] = rig.read(address, 4096) == b"\x77" * 4096


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    agent = Agent(sys.argv[2])
    while True:
        try:
            (verb, *arguments), fd = receive(connection)
        except EOFError:
            return
        if fd is not None:
            agent.fd = fd
        try:
            answer = getattr(agent, verb)(*arguments)
        except DriverError as error:
            send(connection, {"error": type(error).__name__, "code": error.code, "message": str(error)})
        except Exception as error:
            send(connection, {"error": type(error).__name__, "code": "", "message": str(error)})
        else:
            send(connection, [answer], agent.fd if verb == "export" else None)


if __name__ == "__main__":
    main()
