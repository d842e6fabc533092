"""Instance directories: one broker each, only stale sockets replaced, everything else refused by name."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from mmbroker import instance
from mmbroker.instance import Instance, InstanceError

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as directory:
        yield Path(directory)


def of_length(root: Path, nbytes: int, filler: str = "x") -> Path:
    """A path below `root` whose lifeline's path has `nbytes` bytes."""
    missing = nbytes - len(os.fsencode(root / "a" / instance.LIFELINE)) + 1
    unit = len(filler.encode())
    name = filler * (missing // unit) + "y" * (missing % unit)
    assert len(os.fsencode(root / name / instance.LIFELINE)) == nbytes
    return root / name


# --- where ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MMBROKER_DIR": "/a/b", "XDG_RUNTIME_DIR": "/run/user/1"}, "/a/b"),
        ({"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/mmbroker"),
        ({"XDG_RUNTIME_DIR": ""}, f"/tmp/mmbroker-{os.geteuid()}"),
        ({"XDG_RUNTIME_DIR": "relative"}, f"/tmp/mmbroker-{os.geteuid()}"),
        ({}, f"/tmp/mmbroker-{os.geteuid()}"),
        ({"MMBROKER_DIR": "relative"}, str(Path.cwd() / "relative")),
    ],
)
def test_root(environ: dict[str, str], expected: str) -> None:
    assert instance.root(environ) == Path(expected)


# --- one broker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o711)])
def test_made_with_its_mode_and_removed(root: Path, shared: bool, mode: int) -> None:
    path = root / "run" / "cpu"
    with Instance(path, shared=shared) as held:
        assert held.path == path
        for directory in (path, path.parent):
            assert stat.S_IMODE(directory.stat().st_mode) == mode
        assert stat.S_IMODE((path / instance.LOCK).stat().st_mode) == 0o600
        for sock in (held.lifeline, held.control):
            sock.touch()
        held.open_up()
        for sock in (held.lifeline, held.control):
            assert stat.S_IMODE(sock.stat().st_mode) == (0o666 if shared else 0o600)
    assert list(root.iterdir()) == []


def test_a_wider_mode_is_narrowed(root: Path) -> None:
    (root / "cpu").mkdir()
    (root / "cpu").chmod(0o777)
    with Instance(root / "cpu"):
        assert stat.S_IMODE((root / "cpu").stat().st_mode) == 0o700


def test_a_second_broker_is_refused(root: Path) -> None:
    with Instance(root / "cpu"), pytest.raises(InstanceError, match=rf"process {os.getpid()}.*mmbroker stop"):
        Instance(root / "cpu")
    with Instance(root / "cpu"), Instance(root / "other"):
        pass
    assert list(root.iterdir()) == []


def test_close_is_idempotent_and_leaves_strangers_alone(root: Path) -> None:
    held = Instance(root / "cpu")
    (root / "cpu" / "mine").touch()
    held.close()
    held.close()
    assert [path.name for path in (root / "cpu").iterdir()] == ["mine"]
    (root / "cpu" / "mine").unlink()


def test_many_at_once_one_wins(root: Path) -> None:
    """Every claim either gets the directory whole or is refused, while others make and remove it."""
    inside: list[int] = []
    worst: list[int] = []
    wins: list[int] = []
    barrier = threading.Barrier(4)

    def contend(number: int) -> None:
        barrier.wait()
        for _ in range(30):
            try:
                with Instance(root / "cpu"):
                    inside.append(number)
                    worst.append(len(inside))
                    wins.append(number)
                    inside.remove(number)
            except InstanceError:
                pass

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(worst) == {1} and wins
    assert list(root.iterdir()) == []


# --- who is there ---------------------------------------------------------------------------------------------------


def test_living(root: Path) -> None:
    assert instance.living(root) == []
    assert instance.living(root / "missing") == []
    (root / "dead").mkdir()
    (root / "dead" / instance.LOCK).touch()
    (root / "file").touch()
    with Instance(root / "b"), Instance(root / "a"):
        assert instance.living(root) == [root / "a", root / "b"]
    assert instance.living(root) == []
    (root / "file").unlink()


