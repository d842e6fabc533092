"""What goes wrong on a fake GPU, by order.

A fault is written as the call that fails and the code that it returns, by the real driver's names, with a count if the
call works again later: ``cuMemCreate=CUDA_ERROR_OUT_OF_MEMORY*2``. ``*=CODE`` makes every call fail that needs a
context. Two more faults are conditions: ``memlock=BYTES`` limits what one process may pin, and ``zeros`` gives every
map memory of its own, so that what others wrote reads as zeros.
"""

from __future__ import annotations

from typing import Final

from .driver import error

VARIABLE: Final = "MMBROKER_FAKE_CUDA_FAULTS"


class Faults:
    """Faults of one process's fake driver, from a text with commas or spaces between them."""

    def __init__(self, text: str = "") -> None:
        self.memlock: int | None = None
        self.zeros = False
        self._calls: dict[str, tuple[str, int | None]] = {}
        for word in text.replace(",", " ").split():
            name, _, value = word.partition("=")
            if word == "zeros":
                self.zeros = True
            elif name == "memlock" and value.isdecimal():
                self.memlock = int(value)
            elif name.startswith(("*", "cu", "nvml")) and value.startswith(("CUDA_ERROR_", "NVML_ERROR_")):
                code, _, times = value.partition("*")
                self.fail(name, code, int(times) if times else None)
            else:
                raise ValueError(
                    f"{VARIABLE}: {word!r} is no fault; one is call=CODE, memlock=BYTES or zeros"
                )

    def fail(self, call: str, code: str, times: int | None = None) -> None:
        """Let a call fail from now on, always or so many times."""
        self._calls[call] = (code, times)

    def heal(self) -> None:
        """Everything works again."""
        self._calls.clear()
        self.memlock, self.zeros = None, False

    def check(self, call: str, context: bool) -> None:
        """Raise what was ordered for this call; `context` says whether it needs one."""
        for name in (call, "*") if context else (call,):
            if name in self._calls:
                code, times = self._calls[name]
                if times == 1:
                    del self._calls[name]
                elif times is not None:
                    self._calls[name] = (code, times - 1)
                raise error(code, call, "a fault that was ordered")
