"""A ZeroMQ socket, sent to and received from without giving up the interpreter's lock.

pyzmq gives it up in each of these calls, though they do not wait, and has to have it back a microsecond later. Beside a
scheduler thread that costs both of them: it takes the lock meanwhile, or sleeps until it is free again and is woken on
a core that has cooled down, about 50 us each time on an H200's host (`docs/benchmarks.md`). So these go straight into
the library that pyzmq has loaded.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Final

import zmq

from mmbroker.proto.errors import InvalidMessage

try:
    from zmq.backend.cython import _zmq

    _library = ctypes.PyDLL(_zmq.__file__, use_errno=True)
    _send, _recv, _getsockopt = _library.zmq_send, _library.zmq_recv, _library.zmq_getsockopt
except (ImportError, AttributeError, OSError) as problem:
    raise ImportError(
        f"ZeroMQ's functions cannot be found behind pyzmq {zmq.pyzmq_version()} ({problem}): mmbroker needs pyzmq as "
        "its wheels for CPython are, `pip install --force-reinstall pyzmq`"
    ) from problem
_send.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_recv.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_getsockopt.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

_NOBLOCK: Final = int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)


class Quick:
    """A socket of single-part messages, for one thread at a time, as long as it is open. Raises `zmq.ZMQError` where
    pyzmq would, but for a socket that is not ready."""

    def __init__(self, socket: zmq.Socket[bytes], most: int) -> None:
        """`most`: bytes of the longest message that is received."""
        self._pointer = ctypes.c_void_p(socket.underlying)
        self._most = most
        # Only what is written to takes memory.
        room = mmap.mmap(-1, most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._room = memoryview(room)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        self._found = ctypes.c_int()
        self._size = ctypes.c_size_t(ctypes.sizeof(self._found))
        self._asked = ctypes.byref(self._found), ctypes.byref(self._size)

    def send(self, data: bytes) -> bool:
        """False: there is no room for it now."""
        while _send(self._pointer, data, len(data), _NOBLOCK) < 0:
            if not self._interrupted():
                return False
        return True

    def recv(self) -> bytes | None:
        """None: nothing has come; then the socket's descriptor becomes readable when something has."""
        while (size := _recv(self._pointer, self._start, self._most, _NOBLOCK)) < 0:
            if not self._interrupted():
                return None
        if size > self._most:
            raise InvalidMessage(
                f"a broker message of {size} bytes exceeds the limit of {self._most}",
                nbytes=size,
                limit=self._most,
            )
        return self._room[:size].tobytes()

    def events(self) -> int:
        """What may be done now, as `zmq.EVENTS`."""
        while _getsockopt(self._pointer, _EVENTS, *self._asked) < 0:
            self._interrupted()
        return self._found.value

    def _interrupted(self) -> bool:
        """Whether the last call is to be repeated, or (False) the socket was not ready. Else raises."""
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            raise zmq.ZMQError(code)
        return code == errno.EINTR
