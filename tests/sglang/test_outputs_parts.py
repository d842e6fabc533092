"""Encoder outputs without an engine: what is used, what is refused, what is offered, and how much of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.adapters.sglang import consumer, encoding, measure, outputs, settings, uses
from mmbroker.adapters.span import Span
from mmbroker.proto.keys import Key
from tests.kit import BrokerProcess, eventually

from . import kit
from .test_carry import Engine

pytestmark = pytest.mark.sglang

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
WIDTH = 4
Counted = Callable[[str], int]


@pytest.fixture
def counted() -> Counted:
    """What a counter has changed by since the test began."""
    before = measure.counters.read()
    return lambda name: measure.counters.read()[name] - before[name]


# --- an encoder, and what stands in its place -----------------------------------------------------------------------


class FakeUse:
    """What a table gives for a reference."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.paused = self.released = 0

    @property
    def tensor(self) -> Any:
        if isinstance(self._tensor, Exception):
            raise self._tensor
        return self._tensor

    def pause(self) -> None:
        self.paused += 1

    def release(self, stream: object = None) -> None:
        self.released += 1


class Offers(outputs.Outputs):
    """Outputs that only say what they were offered."""

    def __init__(self) -> None:
        super().__init__(lambda: None, True)
        self.made: dict[bytes, torch.Tensor] = {}

    def offer(self, key: bytes, tensor: torch.Tensor, *rest: Any) -> None:
        if self.current:
            self.made[key] = tensor.clone()


def item(shared: outputs.Outputs, number: int, count: int, use: Any = None) -> Any:
    """An item of `count` tokens; what is to be made of it has the key of its number."""
    made = SimpleNamespace(
        modality=SimpleNamespace(name="IMAGE"), offsets=[(5, 4 + count)], number=number, feature=None
    )
    uses.hang_on(made).output = outputs.Output(shared, bytes([number]) * 32, use)
    return made


def rows(number: int, count: int) -> torch.Tensor:
    return torch.full((count, WIDTH), float(number))


class Model:
    """An encoder that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def get_image_feature(self, items: Any) -> Any:
        self.asked.append([one.number for one in items])
        return torch.cat([rows(one.number, outputs.tokens(one)) for one in items])


def encoder(model: Any) -> encoding.Encoder:
    return encoding.Encoder(model.get_image_feature, torch.device("cpu"), WIDTH)


def test_what_is_there_and_what_is_new_come_in_order(counted: Counted) -> None:
    shared, model = Offers(), Model()
    theirs = rows(20, 2)
    use = FakeUse(theirs)
    items = [item(shared, 1, 3), item(shared, 2, 2, use), item(shared, 3, 1)]
    result = encoder(model)(items)
    assert torch.equal(result, torch.cat([rows(1, 3), theirs, rows(3, 1)]))
    assert model.asked == [[1, 3]]
    assert set(shared.made) == {bytes([1]) * 32, bytes([3]) * 32}
    assert torch.equal(shared.made[bytes([3]) * 32], rows(3, 1))
    assert counted("outputs_used") == 1 and use.paused == 1


def test_what_is_used_is_a_copy(counted: Counted) -> None:
    """SGLang keeps it in its cache, beyond the hold on the broker's memory."""
    theirs = rows(1, 3)
    result = encoder(Model())([item(Offers(), 1, 3, FakeUse(theirs))])
    assert torch.equal(result, theirs) and result.data_ptr() != theirs.data_ptr()
    assert counted("outputs_used") == 1


@pytest.mark.parametrize(
    "there",
    [
        rows(9, 2),
        rows(9, 4),
        rows(9, 3)[:, :3],
        torch.ones(3 * WIDTH),
        torch.ones(1, 3, WIDTH),
        [rows(9, 3)],
        mmbroker.FeatureMissing("gone"),
        RuntimeError("no memory"),
    ],
    ids=["short", "long", "narrow", "flat", "deep", "list", "gone", "error"],
)
def test_what_does_not_fit_is_not_used(there: Any, counted: Counted) -> None:
    model = Model()
    mine = item(Offers(), 1, 3, FakeUse(there))
    for _ in range(2):
        assert torch.equal(encoder(model)([mine]), rows(1, 3))
    assert model.asked == [[1], [1]]
    assert counted("outputs_refused") == 1 and not counted("outputs_used")


