"""What SGLang 0.5.17 asks the GPU although the host knows it: which tokens of a batch are a picture's, and how many.

It waits for the answer, behind the whole encoder, and until it has it the GPU gets nothing to do after the encoder. How
many there are follows from where the items are in the prompt, and later versions count there, too. Where the encoder's
rows do not come to that number, SGLang's own way finds out why, and says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from . import uses

#: Tokens of the items that are being embedded, if they are ours. SGLang's functions do not hand it on.
_tokens: Final[ContextVar[int | None]] = ContextVar("mmbroker_tokens", default=None)


def count_ahead(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `get_embedding_and_mask`: one modality's items of a batch."""
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    if not any(uses.late(item) for item in call["embedding_items"]):
        return original(*args, **kwargs)
    token = _tokens.set(
        tokens_between(call["prefix_length"], call["extend_length"], call["items_offset_list"])
    )
    try:
        return original(*args, **kwargs)
    finally:
        _tokens.reset(token)


def mask(original: Callable[[Any, Any], Any], ids: Any, placeholders: Any) -> Any:
    """AROUND `_get_multimodal_mask`, where torch waits for the GPU if the items are many."""
    if _tokens.get() is None:
        return original(ids, placeholders)
    return (ids.unsqueeze(-1) == placeholders).any(dim=-1, keepdim=True)


def adjust(original: Callable[..., Any], embedding: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `_adjust_embedding_length`, where SGLang counts the mask."""
    if embedding.dim() == 2 and embedding.shape[0] == _tokens.get():
        return embedding
    return original(embedding, *args, **kwargs)


def tokens_between(
    prefixes: Sequence[int], extended: Sequence[int], offsets: Sequence[Sequence[tuple[int, int]]]
) -> int:
    """How many tokens of items are in what is computed now. `prefixes`, `extended`: of each request, the tokens that
    were computed before, and those that are now; `offsets`: the first and the last token of each of its items."""
    return sum(
        max(0, min(int(last) + 1, prefix + length) - max(int(first), prefix))
        for prefix, length, items in zip(prefixes, extended, offsets, strict=False)
        for first, last in items
    )
