"""Loading: the flags, what is hooked when, and when the plugin stands aside or refuses."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mmbroker.adapters.sglang import flags, seams, settings
from mmbroker.demo.engine import CPU_ENVIRONMENT

from . import kit

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

VARIABLES = (
    *(settings.TRANSPORT, settings.PATH, settings.WAIT, settings.ENGINE, settings.MEASURE),
    settings.SHARE_OUTPUTS,
    *(flags.SERVED_APP, "SGLANG_HTTP_SERVER_APP_PATH", "SGLANG_MM_BUFFER_SIZE_MB", "SGLANG_RUST_SERVER"),
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our variables is set, and none that is set here stays."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add(lambda parser: None, parser)
    return parser.parse_args(arguments)


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[settings.Settings, bool]]:
    """What `switch_on` was called with."""
    calls: list[tuple[settings.Settings, bool]] = []
    monkeypatch.setattr(flags, "switch_on", lambda asked, main: calls.append((asked, main)))
    return calls


def take(args: argparse.Namespace) -> None:
    assert flags.take(lambda cls, args: (cls, args), "cls", args) == ("cls", args)


def test_the_flags_reach_every_process_through_the_environment(
    switched: list[tuple[settings.Settings, bool]],
) -> None:
    take(parse("--mm-transport", "broker", "--mm-broker", "x/../here", "--mm-broker-wait", "1.5"))
    assert os.environ[settings.TRANSPORT] == "broker"
    assert os.environ[settings.PATH] == os.path.abspath("here")
    assert [(asked.broker, asked.wait, main) for asked, main in switched] == [(True, 1.5, True)]


@pytest.mark.parametrize("arguments", [(), ("--mm-transport", "sglang"), ("--mm-broker", "x")])
def test_who_does_not_ask_gets_nothing(
    arguments: tuple[str, ...], switched: list[tuple[settings.Settings, bool]]
) -> None:
    take(parse(*arguments))
    assert not switched


@pytest.mark.parametrize(
    ("arguments", "shared"),
    [((), True), (("--mm-broker-share-outputs",), True), (("--no-mm-broker-share-outputs",), False)],
)
def test_outputs_are_shared_unless_a_flag_turns_it_off(arguments: tuple[str, ...], shared: bool) -> None:
    take(parse(*arguments))
    assert settings.read().share_outputs is shared


def test_a_flag_overrides_the_environment(switched: list[tuple[settings.Settings, bool]]) -> None:
    os.environ[settings.TRANSPORT] = "broker"
    take(parse("--mm-transport", "sglang"))
    assert not switched


@pytest.mark.parametrize(
    ("arguments", "environ", "why"),
    [
        ({}, {}, None),
        ({"nnodes": 1, "use_ray": False, "encoder_only": False}, {}, None),
        ({"use_ray": True}, {}, "--use-ray"),
        ({"nnodes": 2}, {}, "one node"),
        ({"grpc_mode": True}, {}, "gRPC"),
        ({"encoder_only": True}, {}, "no scheduler"),
        ({}, {"SGLANG_RUST_SERVER": "1"}, "Rust"),
        ({"tokenizer_worker_num": 2, "enable_http2": True}, {}, None if kit.NEWEST else "HTTP/2"),
    ],
)
def test_it_stands_aside_where_no_hook_would_run(
    arguments: dict[str, Any], environ: dict[str, str], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = flags.stands_aside(SimpleNamespace(**arguments))
    assert found is None if why is None else why in str(found)


def test_two_owners_of_the_hash_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MM_BUFFER_SIZE_MB", "64")
    with pytest.raises(ValueError, match="SGLANG_MM_BUFFER_SIZE_MB"):
        flags.stands_aside(SimpleNamespace())


def test_standing_aside_is_said_and_inherited(caplog: pytest.LogCaptureFixture) -> None:
    os.environ[settings.TRANSPORT] = "broker"
    with caplog.at_level(logging.WARNING):
        flags.stand_aside("the moon is full")
    assert "the moon is full" in caplog.text and "SGLang's own transport serves" in caplog.text
    assert not settings.read().broker


def test_an_app_of_the_users_own_is_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "install", lambda **how: None)
    os.environ["SGLANG_HTTP_SERVER_APP_PATH"] = "theirs:app"
    for _ in range(2):
        flags.switch_on(settings.Settings(broker=True), main=True)
        assert os.environ["SGLANG_HTTP_SERVER_APP_PATH"] == flags.HTTP_APP
        assert os.environ[flags.SERVED_APP] == "theirs:app"
    assert os.environ[settings.ENGINE].startswith("sglang-")


def test_a_method_that_escapes_its_hook_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Hooked:
        def _get_multimodal_inputs(self) -> None: ...

    Hooked.__module__, Hooked.__qualname__ = "sglang.srt.managers.scheduler", "Scheduler"

    class Quiet(Hooked):
        pass

    class Own(Quiet):
        def _get_multimodal_inputs(self) -> None: ...

    with caplog.at_level(logging.WARNING):
        seams.warn_of_overrides(Quiet())
        assert not caplog.messages
        seams.warn_of_overrides(Own())
    assert len(caplog.messages) == 1 and "Own has a _get_multimodal_inputs of its own" in caplog.text


def program(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Statements in a fresh process that loads SGLang's plugins as the launcher does."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **CPU_ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


LOAD = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print("patched", sorted(HookRegistry._patched))
"""
ARGUMENTS = (
    "['sglang.srt.server_args.ServerArgs.add_cli_args', 'sglang.srt.server_args.ServerArgs.from_cli_args']"
)


def test_a_missing_name_ends_the_process_before_anything_is_hooked() -> None:
    broken = """
from sglang.srt.managers.tokenizer_manager import TokenizerManager as T
del T._send_one_request
"""
    done = program(broken + LOAD, MMBROKER_TRANSPORT="broker")
    assert done.returncode == 1
    assert "TokenizerManager._send_one_request" in done.stderr and "Nothing was hooked" in done.stderr
    assert "patched" not in done.stdout


def test_an_unknown_version_is_served_without_us() -> None:
    done = program("import sglang.version as v; v.__version__ = '9.9.9'" + LOAD, MMBROKER_TRANSPORT="broker")
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"patched {ARGUMENTS}" in done.stdout
    assert "mmbroker stands aside" in done.stderr and "9.9.9" in done.stderr and "0.5.23" in done.stderr


def test_asked_for_all_of_this_versions_names_are_hooked() -> None:
    done = program("import sglang.srt.managers.scheduler" + LOAD, MMBROKER_TRANSPORT="broker")
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = {**seams._COMMON, **seams.current().hooks}
    for module, name in wanted:
        assert f"'{module}.{name}'" in done.stdout
    assert "'sglang.srt.managers.mm_utils.hash_feature'" not in done.stdout
