"""What a rank on the GPU tells the broker, and when: not for each thing by itself, but of each thing, and once."""

from __future__ import annotations

import time

import pytest

import mmbroker
import mmbroker.table as table_module
from mmbroker import cuda
from mmbroker.proto import messages as m
from mmbroker.proto.errors import BrokerError
from tests.gpu.bench import Bench
from tests.gpu.test_table import block, in_thread, look_at
from tests.kit import PATIENCE, eventually
from tests.rig import same


@pytest.mark.parametrize("what", ["loads", "reads"])
def test_a_gpu_that_fails_keeps_nobody_from_the_rest(
    faked: Bench, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The receiver thread says once what is wrong and does its other duties; nothing is settled before it is known."""
    fake = faked.driven.fake
    table = faked.attach()
    held = faked.client.put(block(1), to="a")
    if what == "reads":
        faked.read_on_device(table, held, block(1))
        fake.faults.fail("cuEventQuery", "CUDA_ERROR_INVALID_VALUE")
        held.drop()
    else:
        fake.faults.fail("cuEventQuery", "CUDA_ERROR_INVALID_VALUE")
        more = faked.client.put(block(1, seed=3), to="a")
        more.drop()
    eventually(lambda: "CUDA_ERROR_INVALID_VALUE" in caplog.text, "a word of it")
    table._link.late_answers = 1  # something to tell
    table._link.wake()
    eventually(lambda: faked.told("a")["late_answers"] == 1, "counters that are told as ever")
    assert caplog.text.count("CUDA_ERROR_INVALID_VALUE") == 1
    assert table.stats()["settled"] == 0
    # Nor does it look again and again.
    assert table._link.run(lambda: table.chores(time.monotonic()), PATIENCE) >= table_module._WATCH[0]
    fake.faults.heal()
    held.drop()
    faked.settled(table)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receiver threads do nothing that nobody has asked for."""
    monkeypatch.setattr("mmbroker.table._REST", 3600.0)
    monkeypatch.setattr("mmbroker.belongings._TALLY", 3600.0)
    monkeypatch.setattr("mmbroker.receiver._TICK", 3600.0)


@pytest.mark.usefixtures("idle")
def test_a_rank_says_all_it_has_to_say_at_once(faked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded travels with what is acknowledged: the receiver thread does not wake for it alone."""
    monkeypatch.setattr("mmbroker.table._DEVICE_WATCH", 3600.0)
    monkeypatch.setattr("mmbroker.table._WATCH", (3600.0, 3600.0))
    table = faked.attach()
    faked.read_on_device(table, faked.client.put(block(0.1, seed=9), to="a"), block(0.1, seed=9))
    faked.driver.finish()
    table._link.run(lambda: None, PATIENCE)  # the segments are there, and what that made it do is done
    said: list[m.Body] = []
    cast = table._link.cast

    def heard(body: m.Body, session: int | None = None) -> None:
        said.append(body)
        cast(body, session)

    monkeypatch.setattr(table._link, "cast", heard)
    held: list[mmbroker.Held] = []
    for seed in range(4):
        held.append(faked.client.put(block(0.1, seed=seed), to="a"))
        assert faked.reads(table, held[-1], block(0.1, seed=seed))
        faked.driver.finish()
    holds = [one.ref.hold for one in held]
    words = [body for body in said if isinstance(body, m.Ack)]
    assert words == said
    assert [body.holds for body in words] == [[hold] for hold in holds]
    assert [body.loaded for body in words] == [[], *([hold] for hold in holds[:-1])]
    for one in held:
        one.drop()


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("how", ["granted", "offered"])
def test_a_load_is_told_soon_if_nothing_else_is_to_be_said(faked: Bench, how: str) -> None:
    table = faked.attach(lazy=how == "offered")
    for number in range(
        2
    ):  # the first one brings a segment, too, after which the receiver thread looks anyway
        held = faked.client.put(block(1, seed=number), to="a")
        if how == "offered":
            look_at(table.take(held.ref))
        eventually(lambda number=number: faked.count("loads") == number + 1, "the word")
        held.drop()
        faked.settled(table)


def test_a_closed_tables_tensor_keeps_no_word_back(faked: Bench) -> None:
    """Another table of the same client loads, after a loss: what is loaded is told, whichever of them looks."""
    client = faked.connect("both")
    first = client.attach(engine="a", device="cuda:0", access="readonly")
    held = faked.client.put(block(1), to="a")
    faked.read_on_device(first, held, block(1))
    tensor = first.take(held.ref).tensor
    first.close()
    faked.broker.kill()
    eventually(lambda: not client.connected, "the loss")
    faked.start()
    eventually(lambda: client.connected and faked.client.connected, "another broker")
    second = client.attach(engine="b", device="cuda:0", access="readonly")
    held = faked.client.put(block(1, seed=3), to="b")
    faked.read_on_device(second, held, block(1, seed=3))
    eventually(lambda: faked.count("loads") == 1, "the word")
    assert same(tensor.cpu(), block(1))
    held.drop()


def test_a_grant_that_was_put_off_and_is_dismissed_with_the_next_one(faked: Bench) -> None:
    """Graphs were captured; the next grant is read before what was put off is made up for. It is never entered."""
    table = faked.attach()
    gpu = table.gpu
    assert gpu is not None

    def put() -> None:
        with pytest.raises(BrokerError, match="let go before it acknowledged"):
            faked.client.put(block(1), to="a")

    with table.quiet():
        end = in_thread(put)
        eventually(lambda: table._put_off, "a grant, put off")
        (late,) = table._put_off
        assert isinstance(late, m.Grant)

        def over() -> None:
            gpu.quiet -= 1
            table.granted([], [late.ref.hold])
            gpu.quiet += 1

        table._link.run(over, PATIENCE)
    end()
    faked.settled(table)


def test_what_is_known_to_be_loaded_is_told_though_the_next_is_not(
    faked: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = faked.attach()
    gpu = table.gpu
    assert gpu is not None
    with monkeypatch.context() as patched:
        patched.setattr("mmbroker.residence.Residence.loaded", lambda residence, gpu: [])
        held = [faked.client.put(block(1, seed=seed), to="a") for seed in range(2)]
        faked.driver.finish()
    query, asked = faked.driver.query, []

    def second_fails(event: int) -> bool:
        asked.append(event)
        if len(asked) == 2:
            raise cuda.DriverError("CUDA_ERROR_UNKNOWN", "cuEventQuery", "a fault that was ordered")
        return query(event)

    with monkeypatch.context() as patched:
        patched.setattr(faked.driver, "query", second_fails)
        table._link.run(lambda: table.chores(time.monotonic()), PATIENCE)
    eventually(lambda: faked.count("loads") == 2, "both words")
    for one in held:
        one.drop()
    faked.settled(table)


def read(faked: Bench, table: mmbroker.FeatureTable, count: int) -> list[mmbroker.Held]:
    """Features that were read on the device, and are still held."""
    held = [faked.client.put(block(0.1, seed=seed), to="a") for seed in range(count)]
    for seed, one in enumerate(held):
        faked.read_on_device(table, one, block(0.1, seed=seed))
    return held


def end(
    faked: Bench, table: mmbroker.FeatureTable, held: list[mmbroker.Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the rank was told is over is settled as soon as it can be, and then nobody holds it any more."""
    monkeypatch.setattr("mmbroker.endings._TOGETHER", 0)
    table._endings.hasten()
    table._link.wake()
    faked.settled(table)
    for one in held:
        one.drop()


def test_what_is_dismissed_with_grants_is_looked_at_together(
    faked: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what it frees: the grants look once in a while, and the chores if no more come."""
    table = faked.attach()
    held = read(faked, table, 4)
    monkeypatch.setattr("mmbroker.endings._TOGETHER", 3600 * 10**9)
    looks: list[int] = []
    settle = table._endings.settle

    def looked(now: int) -> list[int]:
        looks.append(len(table._endings))
        return settle(now)

    def dismissed() -> None:
        for one in held[:2]:
            table.granted([], [one.ref.hold])
        assert looks == []
        table._endings.hasten()  # it is time
        for one in held[2:]:
            table.granted([], [one.ref.hold])
        assert looks == [3]
        assert len(table._endings) == 4

    def begin() -> None:
        table._endings._due = 3600 * 10**9 + time.perf_counter_ns()
        monkeypatch.setattr(table._endings, "settle", looked)
        dismissed()

    table._link.run(begin, PATIENCE)
    assert table.stats()["unsettled"] == 4
    end(faked, table, held, monkeypatch)


def test_what_is_dismissed_alone_is_looked_at_again_in_a_moment(
    faked: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps somebody waits for what it frees. Whoever looks before that moment does not put it off."""
    table = faked.attach()
    held = read(faked, table, 2)
    monkeypatch.setattr("mmbroker.endings._TOGETHER", 3600 * 10**9)
    monkeypatch.setattr("mmbroker.endings._SECOND_LOOK", 60.0)

    def dismissed() -> int:
        with faked.driven.fake.engine.held():  # no fence is passed
            table.dismissed([held[0].ref.hold])
            table.granted([], [held[1].ref.hold])
            table.chores(time.monotonic())
            return table._endings._due

    due = table._link.run(dismissed, PATIENCE)
    assert 0 < due - time.perf_counter_ns() <= 60 * 10**9
    assert table.stats()["unsettled"] == 2
    end(faked, table, held, monkeypatch)


def test_chores_that_make_a_fence_look_soon_whether_it_is_passed(faked: Bench) -> None:
    """However long nothing had moved before, because another feature stays in use."""
    table = faked.attach()
    held = [faked.client.put(block(0.1, seed=seed), to="a") for seed in range(2)]
    faked.read_on_device(table, held[1], block(0.1, seed=1))
    with table.take(held[0].ref) as use:
        assert use.tensor is not None

        def entry(one: mmbroker.Held) -> tuple[bytes, int]:
            return one.ref.boot, one.ref.hold

        def chores() -> list[float]:
            table._withdraw([entry(held[0])])
            pauses = []
            with faked.driven.fake.engine.held():
                for word in ("nothing", "a fence", "nothing"):
                    if word == "a fence":
                        table._withdraw([entry(held[1])])
                    table._pause, table._endings._due = 0.16, 0
                    pauses.append(table.chores(time.monotonic()))
            return pauses

        assert table._link.run(chores, PATIENCE) == [0.32, 0.02, 0.32]
    faked.settled(table)
    for one in held:
        one.drop()


@pytest.mark.parametrize("first", ["table", "client"])
def test_what_was_released_is_given_back_by_whatever_is_closed(faked: Bench, first: str) -> None:
    """The producer still holds it. Its process would have to end for the rest."""
    for number in range(3):
        client = faked.connect(f"closed {number}")
        table = client.attach(engine=f"closed {number}", device="cuda:0", access="readonly")
        held = faked.client.put(block(0.5, seed=number), to=f"closed {number}")
        assert faked.reads(table, held, block(0.5, seed=number)) in (True, False)
        if first == "table":
            table.close()
        client.close()
        assert table.stats()["unsettled"] == 0
        held.drop()
    assert faked.broker.status()["ghosts"] == []
