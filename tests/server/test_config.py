"""Settings: flags, then variables, then the file, then defaults; nonsense is refused by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mmbroker import config
from mmbroker.arena import memory
from mmbroker.config import ConfigError, Settings
from mmbroker.events import Limits

MIB = 1 << 20


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return file


def test_defaults() -> None:
    settings = Settings.resolve({}, {"MMBROKER_DIR": "/x"})
    assert (settings.name, settings.path, settings.allow_uid) == ("cpu", Path("/x/cpu"), frozenset())
    defaults = Limits()
    for field in fields(Limits):
        if field.name != "host_bytes":
            assert getattr(settings.limits, field.name) == getattr(defaults, field.name)


@pytest.mark.parametrize(
    ("free", "expected"), [(4 << 30, 1024), (1 << 40, 16 << 10), (64 << 30, 16 << 10), (7 * MIB, 1)]
)
def test_default_host_arena(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    monkeypatch.setattr(memory, "headroom", lambda: (free, "a limit"))
    settings = Settings.resolve({}, {})
    assert (settings.host_mib, settings.limits.host_bytes) == (expected, expected * MIB)


def test_no_room_for_any_host_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "headroom", lambda: (3 * MIB, "the memory limit of control group /job"))
    with pytest.raises(ConfigError, match=r"control group /job leaves 3145728 bytes"):
        Settings.resolve({}, {})
    assert Settings.resolve({"host_mib": 1}, {}).host_mib == 1


def test_precedence(tmp_path: Path) -> None:
    file = toml(
        tmp_path, 'name = "file"\nhost_mib = 1\nsessions = 11\nallow_uid = [1, 2]\nproducer_grace = 2.5\n'
    )
    environ = {"MMBROKER_HOST_MIB": "2", "MMBROKER_SESSIONS": "12", "MMBROKER_ALLOW_UID": "3, 4"}
    settings = Settings.resolve({"host_mib": 3, "name": None, "allow_uid": ()}, environ, file)
    assert settings.name == "file"
    assert settings.host_mib == 3
    assert settings.limits.host_bytes == 3 * MIB
    assert settings.limits.sessions == 12
    assert settings.limits.producer_grace == 2.5
    assert settings.allow_uid == {3, 4}


@pytest.mark.parametrize(
    "field", [f.name for f in fields(Limits) if f.name != "device" and not f.name.endswith("_bytes")]
)
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_every_limit_can_be_set(tmp_path: Path, field: str, source: str) -> None:
    value = 0.5 if isinstance(getattr(Limits(), field), float) else 3
    settings = {
        "flag": lambda: Settings.resolve({field: value}, {}),
        "variable": lambda: Settings.resolve({}, {f"MMBROKER_{field.upper()}": str(value)}),
        "file": lambda: Settings.resolve({}, {}, toml(tmp_path, f"{field} = {value}\n")),
    }[source]()
    assert getattr(settings.limits, field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host_mib": 0}, "host_mib in the command line: .*>= 1"),
        ({"host_mib": "many"}, "host_mib in the command line: .*'many'"),
        ({"segment_mib": -1}, "segment_mib in the command line"),
        ({"name": ""}, "name in the command line"),
        ({"name": "a/b"}, "name in the command line: .*'a/b'"),
        ({"name": ".."}, "name in the command line"),
        ({"allow_uid": [-1]}, "allow_uid in the command line"),
        ({"allow_uid": [1 << 32]}, "allow_uid in the command line"),
        ({"sessions": 0}, "sessions in the command line: .*>= 1"),
        ({"sessions": 1.5}, "sessions in the command line"),
        ({"producer_grace": -0.1}, "producer_grace in the command line: .*>= 0"),
        ({"watermark": float("nan")}, "watermark in the command line"),
        ({"watermark": 1.0}, "watermark in the command line"),
        ({"host_bytes": 1}, "there is no setting host_bytes"),
        ({"device": "GPU-1"}, "there is no setting device"),
        ({"device_bytes": 1}, "there is no setting device_bytes"),
        ({"colour": "red"}, "there is no setting colour"),
    ],
)
def test_nonsense(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.resolve(flags, {})


@pytest.mark.parametrize("text", ["10.0.0.1:9400", "0", "localhost:9400"])
def test_the_page_is_for_this_machine(tmp_path: Path, text: str) -> None:
    for resolve in (
        lambda: Settings.resolve({"http": text}, {}),
        lambda: Settings.resolve({}, {"MMBROKER_HTTP": text}),
        lambda: Settings.resolve({}, {}, toml(tmp_path, f'http = "{text}"\n')),
    ):
        with pytest.raises(ConfigError, match=rf"http in the .*{text}"):
            resolve()
    assert Settings.resolve({"http": "127.0.0.1:9400"}, {}).http == "127.0.0.1:9400"


def test_variables_of_others_are_not_ours() -> None:
    """Kubernetes sets such variables for a service called mmbroker; MMBROKER_TRANSPORT is the engines'."""
    others = {
        "MMBROKER_PORT": "tcp://10.0.0.1:80",
        "MMBROKER_SERVICE_HOST": "10.0.0.1",
        "MMBROKER_TRANSPORT": "broker",
    }
    assert Settings.resolve({"host_mib": 1}, others) == Settings.resolve({"host_mib": 1}, {})


@pytest.mark.parametrize("text", ["host_mib = ", "host_mib = 1\nhost_mib = 2\n", "\udcff"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"settings file {file} cannot be read"):
        Settings.resolve({}, {}, file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Settings.resolve({}, {}, tmp_path / "missing.toml")


def test_resolved_once() -> None:
    settings = Settings.resolve({"host_mib": 1}, {})
    with pytest.raises(AttributeError):
        settings.host_mib = 2  # type: ignore[misc]
    assert config.MIB == MIB
