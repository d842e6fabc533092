"""Producer and consumer against a real broker, with a manager and a scheduler that only the tests know.

What the tiny model does not have: lists of tensors, large tensors beside the feature, several modalities, foreign
values, items with an identity already.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mmbroker
from mmbroker.adapters.sglang import consumer, holding, measure, packing, producer, seams, settings
from mmbroker.proto.reference import is_reference
from tests.kit import BrokerProcess, eventually

from . import kit
from .kit import NEWEST

pytestmark = pytest.mark.sglang

BIG = packing.LARGE // 4


class Engine:
    """A producer and a consumer of one engine. `serve` is one request from the processor's output to the scheduler."""

    def __init__(self, asked: settings.Settings, architecture: str = "AnyModel") -> None:
        self.batch = kit.schedule_batch()
        version = seams.current()
        scheduler = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])),
            dp_tp_cpu_group=None,
        )
        self.scheduler = scheduler
        self.failures: list[str] = []

        def fail(_scheduler: Any, _received: Any, message: str) -> None:
            self.failures.append(message)

        self.consumer = consumer.Consumer(asked, scheduler, consumer.Topology(0, 1, 0, 1), fail)
        self.producer = producer.Producer(asked, version.identify)
        assert self.producer._joining.joined.wait(10)

    def close(self) -> None:
        self.producer._joining.close()
        assert self.consumer._joining is not None
        self.consumer._joining.close()

    def item(self, feature: Any, modality: str = "IMAGE", **fields: Any) -> Any:
        return self.batch.MultimodalDataItem(
            modality=self.batch.Modality[modality], feature=feature, offsets=[(0, 0)], **fields
        )

    def output(self, *items: Any) -> Any:
        return self.batch.MultimodalProcessorOutput(mm_items=list(items), input_ids=[1, 2])

    async def put(self, output: Any, private: bool = False, known: Sequence[Any] = ()) -> Any:
        """The request as it is sent. `known`: what was held for it before its output was there."""
        tokenized = SimpleNamespace(
            rid="r", mm_inputs=output, session_params=SimpleNamespace() if private else None
        )

        async def original(manager: Any, request: Any) -> Any:
            turn = holding.turn.get()
            assert turn is not None or not known
            if turn is not None:
                turn.hold(known)
            return tokenized

        manager = SimpleNamespace(rid_to_state={"r": None})
        await self.producer.tokenize(original, manager, None)
        self.producer.send(lambda manager, tokenized: None, manager, tokenized)
        return pickle.loads(pickle.dumps(output))

    def take(self, received: Any) -> Any:
        """What the scheduler goes on with."""
        return self.consumer.inputs(
            lambda scheduler, inputs: self.batch.MultimodalInputs.from_processor_output(inputs),
            self.scheduler,
            received,
        )

    def serve(
        self,
        output: Any,
        look: Callable[[Any, Any], None],
        private: bool = False,
        known: Sequence[Any] = (),
    ) -> None:
        """`look` at what was received and at what the scheduler goes on with, while the hold lasts."""

        async def call() -> None:
            mine: list[holding.Claim] = []
            token = holding.scope.set(mine)
            try:
                received = await self.put(output, private, known)
                inputs = self.take(received)
                look(received, inputs)
                if inputs is not None:
                    inputs.release_features()
                    for item in inputs.mm_items:
                        consumer.uses.release(item)
            finally:
                holding.scope.reset(token)
                for claim in mine:
                    self.producer.claims.end_one(claim)
                self.producer.claims.left("r", SimpleNamespace(finished=True, dispatched=True))

        asyncio.run(call())


@pytest.fixture
def counted() -> Callable[[str], int]:
    """What a counter has changed by since the test began."""
    before = measure.counters.read()
    return lambda name: measure.counters.read()[name] - before[name]


@pytest.fixture
def engine(broker: BrokerProcess) -> Iterator[Engine]:
    engine = Engine(settings.Settings(True, str(broker.directory), 2.0, "an-engine"))
    yield engine
    eventually(lambda: kit.balanced(broker.status()), "holds and grants come to nothing")
    engine.close()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("mine", [True, False])
