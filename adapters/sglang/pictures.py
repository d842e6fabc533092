"""How many pictures a request has, and how large they are: what a processor's output says of it.

For the metrics only, and from the tokenizer's process, where each request passes once. A look costs some microseconds;
what was seen waits, at most so much of it, for the thread that exports it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from mmbroker.proto.reference import is_reference

logger = logging.getLogger(__name__)

#: Requests that may wait to be exported: more than a tokenizer handles in the second between two exports.
_KEPT: Final = 4096
#: Channels times frames of one patch, as patch processors lay it out: pictures of two frames (Qwen-VL), or of one.
_DEPTHS: Final = (6, 3)


class Picture(NamedTuple):
    """`pixels`: of what the model sees, after resizing; None: this layout is not known. `nbytes`: of its feature."""

    pixels: int | None
    nbytes: int


#: The pictures of requests, by request; None: nobody exports them.
seen: deque[list[Picture]] | None = None


def watch() -> deque[list[Picture]]:
    """Keep what is seen from now on, for whoever takes it from the left."""
    global seen
    seen = seen if seen is not None else deque(maxlen=_KEPT)
    return seen


def look(output: Any) -> None:
    """A request's media have been processed."""
    if seen is None:
        return
    try:
        found = [picture for item in output.mm_items for picture in _pictures(item)]
    except (
        Exception
    ):  # what a processor puts out is its own affair, and figures are no reason to fail a request
        logger.debug("mmbroker: the sizes of a request's pictures are not known", exc_info=True)
        return
    if found:
        seen.append(found)


def _pictures(item: Any) -> Iterator[Picture]:
    """Of an item, which may have several."""
    if "image" not in str(item.modality.name).lower():
        return
    shape, nbytes = _form(item.feature)
    grid = (item.model_specific_data or {}).get("image_grid_thw")
    if grid is not None:
        patches = [math.prod(row) for row in (grid.tolist() if grid.dim() == 2 else [grid.tolist()])]
        side = _patch(shape[-1]) if shape else None
        for count in patches:
            yield Picture(side * side * count if side else None, nbytes * count // max(1, sum(patches)))
    elif len(shape) >= 3 and shape[-3] == 3:  # planes of colours; of one picture or of its tiles
        yield Picture(math.prod(shape) // 3, nbytes)
    else:
        yield Picture(None, nbytes)


def _form(feature: Any) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of a tensor, of its reference, or of a list of tensors (then the first one's shape)."""
    if is_reference(feature):
        return tuple(feature["shape"]), int(feature["nbytes"])
    if isinstance(feature, list):
        forms = [_form(part) for part in feature]
        return forms[0][0] if forms else (), sum(nbytes for _, nbytes in forms)
    return tuple(getattr(feature, "shape", ())), int(getattr(feature, "nbytes", 0))


def _patch(values: int) -> int | None:
    """The side in pixels of a patch of so many values."""
    for depth in _DEPTHS:
        side = math.isqrt(values // depth)
        if side and side * side * depth == values:
            return side
    return None
