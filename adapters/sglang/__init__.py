"""The SGLang plugin: multimodal features travel through a broker instead of SGLang's own transport.

`register` is the entry point (group ``sglang.srt.plugins``). SGLang calls it in the launcher and in every process it
starts. It offers the flags (`flags`), and nothing else happens unless somebody asks for the broker:

    sglang serve --mm-transport broker [--mm-broker PATH] [--mm-broker-wait SECONDS] ...
    MMBROKER_TRANSPORT=broker python program_that_makes_an_engine.py

The rooms: `seams` says which names of which SGLang version are hooked, `producer` puts features in the tokenizer's
process, `consumer` takes them in the scheduler's, `encoding` reads them there, `uses` ends their use, `outputs` keeps
what encoders make of them, `packing` shortens what still travels inside the request, `measure` counts.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Entry point. Light: it imports neither torch nor anything of SGLang beyond its hook registry."""
    from .flags import offer

    offer()