def test_the_prompt_is_padded_where_identities_are_known(engine: Engine, late: bool, mine: bool) -> None:
    """SGLang's processor has to leave it to the scheduler, which takes long for it. A prompt that it has padded stays,
    and so does a model whose way of padding is not known."""
    engine.consumer._late = late
    items = [engine.item(torch.ones(2, 3)), engine.item(torch.zeros(4))]
    items[0].offsets, items[1].offsets = [(1, 2), (4, 4)], [(5, 7)]
    output = engine.batch.MultimodalProcessorOutput(mm_items=items, input_ids=[5, 9, 9, 5, 9, 9, 9, 9, 5])
    if not mine:
        output.padded_input_ids = list(range(9))

    def look(received: Any, inputs: Any) -> None:
        a, b = (item.pad_value for item in inputs.mm_items)
        assert a != b
        wanted = [5, a, a, 5, a, b, b, b, 5]
        if NEWEST:  # more than one value for an item
            wanted = engine.batch.MultimodalProcessorOutput.build_padded_input_ids(
                output.input_ids, inputs.mm_items
            )
        padded = inputs.padded_input_ids
        assert padded is None if mine and not late else list(padded) == (wanted if mine else list(range(9)))

    engine.serve(output, look)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return bool(left.dtype == right.dtype and torch.equal(left, right))


@pytest.mark.parametrize(
    "feature",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor(2.5),
        [torch.arange(4), torch.ones(2, 2, dtype=torch.float16)],
        [torch.empty(0), torch.tensor([True])],
    ],
    ids=["plain", "transposed", "empty", "scalar", "list", "list with an empty part"],
)
def test_a_feature_arrives_as_it_was(engine: Engine, feature: Any) -> None:
    def look(received: Any, inputs: Any) -> None:
        assert is_reference(received.mm_items[0].feature)
        assert same(inputs.mm_items[0].feature, feature)

    engine.serve(engine.output(engine.item(feature)), look)


def test_the_same_patches_laid_out_otherwise_are_another_picture(engine: Engine) -> None:
    """Of a picture in one colour all patches are equal, whether it is wide or high."""
    hashes: list[int] = []

    def look(received: Any, inputs: Any) -> None:
        hashes.extend(item.hash for item in inputs.mm_items)

    wide, high = torch.tensor([[1, 2, 4]]), torch.tensor([[1, 4, 2]])
    items = [
        engine.item(torch.ones(8, 3), model_specific_data={"image_grid_thw": grid})
        for grid in (wide, high, wide.clone())
    ]
    engine.serve(engine.output(*items), look)
    assert hashes[0] == hashes[2] != hashes[1]


def test_large_tensors_beside_the_feature_go_through_the_broker_too(
    engine: Engine, counted: Callable[[str], int]
) -> None:
    large, small = torch.arange(BIG, dtype=torch.float32), torch.arange(4)
    crops = [torch.arange(BIG, dtype=torch.float32), torch.arange(3)]
    data = {"images_crop": large, "crops": crops, "grid": small, "word": "x", "nested": [small, "y"]}

    def look(received: Any, inputs: Any) -> None:
        sent = received.mm_items[0].model_specific_data
        assert is_reference(sent["images_crop"]) and is_reference(sent["crops"]) and "grid" not in sent
        got = inputs.mm_items[0].model_specific_data
        assert set(got) == set(data), "nothing of ours reaches the model"
        assert same(got["images_crop"], large) and same(got["crops"], crops) and same(got["grid"], small)
        assert got["word"] == "x" and got["nested"][1] == "y"

    engine.serve(engine.output(engine.item(torch.ones(3), model_specific_data=data)), look)
    assert counted("features") == counted("takes") == counted("releases") == 3


def test_modalities_are_told_apart(engine: Engine, counted: Callable[[str], int]) -> None:
    feature = torch.arange(5.0)
    hashes: list[int] = []

    def look(received: Any, inputs: Any) -> None:
        hashes.extend(item.hash for item in inputs.mm_items)

    engine.serve(
        engine.output(engine.item(feature), engine.item(feature, "AUDIO"), engine.item(feature)), look
    )
    assert hashes[0] == hashes[2] != hashes[1], "one content, two modalities"
    assert counted("features") == 3


def test_an_item_without_identity_gets_the_digests(engine: Engine) -> None:
    feature = torch.arange(5.0)
    digest = bytes(mmbroker.digest(feature))

    def look(received: Any, inputs: Any) -> None:
        (item,) = inputs.mm_items
        assert item.hash == int.from_bytes(digest[:8], "big")
        if kit.NEWEST:
            assert item.identity == digest and len(item.pad_values) == 4

    engine.serve(engine.output(engine.item(feature)), look)