def test_an_encoder_whose_output_cannot_be_told_apart(counted: Counted) -> None:
    """It runs for all of them, and nothing is offered."""

    class Other(Model):
        def get_image_feature(self, items: Any) -> Any:
            return [super().get_image_feature(items)]

    shared, model = Offers(), Other()
    result = encoder(model)([item(shared, 1, 3), item(shared, 2, 2, FakeUse(rows(2, 2)))])
    assert isinstance(result, list) and torch.equal(result[0], torch.cat([rows(1, 3), rows(2, 2)]))
    assert not shared.made


def test_new_weights_make_old_outputs_useless(counted: Counted) -> None:
    shared, model = Offers(), Model()
    shared.weights_changed()
    assert torch.equal(encoder(model)([item(shared, 1, 3, FakeUse(rows(9, 3)))]), rows(1, 3))
    assert not shared.made and not counted("outputs_used")


# --- offering -------------------------------------------------------------------------------------------------------


class FakeClient:
    """A broker that takes its time, until it is told to go on."""

    connected = True
    device = ""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.put_: list[dict[str, Any]] = []

    def put_many(
        self, tensors: list[torch.Tensor], *, keys: list[Key], cost: list[int], **options: Any
    ) -> Any:
        for _ in tensors:
            assert self.go.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        self.put_ += [{"key": key, "cost": micros, **options} for key, micros in zip(keys, cost, strict=True)]
        return [SimpleNamespace(ref=key, drop=lambda: None) for key in keys]


def offer(shared: outputs.Outputs, mib: int, number: int = 0) -> None:
    tensor = torch.zeros(mib << 20, dtype=torch.uint8)
    shared.offer(bytes([number]) * 32, tensor, "image", Span(None).stop(), tensor.nbytes)


def test_what_is_over_the_budget_is_dropped_and_counted(counted: Counted) -> None:
    client: Any = FakeClient()
    shared = outputs.Outputs(lambda: client, True)
    for number in range(5):
        offer(shared, 20, number)
    assert counted("outputs_dropped") == 2
    assert counted("outputs_offered") == 5
    client.go.release(3)
    eventually(lambda: counted("outputs_published") == 3, "three fit")
    assert [one["key"] for one in client.put_] == [Key.derived(bytes([n]) * 32) for n in range(3)]
    assert all(one["cost"] >= 0 and one["to"] is None and "tier" not in one for one in client.put_)


