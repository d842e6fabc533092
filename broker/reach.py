"""Looking for the broker that a command means, and asking it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mmbroker.proto.errors import BrokerError

if TYPE_CHECKING:
    from .link import Link

_Command = TypeVar("_Command", bound=Callable[..., None])


class NoBroker(BrokerError):
    """Nothing runs where a command looked for a broker."""


def which(command: _Command) -> _Command:
    return click.option(
        "--name", envvar="MMBROKER_NAME", metavar="NAME", help="Which broker, if several run here."
    )(command)


def find(name: str | None) -> Path:
    """The instance directory of the broker that is meant."""
    from . import instance
    from .connection import start_command

    root = instance.root()
    living = instance.living(root)
    if name is None and len(living) > 1:
        names = ", ".join(path.name for path in living)
        raise click.UsageError(f"several brokers run under {root} ({names}): choose one with --name")
    if name is None and living:
        return living[0]
    directory = root / (name or "cpu")
    if directory in living or _anothers(directory / instance.LIFELINE):
        return directory
    raise NoBroker(f"no broker runs at {directory}; to start one: {start_command(directory)}")


def _anothers(socket: Path) -> bool:
    """Whether another user's broker lives cannot be seen from here, only tried."""
    try:
        return socket.stat().st_uid != os.geteuid()
    except OSError:
        return False


def connect(directory: Path, name: str = "mmbroker-cli", namespace: str | None = None) -> Link:
    from mmbroker.proto.errors import BrokerUnavailable

    from . import instance
    from .link import Link

    try:
        return Link(directory, name, namespace, timeout=2.0)
    except BrokerUnavailable as error:
        if directory in instance.living(directory.parent):
            raise
        raise NoBroker(str(error)) from None


def report(directory: Path, features: int = 0) -> dict[str, Any]:
    """What the broker there says of itself, with so many of its largest features."""
    from mmbroker.proto.messages import Report, Status

    link = connect(directory)
    try:
        answer = link.call(Status(features))
    finally:
        link.close()
    assert isinstance(answer, Report)
    return answer.status
