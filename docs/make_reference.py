"""Write the references of this folder from the code: `python docs/make_reference.py`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from mmbroker import metrics
from mmbroker.adapters.sglang import export
from mmbroker.cli import main as cli

DOCS = Path(__file__).resolve().parent
_HEAD = """# The command line

Written by `docs/make_reference.py` from the code. Exit codes: 0 fine, 1 failed, 2 usage, 3 no broker there.
"""


def command_line() -> str:
    """Every command's help, as it is shown in 100 columns."""
    parts = [_HEAD]
    for name in sorted(cli.commands):
        command = cli.commands[name]
        context = click.Context(
            command, info_name=f"mmbroker {name}", max_content_width=100, terminal_width=100
        )
        shown = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"## {name}\n\n```\n{shown}\n```\n")
    return "\n".join(parts)


def with_metrics(page: str) -> str:
    """The page of metrics with its tables made anew: the engine's, then the broker's."""
    tables = iter((export.reference(), metrics.reference()))
    return re.sub(r"^\| metric \| kind.*\n(\|.*\n)*", lambda _: next(tables) + "\n", page, flags=re.MULTILINE)


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(command_line())
    (DOCS / "metrics.md").write_text(with_metrics((DOCS / "metrics.md").read_text()))
