"""What is installed is what is in the tree: packages are listed by hand, so somebody has to compare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Folder in the tree, and the package it becomes. A deeper folder belongs to the longest match.
HOMES = {"broker": "mmbroker", "proto": "mmbroker/proto", "adapters": "mmbroker/adapters"}
#: What a wheel is made of.
SOURCES = {*HOMES, "pyproject.toml", "README.md", "LICENSE"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        if PurePosixPath(name).parts[0] in SOURCES:
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return copy / "dist" / build("sdist", copy)


@pytest.fixture(scope="module")
def wheel_file(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer does that finds no wheel."""
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    return tree / "dist" / build("wheel", tree)


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


def build(what: str, tree: Path) -> str:
    """With the build backend alone, from no index; the file's name in `dist`."""
    program = f"from setuptools import build_meta; print(build_meta.build_{what}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


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
        "vllm.general_plugins": {"mmbroker": "mmbroker.adapters.vllm:register"},
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
    assert {"client", "cuda", "sglang", "vllm", "dev"} <= extras.keys()
    assert extras["sglang"] == extras["vllm"] == []


def test_the_installed_package_is_this_tree() -> None:
    """Else every other test tests something else."""
    code = "import mmbroker.proto, mmbroker.state, os; print(os.path.realpath(mmbroker.state.__file__))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert Path(result.stdout.strip()) == ROOT / "broker" / "state.py"


# --- installed ------------------------------------------------------------------------------------------------------


def needed(name: str, found: set[str]) -> set[str]:
    """A distribution, and all that it needs at run time."""
    if name not in found:
        found.add(name)
        for requirement in metadata.requires(name) or ():
            if "extra ==" not in requirement and "win32" not in requirement:
                other = re.match(r"[\w.-]+", requirement)
                assert other is not None
                try:
                    metadata.distribution(other[0])
                except metadata.PackageNotFoundError:
                    continue  # for another platform or an older Python
                needed(other[0], found)
    return found


@pytest.fixture(scope="module")
def empty(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that has the wheel, what it says it needs, and nothing else."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names: set[str] = set()
    for dependency in dependencies:
        needed(re.split(r"[>=<]", dependency)[0], names)
    for name in names:
        files = metadata.distribution(name)
        for top in {
            file.parts[0] for file in files.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            target = site / top
            if not target.exists():
                target.symlink_to(Path(str(files.locate_file(top))))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin" / "python",
        "install",
        "--no-index",
        "-q",
        wheel_file,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return home / "bin"


def run(command: list[str | Path], root: Path) -> str:
    environ = {"PATH": os.environ["PATH"], "MMBROKER_DIR": str(root)}
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout


def test_it_installs_where_there_is_nothing_and_works(empty: Path, broker_root: Path) -> None:
    """With its declared dependencies alone, of which torch is none."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run([empty / "mmbroker", "--version"], broker_root) == f"mmbroker {version}\n"
    assert "start" in run([empty / "python", "-m", "mmbroker", "--help"], broker_root)
    assert "Usage: mmbroker start" in run([empty / "mmbroker", "start", "--help"], broker_root)
    process = subprocess.Popen(
        [empty / "mmbroker", "start", "--cpu", "--host-mib", "64", "--http", "127.0.0.1:0"],
        env={"PATH": os.environ["PATH"], "MMBROKER_DIR": str(broker_root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None and "is ready" in process.stdout.readline()
            assert '"ok": true' in run([empty / "mmbroker", "status", "--json"], broker_root)
            assert "healthy" in run([empty / "mmbroker", "top", "--once"], broker_root)
            assert "memfd" in run([empty / "mmbroker", "doctor"], broker_root)
            run([empty / "mmbroker", "stop"], broker_root)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_runner_of_applications_finds_the_command() -> None:
    """`pipx run mmbroker` and `uvx mmbroker` run the command that has the project's name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] in project["scripts"]


def test_the_sdist_has_the_trees_modules(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    own = {
        f"{folder}/{path.removeprefix(f'{home}/')}"
        for path in source_files()
        for folder, home in HOMES.items()
        if max((h for h in HOMES.values() if path.startswith(f"{h}/")), key=len) == home
    }
    assert own <= names
