"""Where the general plugin hooks vLLM: the factories of its processor caches, and its table of requests.

They are no official points, so the versions that were tested are listed (`settings.VERSIONS`). On any other nothing is
hooked; the connector then says why, if there is one. A hook does nothing for an engine that did not ask for a broker.
"""

from __future__ import annotations


def install() -> None:
    """Set the hooks of this process, once."""
