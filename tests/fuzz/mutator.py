"""Damaged copies of real messages, the same ones for the same seed: bytes turned, cut, doubled, or values exchanged."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmbroker.proto.messages import MAX_MESSAGE

CORPUS = Path(__file__).parent / "corpus"
#: What real traffic is kept of, one file each: a message a line, in hex.
CHANNELS = ("lifeline", "call", "downlink", "reference")

#: Longer messages are cut off: twice of what a decoder takes.
LONGEST = 2 * MAX_MESSAGE
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 5, 7, 16, 31, 32, 64, 255, 256, 4095, 4096, 1 << 20, (1 << 20) + 1),
    *(-1, -2, -(1 << 31), -(1 << 63), 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
)
_THINGS: tuple[Any, ...] = (
    *(None, True, False, "", b"", [], {}, [[]], [None], {"t": "status"}, {"": 0}),
    *("status", "created", "uid-0", "uid-1000", "engine-a", "list", "uint8", "float32", "device", "host"),
    *("\x00", "\x1b[2J", "two\nlines", "\U0001f600", "x" * 65, "x" * 129, "x" * 5000),
    *(b"b" * 16, b"k" * 32, b"k" * 31, b"k" * 33, b"\xff" * 300),
)
#: Headers that claim more than a message can hold, and what msgpack has no meaning for.
_CLAIMS = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc1", b"\xd4\x01\x00", b"\xc7\x08\xff12345678", b"\x91" * 50, b"\x81\xa1t" * 30),
)


def corpus(channel: str) -> list[bytes]:
    """The messages that are kept of a channel."""
    return [bytes.fromhex(line) for line in (CORPUS / f"{channel}.hex").read_text().split()]


class Mutator:
    """`next` gives one damaged message after the other. `fix`: is shown the values of each, and may put some right."""

    def __init__(
        self, seed: int, messages: Sequence[bytes], fix: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.random = random.Random(seed)
        self._messages = list(messages)
        self._fix = fix

    def next(self) -> bytes:
        chance = self.random
        data = chance.choice(self._messages)
        if self._fix is not None or chance.random() < 0.6:
            data = self._exchanged(data)
        if self._fix is None or chance.random() < 0.2:
            for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
                data = self._damaged(data)
        return data[:LONGEST]

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _damaged(self, data: bytes) -> bytes:
        chance = self.random
        at, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        match chance.randrange(8):
            case 0 if data:
                bit = 1 << chance.randrange(8)
                at = min(at, len(data) - 1)
                return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            case 1:
                return data[:at] + chance.randbytes(chance.randint(1, 8)) + data[at:]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:at]
            case 4:
                return data[:end] + data[at:end] * chance.randint(1, 40) + data[end:]
            case 5:
                return data[:at] + chance.choice(_CLAIMS) + data[at:]
            case 6:
                return data[:at] + chance.choice(self._messages)[at:]
            case _:
                return data[:at] + chance.randbytes(end - at) + data[end:]

    # --- values -----------------------------------------------------------------------------------------------------

    def _exchanged(self, data: bytes) -> bytes:
        tree = msgspec.msgpack.decode(data)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            tree = self._change(tree)
        if self._fix is not None and isinstance(tree, dict):
            self._fix(tree)
        return msgspec.msgpack.encode(tree)

    def _change(self, tree: Any) -> Any:
        """Exchange something somewhere below `tree`, the deeper the likelier."""
        chance = self.random
        if isinstance(tree, dict) and tree:
            name = chance.choice(list(tree))
            match chance.randrange(10):
                case 0:
                    del tree[name]
                case 1:
                    tree[chance.choice(("extra", "t", "v", name + "x" if isinstance(name, str) else "x"))] = (
                        tree[name]
                    )
                case 2:
                    tree[name] = self._other()
                case _:
                    tree[name] = self._change(tree[name])
            return tree
        if isinstance(tree, list) and tree:
            at = chance.randrange(len(tree))
            match chance.randrange(10):
                case 0:
                    del tree[at]
                case 1:
                    tree += [tree[at]] * chance.choice((1, 2, 30, 300, 1100 if len(tree) < 9 else 1))
                case 2:
                    tree[at] = self._other()
                case 3:
                    tree.reverse()
                case _:
                    tree[at] = self._change(tree[at])
            return tree
        if isinstance(tree, int) and chance.random() < 0.5:
            return min(max(tree + chance.choice((-2, -1, 1, 2)), -(1 << 63)), (1 << 64) - 1)
        return self._other()

    def _other(self) -> Any:
        chance = self.random
        match chance.randrange(4):
            case 0:
                return copy.deepcopy(chance.choice(_THINGS))  # it may be changed in its new place
            case 1:
                return chance.randrange(40)
            case _:
                return chance.choice(_NUMBERS)