def test_no_more_than_so_much_a_second(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if all of it is put at once."""
    now = [100.0]
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now[0])
    client: Any = FakeClient()
    client.go.release(100)
    shared = outputs.Outputs(lambda: client, True)

    def put(number: int) -> None:
        done = counted("outputs_published") + counted("outputs_dropped")
        offer(shared, 32, number)
        eventually(
            lambda: counted("outputs_published") + counted("outputs_dropped") > done, "it is put or dropped"
        )

    for number in range(4):
        put(number)
    assert (counted("outputs_published"), counted("outputs_dropped")) == (2, 2)
    now[0] += 32 / 256
    for number in range(4, 6):
        put(number)
    assert (counted("outputs_published"), counted("outputs_dropped")) == (3, 3)


@pytest.mark.parametrize("error", [mmbroker.PoolFull("no room"), ValueError("a bug")], ids=["full", "bug"])
def test_a_put_that_fails_costs_nothing_but_the_copy(error: Exception, counted: Counted) -> None:
    client: Any = FakeClient()
    client.error = error
    client.go.release(100)
    shared = outputs.Outputs(lambda: client, True)
    for number in range(5):
        offer(shared, 12, number)
    eventually(lambda: counted("outputs_failed") == 5, "all have failed")
    client.error = None
    offer(shared, 1)
    eventually(lambda: counted("outputs_published") == 1, "the next one goes")


def test_without_a_broker_nothing_is_kept(counted: Counted) -> None:
    shared = outputs.Outputs(lambda: None, True)
    offer(shared, 1)
    eventually(lambda: counted("outputs_failed") == 1, "there is nobody to give it to")


def test_only_one_of_the_ranks_offers(counted: Counted) -> None:
    shared = outputs.Outputs(lambda: None, False)
    offer(shared, 1)
    assert not counted("outputs_offered")


# --- given to those that wait ---------------------------------------------------------------------------------------


class FakeTable:
    def __init__(self) -> None:
        self.uses: list[FakeUse] = []

    def take(self, ref: Any) -> FakeUse:
        self.uses.append(FakeUse(rows(7, 3)))
        return self.uses[-1]


class Waiting:
    """Outputs of a lone rank, whose broker takes its time, and items that wait for the encoder."""

    def __init__(self, engine: str = "an-engine", offers: bool = True) -> None:
        self.client: Any = FakeClient()
        self.table: Any = FakeTable()
        self.shared = outputs.Outputs(lambda: self.client, offers, engine, lambda: self.table)
        self.items = [item(self.shared, number, 3) for number in (1, 1, 1, 2)]

    def put(self, counted: Counted) -> None:
        """The first item is encoded, and what comes of it is put."""
        encoder(Model())(self.items[:1])
        self.client.go.release()
        eventually(lambda: counted("outputs_published") + counted("outputs_failed") == 1, "it is put")


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_equal_items_that_wait_are_given_what_was_made(waiting: Waiting, counted: Counted) -> None:
    waiting.put(counted)
    assert waiting.client.put_[0]["to"] == "an-engine"
    model = Model()
    result = encoder(model)(waiting.items[1:])
    assert torch.equal(result, torch.cat([rows(7, 3), rows(7, 3), rows(2, 3)])) and model.asked == [[2]]
    assert counted("outputs_given") == counted("outputs_used") == 2
    for one in waiting.items:
        uses.release(one)
    assert [use.released for use in waiting.table.uses] == [1, 1] and not waiting.shared._waiting


def test_an_item_that_is_over_is_given_nothing(waiting: Waiting, counted: Counted) -> None:
    for one in waiting.items[1:]:
        uses.release(one)
    waiting.put(counted)
    assert waiting.client.put_[0]["to"] is None and not waiting.table.uses
    assert set(waiting.shared._waiting) <= {bytes([1]) * 32}


def test_an_item_whose_end_comes_while_it_is_given_something(waiting: Waiting, counted: Counted) -> None:
    ended = uses.output(waiting.items[1])
    assert ended is not None
    take = waiting.table.take
    waiting.table.take = lambda ref: (take(ref), ended.close())[0]
    waiting.put(counted)
    assert [use.released for use in waiting.table.uses] == [1, 0]


def test_one_that_was_encoded_does_not_wait(waiting: Waiting, counted: Counted) -> None:
    encoder(Model())(waiting.items[:3])
    waiting.client.go.release(3)
    eventually(lambda: counted("outputs_published") == 3, "all are put")
    assert [one["to"] for one in waiting.client.put_] == [None] * 3 and not waiting.table.uses


def test_what_is_not_put_is_given_to_nobody(waiting: Waiting, counted: Counted) -> None:
    waiting.client.error = mmbroker.PoolFull("no room")
    waiting.put(counted)
    model = Model()
    encoder(model)(waiting.items[1:])
    assert model.asked == [[1, 1, 2]] and counted("outputs_failed") == 1 and not counted("outputs_given")


@pytest.mark.parametrize("why", ["ranks", "not the first", "new weights"])
def test_who_cannot_be_given_anything_does_not_wait(why: str, counted: Counted) -> None:
    """Several ranks would have to agree."""
    waiting = Waiting("" if why == "ranks" else "an-engine", why != "not the first")
    if why == "new weights":
        waiting.shared.weights_changed()
        waiting.items.append(item(waiting.shared, 3, 3))
        assert bytes([3]) * 32 not in waiting.shared._waiting
    else:
        assert not waiting.shared._waiting


# --- producer and consumer, with a real broker ----------------------------------------------------------------------


@pytest.fixture
def engine(broker: BrokerProcess) -> Iterator[Engine]:
    asked = settings.Settings(True, str(broker.directory), 2.0, "an-engine", share_outputs=True)
    engine = Engine(asked, ARCHITECTURE)
    keys: Any = SimpleNamespace(unknown=False, key=lambda item, digest: Key.derived(digest[::-1]))
    engine.producer._encoder = keys
    yield engine
    eventually(lambda: kit.balanced(broker.status()), "holds and grants come to nothing")
    engine.close()


def known(engine: Engine, feature: torch.Tensor, made: torch.Tensor) -> None:
    """Somebody has made this of it already."""
    client = engine.producer._joining.client
    assert client is not None
    client.put(made, key=Key.derived(bytes(mmbroker.digest(feature))[::-1])).drop()


def test_what_was_made_already_comes_with_the_request(engine: Engine, counted: Counted) -> None:
    features = [torch.arange(4.0), torch.arange(5.0)]
    known(engine, features[1], rows(7, 1))

    def look(received: Any, inputs: Any) -> None:
        new, old = (uses.output(item) for item in inputs.mm_items)
        assert new is not None and new.read(inputs.mm_items[0], "cpu", WIDTH) is None
        assert old is not None
        there = old.read(inputs.mm_items[1], torch.device("cpu"), WIDTH)
        assert there is not None and torch.equal(there, rows(7, 1))
        assert old.key == bytes(mmbroker.digest(features[1]))[::-1]

    engine.serve(engine.output(*map(engine.item, features)), look)
    assert counted("outputs_found") == counted("outputs_used") == 1
    assert counted("takes") == 2 and not counted("outputs_refused")


def test_an_item_that_waits_is_given_what_was_made_meanwhile(engine: Engine, counted: Counted) -> None:
    """Its request has arrived before the encoder ran for an equal one."""
    feature = torch.arange(4.0)
    model = Model()

    def look(received: Any, inputs: Any) -> None:
        first, second = inputs.mm_items
        first.number = second.number = 1
        made = encoder(model)([first])
        eventually(lambda: counted("outputs_given") == 1, "the second one has it")
        assert torch.equal(encoder(model)([second]), made)

    engine.serve(engine.output(engine.item(feature), engine.item(feature)), look)
    assert model.asked == [[1]] and counted("outputs_used") == counted("outputs_published") == 1


def test_a_session_gets_none(engine: Engine, counted: Counted) -> None:
    """Its items outlive its holds."""
    feature = torch.arange(4.0)
    known(engine, feature, rows(7, 1))

    def look(received: Any, inputs: Any) -> None:
        assert uses.output(inputs.mm_items[0]) is None

    engine.serve(engine.output(engine.item(feature)), look, private=True)
    assert not counted("outputs_found")


@pytest.mark.parametrize("lack", ["missing", "another's", "another rank's"])
def test_what_one_rank_lacks_no_rank_uses(
    engine: Engine, counted: Counted, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on, and the encoder runs on all of them alike."""
    feature = torch.arange(4.0)
    known(engine, feature, rows(7, 1))
    mine = engine.consumer
    table = mine._table
    assert table is not None

    def take(reference: dict[str, Any]) -> Any:
        if len(reference["shape"]) == 2:
            raise mmbroker.FeatureMissing("gone")
        return table.take(reference)

    if lack == "missing":
        monkeypatch.setattr(mine, "_table", SimpleNamespace(take=take, stats=table.stats))
    elif lack == "another's":
        monkeypatch.setattr(consumer, "_key", lambda reference: (reference["boot"], reference["hold"]))
        there: Any = SimpleNamespace(unknown=False, key=lambda item, digest: Key.derived(bytes(32)))
        wrong = engine.producer._joining.client
        assert wrong is not None
        with wrong.put(rows(7, 1), key=Key.derived(bytes(32))):
            pass
        engine.producer._encoder = there
    else:
        monkeypatch.setattr(mine, "_agreed", lambda errors, lacks: (errors, [True] * len(lacks)))

    def tamper(received: Any) -> None:
        if lack == "another's":
            (encoded,) = received.mm_items[0].model_specific_data["__mmbroker__"]["encoded"]
            encoded[1] = b"x" * 32

    def look(received: Any, inputs: Any) -> None:
        (item,) = inputs.mm_items
        output = uses.output(item)
        assert output is not None and output.read(item, "cpu", WIDTH) is None
        late = uses.late(item)
        assert late is not None and torch.equal(late.read(torch.device("cpu")), feature)

    take_ = engine.take
    monkeypatch.setattr(engine, "take", lambda received: (tamper(received), take_(received))[1])
    engine.serve(engine.output(engine.item(feature)), look)
    assert counted("outputs_refused") == 1 and not counted("outputs_used") and not counted("errors")
