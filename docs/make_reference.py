"""Write the references of this folder from the code: `python docs/make_reference.py`, in an environment with torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import mmbroker
from mmbroker import config, events, metrics
from mmbroker.adapters.sglang import export
from mmbroker.cli import main as cli

DOCS = Path(__file__).resolve().parent

# --- the command line -----------------------------------------------------------------------------------------------

_CLI = """# The command line

Written by `docs/make_reference.py` from the code. Exit codes: 0 fine, 1 failed, 2 usage, 3 no broker there.
"""


def command_line() -> str:
    """Every command's help, as it is shown in 100 columns."""
    parts = [_CLI]
    for name, command in _commands(cli):
        context = click.Context(
            command, info_name=f"mmbroker {name}", max_content_width=100, terminal_width=100
        )
        shown = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"## {name}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """By name, each followed by what it has of its own."""
    for name, command in sorted(group.commands.items()):
        yield prefix + name, command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")


# --- metrics --------------------------------------------------------------------------------------------------------


def with_metrics(page: str) -> str:
    """The page of metrics with its tables made anew: the engine's, then the broker's."""
    tables = iter((export.reference(), metrics.reference()))
    return re.sub(r"^\| metric \| kind.*\n(\|.*\n)*", lambda _: next(tables) + "\n", page, flags=re.MULTILINE)


# --- settings -------------------------------------------------------------------------------------------------------

_SETTINGS = """# Settings

Written by `docs/make_reference.py` from the code. A setting has one name: `host_mib` in the TOML file that `--config`
names, `MMBROKER_HOST_MIB` as a variable, and `--host-mib` as a flag, where it has one. Flags come before variables, and
these before the file. Sizes are in MiB, times in seconds; a limit whose default is 0 is none. A value that makes no
sense, or a name in the file that is none, is refused at the start.

```toml
host_mib = 8192
http = "127.0.0.1:9400"
stuck_after = 5.0
```

"""
_CLIENTS = """
## Of clients and engines

| variable | what |
| --- | --- |
| `MMBROKER_DIR` | where brokers and clients meet; else `$XDG_RUNTIME_DIR/mmbroker`, else `/tmp/mmbroker-UID` |
| `MMBROKER_TRANSPORT` | `broker`: SGLang's features go through a broker; as `--mm-transport` |
| `MMBROKER_PATH` | the instance directory of the broker that an engine shall use; as `--mm-broker` |
| `MMBROKER_WAIT` | how long a request waits for room, in seconds; as `--mm-broker-wait` |
| `MMBROKER_SHARE_OUTPUTS` | `0`: encoder outputs are not kept or shared; as `--no-mm-broker-share-outputs` |
| `MMBROKER_PREPROCESS` | `cpu`: the tokenizer's workers make features on the CPU; as `--mm-broker-preprocess` |
| `MMBROKER_WEIGHTS_BY` | `content`: tell weights by their bytes, so that copies of a model share encoder outputs |
| `MMBROKER_ENGINE` | an engine's name |
| `MMBROKER_MEASURE` | a directory for counters of SGLang's processes, also of its own transport |
"""
_TIER = """
## Of `mmbroker tier`

| variable | flag | what |
| --- | --- | --- |
"""


def _tier() -> str:
    """Its flags, which it takes from variables of their own."""
    rows = []
    for option in cli.commands["tier"].params:
        if isinstance(option, click.Option) and option.name != "name":
            text = (option.help or "").replace("|", "\\|")
            rows.append(f"| `MMBROKER_TIER_{(option.name or '').upper()}` | `{option.opts[0]}` | {text} |")
    return _TIER + "\n".join(rows) + "\n"


def settings() -> str:
    """Every setting of the broker: its default, and what the code says about it."""
    flags = {parameter.name: parameter for parameter in cli.commands["start"].params}
    lines = ["| setting | default | flag | what |", "| --- | --- | --- | --- |"]
    for name, default, comment in sorted(_all_settings()):
        flag = flags.get(name)
        text = comment or _help(flag)
        lines.append(f"| `{name}` | {default} | {f'`{flag.opts[0]}`' if flag else ''} | {text} |")
    return _SETTINGS + "\n".join(lines) + "\n" + _CLIENTS + _tier()


def _all_settings() -> Iterator[tuple[str, str, str]]:
    comments = _comments(events.Limits) | _comments(config._Own)
    for field in dataclasses.fields(events.Limits):
        if field.name in config._LIMITS:
            yield (
                field.name,
                f"{field.default:g}" if isinstance(field.default, float) else str(field.default),
                comments[field.name],
            )
    computed = {"host_mib": "a quarter of what is free", "name": "`cpu`, or the GPU's UUID"}
    for name, default in zip(config._Own.__struct_fields__, config._Own.__struct_defaults__, strict=True):
        shown = default.factory() if hasattr(default, "factory") else default
        text = comments[name] or comments.get(name.removesuffix("_mib") + "_bytes", "")
        yield name, computed.get(name, str(shown) if shown or shown == 0 else ""), text


def _comments(kind: type) -> dict[str, str]:
    """What stands behind each field of a class, as a sentence."""
    source = inspect.getsource(kind)
    found = {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = " ".join(
                line.partition("  # ")[2] or line.partition("   # ")[2]
                for line in lines[node.lineno - 1 : node.end_lineno]
            ).strip()
            found[node.target.id] = text[:1].upper() + text[1:] + "." * bool(text)
    return found


def _help(flag: Any) -> str:
    return re.sub(r"\s*\[default:.*\]", "", flag.help) if flag is not None else ""


# --- Python ---------------------------------------------------------------------------------------------------------

_PYTHON = """# The Python API

