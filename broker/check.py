"""What a check of the doctor's says."""

from __future__ import annotations

from typing import Final, NamedTuple

#: All is well; something is done without; something that belongs here does not work.
FINE: Final = "fine"
NOTE: Final = "note"
BROKEN: Final = "broken"


class Check(NamedTuple):
    """`found` is what there is, `advice` what to do about it; there is none where all is well."""

    name: str
    state: str
    found: str
    advice: str = ""