def test_an_item_that_was_known_before_it_was_made_gets_its_keys(engine: Engine) -> None:
    """Its feature was a reference when the processor put it out."""
    key, feature = mmbroker.Key.derived(b"k" * 32), torch.arange(5.0)
    hashes: list[int] = []

    def look(received: Any, inputs: Any) -> None:
        assert same(inputs.mm_items[0].feature, feature)
        hashes.append(inputs.mm_items[0].hash)

    for grid in (None, torch.tensor([[1, 5]])):
        for own in (None, 77):
            held = engine.producer.asking.client.put(feature, key=key, to="an-engine")
            fields = {} if grid is None else {"model_specific_data": {"image_grid_thw": grid}}
            item = engine.item(held.ref.to_wire(), **fields)
            if own is not None:
                item.set_hash(own)
            engine.serve(engine.output(item), look, known=[held])
    assert hashes[0] == int.from_bytes(key.value[:8], "big")
    assert hashes[2] not in (hashes[0], 77), "laid out otherwise"
    assert hashes[1] == hashes[3] == 77


def test_an_item_with_an_identity_keeps_it(engine: Engine, counted: Callable[[str], int]) -> None:
    known = engine.item(torch.arange(5.0))
    known.set_hash(77)
    half = engine.item(torch.arange(6.0), hash=78)
    output = engine.output(known, half)
    pad = known.pad_value

    def look(received: Any, inputs: Any) -> None:
        assert [item.hash for item in inputs.mm_items] == [77, 78]
        assert inputs.mm_items[0].pad_value == pad

    engine.serve(output, look)


