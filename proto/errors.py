"""Every error that mmbroker raises.

::

    BrokerError
    ├── BrokerUnavailable           no working connection to a broker
    │   ├── ConnectTimeout          nothing answered at the instance directory in time
    │   └── BrokerLost              the connection ended while it was in use
    ├── DeadlineExceeded            a call did not finish by its deadline (also a TimeoutError)
    │   └── EngineLagging           because a rank of the engine has stopped acknowledging
    ├── ClientForked                a forked child used the client of its parent
    ├── LeaseError
    │   ├── LeaseClosed             the lease was already sealed or aborted, by its owner
    │   └── LeaseBroken             the broker took the lease back (its session ended)
    ├── FeatureError
    │   ├── FeatureMissing          the table has no entry for this reference
    │   ├── StaleReference          the reference does not fit the entry, or is another broker life's
    │   └── DigestConflict          the key is taken by a feature of another form
    ├── PoolFull                    no room: `requested`, `free` and `limit`, in bytes
    ├── QuotaExceeded               a limit or budget was reached: `requested`, `used` and `limit`
    ├── NoSuchEngine                nobody is attached under that name
    ├── ProtocolError
    │   ├── VersionMismatch         the peer speaks another version of the protocol
    │   ├── InvalidMessage          a message that cannot be decoded, or makes no sense
    │   └── UnknownSession          a session or boot id that this broker did not give out
    └── PermissionDenied            this user may not use this broker or namespace

Each message says what happened, with figures, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping


class BrokerError(Exception):
    """Root of every error of mmbroker. `figures` holds the numbers that the message quotes."""

    def __init__(self, message: str, /, **figures: int) -> None:
        super().__init__(message)
        self.figures: dict[str, int] = figures


class BrokerUnavailable(BrokerError):
    """There is no working connection to a broker."""


class ConnectTimeout(BrokerUnavailable):
    """Nothing answered at the instance directory in time."""


class BrokerLost(BrokerUnavailable):
    """The connection ended while it was in use; the client reconnects by itself."""


class DeadlineExceeded(BrokerError, TimeoutError):
    """A call did not finish by its deadline; the message names what it waited for."""


class EngineLagging(DeadlineExceeded):
    """A rank of the engine has stopped acknowledging grants."""


class ClientForked(BrokerError):
    """A forked child used its parent's client: it has to connect for itself."""


class LeaseError(BrokerError):
    """A lease can no longer be used."""


class LeaseClosed(LeaseError):
    """The lease was already sealed or aborted by its owner."""


class LeaseBroken(LeaseError):
    """The broker took the lease back, because the session that owned it ended."""


class FeatureError(BrokerError):
    """A feature cannot be had under this key or reference."""


class FeatureMissing(FeatureError):
    """The table has no entry for this reference: its hold is over, or was never granted here."""


class StaleReference(FeatureError):
    """The reference belongs to another life of the broker, or does not fit the entry that it names."""


class DigestConflict(FeatureError):
    """The key is taken by a feature of another dtype, shape, size or modality; the first one stays."""


class PoolFull(BrokerError):
    """There is no room for a feature or a batch. All three figures are bytes."""

    @property
    def requested(self) -> int:
        return self.figures.get("requested", 0)

    @property
    def free(self) -> int:
        return self.figures.get("free", 0)

    @property
    def limit(self) -> int:
        return self.figures.get("limit", 0)


class QuotaExceeded(BrokerError):
    """A limit or budget of a call, client, engine or namespace was reached; the message names it.

    `requested`, `used` and `limit` are counts or bytes.
    """

    @property
    def requested(self) -> int:
        return self.figures.get("requested", 0)

    @property
    def used(self) -> int:
        return self.figures.get("used", 0)

    @property
    def limit(self) -> int:
        return self.figures.get("limit", 0)


class NoSuchEngine(BrokerError):
    """No engine is attached under that name; the message lists the attached ones."""


class ProtocolError(BrokerError):
    """The two sides do not understand each other."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class InvalidMessage(ProtocolError):
    """A message that cannot be decoded, is too large, or makes no sense here."""


class UnknownSession(ProtocolError):
    """A session id or boot id that this broker did not give out, or whose session has ended."""


class PermissionDenied(BrokerError):
    """This user may not use this broker, or this namespace."""


def plain(text: object, most: int = 200) -> str:
    """What somebody else wrote, for our messages and logs: not too long, and nothing in it that moves a cursor."""
    shown = str(text)[:most]
    return shown if shown.isprintable() else "".join(c if c.isprintable() else "?" for c in shown)


def _tree(cls: type[BrokerError]) -> dict[str, type[BrokerError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


#: Class by name: an error's name is its code on the wire.
BY_NAME: Mapping[str, type[BrokerError]] = _tree(BrokerError)


def make(name: str, message: str, figures: Mapping[str, int]) -> BrokerError:
    """The exception for an error that came over the wire; an unknown name gives a plain `BrokerError`."""
    return BY_NAME.get(name, BrokerError)(message, **dict(figures))
