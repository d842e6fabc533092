"""Which node of a machine's memory new pages lie on."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_PREFERRED: Final = 1
_WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def prefer(node: int) -> None:
    """Pages that the calling thread allocates from now on lie on that node, as long as it has some.

    Raises `OSError` where the kernel or a container's rules refuse.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"set_mempolicy is not known on {platform.machine()}")
    words = node // _WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD] = 1 << node % _WORD
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _PREFERRED, ctypes.byref(mask), ctypes.c_ulong(words * _WORD + 1)):
        code = ctypes.get_errno()
        raise OSError(code, f"set_mempolicy: {os.strerror(code)}")