def test_no_identity_where_sglang_is_told_to_draw_one(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_MM_SKIP_COMPUTE_HASH", "true")
    engine = Engine(settings.Settings(True, str(broker.directory), 2.0, "an-engine"))
    digest = bytes(mmbroker.digest(torch.arange(5.0)))
    hashes: list[int] = []

    def look(received: Any, inputs: Any) -> None:
        assert received.mm_items[0].hash is None
        hashes.append(inputs.mm_items[0].hash)

    for _ in range(2):
        engine.serve(engine.output(engine.item(torch.arange(5.0))), look)
    assert len({*hashes, int.from_bytes(digest[:8], "big")}) == 3
    eventually(lambda: kit.balanced(broker.status()), "holds and grants come to nothing")
    engine.close()


def test_precomputed_embeddings_travel_alike(engine: Engine) -> None:
    embedding = torch.arange(8.0).reshape(2, 4)

    def look(received: Any, inputs: Any) -> None:
        assert is_reference(received.mm_items[0].precomputed_embeddings)
        assert same(inputs.mm_items[0].precomputed_embeddings, embedding)
        assert inputs.mm_items[0].hash is not None

    engine.serve(engine.output(engine.item(None, precomputed_embeddings=embedding)), look)


def test_what_is_not_ours_passes_untouched(engine: Engine, counted: Callable[[str], int]) -> None:
    foreign = {"pixels": [1, 2], "mmbroker-like": True}
    array = np.arange(6.0).reshape(2, 3)

    def look(received: Any, inputs: Any) -> None:
        assert inputs.mm_items[0].feature == foreign
        assert np.array_equal(inputs.mm_items[1].feature, array)
        assert same(inputs.mm_items[2].feature, torch.ones(2))

    items = [engine.item(foreign, hash=1), engine.item(array, hash=2), engine.item(torch.ones(2))]
    engine.serve(engine.output(*items), look)
    assert counted("foreign") == 2 and counted("features") == 1
    untouched = engine.output(engine.item(foreign, hash=1))
    engine.serve(untouched, lambda received, inputs: None)
    assert packing.envelope_of(untouched) is None


def test_a_session_gets_copies_that_need_no_hold(engine: Engine, broker: BrokerProcess) -> None:
    kept: list[Any] = []

    def look(received: Any, inputs: Any) -> None:
        kept.append(inputs.mm_items[0].feature)

    feature = torch.arange(1000.0)
    engine.serve(engine.output(engine.item(feature)), look, private=True)
    eventually(lambda: kit.balanced(broker.status()), "the tensor is kept, and nothing is held")
    assert same(kept[0], feature)


def test_an_item_that_dies_ends_its_use(engine: Engine, broker: BrokerProcess) -> None:
    """Where SGLang drops a request without a word."""
    table = engine.consumer._table
    assert table is not None

    def look(received: Any, inputs: Any) -> None:
        assert table.stats()["busy"] == 1
        inputs.mm_items.clear()
        assert table.stats()["busy"] == 0

    engine.serve(engine.output(engine.item(torch.ones(3))), look)


def test_a_failed_take_gives_everything_back(engine: Engine, counted: Callable[[str], int]) -> None:
    table = engine.consumer._table
    assert table is not None

    async def call() -> None:
        mine: list[holding.Claim] = []
        token = holding.scope.set(mine)
        received = await engine.put(engine.output(engine.item(torch.ones(3)), engine.item(torch.zeros(2))))
        holding.scope.reset(token)
        good = received.mm_items[1].feature
        received.mm_items[1].feature = {**good, "hold": good["hold"] + 1000}
        assert engine.take(received) is None
        for claim in mine:
            engine.producer.claims.end_one(claim)
        engine.producer.claims.left("r", SimpleNamespace(finished=True, dispatched=True))

    asyncio.run(call())
    assert len(engine.failures) == 1 and "FeatureMissing" in engine.failures[0]
    assert counted("misses") == counted("errors") == 1
    assert table.stats()["busy"] == 0


def test_requests_that_arrive_together_are_taken_together(
    engine: Engine, counted: Callable[[str], int]
) -> None:
    """And what is turned away before its inputs are looked at leaves no use behind."""
    table = engine.consumer._table
    assert table is not None
    features = [torch.full((4,), float(n)) for n in range(3)]

    async def call() -> None:
        mine: list[holding.Claim] = []
        token = holding.scope.set(mine)
        received = [await engine.put(engine.output(engine.item(feature))) for feature in features]
        holding.scope.reset(token)
        bad = received[1].mm_items[0].feature
        received[1].mm_items[0].feature = {**bad, "hold": bad["hold"] + 1000}

        def handle(scheduler: Any, arrived: Any) -> None:
            assert counted("takes") == 2 and table.stats()["busy"] == 2
            first = engine.take(received[0])
            assert same(first.mm_items[0].feature, features[0])
            assert engine.take(received[1]) is None
            first.release_features()
            consumer.uses.release(first.mm_items[0])

        batch = [SimpleNamespace(mm_inputs=output) for output in received[1:]]
        arrived = [
            SimpleNamespace(rid="control"),
            SimpleNamespace(mm_inputs=received[0]),
            SimpleNamespace(batch=batch),
        ]
        engine.consumer.requests(handle, engine.scheduler, arrived)
        for claim in mine:
            engine.producer.claims.end_one(claim)
        engine.producer.claims.left("r", SimpleNamespace(finished=True, dispatched=True))

    asyncio.run(call())
    assert len(engine.failures) == 1 and "FeatureMissing" in engine.failures[0]
    assert table.stats()["busy"] == 0 and counted("takes") == 2


def test_a_damaged_envelope_fails_the_request_and_nothing_else(engine: Engine) -> None:
    received = engine.output(engine.item(torch.ones(3), hash=1))
    received.mm_items[0].model_specific_data = {
        packing.ENVELOPE: {"output": {}, "items": [], "padded": False}
    }
    assert engine.take(received) is None
    assert len(engine.failures) == 1


def test_a_request_that_cannot_be_shortened_keeps_its_tensors(
    engine: Engine, counted: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = torch.arange(5.0)

    def fail(output: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(packing, "close", fail)

    def look(received: Any, inputs: Any) -> None:
        assert same(received.mm_items[0].feature, feature) and same(inputs.mm_items[0].feature, feature)

    engine.serve(engine.output(engine.item(feature)), look)
    assert counted("fallback_failed") == 1 and counted("takes") == 0


def test_outside_of_a_call_nobody_would_end_the_hold(engine: Engine, counted: Callable[[str], int]) -> None:
    output = engine.output(engine.item(torch.ones(3)))
    asyncio.run(engine.put(output))
    assert isinstance(output.mm_items[0].feature, torch.Tensor)
    assert not counted("holds")


def test_a_call_that_is_cancelled_while_it_puts_holds_nothing(
    broker: BrokerProcess, engine: Engine, counted: Callable[[str], int]
) -> None:
    with mmbroker.connect(broker.directory) as client:
        full = client.put(torch.zeros(60 << 20, dtype=torch.uint8))

        async def call() -> None:
            holding.scope.set([])
            put = asyncio.ensure_future(engine.put(engine.output(engine.item(torch.ones(8 << 20)))))
            while not broker.status()["waiting_count"]:
                await asyncio.sleep(0)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put

        asyncio.run(call())
        full.drop()
        eventually(lambda: kit.balanced(broker.status()), "what came too late was given back")
    assert not counted("holds")
