"""The fault campaign: every step of every role, with one action that the seed chooses, or with each.

A seed reproduces a run: it chooses actions, sizes, ways of access, and whose connection a broker cuts. Without pytest,
and not ending at the first failure:

    python -m tests.faults.campaign [--seed N] [--all] [ROLE[:STEP[:ACTION]] ...]
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator

import click

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
        self.worst: dict[str, int] = {}

    def play(self, role: str, step: str, action: str, seed: int) -> None:
        """One life with one fault. What went wrong is raised, with the log of the broker and of its clients."""
        if self._stage is None:
            self._stage = Stage()
            self._stage.start()
            self._stage.bystanders()
        try:
            with Life(self._stage, role, step, action, seed) as life:
                life.live()
                life.end()
        except BaseException as error:
            error.add_note(f"{role}:{step}:{action}, seed {seed}\n{self._stage.log.read_text()[-4000:]}")
            self.close()
            raise

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            for what, took in stage.worst.items():
                self.worst[what] = max(took, self.worst.get(what, 0))
            stage.close()


@click.command()
@click.option("--seed", default=0)
@click.option("--all", "all_", is_flag=True)
@click.argument("only", nargs=-1)
def main(seed: int, all_: bool, only: tuple[str, ...]) -> None:
    chosen = [
        fault
        for fault in (everything() if all_ or only else short(seed))
        if not only or ":".join(fault).startswith(only)
    ]
    print(f"{len(chosen)} faults, seed {seed}")
    theatre, started, failures = Theatre(), time.monotonic(), []
    for fault in chosen:
        before = time.monotonic()
        try:
            theatre.play(*fault, seed)
        except Exception:
            failures.append(":".join(fault))
            traceback.print_exc()
        print(f"{time.monotonic() - before:6.2f} s  {':'.join(fault)}", flush=True)
    theatre.close()
    print(f"{time.monotonic() - started:.0f} s; longest, in ms: {theatre.worst}")
    for failure in failures:
        print(f"failed: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
