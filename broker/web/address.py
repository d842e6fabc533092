"""Where the page may listen: on this machine, for this machine."""

from __future__ import annotations

from typing import Final, NamedTuple

#: The two addresses that nobody outside this machine can reach.
LOOPBACK: Final = ("127.0.0.1", "::1")


class Address(NamedTuple):
    """`port` 0: whichever is free."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return (
            f"http://[{self.host}]:{self.port}/" if ":" in self.host else f"http://{self.host}:{self.port}/"
        )


def parse(text: str) -> Address:
    """``127.0.0.1:PORT`` or ``[::1]:PORT``; raises `ValueError` with what is wrong about another address."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected 127.0.0.1:PORT, not {text!r}")
    if host not in LOOPBACK:
        raise ValueError(
            f"{host or 'any address'} can be reached from other machines, and the page is for this machine: use "
            f"127.0.0.1:{port}, and a tunnel (ssh -L {port}:127.0.0.1:{port} ...) to see it from elsewhere"
        )
    return Address(host, int(port))
