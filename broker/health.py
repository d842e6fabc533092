"""Health means progress: is work pending that does not get on, and what is it stuck on?

Pending are calls that wait (for room, for a budget, for a key's writer), and grants that a rank has not acknowledged,
whether or not a call still waits for that. Finished is what moves them: a feature delivered, a grant acknowledged, a
hold closed, a waiting call served. Answers to `status` and refusals are neither, so that asking does not look like
progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from .records import Engine, Promise, Rank, Request, Session, Wait

if TYPE_CHECKING:
    from .state import Broker

#: Most sentences about what is stuck.
_SENTENCES: Final = 16
#: How long making what was promised may take before those who wait for it are pending, in seconds.
_MAKING: Final = 30.0


def health(broker: Broker, now: float) -> dict[str, Any]:
    """What `report()["health"]` says::

        {"ok": bool, "stuck": [sentence, ...], "oldest_pending_s": float, "last_finished_s": float}

    `ok` is False when something has been pending for `Limits.stuck_after` seconds and nothing at all has finished in
    the same time; then, and only then, `stuck` says what waits, for whom, and what to do, the oldest first.
    `oldest_pending_s` is the age of the oldest pending work, 0.0 if there is none; `last_finished_s` is how long ago
    something finished last (or the first event came, if nothing has), both in seconds.
    """
    books = broker.books
    pending = [*_calls(broker), *_silences(broker)]
    oldest = max((now - since for since in pending), default=0.0)
    finished = now - (books.finished if books.finished is not None else now)
    ok = min(oldest, finished) < broker.limits.stuck_after
    return {
        "ok": ok,
        "stuck": [] if ok else _sentences(broker, now),
        "oldest_pending_s": round(oldest, 3),
        "last_finished_s": round(finished, 3),
    }


def _counted(broker: Broker) -> Iterator[Session]:
    """All but the movers: nobody waits for what they read, nor for long for what they fetch."""
    return (session for session in broker.books.sessions.values() if session.mover is None)


def _waiting(broker: Broker) -> Iterator[Request]:
    for session in _counted(broker):
        yield from session.requests.values()


def _calls(broker: Broker) -> Iterator[float]:
    """Since when each call waits."""
    for request in _waiting(broker):
        making = request.reason is Wait.FLIGHT and _only_promised(broker, request)
        yield request.since + (_MAKING if making else 0.0)


def _only_promised(broker: Broker, request: Request) -> bool:
    """Is what a call waits for being made, and not being written?"""
    writers = [one for place in request.flights for one in broker.books.flights.get(place, ())]
    return all(isinstance(one, Promise) for one in writers)


def _silences(broker: Broker) -> Iterator[float]:
    """Since when each rank owes its oldest acknowledgement."""
    for session in _counted(broker):
        if session.unacked:
            yield next(iter(session.unacked.values()))


# --- what it is stuck on --------------------------------------------------------------------------------------------


def _sentences(broker: Broker, now: float) -> list[str]:
    found = [*_ranks(broker, now), *_requests(broker, now)]
    found.sort(key=lambda aged: -aged[0])
    return [sentence for _, sentence in found[:_SENTENCES]]


def _ranks(broker: Broker, now: float) -> Iterator[tuple[float, str]]:
    for session in _counted(broker):
        if session.unacked and session.engine is not None:
            age = now - next(iter(session.unacked.values()))
            yield age, _silent(broker, session, session.engine, age)


def _silent(broker: Broker, session: Session, engine: Engine, age: float) -> str:
    number = next(iter(session.unacked))
    hold = session.grants[number]
    feature = f"feature {hold.feature.number} ({len(session.unacked)} in all)"
    who = f"rank {session.rank} (pid {session.pid}) of engine {engine.name!r}"
    replica = hold.feature.replica
    if hold.ranks[session.number] is Rank.DEFERRED and replica is not None:
        loader = broker.books.sessions[replica.loader]
        return f"{who} has waited {age:.1f} s for {loader.name!r} (pid {loader.pid}) to load {feature}"
    return f"{who} has not acknowledged {feature} for {age:.1f} s: see whether that process is stopped or overloaded"


def _requests(broker: Broker, now: float) -> Iterator[tuple[float, str]]:
    """One sentence for all calls that wait for the same."""
    groups: dict[tuple[Any, ...], list[Request]] = {}
    for request in _waiting(broker):
        match request.reason:
            case Wait.FLIGHT:
                what: tuple[Any, ...] = (request.reason, *_writers(broker, request))
            case Wait.ROOM:
                what = (request.reason, request.tier, request.namespace)
            case Wait.CLIENT:
                what = (request.reason, request.session)
            case _:
                what = (request.reason, request.tier, request.engine)
        groups.setdefault(what, []).append(request)
    for requests in groups.values():
        first = min(requests, key=lambda request: request.since)
        age = now - first.since
        client = broker.books.sessions[first.session]
        verb = "calls wait" if len(requests) > 1 else "call waits"
        who = f"{len(requests)} {verb}, the oldest of {client.name!r} (pid {client.pid}) for {age:.1f} s: "
        yield age, who + _cause(broker, first)


def _cause(broker: Broker, request: Request) -> str:
    if request.reason is Wait.FLIGHT:
        return f"{_join(_writers(broker, request))} must seal the same key first, or end"
    return broker.admission.lack(request).message


def _writers(broker: Broker, request: Request) -> list[str]:
    books = broker.books
    writers = {lease.session for place in request.flights for lease in books.flights.get(place, ())}
    return sorted(f"{books.sessions[number].name!r} (pid {books.sessions[number].pid})" for number in writers)


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "another client"
