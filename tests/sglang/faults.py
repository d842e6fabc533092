"""A second plugin, for tests only: it breaks the first one in the engine's processes when a file says so, has
schedulers on the CPU believe that they are on a GPU, and counts what is decoded and preprocessed.

It is copied into a directory of its own with the metadata of an installed distribution, so that SGLang finds it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    """The entry point."""
    import mmbroker
    from mmbroker.adapters.sglang import consumer

    if os.environ.get("TEST_ACCESS") == "copy":
        consumer.READS_ONLY = frozenset()  # type: ignore[misc]
    if device := os.environ.get("TEST_DEVICE"):
        consumer.device_of = lambda scheduler: device
    orders = Path(os.environ["TEST_FAULTS"])
    take = mmbroker.FeatureTable.take

    def broken(table: mmbroker.FeatureTable, reference: Any) -> mmbroker.Use:
        if (orders / f"take-{table.rank}").exists():
            raise RuntimeError("a fault made on purpose")
        return take(table, reference)

    mmbroker.FeatureTable.take = broken  # type: ignore[method-assign]
    _count(orders)


def _count(orders: Path) -> None:
    """A byte in a file for each picture that any process decodes, and for each that it preprocesses."""
    from PIL import ImageFile
    from transformers.image_processing_utils import BaseImageProcessor

    load, call = ImageFile.ImageFile.load, BaseImageProcessor.__call__

    def one_more(name: str, count: int = 1) -> None:
        file = os.open(orders / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, b"x" * count)
        os.close(file)

    def loading(picture: Any, *args: Any, **kwargs: Any) -> Any:
        if picture.tile:  # else it is decoded already
            one_more("decoded")
        return load(picture, *args, **kwargs)

    def preprocessing(processor: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        one_more("preprocessed", len(images) if isinstance(images, list | tuple) else 1)
        return call(processor, images, *args, **kwargs)

    ImageFile.ImageFile.load = loading  # type: ignore[method-assign]
    BaseImageProcessor.__call__ = preprocessing  # type: ignore[method-assign]
