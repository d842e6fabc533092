"""The door: who may have a session, and under which names."""

from __future__ import annotations

import secrets

from mmbroker.proto.errors import BrokerUnavailable, InvalidMessage, PermissionDenied, QuotaExceeded
from mmbroker.proto.messages import Hello, Welcome
from mmbroker.proto.reference import PROTOCOL_VERSION

from .instance import CONTROL

#: Longest name of a client or a namespace, in characters.
NAME_LIMIT = 128
#: Ended sessions of one living process that still have something; it may release them by connecting again, or exit.
GHOSTS_PER_PROCESS = 16


class Door:
    """Decides about every hello. `sessions` is how many there may be at once."""

    def __init__(self, instance: str, boot: bytes, sessions: int, device: str = "") -> None:
        self._instance = instance
        self._boot = boot
        self._device = device
        self._sessions = sessions
        self.closed = False

    def admit(self, uid: int, pid: int, hello: Hello, sessions: int, ghosts: int) -> Welcome:
        """A new session, or a `BrokerError`. There are `sessions` now, and `ghosts` ended ones of the same process."""
        if self.closed:
            raise BrokerUnavailable("the broker is shutting down: connect again when it is back")
        namespace = self._namespace(uid, hello)
        if sessions >= self._sessions:
            raise QuotaExceeded(
                f"{sessions} clients are connected, the limit is {self._sessions}: close some, or raise the broker's "
                "setting `sessions`",
                requested=1,
                used=sessions,
                limit=self._sessions,
            )
        if ghosts >= GHOSTS_PER_PROCESS:
            raise QuotaExceeded(
                f"process {pid} still has features of {ghosts} sessions that have ended: restart it",
                requested=1,
                used=ghosts,
                limit=GHOSTS_PER_PROCESS,
            )
        session, routing = 1 + secrets.randbelow((1 << 63) - 1), secrets.token_bytes(16)
        return Welcome(
            PROTOCOL_VERSION,
            self._boot,
            session,
            routing,
            CONTROL,
            namespace,
            self._instance,
            self._device,
        )

    def _namespace(self, uid: int, hello: Hello) -> str:
        own = f"uid-{uid}"
        namespace = own if hello.namespace is None else hello.namespace
        for what, name in (("name", hello.name), ("namespace", namespace)):
            if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
                raise InvalidMessage(
                    f"a {what} has 1 to {NAME_LIMIT} printable characters: choose another one"
                )
        if namespace.startswith("uid-") and namespace != own:
            raise PermissionDenied(
                f"namespace {namespace!r} is another user's: use {own!r}, or a name that does not start with 'uid-'"
            )
        return namespace
