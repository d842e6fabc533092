"""Every command that the documents tell somebody to type: it is run here, or it is in `ELSEWHERE`, with the reason."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmbroker.cuda.fake_memory import VARIABLE as FAKE
from mmbroker.cuda.fake_memory import Machine, Make
from tests.conftest import StartBroker
from tests.kit import PATIENCE
from tests.packaging.test_documents import PAGES, ROOT

#: What is not run, by a pattern that the whole line fits, and why. What else is checked of it is in the tests below.
ELSEWHERE = {
    r"(make [\w-]+)": "CI runs `make check` and `make test`; the demo and the benches have tests of their own",
    r"(\S*/)?pytest .*": "this is one",
    r"python3 -m venv venv": "`test_wheel` makes an environment",
    r"(\S*/)?pip install .*": "needs an index; `test_wheel` installs the wheel with what it needs",
    r"(\w+=\S+ )*(python -m sglang\.launch_server|vllm serve) .*": "needs a model; each engine's tests start it",
    r"mmbroker top": "needs a terminal; `cli/test_top` has one",
    r"mmbroker bench": "takes minutes; `cli/test_bench` runs its short form",
    r"mmbroker profile PID": "needs an engine; `sglang/test_serving` and `cli/test_profile` have one",
    r"(\w+=\S+ )*docker .*": "needs docker's daemon; `test_deployments` checks its files",
    r"kubectl .*": "needs a cluster; `test_deployments` checks its file",
    r"(cp deploy/.*|systemctl .*)": "changes the machine; `test_deployments` has systemd check the units",
    r"python (bench/|-m bench\.).*": "takes minutes, or a GPU, or a model; `tests/bench` runs their short forms",
    r"\.venv/bin/python docs/.*": "writes into the tree; `test_documents` compares what it would write",
    r"ssh .*": "needs another machine",
    r"apt-get install .*": "changes the machine; `test_deployments` compares it with what the store's library needs",
    r"(mmbroker tier|mooncake_master) .*": "needs a network of machines; `tier/hosts` has one",
}


def told() -> Iterator[tuple[str, str]]:
    """Pages and lines: what is in blocks for a shell, without the remarks behind it, whatever the environment."""
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if command := re.sub(r"\s+# .*$|(?<![\w.])venv/bin/", "", line).strip():
                    yield str(page.relative_to(ROOT)), command


LINES = sorted({line for _, line in told()})


def elsewhere(line: str) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in ELSEWHERE)


HERE = [line for line in LINES if not elsewhere(line)]


def test_there_are_commands_and_each_exception_is_needed() -> None:
    assert len(HERE) > 20
    assert [p for p in ELSEWHERE if not any(re.fullmatch(p, line) for line in LINES)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_where_they_are_found(page: Path) -> None:
    """In a block that says what it is: indented, or without a language, they would be in none of these tests."""
    text = page.read_text()
    languages = set(re.findall(r"^```(\w*)\n.*?^```$", text, re.MULTILINE | re.DOTALL))
    assert languages <= {"sh", "python", "text", "toml", "yaml"}
    elsewhere = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert (
        re.findall(r"^    (?:\S*/)?(?:mmbroker|pip|make|python3?|docker) .*$", elsewhere, re.MULTILINE) == []
    )


# --- those that are run ---------------------------------------------------------------------------------------------


@pytest.fixture
def environ(broker_root: Path, tmp_path: Path) -> dict[str, str]:
    """This project's commands first, brokers in a directory of their own, and two fake GPUs."""
    uuids = ("GPU-fa4e0000-0000-4000-8000-000000000000", "GPU-fa4e1111-0000-4000-8000-000000000001")
    gpus = Machine(tmp_path / "gpus", Make(uuids=uuids, total=4096 << 20, context=500 << 20))
    found = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**found, "PATH": path, "MMBROKER_DIR": str(broker_root), FAKE: str(gpus.directory)}


def here(line: str, root: Path) -> str:
    """A line as it can be run on this machine: its own directories, and a port that is free."""
    return line.replace("/run/mmbroker", str(root)).replace("127.0.0.1:9400", "127.0.0.1:0")


STARTS = [line for line in HERE if re.search(r"\bmmbroker start\b", line)]


@pytest.mark.parametrize("line", [line for line in HERE if line not in STARTS])
def test_it_works(line: str, start_broker: StartBroker, environ: dict[str, str], tmp_path: Path) -> None:
    """Beside a broker that runs."""
    process = start_broker()
    done = subprocess.run(
        ["bash", "-euc", here(line, process.root)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("line", STARTS)
def test_a_broker_starts(line: str, broker_root: Path, environ: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["bash", "-euc", re.sub(r"\bmmbroker start", "exec mmbroker start", here(line, broker_root))],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE)[0]
            assert process.stdout.readline().startswith("mmbroker is ready at ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


# --- those that are not ---------------------------------------------------------------------------------------------


def test_targets_are_the_makefiles() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {line.split()[1] for line in LINES if line.startswith("make ")}
    assert asked and asked <= targets


def test_files_that_commands_name_are_there() -> None:
    named = {name for line in LINES for name in re.findall(r"deploy/[\w.@-]+", line)}
    assert len(named) >= 5 and [name for name in named if not (ROOT / name).exists()] == []


def test_extras_that_are_installed_are_ones() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    asked = {
        extra
        for page in PAGES
        for extra in re.findall(r"pip install '(?:mmbroker|\.)\[(\w+)\]'", page.read_text())
    }
    assert {"client", "otel", "profile"} <= asked <= extras


def test_vllms_connector_is_ours() -> None:
    from mmbroker.adapters.vllm import settings

    asked = [shlex.split(line) for line in LINES if line.startswith("vllm serve ")]
    assert len(asked) >= 2
    for words in asked:
        told = json.loads(words[words.index("--ec-transfer-config") + 1])
        settings.read(told.pop("ec_connector_extra_config", {}))
        found = {"ec_connector": settings.CONNECTOR, "ec_connector_module_path": settings.MODULE}
        assert told == {**found, "ec_role": "ec_both"}


@pytest.mark.sglang
def test_engines_flags_are_ones() -> None:
    from sglang.srt.server_args import ServerArgs

    from mmbroker.adapters.sglang import flags

    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add(ServerArgs.add_cli_args, parser)
    lines = [line.partition("launch_server ")[2] for line in LINES if "sglang.launch_server" in line]
    assert len(lines) >= 3
    for words in lines:
        found, unknown = parser.parse_known_args(words.split())
        assert unknown == [] and found.mm_transport == "broker", words
