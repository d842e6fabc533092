"""What benches have in common around what they measure: their options, what they say meanwhile, and where it was."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine

Say = Callable[[str], None]


class Asked(NamedTuple):
    """`sections`: in their order. `file`: where the figures go, too."""

    sections: list[str]
    quick: bool
    file: Path | None


def asked(doc: str | None, sections: Iterable[str]) -> Asked:
    """What the command line says. A SIGTERM cleans up from now on."""
    names = list(sections)
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--only", choices=names, action="append", help="this alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return Asked([name for name in names if name in (options.only or names)], options.quick, options.json)


def saying(started: float) -> Say:
    """Say on stderr what is being done, with the seconds since `started`, which is of the monotonic clock."""

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def origin(**versions: str) -> dict[str, Any]:
    """When and where it was measured, and of what; `versions` beside the usual ones."""
    return {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": {**machine.versions(), **versions},
    }


def heading(found: dict[str, Any]) -> str:
    where = found["machine"]
    return f"{found['date']}  {where['cpu']}, {where['cores']} cores, load before {where['load_before']}"


def write(file: Path, found: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + os.linesep)
