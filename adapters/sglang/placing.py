"""Features that were made on the GPU stay there, if they can; else they go through the host: counted, and said."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from mmbroker.proto.errors import BrokerError, DeadlineExceeded, FeatureError, PoolFull

from . import measure
from .fallbacks import Fallbacks

#: How long they wait for room on the GPU, in seconds.
_ON_DEVICE: Final = 0.5

_through_host: Final = Fallbacks(
    what="features on the GPU went through the host, which costs two copies", counter="through_host"
)


def put(
    put: Callable[..., Any], features: Any, there: bool, timeout: float, least: float, **options: Any
) -> Any:
    """What `put`, of a client, returns for `features`. `there`: they are on the GPU that the broker serves. What they
    wait for there is the host's loss, but `least` seconds are left to it."""
    if not there:
        return put(features, timeout=timeout, **options)
    start = time.monotonic()
    try:
        got = put(features, tier="device", timeout=min(timeout, _ON_DEVICE), **options)
    except (PoolFull, DeadlineExceeded, FeatureError) as error:
        failed: BrokerError = error
    else:
        measure.counters.add("put_on_device", len(got) if isinstance(got, list) else 1)
        return got
    left = max(timeout - (time.monotonic() - start), least)
    got = put(features, timeout=left, **options)
    count = len(got) if isinstance(got, list) else 1
    _through_host.count("", count, f"{type(failed).__name__}: {failed}")
    return got
