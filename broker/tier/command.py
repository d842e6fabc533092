"""`mmbroker tier`: the mover as a process of its own, and what removes a namespace from the store."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from mmbroker.reach import connect, find, which

_Command = TypeVar("_Command", bound=Callable[..., None])
_MIB: Final = 1 << 20


def _store_options(command: _Command) -> _Command:
    """Where the store is, and how it is reached."""
    for option in (
        click.option(
            "--protocol",
            type=click.Choice(("tcp", "rdma")),
            default="tcp",
            show_default=True,
            envvar="MMBROKER_TIER_PROTOCOL",
            help="How features travel between machines.",
        ),
        click.option(
            "--address",
            metavar="HOST",
            envvar="MMBROKER_TIER_ADDRESS",
            help="The one IPv4 address of this machine that others reach it by: nothing is heard on any other.",
        ),
        click.option(
            "--master",
            metavar="HOST:PORT",
            envvar="MMBROKER_TIER_MASTER",
            help="Where the store's master listens.",
        ),
    ):
        command = option(command)
    return command


@click.group(invoke_without_command=True, context_settings={"auto_envvar_prefix": "MMBROKER_TIER"})
@which
@_store_options
@click.option(
    "--store-mib",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="MIB",
    help="Memory of this machine that the store may use for objects, beside the broker's own.",
)
@click.option("--namespace", metavar="NAME", help="Whose features.  [default: this user's]")
@click.option(
    "--store-namespace",
    metavar="NAME",
    help="What they are called in the store: machines that say the same share them.  [default: as here]",
)
@click.option(
    "--wait-ms",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    metavar="MS",
    help="How long whoever asks for a feature waits for the store.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    help="Most features that are sought at once; others are made as without a store.",
)
@click.option(
    "--write-mib-s",
    type=click.FloatRange(min=0, min_open=True),
    default=256.0,
    show_default=True,
    metavar="MIB",
    help="Most that is stored in a second.",
)
@click.option(
    "--min-cost-per-mib",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="US",
    help="Store at once what took so many microseconds a MiB to make.",
)
@click.option(
    "--reuse",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Store what took less once it has been found so often.",
)
@click.option(
    "--ttl",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Serve what is stored for so long.  [default: until the store needs its room]",
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    envvar=["MMBROKER_TIER_LOG_FORMAT", "MMBROKER_LOG_FORMAT"],
    help="How to write the log.",
)
@click.pass_context
def tier(ctx: click.Context, /, master: str | None, address: str | None, **options: Any) -> None:
    """Share features with other machines, through Mooncake Store.

    Run one beside each broker, in the foreground. What nobody here has is looked for in the store before anybody makes
    it, and what is made here is stored. It prints one line when it is ready; SIGTERM and SIGINT end it. Without it, or
    without its store, the broker and its engines run on as they did. Needs: pip install 'mmbroker[tier]'.

    \b
      mmbroker tier --master 10.0.0.1:50051 --address 10.0.0.7 --store-mib 4096

    A setting comes from its flag, else from its variable (MMBROKER_TIER_STORE_MIB for --store-mib).
    """
    if ctx.invoked_subcommand is None:
        _run(*_place(master, address), **options)


@tier.command()
@_store_options
@click.option(
    "--store-namespace",
    "namespace",
    required=True,
    metavar="NAME",
    envvar="MMBROKER_TIER_STORE_NAMESPACE",
    help="As it is called in the store.",
)
def remove(master: str | None, address: str | None, protocol: str, namespace: str) -> None:
    """Remove all features of a namespace from the store. What machines have of them stays with them."""
    from .objects import prefix_of
    from .store import MooncakeStore

    master, address = _place(master, address)
    store = MooncakeStore(master, address, 0, protocol)
    removed = store.remove_all(prefix_of(namespace))
    click.echo(f"removed {removed:,} features of {namespace} from the store of {master}")
    _leave(store)


def _place(master: str | None, address: str | None) -> tuple[str, str]:
    if master is None:
        raise click.UsageError("--master HOST:PORT is missing: where does the store's master listen?")
    host, _, port = master.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise click.UsageError(f"--master is HOST:PORT, not {master!r}")
    if address is None:
        raise click.UsageError("--address HOST is missing: which address of this machine may others reach?")
    return master, address


def _run(
    master: str,
    address: str,
    name: str | None,
    protocol: str,
    namespace: str | None,
    store_namespace: str | None,
    store_mib: int,
    wait_ms: float,
    in_flight: int,
    write_mib_s: float,
    min_cost_per_mib: float,
    reuse: int,
    ttl: float | None,
    log_format: str,
) -> None:
    from mmbroker import logs

    from .desk import Terms
    from .mover import Mover, Options
    from .policy import Policy
    from .store import MooncakeStore

    logs.set_up(log_format, "warning")
    # Before any thread is made, so that none of them is ended by a signal.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    link = connect(find(name), "tier", namespace)
    try:
        store = MooncakeStore(master, address, store_mib * _MIB, protocol)
        options = Options(
            Terms(wait_ms / 1e3, in_flight, reuse),
            Policy(min_cost_per_mib, reuse, ttl),
            write_mib_s * _MIB,
            store_namespace or "",
        )
        mover = Mover(link, store, options, time.time)
    except BaseException:
        link.close()
        raise
    click.echo(
        f"mmbroker tier: features of {link.namespace} at {link.directory} are shared as {mover.namespace} "
        f"by way of {master}"
    )
    signal.sigwait(ends)
    mover.close()
    _leave(None if mover.stuck else store)


def _leave(store: Any) -> None:
    """End without the interpreter's own end, which does not bear the store's threads that are still at work."""
    if store is not None:
        store.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
