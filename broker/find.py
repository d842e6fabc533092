"""Which broker is meant when no path is given."""

from __future__ import annotations

import time
from pathlib import Path

from mmbroker.proto.errors import BrokerUnavailable, ConnectTimeout

from . import instance


def find_instance(deadline: float) -> Path:
    """The only living instance directory of this user. Waits for one until `deadline`."""
    root = instance.root()
    started = time.monotonic()
    while not (found := instance.living(root)):
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConnectTimeout(
                f"no broker lives in {root}, looked for {time.monotonic() - started:.1f} s; "
                f"to start one: MMBROKER_DIR={root} mmbroker start --cpu"
            )
        time.sleep(min(0.05, left))
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise BrokerUnavailable(f"several brokers live here: {listed}; give one of these paths to connect")
    return found[0]
