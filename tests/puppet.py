"""A process that does what a test tells it: a client to be stopped, killed, forked, or run as another user.

Run as ``python -m tests.puppet``: each line of input is JSON text of Python statements, and is answered by one line
with what they left in `result`, or the error that they raised. `kit.Puppet` is the other end.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from pathlib import Path

    from mmbroker.proto import messages as m
    from tests.kit import RawClient

    world: dict[str, Any] = {"m": m, "Path": Path, "RawClient": RawClient}
    for line in sys.stdin:
        world["result"] = None
        try:
            exec(json.loads(line), world)
            answer = {"result": world["result"]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
