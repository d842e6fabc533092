"""Reports of kind C: features that were taken for one another."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from random import Random

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import FeatureMissing, NoSuchEngine
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key
from tests.kit import BrokerProcess, Puppet, RawClient, eventually
from tests.rig import Rig, same, values

ROWS, SHORT, WIDTH = 279, 260, 64


@pytest.mark.balanced
def test_bytes_for_fewer_rows_than_declared(broker: BrokerProcess) -> None:
    """C3. The form's size is computed, not believed: both figures are named, and no rank hears of it."""
    form = Form("float32", (ROWS, WIDTH), SHORT * WIDTH * 4)
    with RawClient(broker.directory) as producer, RawClient(broker.directory) as rank:
        assert rank.call(m.Attach("a", 0, 1)) == m.Attached(True)
        failed = producer.call(m.Create([m.Item(Key.caller(os.urandom(32)), form)], to="a"))
        assert isinstance(failed, m.Failed) and failed.error == "InvalidMessage"
        assert failed.figures == {"declared": SHORT * WIDTH * 4, "computed": ROWS * WIDTH * 4}
        report = rank.call(m.Status())
        assert isinstance(report, m.Report) and report.status["features"] == report.status["leases"] == 0
        assert rank.notices == []


def test_fewer_rows_written_than_leased(readonly: Rig) -> None:
    """C3. In a lease the tensor has the declared form, so torch itself refuses; the lease is given back."""
    with (
        pytest.raises(RuntimeError, match=rf"\({ROWS}\).*\({SHORT}\)"),
        readonly.client.get_or_create("rows", (ROWS, WIDTH), torch.float32, to="a").lease as lease,  # type: ignore[union-attr]
    ):
        lease.tensor.copy_(torch.ones(SHORT, WIDTH))
    eventually(lambda: readonly.broker.status()["leases"] == 0, "no lease")
    assert readonly.client.lookup("rows") is None
    assert readonly.table.stats()["entries"] == 0


@pytest.mark.sglang
def test_no_two_identities_have_the_same_values_in_the_prompt() -> None:
    """C4, C16. All 32 bytes go to the engine: of 100,000, no two meet in what its caches see, or with a token."""
    from mmbroker.adapters.sglang import seams
    from tests.sglang import kit

    batch, identify = kit.schedule_batch(), seams.current().identify
    random = Random(4)
    count = 100_000
    hashes, patterns, lowest = set(), set(), 1 << 62
    for _ in range(count):
        item = batch.MultimodalDataItem(modality=batch.Modality.IMAGE)
        identify(item, random.randbytes(32))
        pads = item.padding_values() if kit.NEWEST else (item.pad_value,)
        hashes.add(item.hash)
        patterns.add(pads)
        lowest = min(lowest, *pads)
    assert len(hashes) == count
    assert lowest >= 1_000_000
    if kit.NEWEST:  # the older version itself keeps 30 bits of the hash, whatever it is given
        assert len(patterns) == count


@pytest.mark.balanced
def test_another_tenants_features_do_not_exist(broker: BrokerProcess) -> None:
    """C11. Who knows the content or the key of somebody else's feature gets neither it nor a sign that it is there."""
    secret = values(torch.float32, (30, 40))
    with (
        mmbroker.connect(broker.directory, namespace="x") as x,
        mmbroker.connect(broker.directory, namespace="x") as engine_x,
        mmbroker.connect(broker.directory, namespace="y") as y,
        mmbroker.connect(broker.directory, namespace="y") as engine_y,
    ):
        engine_x.attach(engine="of x", access="readonly")
        table_y = engine_y.attach(engine="of y", access="readonly")
        named, held = x.put(secret, key="image-1", to="of x"), x.put(secret, to="of x")
        assert y.lookup("image-1") is None and y.lookup(mmbroker.digest(secret)) is None
        with pytest.raises(NoSuchEngine) as refused:
            y.put(secret, to="of x")
        assert refused.value.args[0] == _as_if_it_were_not_there(y)
        for ref in (held.ref, named.ref):
            with pytest.raises(FeatureMissing):
                table_y.take(ref)
        own = y.put(secret, to="of y")
        assert own.ref.feature != held.ref.feature
        assert (y.stats()["bytes_written"], y.stats()["hits"]) == (secret.nbytes, 0)
        with table_y.take(own.ref) as use:
            assert same(use.tensor, secret)
        spaces = {arena["namespace"] for arena in broker.status()["arenas"]}
        assert spaces == {"x", "y"}


def _as_if_it_were_not_there(client: mmbroker.Client) -> str:
    with pytest.raises(NoSuchEngine) as refused:
        client.put(torch.ones(1), to="nowhere")
    return str(refused.value).replace("nowhere", "of x")


@pytest.mark.balanced
def test_a_producer_that_starts_again_does_not_repeat_itself(
    broker: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    """C12. Its count of requests is back at 0: no reference of its first life fits anything of its second."""
    with mmbroker.connect(broker.directory, name="engine") as engine:
        table = engine.attach(engine="a", access="readonly")
        first_life = puppet()
        first_life("import mmbroker, torch")
        first_life(f"client = mmbroker.connect({str(broker.directory)!r}, name='worker-0')")
        first = ast.literal_eval(
            first_life(
                "held = [client.put(torch.full((9,), n), to='a') for n in range(5)]\n"
                "result = repr([one.ref.to_wire() for one in held])\n"
                "for one in held: one.drop()\nclient.close()"
            )
        )
        first_life.kill()
        eventually(lambda: table.stats()["entries"] == 0, "the end of the first")
        with mmbroker.connect(broker.directory, name="worker-0") as second_life:
            held = [second_life.put(torch.full((9,), 100 + n), to="a") for n in range(5)]
            assert not {one.ref.hold for one in held} & {wire["hold"] for wire in first}
            assert not {one.ref.feature for one in held} & {wire["feature"] for wire in first}
            for wire in first:
                with pytest.raises(FeatureMissing):
                    table.take(wire)
            for n, one in enumerate(held):
                with table.take(one.ref) as use:
                    assert same(use.tensor, torch.full((9,), 100 + n))
