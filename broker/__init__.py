"""mmbroker: hands multimodal features from tokenizer workers to inference engines.

Everything public is here, and is loaded when it is first used: the broker itself never imports torch. Every error that
is raised is a `BrokerError`::

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

Not drawn: `TypeError` for what is no tensor, and `ValueError` for an argument that makes no sense.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmbroker.proto.errors import (
        BrokerError,
        BrokerLost,
        BrokerUnavailable,
        ClientForked,
        ConnectTimeout,
        DeadlineExceeded,
        DigestConflict,
        EngineLagging,
        FeatureError,
        FeatureMissing,
        InvalidMessage,
        LeaseBroken,
        LeaseClosed,
        LeaseError,
        NoSuchEngine,
        PermissionDenied,
        PoolFull,
        ProtocolError,
        QuotaExceeded,
        StaleReference,
        UnknownSession,
        VersionMismatch,
    )
    from mmbroker.proto.keys import Digest, Key
    from mmbroker.proto.reference import Reference

    from . import aio
    from .client import Client, connect
    from .entry import Use
    from .handles import Held, Hit, Lease, Promise
    from .table import FeatureTable
    from .tensors import digest

__all__ = [
    "BrokerError",
    "BrokerLost",
    "BrokerUnavailable",
    "Client",
    "ClientForked",
    "ConnectTimeout",
    "DeadlineExceeded",
    "Digest",
    "DigestConflict",
    "EngineLagging",
    "FeatureError",
    "FeatureMissing",
    "FeatureTable",
    "Held",
    "Hit",
    "InvalidMessage",
    "Key",
    "Lease",
    "LeaseBroken",
    "LeaseClosed",
    "LeaseError",
    "NoSuchEngine",
    "PermissionDenied",
    "PoolFull",
    "Promise",
    "ProtocolError",
    "QuotaExceeded",
    "Reference",
    "StaleReference",
    "UnknownSession",
    "Use",
    "VersionMismatch",
    "aio",
    "connect",
    "digest",
]

#: Where public names are that are no errors.
_HOMES = {
    "Client": "client",
    "Digest": "proto.keys",
    "FeatureTable": "table",
    "Held": "handles",
    "Hit": "handles",
    "Key": "proto.keys",
    "Lease": "handles",
    "Promise": "handles",
    "Reference": "proto.reference",
    "Use": "entry",
    "connect": "client",
    "digest": "tensors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "aio":
        return importlib.import_module("mmbroker.aio")
    value = getattr(importlib.import_module(f"mmbroker.{_HOMES.get(name, 'proto.errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
