"""What is sent: each load has a name, a shape, and a seed of its own."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Final

#: Width and height of pictures, by the bucket's name. `screenshot` is a long one of a telephone.
SIZES: Final = {"720p": (1280, 720), "1080p": (1920, 1080), "screenshot": (1080, 3840)}
#: Words of prompt text beside the pictures.
TEXTS: Final = {"short": 12, "long": 800}
IMAGES: Final = (1, 3, 8)
CONCURRENCY: Final = (4, 16, 64)
#: How often each picture is sent.
REPEATS: Final = (1, 4)


@dataclass(frozen=True)
class Load:
    """`concurrency`: requests in flight. `repeats`: how often each picture comes. `tokens`: of each answer."""

    name: str
    images: int
    size: tuple[int, int]
    requests: int
    concurrency: int = 64
    words: int = TEXTS["short"]
    repeats: int = 1
    tokens: int = 32
    #: Whether the texts of the answers are kept, to be compared between transports.
    keep_texts: bool = False

    def seed(self, base: int, turn: int) -> int:
        """A repeated seed would hit the engine's caches, so no two loads and no two turns of a load have one."""
        return zlib.crc32(f"{base} {turn} {self.name}".encode())

    def shape(self) -> dict[str, Any]:
        """All of it, as JSON has it: two runs are of one load if this is equal."""
        return {**asdict(self), "size": list(self.size)}


def _named(size: str, images: int, text: str, concurrency: int, repeats: int, requests: int) -> Load:
    name = f"{size}-{images}-{text}-c{concurrency}" + (f"-x{repeats}" if repeats > 1 else "")
    return Load(name, images, SIZES[size], requests, concurrency, TEXTS[text], repeats)


#: Few in flight need few requests to be measured; many need a few rounds of what is in flight.
_REQUESTS: Final = {4: 32, 16: 64, 64: 192}

MATRIX: Final = tuple(
    _named(size, images, text, concurrency, repeats, _REQUESTS[concurrency])
    for size, images, text, concurrency, repeats in itertools.product(
        SIZES, IMAGES, TEXTS, CONCURRENCY, REPEATS
    )
)
#: What the goals are about.
GOALS: Final = (
    Load("one", 1, (1024, 768), 256),
    Load("eight", 8, (640, 480), 128),
    Load("one-x4", 1, (1024, 768), 256, repeats=4),
    Load("eight-x4", 8, (640, 480), 128, repeats=4),
)
#: Nine pictures of ten have come before.
KNOWN: Final = Load("eight-x10", 8, (640, 480), 512, repeats=10)
#: Six that span the matrix.
SPAN: Final = (
    "720p-1-short-c4",
    "720p-8-short-c16-x4",
    "720p-3-long-c64",
    "1080p-1-long-c64-x4",
    "1080p-3-short-c16",
    "screenshot-1-long-c16",
)
#: Asked one after another, decoded greedily, and compared between transports.
TEXT: Final = Load("texts", 2, (448, 336), 12, concurrency=1, tokens=16, keep_texts=True)
#: To see that everything works: small enough for a tiny model on a CPU.
SMOKE: Final = Load("smoke", 2, (112, 84), 12, concurrency=4, tokens=8, keep_texts=True)

_ALL: Final = {load.name: load for load in (TEXT, *GOALS, KNOWN, *MATRIX, SMOKE)}
DEFAULT: Final = (TEXT.name, *(load.name for load in GOALS), *SPAN)


def named(names: list[str]) -> list[Load]:
    """Loads by name. Raises `ValueError` that says which there are."""
    unknown = [name for name in names if name not in _ALL]
    if unknown:
        raise ValueError(f"there is no load {', '.join(unknown)}; there are {', '.join(_ALL)}")
    return [_ALL[name] for name in names]


def matrix() -> list[Load]:
    return [TEXT, *GOALS, *MATRIX]
