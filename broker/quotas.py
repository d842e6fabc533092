"""How much a client, an engine and a namespace may have at once.

Whoever is over a *budget* waits, and nobody else does: a client has one for its leases and holds, an engine for what it
has in flight. A *limit* refuses at once. Each answer names the setting, its figures, and what to do next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mmbroker.proto.messages import Failed, Item

from .arena.allocator import round_up
from .books import Books
from .records import Engine, Feature, Lease, Place, Request, Session, Wait


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes when it is served: a hold for each hit, a lease for each fresh item, promises. Promises that
    it keeps make room for the leases in their place."""

    hits: list[Feature]
    fresh: list[Item]
    promised: int = 0
    kept: int = 0

    @property
    def count(self) -> int:
        """So many more there are afterwards."""
        return max(0, len(self.hits) + len(self.fresh) + self.promised - self.kept)

    @property
    def nbytes(self) -> int:
        """Whole pages of every hold and lease."""
        return sum(feature.slot.nbytes for feature in self.hits) + self.written

    @property
    def written(self) -> int:
        """Whole pages of the leases alone."""
        return sum(round_up(item.form.nbytes) for item in self.fresh)

    @property
    def distinct(self) -> list[Feature]:
        """Each hit once, however often it is held."""
        return list({feature.number: feature for feature in self.hits}.values())


