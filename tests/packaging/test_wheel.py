"""What is installed is what is in the tree: packages are listed by hand, so somebody has to compare."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Folder in the tree, and the package it becomes. A deeper folder belongs to the longest match.
HOMES = {"broker": "mmbroker", "proto": "mmbroker/proto", "adapters": "mmbroker/adapters"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, because a build directory in the tree is shared with the editable install."""
    copy = tmp_path_factory.mktemp("tree")
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if PurePosixPath(name).parts[0] in {*HOMES, "pyproject.toml", "README.md", "LICENSE"}:
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-q",
            "-w",
            copy / "dist",
            copy,
        ],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next((copy / "dist").glob("mmbroker-*.whl")))


def source_files() -> set[str]:
    """The packages' files in the tree, as the wheel names them."""
    found = set()
    for folder, package in HOMES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".html") or path.name == "py.typed":
                found.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


def test_the_wheel_has_the_trees_modules_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    installed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert installed == source_files()


def test_every_package_is_typed(wheel: zipfile.ZipFile) -> None:
    packages = {str(PurePosixPath(name).parent) for name in wheel.namelist() if name.endswith("/__init__.py")}
    assert {f"{package}/py.typed" for package in packages} <= set(wheel.namelist())


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without `__init__.py` would be a namespace that anybody may add to."""
    folders = {str(PurePosixPath(name).parent) for name in source_files()}
    assert {f"{folder}/__init__.py" for folder in folders} <= source_files()


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"mmbroker": "mmbroker.cli:main"},
        "sglang.srt.plugins": {"mmbroker": "mmbroker.adapters.sglang:register"},
    }


def test_the_licence_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()
    (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    assert b"License-Expression: Apache-2.0" in wheel.read(metadata)


def test_a_plain_install_brings_no_torch() -> None:
    """The daemon does without; and an engine's environment must keep the torch it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {requirement.partition(">")[0] for requirement in project["dependencies"]} == {
        "click",
        "h11",
        "msgspec",
        "prometheus_client",
        "pyzmq",
        "rich",
        "uvloop",
    }
    extras = project["optional-dependencies"]
    assert {"client", "cuda", "sglang", "dev"} <= extras.keys()
    assert extras["sglang"] == []


def test_the_installed_package_is_this_tree() -> None:
    """Else every other test tests something else."""
    code = "import mmbroker.proto, mmbroker.state, os; print(os.path.realpath(mmbroker.state.__file__))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert Path(result.stdout.strip()) == ROOT / "broker" / "state.py"
