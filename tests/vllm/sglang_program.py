"""SGLang with a broker, as a program of its own environment: prints, as JSON, what it answers to pictures.

The broker's directory and the pictures' seeds on the command line; it serves until its input ends.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from mmbroker.demo.engine import Engine
from mmbroker.demo.model import tiny_model
from tests.vllm.serving import url


def main() -> None:
    broker, seeds = sys.argv[1], json.loads(sys.argv[2])
    flags = ("--mm-transport", "broker", "--mm-broker", broker)
    with (
        tempfile.TemporaryDirectory(prefix="mmsgl-", dir="/tmp") as scratch,
        Engine(tiny_model(), Path(scratch), flags, measure=True) as engine,
    ):
        texts = [engine.ask([url(seed)]).texts for seed in seeds]
        counts = engine.counters()
        took = sum(role["takes"] for name, role in counts.items() if name.startswith("scheduler"))
        print(json.dumps({"texts": texts, "takes": took}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