def test_looking_does_not_disturb_a_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`living` takes the lock for an instant: a broker that starts just then waits for it."""
    (root / "cpu").mkdir()
    looking = os.open(root / "cpu" / instance.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(looking, fcntl.LOCK_SH)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(looking)

    monkeypatch.setattr(instance, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    with Instance(root / "cpu"):
        assert len(pauses) == 3


@pytest.mark.parametrize("successor", [False, True])
def test_the_lock_that_was_opened_is_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch, successor: bool
) -> None:
    """A broker that ends removes its directory while the next one waits for the lock: that lock is worth nothing."""
    path = root / "cpu"
    flock = fcntl.flock
    locked: list[int] = []

    def remove_first(fd: int, operation: int) -> None:
        if not locked:
            (path / instance.LOCK).unlink()
            if successor:
                (path / instance.LOCK).touch()
            else:
                path.rmdir()
        locked.append(os.fstat(fd).st_ino)
        flock(fd, operation)

    constants = {name: getattr(fcntl, name) for name in ("LOCK_EX", "LOCK_SH", "LOCK_NB")}
    monkeypatch.setattr(instance, "fcntl", SimpleNamespace(flock=remove_first, **constants))
    with Instance(path):
        assert len(locked) == 2
        assert locked[1] == (path / instance.LOCK).stat().st_ino


# --- what is in the way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filler", ["x", "ü"])
@pytest.mark.parametrize("nbytes", [40, 90, 106, 107])
def test_paths_that_fit(root: Path, nbytes: int, filler: str) -> None:
    path = of_length(root, nbytes, filler)
    with Instance(path) as held, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lifeline:
        lifeline.bind(os.fspath(held.lifeline))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as control:
            control.bind(b"ipc://" + os.fsencode(held.control))


@pytest.mark.parametrize("filler", ["x", "ü"])
@pytest.mark.parametrize("nbytes", [108, 109, 200])
def test_paths_that_are_too_long(root: Path, nbytes: int, filler: str) -> None:
    path = of_length(root, nbytes, filler)
    with pytest.raises(InstanceError, match=rf"{path}.* has {nbytes} bytes.*107.*MMBROKER_DIR") as caught:
        Instance(path)
    assert caught.value.figures == {"length": nbytes, "limit": 107}
    assert list(root.iterdir()) == []


def plain_file(path: Path) -> None:
    path.write_text("precious")


def directory(path: Path) -> None:
    path.mkdir()


def symlink(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def dangling_symlink(path: Path) -> None:
    path.symlink_to("nowhere")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def strangers_file(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, -1)


def strangers_socket(path: Path) -> None:
    stale_socket(path)
    os.chown(path, 12345, -1)


def stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(os.fspath(path))


obstacles = pytest.mark.parametrize(
    ("make", "kind"),
    [
        (plain_file, "a regular file"),
        (directory, "a directory"),
        (symlink, "a symbolic link"),
        (dangling_symlink, "a symbolic link"),
        (fifo, "a special file"),
        (strangers_file, "a regular file of user 12345"),
    ],
)


def snapshot(root: Path) -> list[tuple[str, int, int, int]]:
    return sorted(
        (str(path), info.st_ino, info.st_mode, info.st_uid)
        for path in root.rglob("*")
        for info in [path.lstat()]
        if path.name != "cpu"
    )


@obstacles
@pytest.mark.parametrize("name", [instance.LIFELINE, instance.CONTROL])
def test_something_at_a_sockets_path(root: Path, name: str, make: Callable[[Path], None], kind: str) -> None:
    (root / "cpu").mkdir()
    make(root / "cpu" / name)
    before = snapshot(root)
    with pytest.raises(InstanceError, match=rf"/cpu/{name} is {kind}.*move it away"):
        Instance(root / "cpu")
    assert [entry for entry in snapshot(root) if not entry[0].endswith(instance.LOCK)] == before


@pytest.mark.parametrize("name", [instance.LIFELINE, instance.CONTROL])
def test_another_users_socket(root: Path, name: str) -> None:
    (root / "cpu").mkdir()
    strangers_socket(root / "cpu" / name)
    with pytest.raises(InstanceError, match=rf"/cpu/{name} is a socket of user 12345.*move it away"):
        Instance(root / "cpu")
    assert (root / "cpu" / name).is_socket()


@obstacles
def test_something_at_the_locks_path(root: Path, make: Callable[[Path], None], kind: str) -> None:
    if make is plain_file:
        make = strangers_file  # one of ours is the lock
    (root / "cpu").mkdir()
    make(root / "cpu" / instance.LOCK)
    before = snapshot(root)
    with pytest.raises(InstanceError, match=rf"/cpu/{instance.LOCK} is {kind}.*move it away"):
        Instance(root / "cpu")
    assert snapshot(root) == before


@obstacles
def test_something_at_the_directorys_path(root: Path, make: Callable[[Path], None], kind: str) -> None:
    if make is directory:
        make = strangers_directory
        kind = "belongs to user 12345"
    elif make is strangers_file:
        kind = "a regular file"
    make(root / "cpu")
    with pytest.raises(InstanceError, match=rf"{root}/cpu.*{kind}.*--name"):
        Instance(root / "cpu")


def strangers_directory(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("make", [plain_file, symlink, strangers_directory])
def test_something_at_the_parents_path(root: Path, make: Callable[[Path], None]) -> None:
    make(root / "run")
    with pytest.raises(InstanceError, match=rf"{root}/run.*set MMBROKER_DIR"):
        Instance(root / "run" / "cpu")


def test_a_parent_that_cannot_be_made() -> None:
    with pytest.raises(InstanceError, match=r"/proc/nowhere cannot be made.*set MMBROKER_DIR"):
        Instance(Path("/proc/nowhere/cpu"))


# --- stale and living sockets ---------------------------------------------------------------------------------------


def test_stale_sockets_are_replaced(root: Path) -> None:
    (root / "cpu").mkdir()
    for name in (instance.LIFELINE, instance.CONTROL):
        stale_socket(root / "cpu" / name)
    with Instance(root / "cpu") as held:
        assert [path.name for path in held.path.iterdir()] == [instance.LOCK]


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
@pytest.mark.parametrize("name", [instance.LIFELINE, instance.CONTROL])
def test_somebody_listens_without_the_lock(root: Path, name: str, kind: socket.SocketKind) -> None:
    """Somebody removed the lock of a living broker: its sockets are still not taken over."""
    (root / "cpu").mkdir()
    with ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        sock.bind(os.fspath(root / "cpu" / name))
        sock.listen()
        with pytest.raises(InstanceError, match=rf"somebody listens at .*/{name}"):
            Instance(root / "cpu")
        assert (root / "cpu" / name).is_socket()


def test_a_dead_owners_lock_is_free(root: Path) -> None:
    """The kernel ends ownership with the process, however it dies."""
    code = (
        "import os, signal, sys; from pathlib import Path; from mmbroker.instance import Instance; "
        f"held = Instance(Path({str(root / 'cpu')!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert (root / "cpu" / instance.LOCK).exists()
    assert instance.living(root) == []
    with Instance(root / "cpu"):
        assert instance.living(root) == [root / "cpu"]
