"""Pictures to send: real photographs, and generated ones of any size."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


def photographs() -> dict[str, Image]:
    """The two photographs that ship with scikit-learn, 640x427."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    sample = load_sample_images()
    names = (Path(name).stem for name in sample.filenames)
    return {name: Image.fromarray(pixels) for name, pixels in zip(names, sample.images, strict=True)}


def generated(seed: int, width: int, height: int) -> Image:
    """A picture of colour gradients with some noise; the same for the same arguments."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    corners = rng.uniform(0, 255, (2, 2, 3))
    left, right = (corners[0, i] * (1 - y[..., None]) + corners[1, i] * y[..., None] for i in (0, 1))
    smooth = left * (1 - x[None, :, None]) + right * x[None, :, None]
    noisy = smooth + rng.normal(0, 12, smooth.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def data_url(picture: Image) -> str:
    """The picture as a request carries it."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
