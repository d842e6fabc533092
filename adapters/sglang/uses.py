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

_KEY: Final = "_mmbroker_uses"


class ItemUses(list["mmbroker.Use"]):
    """The uses of one item. They stay in their process: a pickle of an item may take its `__dict__` along."""

    def __reduce__(self) -> tuple[type[ItemUses], tuple[()]]:
        return ItemUses, ()


def hang_on(item: Any) -> ItemUses:
    """A list for the uses of `item`, hung on it."""
    uses = item.__dict__[_KEY] = ItemUses()
    return uses


def release(item: Any) -> None:
    """The engine is done with `item`; a second call does nothing."""
    uses = item.__dict__.pop(_KEY, ())
    for use in uses:
        use.release()
    if uses:
        measure.counters.add("releases", len(uses))
