"""Features for tests of the wire."""

from __future__ import annotations

import os

from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from tests.kit import RawClient


def an_item(nbytes: int, key: bytes | None = None) -> m.Item:
    """A new feature of so many bytes."""
    return m.Item(
        Key.caller(os.urandom(32) if key is None else key), tensor_form("uint8", (nbytes,), "image")
    )


def lease_one(client: RawClient, nbytes: int) -> m.Leased:
    """A lease on a new feature."""
    created = client.call(m.Create([an_item(nbytes)]))
    assert isinstance(created, m.Created), created
    (leased,) = created.results
    assert isinstance(leased, m.Leased)
    return leased
