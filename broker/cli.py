"""The command line.

Exit codes: 0 fine, 1 failed, 2 usage, 3 no broker there. Every error is one sentence on stderr.
Each command imports what it needs when it runs, so that `--help` is quick and the daemon never loads torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click

from mmbroker.proto.errors import BrokerError

from .reach import NoBroker, connect, find, report, which
from .tier.command import tier
from .tools import TOOLS

FAILED: Final = 1
NO_BROKER: Final = 3
#: How often `drain` looks whether it is over, in seconds.
_LOOK: Final = 0.1
#: Features that `evict` has dropped in one go: others are served in between.
_AT_ONCE: Final = 256


class _Commands(click.Group):
    """Turns our errors into one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NoBroker as error:
            _complain(error)
            ctx.exit(NO_BROKER)
        except BrokerError as error:
            _complain(error)
            ctx.exit(FAILED)


def _complain(error: BrokerError) -> None:
    click.echo(f"mmbroker: {error}", err=True)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="mmbroker", message="mmbroker %(version)s")
def main() -> None:
    """Carry multimodal features to inference engines, so that their schedulers only look them up.

    One broker runs beside the engines of a machine. Start it, then start engines and workers that use it:

    \b
      mmbroker start --cpu --host-mib 4096
      python -m sglang.launch_server --mm-transport broker ...

    Brokers and their clients meet in a directory: $MMBROKER_DIR, else $XDG_RUNTIME_DIR/mmbroker, else
    /tmp/mmbroker-UID. Every process that has the same one finds the broker by itself.
    """


# --- start ----------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--cpu", is_flag=True, help="A broker with a host arena only. The default.")
@click.option(
    "--gpu", metavar="N|UUID", help="Serve this GPU as well: its index, its UUID or the beginning of one."
)
@click.option(
    "--name",
    metavar="NAME",
    help="The broker's name, if several run here.  [default: cpu, or the GPU's UUID]",
)
@click.option(
    "--host-mib",
    type=click.IntRange(min=1),
    metavar="MIB",
    help="Most host memory for features; it is taken as it is needed.  [default: a quarter of what is free]",
)
@click.option(
    "--device-mib",
    type=click.IntRange(min=1),
    metavar="MIB",
    help="Most GPU memory for features.  [default: 320]",
)
@click.option(
    "--device-reserve-mib",
    type=click.IntRange(min=0),
    metavar="MIB",
    help="GPU memory that is taken at the start and kept.  [default: 0]",
)
@click.option(
    "--device-headroom-mib",
    type=click.IntRange(min=0),
    metavar="MIB",
    help="Never grow into the last so much free GPU memory.  [default: 2048]",
)
@click.option(
    "--allow-uid",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="UID",
    help="Let this user connect, too. May be repeated.",
)
@click.option(
    "--config", type=click.Path(dir_okay=False), metavar="FILE", help="A TOML file with further settings."
)
@click.option(
    "--log-format", type=click.Choice(("text", "json")), help="How to write the log.  [default: text]"
)
@click.option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    help="What to write into it, at least.  [default: info]",
)
@click.option(
    "--http",
    metavar="127.0.0.1:PORT",
    help="Show a page, metrics and health there, to this machine only.  [default: nowhere]",
)
def start(cpu: bool, config: str | None, **flags: Any) -> None:
    """Run a broker in the foreground.

    It prints one line once clients can connect. SIGTERM, SIGINT and `mmbroker stop` end it. A setting comes from
    its flag, else from its variable (MMBROKER_HOST_MIB for --host-mib), else from the file (host_mib).
    """
    from .config import Settings
    from .server import serve

    if cpu and flags["gpu"] is not None:
        raise click.UsageError("--cpu and --gpu: a broker serves one GPU, or none")
    if cpu:
        flags["gpu"] = ""
    sys.exit(serve(Settings.resolve(flags, file=config)))


# --- status, ls, stop -----------------------------------------------------------------------------------------------


