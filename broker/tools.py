"""The command line's tools: watching a broker, looking into an engine, trying a machine. `cli` has the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import click

from .reach import connect, find, which

#: Exit code of a tool that found something broken.
_FAILED: Final = 1

# --- top ------------------------------------------------------------------------------------------------------------


@click.command()
@which
@click.option("--once", is_flag=True, help="Print one screen, with averages since the start, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option(
    "--sort",
    type=click.Choice(("bytes", "holds", "leases", "grants", "waiting", "fallbacks", "age", "name")),
    default="bytes",
    show_default=True,
    help="What to sort clients by.",
)
def top(name: str | None, once: bool, interval: float, sort: str) -> None:
    """Watch a broker: memory, rates, latencies, what waits, who holds what.

    q ends it; s sorts the clients by something else.
    """
    from mmbroker.proto.messages import Report, Status

    from . import top as screen
    from .screen import console

    out = console()
    if not once and not (out.is_terminal and sys.stdin.isatty()):
        raise click.UsageError(
            "top needs a terminal; for scripts there are --once and `mmbroker status --json`"
        )
    link = connect(find(name))

    def ask() -> dict[str, Any]:
        answer = link.call(Status())
        assert isinstance(answer, Report)
        return answer.status

    try:
        if once:
            screen.once(ask, out, sort)
        else:
            screen.watch(ask, out, sort, interval)
    finally:
        link.close()


# --- profile --------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("pid", type=click.IntRange(min=1))
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=10.0, show_default=True, help="How long to look."
)
@click.option(
    "--rate", type=click.IntRange(1, 1000), default=100, show_default=True, help="Samples a second."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which scheduler, if PID has several.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write the flame graph.  [default: mmbroker-profile-PID.svg]",
)
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
def profile(pid: int, seconds: float, rate: int, rank: int, svg: Path | None, as_json: bool) -> None:
    """Say what an SGLang scheduler's thread spends its time on.

    PID is the server's process or a scheduler's own; the broker need not be in use. Needs py-spy (pip install
    'mmbroker[profile]'), and the right to look into that process. It is stopped for a moment at every sample.
    """
    from . import flame, profiling

    found = profiling.schedulers(pid)
    if rank >= len(found):
        raise click.UsageError(f"process {pid} has {len(found)} scheduler(s): --rank counts from 0")
    process = found[rank]
    seen = profiling.record(process.pid, seconds, rate)
    target = svg or Path(f"mmbroker-profile-{process.pid}.svg")
    target.write_text(flame.draw(seen.stacks, f"process {process.pid}: {process.title}"))
    told = profiling.report(seen, process, seconds)
    if as_json:
        click.echo(json.dumps({**told, "flame_graph": str(target)}, indent=1))
        return
    from .screen import show_profile

    show_profile(told)
    click.echo(f"flame graph: {target}")


# --- doctor ---------------------------------------------------------------------------------------------------------


@click.command()
@which
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
@click.pass_context
def doctor(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Try what a broker and its clients need here, and say what to do about what fails.

    A child process makes a CUDA context for a moment where there is a GPU. Exit code 1 if something is broken.
    """
    from .doctor import examine, passed

    checks = examine(name)
    if as_json:
        found = {"fine": passed(checks), "checks": [check._asdict() for check in checks]}
        click.echo(json.dumps(found, indent=1))
    else:
        from .screen import show_checks

        show_checks(checks)
    if not passed(checks):
        ctx.exit(_FAILED)


# --- bench ----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The same, for programs.")
@click.option("--quick", is_flag=True, help="A second or two, to see that it works; its figures say little.")
def bench(as_json: bool, quick: bool) -> None:
    """Measure a broker on this machine, beside what the machine can do at all. Takes less than two minutes.

    It starts a broker and an engine of its own, and needs torch. Run it while nothing else does.
    """
    from . import selftest

    def say(what: str) -> None:
        if not as_json:
            click.echo(f"measuring {what}", err=True)

    found = selftest.run(selftest.QUICK if quick else selftest.Plan(), say)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    from .screen import show_bench

    show_bench(found)


# --- demo -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option(
    "--keep", type=click.Path(file_okay=False), metavar="DIR", help="Keep the logs and figures there."
)
def demo(keep: str | None) -> None:
    """Serve pictures with the real SGLang, first its own way, then through a broker.

    Needs SGLang in this environment, on the CPU; in a checkout, `make demo` sees to that. It makes a tiny model on the
    spot, sends the same requests twice, and compares the answers and what SGLang's scheduler thread paid.
    """
    from .demo import run

    run(Path(keep) if keep else None)


# --- completion -----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete this command.

    \b
      ~/.bashrc                   eval "$(mmbroker completion bash)"
      ~/.zshrc                    eval "$(mmbroker completion zsh)"
      ~/.config/fish/config.fish  mmbroker completion fish | source
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "mmbroker", "_MMBROKER_COMPLETE").source())


TOOLS: Final = (top, profile, doctor, bench, demo, completion)
