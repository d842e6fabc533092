"""The instance directory: where a broker and its clients meet, and the lock that makes it one broker's.

``$MMBROKER_DIR``, else ``$XDG_RUNTIME_DIR/mmbroker``, else ``/tmp/mmbroker-<uid>`` holds one directory for each broker
of this user, by name. A living broker keeps the lock file in its directory flocked, so the kernel ends its ownership
with it; whatever sockets the owner of the lock finds are a dead broker's, and only the owner removes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from mmbroker.proto.errors import BrokerError

LIFELINE: Final = "lifeline.sock"
CONTROL: Final = "control.sock"
LOCK: Final = "lock"
#: Longest path of a socket, in bytes: what `sockaddr_un` holds beside its final zero.
MAX_SOCKET_PATH: Final = 107
#: How long a lock may be busy before it counts as a broker's, in seconds: `living` takes it for an instant.
_LOCK_PATIENCE: Final = 0.25

_KINDS: Final = (
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISREG, "a regular file"),
)


class InstanceError(BrokerError):
    """A broker cannot use this instance directory. The message is one sentence that says what to do."""


def root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory that holds this user's instance directories; the same for brokers and clients."""
    if chosen := environ.get("MMBROKER_DIR"):
        return Path(os.path.abspath(chosen))
    if (runtime := environ.get("XDG_RUNTIME_DIR", "")).startswith("/"):
        return Path(runtime, "mmbroker")
    return Path(f"/tmp/mmbroker-{os.geteuid()}")


def check_length(path: Path) -> None:
    """Raise `InstanceError` if a socket in the instance directory `path` would have too long a path."""
    for name in (LIFELINE, CONTROL):
        length = len(os.fsencode(path / name))
        if length > MAX_SOCKET_PATH:
            raise InstanceError(
                f"the path {path / name} has {length} bytes, and a socket's path may have {MAX_SOCKET_PATH}: "
                "set MMBROKER_DIR to a shorter directory, or give the broker a shorter --name",
                length=length,
                limit=MAX_SOCKET_PATH,
            )


def living(parent: Path) -> list[Path]:
    """Instance directories in `parent` whose broker lives: those with a held lock, by name."""
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    return [parent / name for name in names if _held(parent / name / LOCK)]


def _held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Instance:
    """An instance directory that is ours, until `close`, which removes it. Also a context manager.

    `shared`: other users may connect to the sockets in it, but cannot list it.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        check_length(path)
        self.path = path
        self.shared = shared
        self._made_parent = _make_parent(path.parent, shared)
        self._lock = -1
        while self._lock < 0:
            self._lock = self._claim()
        try:
            for name in (LIFELINE, CONTROL):
                _remove_stale(path / name)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def lifeline(self) -> Path:
        return self.path / LIFELINE

    @property
    def control(self) -> Path:
        return self.path / CONTROL

    def barrier(self) -> Path | None:
        """The first directory on the way here whose mode lets no other users through, if any."""
        return next(
            (up for up in reversed(self.path.parents) if not os.stat(up).st_mode & stat.S_IXOTH), None
        )

    def open_up(self) -> None:
        """Once the sockets exist: give them the mode that goes with `shared`."""
        for socket_path in (self.lifeline, self.control):
            os.chmod(socket_path, 0o666 if self.shared else 0o600)

    def _claim(self) -> int:
        """The descriptor of the lock, held; -1 if the directory was removed meanwhile, by the broker that had it."""
        with suppress(FileExistsError):
            _making(os.mkdir, self.path, 0o700)
        _check_directory(self.path, "give the broker another --name, or move it away")
        try:
            directory = os.open(self.path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        try:
            os.fchmod(directory, 0o711 if self.shared else 0o700)
            fd = self._open_lock(directory)
        except FileNotFoundError:
            return -1
        finally:
            os.close(directory)
        try:
            self._flock(fd)
            held, named = os.fstat(fd), os.stat(self.path / LOCK, follow_symlinks=False)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, FileNotFoundError):
                return -1
            raise
        if (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
            os.close(fd)
            return -1
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _open_lock(self, directory: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(LOCK, flags, 0o600, dir_fd=directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InstanceError(_obstacle(self.path / LOCK, error.strerror or "cannot be opened")) from None
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            os.close(fd)
            raise InstanceError(_obstacle(self.path / LOCK, "cannot serve as the lock"))
        return fd

    def _flock(self, fd: int) -> None:
        patience = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < patience:
                    time.sleep(0.01)
                    continue
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise InstanceError(
                f"a broker (process {owner}) already runs at {self.path}: use that one, end it with "
                f"`mmbroker stop`, or give this one another --name"
            )

    def close(self) -> None:
        """Remove everything, then let go of the lock. Idempotent."""
        if self._lock < 0:
            return
        for name in (LIFELINE, CONTROL, LOCK):
            with suppress(FileNotFoundError):
                os.unlink(self.path / name)
        # Not empty: somebody else's files, or the next broker, which made its lock file just now.
        with suppress(OSError):
            os.rmdir(self.path)
            if self._made_parent:
                os.rmdir(self.path.parent)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Instance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_parent(parent: Path, shared: bool) -> bool:
    """Make the directory of instance directories if it is missing: True if so. Its owner is trusted, so check it."""
    made = False
    if not os.path.lexists(parent):
        with suppress(FileExistsError):
            _making(os.makedirs, parent, 0o700)
            made = True
    _check_directory(parent, "set MMBROKER_DIR to a directory of your own", owners=(os.geteuid(), 0))
    if made and shared:
        os.chmod(parent, 0o711)
    return made


def _making(make: Callable[[Path, int], None], path: Path, mode: int) -> None:
    try:
        make(path, mode)
    except FileExistsError:
        raise
    except OSError as error:
        raise InstanceError(
            f"the directory {path} cannot be made ({error.strerror}): "
            "set MMBROKER_DIR to a directory that this user may write to"
        ) from None


def _kind(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "a special file")


def _check_directory(path: Path, advice: str, owners: tuple[int, ...] = ()) -> None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return  # removed this instant; whoever uses it finds out
    if not stat.S_ISDIR(info.st_mode):
        raise InstanceError(f"{path} is {_kind(info.st_mode)}, not a directory: {advice}")
    if info.st_uid not in (owners or (os.geteuid(),)):
        raise InstanceError(
            f"the directory {path} belongs to user {info.st_uid}, not to user {os.geteuid()}: {advice}"
        )


def _obstacle(path: Path, problem: str) -> str:
    """Sentence about something at `path` that is in the way."""
    try:
        info = os.lstat(path)
    except OSError:
        return f"{path}: {problem}: move it away, then start the broker again"
    what, whose = _kind(info.st_mode), f"user {info.st_uid}"
    return f"{path} is {what} of {whose} ({problem}): move it away, then start the broker again"


def _remove_stale(path: Path) -> None:
    """Remove a dead broker's socket. Anything else there is refused by name. Only for the lock's owner."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
        raise InstanceError(_obstacle(path, "a broker's socket belongs there"))
    if _answers(path):
        raise InstanceError(
            f"somebody listens at {path} without holding {path.parent / LOCK}: end that process, "
            "or give this broker another --name"
        )
    with suppress(FileNotFoundError):
        os.unlink(path)


def _answers(path: Path) -> bool:
    """Does a process listen at this socket?"""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
            code = probe.connect_ex(os.fspath(path))
        if code in (0, errno.EAGAIN):
            return True
    return False
