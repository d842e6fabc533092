"""Puts, lookups and holds: what they cost in messages, what they do together, and how they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import tensors
from mmbroker.proto.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidMessage,
    NoSuchEngine,
    PoolFull,
    QuotaExceeded,
)
from tests.kit import BrokerProcess, eventually
from tests.rig import Rig, a_rig, same, values

MIB = 1 << 20


@pytest.fixture
def clients(broker: BrokerProcess) -> Iterator[Callable[..., mmbroker.Client]]:
    made: list[mmbroker.Client] = []

    def make(**options: Any) -> mmbroker.Client:
        made.append(mmbroker.connect(broker.directory, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def block(mib: float, seed: int = 0) -> torch.Tensor:
    """A tensor of `mib` MiB."""
    return values(torch.uint8, (int(mib * MIB),), seed=seed)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at one time; their results, or the first error."""
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 64])
def test_a_batch_costs_two_round_trips(readonly: Rig, count: int) -> None:
    batch = [values(torch.float32, (100, n + 1), seed=count) for n in range(count)]
    before = readonly.client.stats().get("calls", 0)
    held = readonly.client.put_many(batch, to="a")
    assert readonly.client.stats()["calls"] - before == 2
    for one, tensor in zip(held, batch, strict=True):
        with readonly.table.take(one.ref) as use:
            assert same(use.tensor, tensor)
    before = readonly.client.stats()["calls"]
    again = readonly.client.put_many(batch, to="a")
    assert readonly.client.stats()["calls"] - before == 1  # hits: nothing to seal
    for one in held + again:
        one.drop()


@pytest.mark.parametrize(("cost", "stated"), [(None, [None] * 2), (7, [7, 7]), ([9, None], [9, None])])
def test_a_batch_states_what_each_feature_takes_to_make(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cost: Any, stated: list[int | None]
) -> None:
    sealed: list[int | None] = []
    seal = rig.client._own.seal

    def noted(leases: Any, *args: Any) -> Any:
        sealed.extend(lease.cost for lease in leases)
        return seal(leases, *args)

    monkeypatch.setattr(rig.client._own, "seal", noted)
    for held in rig.client.put_many([torch.randn(10), torch.randn(20)], cost=cost):
        held.drop()
    assert sealed == stated
    with pytest.raises(ValueError, match=r"2 feature\(s\), and what 1 of them cost"):
        rig.client.put_many([torch.randn(10), torch.randn(20)], cost=[3])


def test_an_empty_batch_costs_nothing(readonly: Rig) -> None:
    before = readonly.client.stats().get("calls", 0)
    assert readonly.client.put_many([]) == []
    assert readonly.client.lookup_many([]) == []
    assert readonly.client.stats().get("calls", 0) == before


def test_a_reference_is_small(readonly: Rig) -> None:
    from mmbroker.proto.messages import encode

    with readonly.client.put(torch.zeros(3, 1024, 768)) as held:
        assert len(encode(held.ref)) < 2048


# --- together -------------------------------------------------------------------------------------------------------


def test_equal_tensors_in_one_batch(rig: Rig) -> None:
    x, y = torch.randn(10), torch.randn(10)
    held = rig.client.put_many([x, x, y, x], to="a")
    assert len({one.ref.hold for one in held}) == 4
    assert len({one.ref.feature for one in held}) == 2
    for one, tensor in zip(held, [x, x, y, x], strict=True):
        with rig.table.take(one.ref) as use:
            assert same(use.tensor, tensor)
        one.drop()


def test_batches_in_opposite_order(clients: Callable[..., mmbroker.Client], broker: BrokerProcess) -> None:
    first, second = clients(), clients()
    for round_ in range(20):
        x, y = block(0.5, seed=2 * round_), block(0.5, seed=2 * round_ + 1)
        for held in together(lambda: first.put_many([x, y]), lambda: second.put_many([y, x])):  # noqa: B023
            for one in held:
                one.drop()
    eventually(lambda: not (broker.status()["leases"] or broker.status()["holds"]), "balanced books")


def test_two_batches_that_do_not_fit_together(clients: Callable[..., mmbroker.Client]) -> None:
    def put(client: mmbroker.Client, seed: int) -> None:
        for one in client.put_many([block(9.5, seed=seed + n) for n in range(4)], timeout=30):
            one.drop()

    together(lambda: put(clients(), 0), lambda: put(clients(), 10))


def test_one_content_from_many_at_once(
    clients: Callable[..., mmbroker.Client], broker: BrokerProcess
) -> None:
    tensor = block(2)
    makers = [clients() for _ in range(4)]
    held = together(*[lambda client=client: client.put(tensor) for client in makers])
    assert broker.status()["features"] == 1
    assert {one.ref.feature for one in held} == {held[0].ref.feature}


