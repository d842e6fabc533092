"""The fault campaign: every step of every role, with every action, or with one that the seed chooses.

``python -m tests.faults.campaign [--seed N] [--all] [ROLE[:STEP[:ACTION]]]`` runs it without pytest, goes on after failures, and says
which there were. A seed reproduces a run: it chooses actions, sizes, ways of access, and whose connection is cut.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator

import click

from .scene import Stage, try_out
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


def run(stage: Stage, faults: list[Fault], seed: int) -> tuple[Stage, list[str]]:
    """Try all out on a stage; after a failure, on a new one. The last stage, and what failed."""
    failures: list[str] = []
    for fault in faults:
        started = time.monotonic()
        try:
            try_out(stage, *fault, seed)
        except Exception:
            failures.append(f"{':'.join(fault)} (seed {seed})")
            traceback.print_exc()
            print(stage.log.read_text()[-4000:], file=sys.stderr)
            stage.close()
            stage = ready()
        print(f"{time.monotonic() - started:6.2f} s  {':'.join(fault)}", flush=True)
    return stage, failures


def ready() -> Stage:
    stage = Stage()
    stage.start()
    stage.bystanders()
    return stage


@click.command()
@click.option("--seed", default=0)
@click.option("--all", "all_", is_flag=True)
@click.argument("only", nargs=-1)
def main(seed: int, all_: bool, only: tuple[str, ...]) -> None:
    chosen = [
        fault
        for fault in (everything() if all_ or only else short(seed))
        if not only or any(":".join(fault).startswith(prefix) for prefix in only)
    ]
    print(f"{len(chosen)} faults, seed {seed}")
    started = time.monotonic()
    stage, failures = run(ready(), chosen, seed)
    print(f"{time.monotonic() - started:.0f} s; longest, in ms: {dict(stage.worst)}")
    stage.close()
    for failure in failures:
        print(f"failed: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
