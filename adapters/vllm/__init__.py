"""The vLLM adapter: encoder outputs, and what stands for pictures before them, are kept in a broker.

`MMBrokerConnector` is an ECConnector, vLLM's own seam for encoder outputs, and the only switch there is:

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "MMBrokerConnector",
        "ec_connector_module_path": "mmbroker.adapters.vllm", "ec_role": "ec_both",
        "ec_connector_extra_config": {"broker": "/run/user/1000/mmbroker/cpu"}}'

`register` is the entry point of the general plugin (group ``vllm.general_plugins``), which vLLM calls in each of its
processes; it sets hooks that do nothing unless that switch is there.

The rooms: `connector` is what vLLM calls, `scheduler` answers it from what `lookups` has found out, `worker` hands out
tensors, `saving` keeps new ones, `fetching` brings those from a GPU, `identity` says what makes two outputs the same.
Before preprocessing: `sender` in the API servers, `receiver` in the engine, `items` between them, `resending` when an
entry has gone, `seams` for where all that is hooked.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MMBrokerConnector", "register"]


def register() -> None:
    """Entry point of the general plugin. May be called more than once."""
    from . import seams

    seams.install()


def __getattr__(name: str) -> Any:
    """The connector is imported when vLLM asks for it: whoever only loads plugins need not pay for it."""
    if name == "MMBrokerConnector":
        from .connector import MMBrokerConnector

        return MMBrokerConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
