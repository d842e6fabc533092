"""When the scheduler is done with an item: the end of the uses that were taken for it.

The first of three ends counts: `MultimodalInputs.release_features`, `Req.release_mm_inputs_on_abort`, or the item's
death, which is the only one on some of SGLang's paths. For that last one the uses hang on the item itself, in its
`__dict__`, and a use that dies releases itself: items cannot be weakly referenced, their ids are reused, and whatever
is in `model_specific_data` reaches models.
"""

from __future__ import annotations

from typing import Any, Final

import mmbroker

from . import measure
from .outputs import Output

_KEY: Final = "_mmbroker_uses"


class Late:
    """A feature whose reference stays in its place until an encoder reads it."""

    def __init__(self, use: mmbroker.Use, reference: dict[str, Any]) -> None:
        self.reference = reference
        self._use = use
        self._paused = False

    def read(self, device: Any) -> Any:
        """The feature where the encoder is: there already, or copied in the current stream."""
        self._paused = False
        value = self._use.tensor
        parts = value if isinstance(value, list) else [value]
        there = all(part.device == device for part in parts)
        measure.counters.add("encoded")
        if there:
            return value
        measure.counters.add("moved")
        moved = [part.to(device, non_blocking=True) for part in parts]
        return moved if isinstance(value, list) else moved[0]

    def pause(self) -> None:
        """Not needed for now, from what is in the current stream on."""
        if not self._paused:
            self._paused = True
            self._use.pause()


class ItemUses(list["mmbroker.Use"]):
    """The uses of one item. They stay in their process: a pickle of an item may take its `__dict__` along."""

    def __init__(self, stream: object = None) -> None:
        """`stream`: the one in which models run, on a GPU."""
        super().__init__()
        self.stream = stream
        self.late: Late | None = None  # the item's feature, if it is read late
        self.output: Output | None = None  # what the encoder makes of it, if that is shared

    def __reduce__(self) -> tuple[type[ItemUses], tuple[()]]:
        return ItemUses, ()


def hang_on(item: Any, stream: object = None) -> ItemUses:
    """A list for the uses of `item`, hung on it."""
    uses = item.__dict__[_KEY] = ItemUses(stream)
    return uses


def late(item: Any) -> Late | None:
    """The feature of `item`, if it is one of ours and read late."""
    uses = item.__dict__.get(_KEY)
    return None if uses is None else uses.late


def output(item: Any) -> Output | None:
    """What the encoder makes of `item`, if that is shared."""
    uses = item.__dict__.get(_KEY)
    return None if uses is None else uses.output


def release(item: Any) -> None:
    """The engine is done with `item`; a second call does nothing."""
    uses = item.__dict__.pop(_KEY, None)
    if uses is None:
        return
    if uses.output is not None:
        uses.output.close(uses.stream)
    uses.late = uses.output = None
    for use in uses:
        use.release(uses.stream)
    measure.counters.add("releases", len(uses))