class Quotas:
    def __init__(self, books: Books) -> None:
        self.books = books
        self.limits = books.limits

    # --- limits -----------------------------------------------------------------------------------------------------

    def one_more_call(self, session: Session) -> Failed | None:
        """Why a client may not have one more call that waits, if so."""
        waiting, limit = len(session.requests) + len(session.tickets), self.limits.pending_per_session
        return self._over("pending_per_session", "this client", "calls waiting", 1, waiting, limit)

    def may_promise(self, session: Session) -> bool:
        """May a client be given one promise more that it did not ask for?"""
        limits = self.limits
        waiting = sum(len(request.items) for request in session.requests.values())
        return (
            session.features + waiting < limits.features_per_session
            and session.features < (limits.client_budget_features or limits.features_per_session)
            and self.books.claims[session.namespace] < limits.features_per_namespace
        )

    def batch(self, session: Session, items: list[Item]) -> Failed | None:
        """Why a call may not have so many items, whatever there is, if so."""
        limits, count = self.limits, len(items)
        waiting = sum(len(request.items) for request in session.requests.values())
        used = session.features + waiting - len(session.promises.keys() & {item.promise for item in items})
        parts = sum(len(item.form.parts or ()) for item in items)
        return (
            self._over("items_per_call", "one call", "items", count, 0, limits.items_per_call)
            or self._over("parts_per_call", "one call", "parts", parts, 0, limits.parts_per_call)
            or self._over(
                "features_per_session", "this client", "features", count, used, limits.features_per_session
            )
        )

    def refusal(self, request: Request, demand: Demand) -> Failed | None:
        """Why a request may not have what it asks for, if so: no budget is as large, or a limit is reached."""
        limits = self.limits
        count, nbytes, namespace = demand.count, demand.nbytes, request.namespace
        session = self.books.sessions[request.session]
        if request.engine is not None:
            refused = self._over(
                "features_per_engine", "one call", "features", count, 0, limits.features_per_engine
            )
            if refused is not None:
                return refused
        in_use = more = 0
        if limits.namespace_bytes:
            in_use = self.books.pool.held_by(namespace)
            woken = [f.slot.nbytes for f in demand.distinct if f.slot.tier == "host" and not f.pinned]
            more = sum(woken) + (demand.written if request.tier == "host" else 0)
        claims, whose = self.books.claims[namespace], f"namespace {namespace!r}"
        return (
            self._over("client_budget_features", "one call", "features", count, 0, limits.client_budget_features)
            or self._over("client_budget_mib", "one call", "bytes", nbytes, 0, limits.client_budget_bytes)
            or self._over("session_mib", "this client", "bytes", nbytes, session.nbytes, limits.session_bytes)
            or self._over(
                "features_per_namespace", whose, "features", count, claims, limits.features_per_namespace
            )
            or self._over(
                "namespace_mib", whose, "bytes", more, in_use, limits.namespace_bytes
            )
        )  # fmt: skip

    def _over(self, setting: str, whose: str, unit: str, more: int, used: int, limit: int) -> Failed | None:
        """A refusal if so much more is over the limit; 0 is none."""
        if not limit or not more or used + more <= limit:
            return None
        counters = self.books.counters
        counters["quota_refusals"] += 1
        counters[f"quota_refusals_{setting}"] += 1
        said = (
            f"{whose} has {used} {unit}, and {more} more exceed the limit of {limit}: drop some, wait for some to end"
            if used
            else f"{more} {unit} of {whose} exceed the limit of {limit}: split the batch"
        )
        figures = {"requested": more, "used": used, "limit": limit}
        return Failed("QuotaExceeded", f"{said}, or raise the setting `{setting}`", figures)

    # --- budgets ----------------------------------------------------------------------------------------------------

    def budget(self, request: Request, demand: Demand) -> Wait | None:
        """Which budget a request has to wait for."""
        limits, session = self.limits, self.books.sessions[request.session]
        nbytes = demand.nbytes
        for wants, used, most in (
            (demand.count, session.features, limits.client_budget_features),
            (nbytes, session.nbytes, limits.client_budget_bytes),
        ):
            if most and used + wants > most:
                return Wait.CLIENT
        engine = request.engine
        if engine is None:
            return None
        more = [(request.tier, round_up(item.form.nbytes)) for item in demand.fresh]
        more += [(f.slot.tier, f.slot.nbytes) for f in demand.distinct if f.number not in engine.uses]
        return None if self._has_room(engine, more) else Wait.BUDGET

    def _has_room(self, engine: Engine, more: list[tuple[str, int]]) -> bool:
        """May an engine have these features in flight, too: tier and bytes of each?

        One that has nothing in flight may take any bytes that fit the arena.
        """
        if more and engine.features + len(more) > self.limits.features_per_engine:
            return False
        extra: Counter[str] = Counter()
        for tier, nbytes in more:
            extra[tier] += nbytes
        return all(
            not nbytes
            or not engine.in_flight[tier]
            or engine.in_flight[tier] + nbytes <= self.books.budget(tier, engine)
            for tier, nbytes in extra.items()
        )

    def side_door(self, engine: Engine, leases: list[Lease]) -> Failed | None:
        """Why leases that were not made for an engine may not be sealed to it, if so: they waited for no budget."""
        more: dict[Place, tuple[str, int]] = {}
        for lease in leases:
            taken = self.books.features.get(lease.place)
            slot = lease.slot if taken is None else taken.slot
            if lease.engine is not engine and (taken is None or taken.number not in engine.uses):
                more[lease.place] = (slot.tier, slot.nbytes)
        if self._has_room(engine, list(more.values())):
            return None
        self.books.counters["quota_refusals"] += 1
        self.books.counters["quota_refusals_seal"] += 1
        used, nbytes = engine.features, sum(nbytes for _, nbytes in more.values())
        text = (
            f"engine {engine.name!r} has {used} features of {engine.in_flight.total()} bytes in flight, and no room "
            f"for {len(more)} more of {nbytes} bytes: create them with to={engine.name!r}, which waits for its budget"
        )
        figures = {"requested": len(more), "used": used, "limit": self.limits.features_per_engine}
        return Failed("QuotaExceeded", text, figures)

    def lack(self, request: Request) -> Failed:
        """What a request is told that has waited for a budget in vain."""
        limits, tier, engine = self.limits, request.tier, request.engine
        if request.reason is Wait.CLIENT or engine is None:
            return self._lack_of_client(request)
        count = request.wants[0]
        if engine.features + count > limits.features_per_engine:
            used, most = engine.features, limits.features_per_engine
            text = f"engine {engine.name!r} has {used} features in flight, and {count} more exceed the limit of {most}"
            figures = {"requested": count, "used": used, "limit": most}
            then = "; end some of its requests, or raise the setting `features_per_engine`"
            return Failed("QuotaExceeded", text + then, figures)
        budget, in_flight = self.books.budget(tier, engine), engine.in_flight[tier]
        text = (
            f"engine {engine.name!r} has {in_flight} bytes in flight of its budget of {budget}, and {request.nbytes} "
            f"more do not fit; end some of its requests, or raise --{tier}-mib"
        )
        if limits.engine_bytes == budget:
            text += " and the setting `engine_mib`"
        figures = {"requested": request.nbytes, "free": max(0, budget - in_flight), "limit": budget}
        return Failed("PoolFull", text, figures)

    def _lack_of_client(self, request: Request) -> Failed:
        """Its calls are served in order: what waits before this one counts as if the client had it."""
        session = self.books.sessions[request.session]
        ahead = [
            r.wants
            for r in session.requests.values()
            if r.reason is Wait.CLIENT and r.number < request.number
        ]
        count, nbytes = request.wants
        used, used_bytes = (
            session.features + sum(n for n, _ in ahead),
            session.nbytes + sum(n for _, n in ahead),
        )
        features, most = self.limits.client_budget_features, self.limits.client_budget_bytes
        parts = [f"{features} features"] * bool(features) + [f"{most} bytes"] * bool(most)
        text = (
            f"client {session.name!r} has {used} features of {used_bytes} bytes of its budget of {' and '.join(parts)}"
            f", and {count} more of {nbytes} bytes have to wait; end some of its requests, or raise the settings "
            "`client_budget_features` and `client_budget_mib`"
        )
        figures = {"requested": nbytes, "used": used_bytes, "limit": most}
        if features and (used + count > features or not most):
            figures = {"requested": count, "used": used, "limit": features}
        return Failed("QuotaExceeded", text, figures)
