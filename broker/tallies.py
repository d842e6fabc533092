"""What clients count themselves and tell, kept beyond their sessions: sums over all clients never go back. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Final

from .records import Session

#: Names in one tally; characters in a name; the largest count; names in the sum of those who are gone; how many of them
#: are told apart.
NAMES: Final = 96
NAME_LIMIT: Final = 64
COUNT_LIMIT: Final = 1 << 62  # sums stop there, too: a message carries no larger numbers
_SUMMED: Final = 256
_REMEMBERED: Final = 256
#: What is open at present goes with its client; everything else was counted once and for all.
PASSING: Final = frozenset(
    {"holds", "open_leases", "retained", "sglang_holds"}
    | {f"table_{name}" for name in ("entries", "idle", "busy", "unsettled", "kept", "buffer_bytes")}
)

_Client = tuple[int, int, str, str]


class Tallies:
    """A client that comes back tells everything since its own start again: then its earlier session's word is void."""

    def __init__(self) -> None:
        self._gone: OrderedDict[_Client, dict[str, int]] = OrderedDict()
        self._sum: Counter[str] = Counter()

    def hear(self, session: Session, counts: Mapping[str, int]) -> bool:
        """A session's own counters, cumulative, by name. False: too many, too long, unprintable, or no counts."""
        if len(counts) > NAMES or any(len(name) > NAME_LIMIT or not name.isprintable() for name in counts):
            return False
        if not all(0 <= count <= COUNT_LIMIT for count in counts.values()):
            return False
        earlier = None if session.tally else self._gone.get(_client(session))
        if earlier is not None and all(counts.get(name, 0) >= count for name, count in earlier.items()):
            del self._gone[_client(session)]
        session.tally = dict(counts)
        return True

    def end(self, session: Session) -> None:
        """A session has ended: what it told stays true."""
        lasting = {name: count for name, count in session.tally.items() if name not in PASSING}
        if not lasting:
            return
        client = _client(session)
        self._fold(self._gone.pop(client, {}))
        self._gone[client] = lasting
        if len(self._gone) > _REMEMBERED:
            self._fold(self._gone.popitem(last=False)[1])

    def _fold(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if name in self._sum or len(self._sum) < _SUMMED:
                self._sum[name] = min(self._sum[name] + count, COUNT_LIMIT)

    @property
    def before(self) -> dict[str, int]:
        """Counted by clients that are gone."""
        total = Counter(self._sum)
        for counts in self._gone.values():
            for name, count in counts.items():
                if name in total or len(total) < _SUMMED:
                    total[name] = min(total[name] + count, COUNT_LIMIT)
        return dict(total)


def _client(session: Session) -> _Client:
    return session.uid, session.pid, session.namespace, session.name
