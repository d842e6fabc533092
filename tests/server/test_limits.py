"""Budgets, limits and the watchdog of a real broker, set in its settings file and seen in its status."""

from __future__ import annotations

import signal
from collections.abc import Callable

from mmbroker.proto import messages as m
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, RawClient, eventually
from tests.server.items import an_item, lease_one

MIB = 1 << 20
StartPuppet = Callable[..., Puppet]


def refused(reply: m.Reply, requested: int, used: int, limit: int, setting: str) -> None:
    assert isinstance(reply, m.Failed) and reply.error == "QuotaExceeded", reply
    assert reply.figures == {"requested": requested, "used": used, "limit": limit}
    assert f"raise the setting `{setting}`" in reply.message


def seal(client: RawClient, leased: m.Leased, to: str | None = None) -> m.Reply:
    return client.call(m.Seal([m.Sealing(leased.lease)], to))


def test_one_agent_cannot_flood_an_engine(start_broker: StartBroker) -> None:
    """It waits at its own budget, while others are served; what it has, and of how much, is in the status."""
    broker = start_broker(client_budget_features=4, client_budget_mib=8)
    with (
        RawClient(broker.directory, name="engine") as rank,
        RawClient(broker.directory, name="agent") as agent,
        RawClient(broker.directory, name="other") as other,
    ):
        assert rank.call(m.Attach("e", 0, 1)) == m.Attached(True)

        def deliver(client: RawClient, nbytes: int) -> int:
            created = client.call(m.Create([an_item(nbytes)], "e"))
            assert isinstance(created, m.Created), created
            (leased,) = created.results
            assert isinstance(leased, m.Leased)
            seq = client.post(m.Seal([m.Sealing(leased.lease)], "e"))
            (grant,) = rank.notice(m.Granted).grants
            rank.cast(m.Ack([grant.ref.hold]))
            assert isinstance(client.answer(seq), m.Sealed)
            return int(grant.ref.hold)

        held = [deliver(agent, MIB) for _ in range(4)]
        flood = [agent.post(m.Create([an_item(MIB)], "e"), timeout=60.0) for _ in range(20)]
        for _ in range(4):
            deliver(other, 2 * MIB)
        status = eventually(lambda: (s := broker.status())["waiting_count"] == 20 and s, "the flood")
        assert {r["client"] for r in status["waiting"]} == {"agent"}
        assert {r["for"] for r in status["waiting"]} == {"client"}
        assert status["budget"] == {"features": 4, "bytes": 8 * MIB}
        has = {s["name"]: (s["holds"], s["bytes"]) for s in status["sessions"]}
        assert (has["agent"], has["other"]) == ((4, 4 * MIB), (4, 8 * MIB))
        late = other.call(m.Create([an_item(MIB)], "e"), timeout=0.05)
        assert isinstance(late, m.Failed) and late.error == "QuotaExceeded"
        assert "of its budget of 4 features and 8388608 bytes" in late.message
        refused(agent.call(m.Create([an_item(9 * MIB)])), 9 * MIB, 0, 8 * MIB, "client_budget_mib")
        agent.cast(m.Drop(held[:2]))
        for seq in flood[:2]:
            assert isinstance(agent.answer(seq), m.Created)
        status = broker.status()
        assert status["waiting_count"] == 18
        assert status["counters"]["quota_refusals_client_budget_mib"] == 1


def test_limits_of_a_session_an_engine_and_a_namespace(start_broker: StartBroker) -> None:
    broker = start_broker(
        session_mib=3, features_per_engine=2, engine_mib=4, features_per_namespace=5, namespace_mib=4
    )
    with (
        RawClient(broker.directory, name="one") as one,
        RawClient(broker.directory, name="two") as two,
        RawClient(broker.directory, name="other", namespace="other") as other,
    ):
        assert isinstance(seal(one, lease_one(one, 2 * MIB)), m.Sealed)
        refused(one.call(m.Create([an_item(2 * MIB)])), 2 * MIB, 2 * MIB, 3 * MIB, "session_mib")
        refused(two.call(m.Create([an_item(3 * MIB)])), 3 * MIB, 2 * MIB, 4 * MIB, "namespace_mib")
        tiny = [an_item(0) for _ in range(5)]
        refused(two.call(m.Create(tiny)), 5, 1, 5, "features_per_namespace")
        assert isinstance(other.call(m.Create(tiny)), m.Created)
        assert two.call(m.Attach("e", 0, 1)) == m.Attached(True)
        refused(one.call(m.Create(tiny[:3], "e")), 3, 0, 2, "features_per_engine")
        leased = [lease_one(one, 0) for _ in range(3)]
        failed = one.call(m.Seal([m.Sealing(each.lease) for each in leased], "e"))
        assert isinstance(failed, m.Failed) and "create them with to='e'" in failed.message
        status = broker.status()
        assert status["engines"][0]["budget"] == 4 * MIB
        names = {n["namespace"]: (n["features"], n["bytes"], n["bytes_limit"]) for n in status["namespaces"]}
        assert names == {"uid-0": (4, 2 * MIB, 4 * MIB), "other": (5, 0, 4 * MIB)}
        assert status["counters"]["quota_refusals"] == 5


def test_calls_that_wait_are_limited(start_broker: StartBroker) -> None:
    broker = start_broker(host_mib=4, pending_per_session=3)
    with RawClient(broker.directory) as client, RawClient(broker.directory) as other:
        lease_one(other, 4 * MIB)
        for _ in range(3):
            client.post(m.Create([an_item(MIB)]), timeout=60.0)
        refused(client.call(m.Create([an_item(MIB)])), 1, 3, 3, "pending_per_session")
        assert isinstance(other.call(m.Status()), m.Report)


# --- the watchdog ---------------------------------------------------------------------------------------------------


def test_a_stopped_rank_makes_the_health_bad_and_is_named(broker: BrokerProcess, puppet: StartPuppet) -> None:
    """With the defaults; and the broker is well again when it goes on."""
    rank = puppet()
    rank(f"c = RawClient(Path({str(broker.directory)!r}), name='rank'); c.call(m.Attach('e', 0, 1))")
    with RawClient(broker.directory, name="producer") as producer:
        seq = producer.post(m.Seal([m.Sealing(lease_one(producer, MIB).lease)], "e"), timeout=60.0)
        rank("(grant,) = c.notice(m.Granted).grants")
        rank.stop()
        assert broker.status()["health"]["ok"], "two seconds have not passed"
        health = eventually(lambda: not (h := broker.status()["health"])["ok"] and h, "a bad health")
        assert health["oldest_pending_s"] >= 2.0
        assert health["last_finished_s"] >= 2.0
        (sentence,) = [s for s in health["stuck"] if "acknowledged" in s]
        assert (
            f"rank 0 (pid {rank.pid}) of engine 'e' has not acknowledged feature 1 (1 in all) for" in sentence
        )
        rank.signal(signal.SIGCONT)
        rank("c.cast(m.Ack([grant.ref.hold]))")
        assert isinstance(producer.answer(seq), m.Sealed)
        assert broker.status()["health"]["ok"]
