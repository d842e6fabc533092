"""Requests, made before anything is measured, and kept in a file: whoever sends them only reads.

Pictures are random JPEGs, so that no two are alike and each has the size of a photograph.
"""

from __future__ import annotations

import base64
import io
import json
import mmap
import os
import struct
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from .loads import Load

QUALITY: Final = 85
_COUNT: Final = struct.Struct("<Q")


def picture(seed: int, number: int, width: int, height: int) -> str:
    """A JPEG in base64: colours of 8x8 pixels, smoothly joined."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng((seed, number))
    small = rng.integers(0, 255, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(data, "JPEG", quality=QUALITY)
    return base64.b64encode(data.getvalue()).decode()


def body(load: Load, model: str, number: int, pictures: list[str]) -> dict[str, Any]:
    """One chat request, answered greedily and in a stream, of exactly `load.tokens` tokens where the server can."""
    words = " ".join(f"w{(number * 31 + k) % 997}" for k in range(load.words))
    urls = [{"url": "data:image/jpeg;base64," + one} for one in pictures]
    content = [
        *({"type": "image_url", "image_url": url} for url in urls),
        {"type": "text", "text": words},
    ]
    return {
        "model": model,
        "max_tokens": load.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": content}],
    }


def which(load: Load, number: int) -> list[int]:
    """The pictures of a request, by number. Those that repeat come again after all have come once."""
    first = number * load.images
    if load.repeats == 1:
        return list(range(first, first + load.images))
    distinct = max(1, load.requests * load.images // load.repeats)
    return [(first + k) % distinct for k in range(load.images)]


def _make(load: Load, seed: int, model: str, numbers: range) -> list[bytes]:
    made: dict[int, str] = {}

    def one(number: int) -> str:
        if number not in made:
            made[number] = picture(seed, number, *load.size)
        return made[number]

    return [
        json.dumps(body(load, model, number, [one(k) for k in which(load, number)])).encode()
        for number in numbers
    ]


def write(path: Path, load: Load, seed: int, model: str, count: int) -> None:
    """`count` requests of a load into a file: how many, where each ends, and the bodies."""
    workers = max(1, min(len(os.sched_getaffinity(0)), 16, count // 4))
    step = -(-count // workers)
    parts = [range(start, min(start + step, count)) for start in range(0, count, step)]
    made: list[bytes] = []
    if len(parts) == 1:
        made = _make(load, seed, model, parts[0])
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(_make, load, seed, model, part) for part in parts]
            for job in jobs:
                made += job.result()
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(_COUNT.pack(len(made)))
        end = 0
        for one in made:
            end += len(one)
            file.write(_COUNT.pack(end))
        for one in made:
            file.write(one)
    part.rename(path)


def read(path: Path) -> tuple[int, Callable[[int], bytes]]:
    """How many there are, and a function that gives one by its number."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (count,) = _COUNT.unpack_from(data)
    ends = [0, *struct.unpack_from(f"<{count}Q", data, _COUNT.size)]
    base = _COUNT.size * (1 + count)
    return count, lambda number: data[base + ends[number] : base + ends[number + 1]]