def test_one_client_from_many_threads(rig: Rig) -> None:
    def work(seed: int) -> None:
        for n in range(20):
            tensor = values(torch.int32, (50, n + 1), seed=seed)
            with rig.client.put(tensor, to="a") as held, rig.table.take(held.ref) as use:
                assert same(use.tensor, tensor)

    together(*[lambda seed=seed: work(seed) for seed in range(8)])


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "put",
    [
        lambda c: c.get_or_create("big", (65 * MIB,), torch.uint8, timeout=3600),
        lambda c: c.get_or_create("big", (12_000, 12_000, 3), torch.float32, timeout=3600),
        lambda c: c.put(block(65), timeout=3600),
        lambda c: c.put_many([block(33), block(33, seed=1)], timeout=3600),
        lambda c: c.put_list([block(33), block(33, seed=1)], timeout=3600),
    ],
    ids=["lease", "huge picture", "feature", "batch", "list"],
)
def test_what_can_never_fit_is_refused_at_once(readonly: Rig, put: Callable[[mmbroker.Client], Any]) -> None:
    with pytest.raises(PoolFull) as caught:
        put(readonly.client)
    error = caught.value
    assert error.limit == 64 * MIB < error.requested
    assert str(error.requested) in str(error)
    assert str(error.limit) in str(error)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2**40, 2**40), "limit for one feature"),
        ((2**63, 2**63), "limit for one feature"),
        ((2**48 + 1,), "limit for one feature"),
        ((1,) * 26, "26 axes"),
        ((3, -1), "negative axis"),
    ],
)
def test_shapes_that_cannot_be(readonly: Rig, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(InvalidMessage, match=match):
        readonly.client.get_or_create("shape", shape, torch.uint8)


@pytest.mark.parametrize("shape", [(1.5,), ("3",), (None,)])
def test_shapes_that_are_no_numbers(readonly: Rig, shape: Any) -> None:
    with pytest.raises(TypeError):
        readonly.client.get_or_create("shape", shape, torch.uint8)


@pytest.mark.parametrize("dtype", [torch.quint8, "float31", None, int])
def test_dtypes_that_are_not_carried(readonly: Rig, dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        readonly.client.get_or_create("dtype", (1,), dtype)


def test_a_full_arena_makes_puts_wait_until_their_deadline(clients: Callable[..., mmbroker.Client]) -> None:
    client = clients()
    held = [client.put(block(15, seed=n)) for n in range(4)]
    with pytest.raises(PoolFull) as caught:
        clients().put(block(15, seed=9), timeout=0.3)
    assert (caught.value.requested, caught.value.free, caught.value.limit) == (15 * MIB, 4 * MIB, 64 * MIB)
    waiting = threading.Thread(target=held[0].drop)
    waiting.start()
    clients().put(block(15, seed=9), timeout=30).drop()
    waiting.join()


def test_nobody_is_attached_under_that_name(readonly: Rig) -> None:
    for put in (
        lambda: readonly.client.put(torch.ones(1), to="b"),
        lambda: readonly.client.get_or_create("nobody", (1,), torch.uint8, to="b"),
        lambda: readonly.client.put_many([torch.ones(1)] * 2, to="b"),
    ):
        with pytest.raises(NoSuchEngine, match=r"'b'.*a"):
            put()
    assert readonly.broker.status()["leases"] == 0


def test_too_many_at_once(readonly: Rig) -> None:
    with pytest.raises((QuotaExceeded, InvalidMessage), match="1024"):
        readonly.client.put_many([torch.tensor(n) for n in range(1025)])
    parts = [torch.tensor(n) for n in range(200)]
    with pytest.raises((QuotaExceeded, InvalidMessage), match="limit"):
        readonly.client.put_list(parts * 500)


@pytest.mark.parametrize("timeout", [0, -1, 1e-9])
def test_no_time_at_all(readonly: Rig, timeout: float) -> None:
    with pytest.raises(DeadlineExceeded, match="put of 1 feature"):
        readonly.client.put(torch.ones(1), timeout=timeout)
    with pytest.raises(DeadlineExceeded):
        readonly.client.lookup("k", timeout=-1)


def test_the_default_deadline_is_that_of_connect(
    clients: Callable[..., mmbroker.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = clients(timeout=20)
    asked: list[float] = []
    exchange = client._link.exchange

    def spy(body: Any, timeout: float | None = None, *rest: Any) -> Any:
        asked.append(client._link.timeout if timeout is None else timeout)
        return exchange(body, timeout, *rest)

    monkeypatch.setattr(client._link, "exchange", spy)
    client.put(torch.ones(1))
    client.lookup("k")
    client.put(torch.zeros(1), timeout=10)
    assert all(5 < seconds <= 20 for seconds in asked[:3])  # five is what it is without
    assert all(5 < seconds <= 10 for seconds in asked[3:])
    assert len(asked) == 5


# --- failing halfway ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["write", "second write", "seal"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_put_that_fails_leaves_nothing(
    clients: Callable[..., mmbroker.Client],
    broker: BrokerProcess,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    error: BaseException,
) -> None:
    client = clients()
    hit = client.put(torch.zeros(5))
    calls = 0
    write = tensors.Source.write

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if at == "seal" or calls == ("write", "second write").index(at) + 1:
            raise error
        return write(*args)

    if at == "seal":
        monkeypatch.setattr(client._own, "seal", failing)
    else:
        monkeypatch.setattr(tensors.Source, "write", failing)
    with pytest.raises(type(error)):
        client.put_many([torch.zeros(5), torch.ones(5), torch.ones(6)])
    monkeypatch.undo()
    eventually(lambda: (broker.status()["leases"], broker.status()["holds"]) == (0, 1), "only the first hold")
    hit.drop()
    assert same(torch.ones(5), torch.ones(5))
    client.put_many([torch.ones(5), torch.ones(6)])  # and it can be done again


# --- holds ----------------------------------------------------------------------------------------------------------


def test_a_hold_ends_once(readonly: Rig) -> None:
    with readonly.client.put(torch.ones(7), to="a") as held:
        held.drop()
        held.drop()
    readonly.settled()
    before = readonly.broker.status()["counters"].get("unknown_holds", 0)
    held.drop()
    assert readonly.client.lookup("a barrier") is None
    assert readonly.broker.status()["counters"].get("unknown_holds", 0) == before


def test_holds_live_without_their_objects(rig: Rig) -> None:
    wire = rig.client.put(torch.arange(9), to="a").ref.to_wire()
    with rig.table.take(wire) as use:
        assert torch.equal(use.tensor, torch.arange(9))


def test_a_lookup_grants(rig: Rig) -> None:
    rig.client.put(torch.arange(11), key="cached").drop()
    assert rig.client.lookup("not there", to="a") is None
    held, nothing = rig.client.lookup_many(["cached", "not there"], to="a")
    assert nothing is None
    assert held is not None
    with held, rig.table.take(held.ref) as use:
        assert torch.equal(use.tensor, torch.arange(11))


def test_a_closed_client_says_so(broker: BrokerProcess) -> None:
    client = mmbroker.connect(broker.directory)
    held = client.put(torch.ones(1))
    client.close()
    client.close()
    for call in (
        lambda: client.put(torch.ones(1)),
        lambda: client.lookup("k"),
        lambda: client.get_or_create("k", (1,), torch.uint8),
        lambda: client.attach(engine="e"),
    ):
        with pytest.raises(BrokerUnavailable, match="closed"):
            call()
    held.drop()
    assert client.stats()["holds"] == 0


@pytest.mark.balanced
def test_closing_gives_everything_back(broker: BrokerProcess) -> None:
    with mmbroker.connect(broker.directory) as engine, mmbroker.connect(broker.directory) as client:
        table = engine.attach(engine="e")
        held = [client.put(torch.tensor(n), to="e") for n in range(50)]
        lease = client.get_or_create("open", (3,), torch.int8).lease
        assert lease is not None
        use = table.take(held[3].ref)
        assert use.tensor == 3
        use.release()
        client.close()
        assert broker.status()["leases"] == 0
        eventually(lambda: not broker.status()["holds"], "holds that the rank has settled")
        eventually(lambda: not table.stats()["entries"], "dismissed entries")


def test_books_balance_after_random_calls() -> None:
    """Whatever was called, in whatever order, with whatever failed: what is dropped is gone."""
    import random

    with a_rig("readonly", host_mib=8, segment_mib=1) as rig:
        chance = random.Random(1)
        held: list[mmbroker.Held] = []
        uses: list[mmbroker.Use] = []
        errors = 0
        for n in range(1000):
            try:
                match chance.randrange(9):
                    case 0:
                        held.append(
                            rig.client.put(torch.tensor([n % 7]), to=chance.choice(["a", "a", None, "none"]))
                        )
                    case 1:
                        held += rig.client.put_many(
                            [torch.tensor(n), torch.tensor(n), torch.tensor(n % 3)], to="a"
                        )
                    case 2:
                        held.append(
                            rig.client.put(torch.zeros(MIB, dtype=torch.uint8), key=f"{n}", timeout=0.01)
                        )
                    case 3:
                        found = rig.client.lookup(mmbroker.digest(torch.tensor([n % 7])), to="a")
                        held += [found] if found else []
                    case 4:
                        with (
                            rig.client.get_or_create(f"lease {n % 20}", (n % 5,), torch.uint8).lease
                            or _nothing()
                        ):
                            if n % 2:
                                raise ValueError
                    case 5 if held:
                        uses.append(rig.table.take(chance.choice(held).ref))
                    case 6 if uses:
                        uses.pop(chance.randrange(len(uses))).release()
                    case 7 if held:
                        held.pop(chance.randrange(len(held))).drop()
                    case 8:
                        rig.client.put(object())  # type: ignore[arg-type]
            except (mmbroker.BrokerError, TypeError, ValueError):
                errors += 1
        assert 100 < errors < 800
        for one in held:
            one.drop()
        for use in uses:
            use.release()
        rig.client.close()
        rig.settled()
        status = rig.broker.status()
        assert (status["leases"], status["holds"], status["writer_pins"]) == (0, 0, 0)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
