"""Screenshots to send, and in which order: some are new, some have come before."""

from __future__ import annotations

import base64
import functools
import io
import random
import string
from collections.abc import Iterable
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from mmbroker.demo import pictures

SIZE: Final = (1920, 1080)
#: So many desktops there are; each screenshot has a photograph of its own on one of them.
_DESKTOPS: Final = 4
_PHOTOGRAPH: Final = (320, 180)


def screenshot(seed: int) -> str:
    """A desktop with windows, text and a photograph, as the data URL of a PNG; the same for the same seed."""
    draw, (width, height) = random.Random(seed), _PHOTOGRAPH
    picture = _desktop(seed % _DESKTOPS).copy()
    place = draw.randrange(SIZE[0] - width), draw.randrange(SIZE[1] - height)
    picture.paste(pictures.generated(seed, width, height), place)
    data = io.BytesIO()
    picture.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


@functools.cache
def _desktop(seed: int) -> Image.Image:
    draw, (width, height) = random.Random(seed), SIZE
    desktop = Image.new("RGB", SIZE, _colour(draw, 225))
    brush, font = ImageDraw.Draw(desktop), ImageFont.load_default(14)
    for _ in range(6):
        left, top = draw.randrange(width - 200), draw.randrange(height - 100)
        corner = left + draw.randrange(100, 700), top + draw.randrange(60, 400)
        brush.rectangle((left, top, *corner), fill=_colour(draw), outline=(0, 0, 0))
    for top in range(20, height - 20, 18):
        words = ("".join(draw.choices(string.ascii_lowercase, k=draw.randrange(2, 10))) for _ in range(36))
        brush.text((20, top), " ".join(words), fill=(30, 30, 30), font=font)
    return desktop


def _colour(draw: random.Random, least: int = 0) -> tuple[int, int, int]:
    return draw.randrange(least, 256), draw.randrange(least, 256), draw.randrange(least, 256)


def order(requests: int, repeats: int) -> list[int]:
    """Numbers of pictures, from 0, in an order in which `repeats` percent have come before."""
    draw = random.Random(repeats)
    fresh = max(1, round(requests * (100 - repeats) / 100))
    again = set(draw.sample(range(1, requests), requests - fresh))
    sent: list[int] = []
    new = 0
    for position in range(requests):
        if position in again:
            sent.append(draw.randrange(new))
        else:
            sent.append(new)
            new += 1
    return sent


class Album:
    """Screenshots by number, each drawn when it is first asked for."""

    def __init__(self) -> None:
        self._urls: dict[int, str] = {}

    def __getitem__(self, number: int) -> str:
        if number not in self._urls:
            self._urls[number] = screenshot(number)
        return self._urls[number]

    def draw(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self[number]
