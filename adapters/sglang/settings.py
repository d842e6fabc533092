"""What the operator asked for, carried in the environment, because every process of the engine inherits that.

SGLang's own argument record has no place for foreign flags; and `sglang.Engine(...)` never sees a command line at all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

from mmbroker.adapters.weights import by_content

TRANSPORT: Final = "MMBROKER_TRANSPORT"
PATH: Final = "MMBROKER_PATH"
WAIT: Final = "MMBROKER_WAIT"
ENGINE: Final = "MMBROKER_ENGINE"
MEASURE: Final = "MMBROKER_MEASURE"
SHARE_OUTPUTS: Final = "MMBROKER_SHARE_OUTPUTS"
PREPROCESS: Final = "MMBROKER_PREPROCESS"

#: What SGLang takes for a yes in its own variables, and what is a no here.
YES: Final = ("1", "true", "yes", "y")
NO: Final = ("0", "false", "no", "n")
#: Where features are made: where SGLang would, or on the CPU.
PLACES: Final = ("engine", "cpu")
#: How long a request waits for room in a healthy broker, in seconds.
DEFAULT_WAIT: Final = 30.0
#: The SGLang versions whose seams are known (`seams.VERSIONS`).
TESTED: Final = ("0.5.17", "0.5.23")


@dataclass(frozen=True)
class Settings:
    """`broker`: carry features through a broker. `path`: the instance directory, None: find it. `wait`: seconds.
    `share_outputs`: of encoders, for the next time and for other engines. `on_cpu`: make features there, whatever
    SGLang would do."""

    broker: bool = False
    path: str | None = None
    wait: float = DEFAULT_WAIT
    engine: str = ""
    measure: str | None = None
    share_outputs: bool = True
    on_cpu: bool = False


def read(environ: MutableMapping[str, str] = os.environ) -> Settings:
    """The settings of this process; raises `ValueError` that names the variable which makes no sense."""
    transport = environ.get(TRANSPORT) or "sglang"
    if transport not in ("sglang", "broker"):
        raise ValueError(f"{TRANSPORT}={transport!r}: it is 'sglang' or 'broker'")
    text = environ.get(WAIT) or str(DEFAULT_WAIT)
    try:
        wait = float(text)
    except ValueError:
        wait = -1.0
    if not 0 <= wait <= 3600:
        raise ValueError(f"{WAIT}={text!r}: it is a number of seconds from 0 to 3600")
    place = environ.get(PREPROCESS) or PLACES[0]
    if place not in PLACES:
        raise ValueError(f"{PREPROCESS}={place!r}: it is {' or '.join(map(repr, PLACES))}")
    share = (environ.get(SHARE_OUTPUTS) or YES[0]).lower()
    if share not in (*YES, *NO):
        raise ValueError(f"{SHARE_OUTPUTS}={share!r}: it is {YES[0]!r} or {NO[0]!r}")
    by_content(environ)
    return Settings(
        broker=transport == "broker",
        path=environ.get(PATH) or None,
        wait=wait,
        engine=environ.get(ENGINE, ""),
        measure=environ.get(MEASURE) or None,
        share_outputs=share in YES,
        on_cpu=place == "cpu",
    )


def name_engine(environ: MutableMapping[str, str] = os.environ) -> str:
    """The engine's name: drawn once, by the launcher, and inherited by all its processes."""
    if not environ.get(ENGINE):
        environ[ENGINE] = f"sglang-{secrets.token_hex(6)}"
    return environ[ENGINE]
