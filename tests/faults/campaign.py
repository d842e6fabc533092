"""The fault campaign: every step of every role, with one action that the seed chooses, or with each.

A seed reproduces a run: it chooses actions, sizes, ways of access, and whose connection a broker cuts. Without pytest,
and not ending at the first failure:

    python -m tests.faults.campaign [--seed N] [--all] [--shard I/N] [--json FILE] [ROLE[:STEP[:ACTION]] ...]

Shards have nothing in common, a broker least of all: a machine with many cores runs N of them side by side.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from bench import machine

from .scene import Life, Stage
from .steps import ACTIONS, BROKER, ENGINE, PRODUCER

STEPS = {"producer": PRODUCER, "engine": ENGINE, "broker": BROKER}

Fault = tuple[str, str, str]


def everything() -> Iterator[Fault]:
    """Role, step and action."""
    for role, steps in STEPS.items():
        for step in steps:
            for action in ACTIONS:
                yield role, step, action


def short(seed: int) -> Iterator[Fault]:
    """Every step once. Five seeds in a row make everything."""
    for role, steps in STEPS.items():
        for at, step in enumerate(steps):
            yield role, step, ACTIONS[(at + seed) % len(ACTIONS)]


class Theatre:
    """Tries faults out, on one stage until something goes wrong on it."""

    def __init__(self) -> None:
        self._stage: Stage | None = None

    def play(self, role: str, step: str, action: str, seed: int) -> Counter[str]:
        """One life with one fault, and the longest that anything took in it, in milliseconds. What went wrong is
        raised, with the log of the broker and of its clients."""
        if self._stage is None:
            self._stage = Stage()
            self._stage.start()
            self._stage.bystanders()
        self._stage.longest = Counter()
        try:
            with Life(self._stage, role, step, action, seed) as life:
                life.live()
                life.end()
        except BaseException as error:
            error.add_note(f"{role}:{step}:{action}, seed {seed}\n{self._stage.log.read_text()[-4000:]}")
            self.close()
            raise
        return self._stage.longest

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()


def play(faults: list[Fault], seed: int, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Try these faults out, all of them. What came of it is told after each: how many there are and how many were
    tried, each one's time in milliseconds, the errors, and the longest that anything took, with the fault."""
    theatre, started = Theatre(), time.monotonic()
    found: dict[str, Any] = {"faults": len(faults), "seed": seed, "tried": 0, "failed": {}}
    by_action: Counter[str] = Counter()
    took: dict[str, int] = {}
    longest: dict[str, tuple[int, str]] = {}
    for fault in faults:
        name, before = ":".join(fault), time.monotonic()
        try:
            for what, ms in theatre.play(*fault, seed).items():
                longest[what] = max(longest.get(what, (0, "")), (ms, name))
        except Exception as error:
            traceback.print_exc()
            found["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
        took[name] = int((time.monotonic() - before) * 1000)
        by_action[fault[2]] += 1
        found |= {
            "tried": len(took),
            "seconds": round(time.monotonic() - started, 1),
            "by_action": dict(by_action),
            "longest_ms": longest,
            "took_ms": took,
        }
        note(found)
        print(f"{took[name]:6} ms  {name}{'  FAILED' * (name in found['failed'])}", flush=True)
    theatre.close()
    return found


class Shard(click.ParamType):
    """``I/N``: the I-th of N parts, counted from 1."""

    name = "I/N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        index, _, count = str(value).partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            self.fail(f"{value!r} is no part of something, such as 1/12", param, ctx)
        return int(index), int(count)


@click.command()
@click.option("--seed", default=0)
@click.option("--all", "all_", is_flag=True)
@click.option("--shard", type=Shard(), default="1/1")
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.argument("only", nargs=-1)
def main(seed: int, all_: bool, shard: tuple[int, int], path: Path | None, only: tuple[str, ...]) -> None:
    chosen = [
        fault
        for fault in (everything() if all_ or only else short(seed))
        if not only or ":".join(fault).startswith(only)
    ]
    index, count = shard
    chosen = chosen[index - 1 :: count]
    print(f"{len(chosen)} faults, seed {seed}")
    circumstances = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "shard": f"{index}/{count}",
    }

    def note(found: dict[str, Any]) -> None:
        if path is not None:
            path.write_text(json.dumps(circumstances | found, indent=1) + "\n")

    found = play(chosen, seed, note)
    print(f"{found['seconds']} s; longest, in ms: {found['longest_ms']}")
    for failure in found["failed"]:
        print(f"failed: {failure}")
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
