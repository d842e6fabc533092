"""Servers, pictures and options that are nearly the same, and are not."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from PIL import Image, PngImagePlugin

from mmbroker.demo import pictures

#: Width and height of most pictures: whole patches, so that a bound that is off by one tells.
SIZE: Final = (112, 84)
PIXELS: Final = SIZE[0] * SIZE[1]


@dataclass(frozen=True)
class Server:
    """A server's settings, as far as they could matter to a picture. `attributes`: of the image processor."""

    name: str
    image: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    pil: bool = False


def servers() -> list[Server]:
    """The plain one, those with one change, and those with one change of two kinds."""
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    edges = {"shortest_edge": 3136, "longest_edge": 12845056}
    bounds = [
        *(
            Server(f"at most {pixels} pixels", {"max_pixels": pixels})
            for pixels in range(PIXELS - 2, PIXELS + 3)
        ),
        *(
            Server(f"at least {pixels} pixels", {"min_pixels": pixels})
            for pixels in range(PIXELS - 2, PIXELS + 3)
        ),
        Server(f"at most {float(PIXELS)} pixels", {"max_pixels": float(PIXELS)}),
        *(
            Server(f"{name} {edges[name] + step}", attributes={"size": {**edges, name: edges[name] + step}})
            for name in edges
            for step in (-1, 1)
        ),
        *(
            Server(
                f"longest edge {PIXELS + step}", attributes={"size": {**edges, "longest_edge": PIXELS + step}}
            )
            for step in (-1, 0, 1)
        ),
    ]
    ways = [
        *(Server(f"resampled by {way}", attributes={"resample": way}) for way in (0, 1, 2)),
        Server("another mean", attributes={"image_mean": [mean[0], mean[1], 0.40821072]}),
        Server("means turned round", attributes={"image_mean": mean[::-1]}),
        Server("another deviation", attributes={"image_std": [*std[:2], 0.2757771]}),
        Server("rescaled by 1/256", attributes={"rescale_factor": 1 / 256}),
        Server("not rescaled", attributes={"do_rescale": False}),
        Server("not normalised", attributes={"do_normalize": False}),
        Server("not resized", attributes={"do_resize": False}),
        Server("colours as they are", attributes={"do_convert_rgb": False}),
        Server("patches of 28", attributes={"patch_size": 28}),
        Server("merged by one", attributes={"merge_size": 1}),
        Server("by PIL", pil=True),
    ]
    about = [
        Server("another revision", revision="main"),
        Server("another configuration", config={"bos_token_id": 7}),
        *(
            Server(f"{name} 0.0.{n}", versions={name: f"0.0.{n}"})
            for name in ("pillow", "torch")
            for n in (1, 2)
        ),
        Server("a variable", environment={"SGLANG_IMAGE_MAX_PIXELS": str(PIXELS)}),
        Server("another value of it", environment={"SGLANG_IMAGE_MAX_PIXELS": str(PIXELS - 1)}),
    ]
    both = [
        replace(way, name=f"{way.name}, {bound.name}", image=bound.image)
        for way in (*ways, *about)
        for bound in bounds[:10:3]
    ]
    return [Server("plain"), *bounds, *ways, *about, *both]


def album() -> dict[str, bytes]:
    """Encoded pictures by what they are."""
    found: dict[str, bytes] = {}

    def keep(name: str, picture: Image.Image, kind: str = "PNG", **options: Any) -> None:
        data = io.BytesIO()
        picture.save(data, kind, **options)
        found[name] = data.getvalue()

    plain = pictures.generated(1, *SIZE)
    keep("plain", plain)
    for level in (1, 9):
        keep(f"the same, compressed by {level}", plain, compress_level=level)
    for step in (-1, 1):
        keep(f"{step:+} wide", pictures.generated(1, SIZE[0] + step, SIZE[1]))
        keep(f"{step:+} high", pictures.generated(1, SIZE[0], SIZE[1] + step))
    for place in (0, 3 * PIXELS - 1):
        data = bytearray(plain.tobytes())
        data[place] ^= 1
        keep(f"another bit at {place}", Image.frombytes("RGB", SIZE, bytes(data)))
    gamma = PngImagePlugin.PngInfo()
    gamma.add(b"gAMA", (45455).to_bytes(4, "big"))
    keep("with a gamma", plain, pnginfo=gamma)
    keep("turned over", plain.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    for orientation in range(1, 9):
        turned = Image.Exif()
        turned[0x0112] = orientation
        keep(f"JPEG, orientation {orientation}", plain, "JPEG", quality=95, exif=turned)
        keep(f"PNG, orientation {orientation}", plain, exif=turned)
    for quality in (94, 95):
        keep(f"JPEG of {quality}", plain, "JPEG", quality=quality)
    keep("JPEG in four colours", plain.convert("CMYK"), "JPEG", quality=95)
    keep("WebP", plain, "WEBP", lossless=True)
    for alpha in (0, 1, 128, 254, 255):
        clear = plain.convert("RGBA")
        clear.putalpha(alpha)
        keep(f"alpha {alpha}", clear)
    clear.paste((0, 0, 0, 254), (3, 3, 4, 4))
    keep("a clear place", clear)
    grey = plain.convert("L")
    keep("grey", grey)
    keep("grey with alpha", grey.convert("LA"))
    keep("black and white", grey.convert("1"))
    keep("grey of 16 bits", grey.convert("I;16"))
    indices = Image.frombytes("P", SIZE, bytes(n % 7 for n in range(PIXELS)))
    for seed in (1, 2):
        indices.putpalette(random.Random(seed).randbytes(21))
        keep(f"palette {seed}", indices)
        keep(f"palette {seed}, as a GIF", indices, "GIF")
        for clear_one in (3, 4):
            keep(f"palette {seed}, colour {clear_one} clear", indices, transparency=clear_one)
    return found


#: What a request says of its picture, beside its bytes.
OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"detail": "auto"},
    {"detail": "low"},
    {"detail": "high"},
    {"max_dynamic_patch": 1},
    {"max_dynamic_patch": 2},
    {"preprocess_kwargs": {"max_pixels": PIXELS}},
    {"preprocess_kwargs": {"max_pixels": PIXELS - 1}},
)
