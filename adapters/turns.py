"""How soon a process's threads get their turn at the interpreter.

An engine's scheduler and a tokenizer's event loop seldom let go of the interpreter's lock, and for a moment only: who
waits for it gets it by asking, after the switch interval. That is 5 ms unless it is told otherwise, and a feature's
way has about ten such moments in each process: of the thread that puts, of those that hash, of the receiver. With a
shorter interval the same work is done in the same order, and the waiting between is gone.
"""

from __future__ import annotations

import sys
from typing import Final

#: Seconds. A change of turns takes some 20 us, so even two threads that never rest lose a few percent by it.
INTERVAL: Final = 0.0005


def shorten() -> None:
    """Have threads change turns after `INTERVAL`, unless they do so sooner already. For the whole process."""
    if sys.getswitchinterval() > INTERVAL:
        sys.setswitchinterval(INTERVAL)