Written by `docs/make_reference.py` from the docstrings. Everything public is in the package itself; `help(mmbroker)`
says the same.

```python
import mmbroker
```

"""
#: In which order what is no error is told.
_ORDER = (
    "connect",
    "Client",
    "Held",
    "Hit",
    "Lease",
    "Promise",
    "FeatureTable",
    "Use",
    "Reference",
    "Key",
    "Digest",
    "digest",
)


def python() -> str:
    """Functions, classes and errors."""
    parts = [_PYTHON + _aio()]
    for name in _ORDER:
        parts += _told(name, getattr(mmbroker, name))
    errors = [
        name
        for name in mmbroker.__all__
        if isinstance(getattr(mmbroker, name), type)
        and issubclass(getattr(mmbroker, name), mmbroker.BrokerError)
    ]
    tree = inspect.getdoc(mmbroker) or ""
    drawn = tree[tree.index("BrokerError\n") : tree.index("Not drawn:")].rstrip()
    drawn = "\n".join(line.removeprefix("    ") for line in drawn.splitlines())
    parts.append(f"## Errors\n\n```text\n{drawn}\n```\n\n{tree[tree.index('Not drawn:') :]}\n")
    for name in errors:
        parts.append(f"**`{name}`**: {_doc(getattr(mmbroker, name))}\n")
    return "\n".join(parts)


def _aio() -> str:
    return f"`mmbroker.aio`: {_doc(mmbroker.aio)}\n"


def _told(name: str, thing: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if not inspect.isclass(thing):
        if callable(thing):
            yield _signature(name, thing)
        yield (_doc(thing) if callable(thing) else f"`{thing}`".replace("typing.", "")) + "\n"
        return
    yield f"{_doc(thing)}\n"
    for member, value in _members(thing):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, property):
            yield f"### {name}.{member}\n"
        else:
            yield f"### {name}.{member}()\n"
            yield _signature(member, function)
        if text := _doc(function):
            yield f"{text}\n"


#: Of classes that the package itself uses in more ways than its users do.
_PUBLIC = {
    "FeatureTable": ("take", "quiet", "stats", "close"),
    "Lease": ("tensor", "memory", "lease", "seal", "abort"),
}


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings of their own, in the order of the source."""
    for member, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        public = member in _PUBLIC.get(kind.__name__, (member,)) and not member.startswith("_")
        if public and inspect.isfunction(function) and function.__doc__:
            yield member, value


def _signature(name: str, function: Any) -> str:
    """Of one that can be called; a parameter a line if there are many."""
    signature = inspect.signature(function)
    words = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        words.append(f"{parameter.name}: {parameter.annotation}{default}")
    whole = f"{name}({', '.join(words)}) -> {signature.return_annotation}"
    if len(whole) > 100:
        lines = "".join(f"    {word},\n" for word in words)
        whole = f"{name}(\n{lines}) -> {signature.return_annotation}"
    return f"```python\n{whole}\n```\n"


def _doc(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


# --- writing them ---------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """All that is written, by file name."""
    return {
        "cli.md": command_line(),
        "metrics.md": with_metrics((DOCS / "metrics.md").read_text()),
        "settings.md": settings(),
        "python.md": python(),
    }


if __name__ == "__main__":
    for name, page in pages().items():
        (DOCS / name).write_text(page)