@main.command()
@which
@click.option("--json", "as_json", is_flag=True, help="The whole report, for programs.")
@click.pass_context
def status(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Memory, sessions, engines, what waits, and what happened so far.

    Exit code 1 if the broker is not well: work is pending, nothing gets done, and it says what is stuck.
    """
    told = report(find(name))
    if as_json:
        click.echo(json.dumps(told, indent=1))
    else:
        from .screen import show_status

        show_status(told)
    if not told["health"]["ok"]:
        ctx.exit(FAILED)


@main.command()
@which
@click.option("-n", "--number", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
def ls(name: str | None, number: int, as_json: bool) -> None:
    """List the largest features."""
    told = report(find(name), number)
    if as_json:
        click.echo(json.dumps(told["largest"], indent=1))
        return
    from .screen import show_features

    show_features(told)


@main.command()
@which
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to wait for its end.",
)
def stop(name: str | None, timeout: float) -> None:
    """End a broker, and wait until it is gone.

    Engines carry on: they use what they have, and send new features their own way.
    """
    from mmbroker.proto.errors import BrokerLost
    from mmbroker.proto.messages import Shutdown

    from . import instance

    directory = find(name)
    gone = _when_unlocked(directory / instance.LOCK)
    link = connect(directory)
    try:
        with suppress(BrokerLost):  # it may be gone before its answer is here
            link.call(Shutdown())
    finally:
        link.close()
    gone.join(timeout)
    if gone.is_alive():
        raise BrokerError(
            f"the broker at {directory} is still ending after {timeout:g} s: see `mmbroker status`"
        )
    click.echo(f"the broker at {directory} has ended")


@main.command()
@which
@click.option("--undo", is_flag=True, help="Take new work again.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="Seconds to wait for what is held.",
)
def drain(name: str | None, undo: bool, timeout: float) -> None:
    """Take no new work, and wait until nothing is held: then a restart costs no request anything.

    Engines carry on meanwhile: they use what they have, and send new features their own way.
    """
    from mmbroker.proto.messages import Drain, Report, Status

    directory = find(name)
    link = connect(directory)
    try:
        link.call(Drain(not undo))
        if undo:
            click.echo(f"the broker at {directory} takes new work again")
            return
        end = time.monotonic() + timeout
        while True:
            answer = link.call(Status())
            assert isinstance(answer, Report)
            leases, holds = answer.status["leases"], answer.status["holds"]
            if not leases + holds:
                break
            if time.monotonic() >= end:
                raise BrokerError(
                    f"{holds} hold(s) and {leases} lease(s) are left after {timeout:g} s: `mmbroker top` shows whose; "
                    "the broker goes on draining, until `mmbroker drain --undo`"
                )
            time.sleep(_LOOK)
    finally:
        link.close()
    click.echo(f"the broker at {directory} is drained: nothing is held. `mmbroker stop` ends it")


@main.command()
@which
@click.option("--namespace", metavar="NAME", help="Only what this namespace has in the cache.")
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
def evict(name: str | None, namespace: str | None, as_json: bool) -> None:
    """Drop the cache: features that nobody holds. Empty segments go back to the system a few seconds later."""
    from mmbroker.proto.messages import Evict, Evicted

    link = connect(find(name))
    features = nbytes = 0
    try:
        while isinstance(answer := link.call(Evict(_AT_ONCE, namespace)), Evicted) and answer.features:
            features += answer.features
            nbytes += answer.nbytes
    finally:
        link.close()
    if as_json:
        click.echo(json.dumps({"features": features, "bytes": nbytes}))
        return
    from .screen import size

    click.echo(f"evicted {features:,} features, {size(nbytes)}")


def _when_unlocked(lock: Path) -> threading.Thread:
    """A thread that ends when the broker's lock is given back, which is the last thing it does."""

    def wait() -> None:
        with suppress(FileNotFoundError):
            fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            finally:
                os.close(fd)

    thread = threading.Thread(target=wait, name="mmbroker-wait", daemon=True)
    thread.start()
    return thread


for tool in (*TOOLS, tier):
    main.add_command(tool)
