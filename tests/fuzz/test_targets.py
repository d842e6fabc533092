"""The short form for everything that reads; what the long one has found is tried first."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbroker.proto import messages as m
from mmbroker.proto.form import Form
from mmbroker.proto.keys import Key, Kind
from mmbroker.proto.reference import PROTOCOL_VERSION
from mmbroker.vitals import resident
from tests.fuzz import targets
from tests.fuzz.mutator import CORPUS, Mutator, corpus

MIB = 1 << 20
#: A channel and a message each, of all campaigns.
FOUND = [line.split() for line in (CORPUS / "found.hex").read_text().splitlines()]


@pytest.mark.parametrize(("channel", "data"), FOUND)
def test_what_was_found_once(channel: str, data: str) -> None:
    targets.DECODERS[channel](bytes.fromhex(data))


@pytest.mark.parametrize("channel", targets.DECODERS)
def test_the_corpus_is_read(channel: str) -> None:
    """Else what is damaged was no traffic to begin with."""
    assert {targets.DECODERS[channel](data) for data in corpus(channel)} == {"read"}


def test_the_corpus_has_every_message() -> None:
    tags = set()
    for channel in ("lifeline", "call", "downlink"):
        for data in corpus(channel):
            tree = msgspec.msgpack.decode(data)
            tags |= {tree.get("t"), (tree.get("body") or {}).get("t")}
    for union in (m.Lifeline, m.Body, m.Reply, m.Notice):
        for kind in union.__args__:
            assert kind.__struct_config__.tag in tags


@pytest.mark.parametrize("channel", targets.DECODERS)
def test_damaged_traffic_is_read_or_refused(channel: str) -> None:
    """The same messages twice: what the second time costs in memory, would be lost each time."""
    outcomes: set[str] = set()
    taken: list[tuple[int, int]] = []
    for _ in range(2):
        mutator = Mutator(7, corpus(channel))
        for _ in range(12_000):
            data = mutator.next()
            try:
                outcomes.add(targets.DECODERS[channel](data))
            except Exception as error:
                pytest.fail(f"{type(error).__name__}: {error} for {channel} {data.hex()}")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        taken.append((sys.getallocatedblocks(), resident()))
    (blocks, before), (more_blocks, after) = taken
    assert more_blocks - blocks < 1000
    assert after - before < 16 * MIB
    assert {"read", "InvalidMessage", "VersionMismatch"} <= outcomes


def test_the_same_seed_makes_the_same_messages() -> None:
    one, two, other = (Mutator(seed, corpus("call")) for seed in (3, 3, 4))
    first = [one.next() for _ in range(100)]
    assert first == [two.next() for _ in range(100)]
    assert first != [other.next() for _ in range(100)]


def test_the_state_machine_hears_damaged_calls() -> None:
    machine = targets.Machine()
    mutator = Mutator(8, corpus("call"), targets.envelope)
    for n in range(12_000):
        data = mutator.next()
        try:
            machine.feed(data)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} for message {n} of the seed, {data.hex()}")
    assert machine.lives > 3
    reached = {
        "Created",
        "Sealed",
        "Found",
        "Granted",
        "Dismissed",
        "Attached",
        "Done",
        "Report",
        "Sought",
        "Fresh",
    }
    refused = {"QuotaExceeded", "NoSuchEngine", "LeaseClosed", "FeatureError", "EngineLagging", "BrokerLost"}
    assert reached | refused <= machine.answers.keys(), machine.answers


# --- hypothesis: what no real traffic has --------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
UNIONS = (m.Lifeline, m.Body, m.Reply, m.Notice)
tags = st.sampled_from(
    sorted({kind.__struct_config__.tag for union in UNIONS for kind in union.__args__} | {"answer"})
)
names = st.sampled_from(
    ["t", "v", "boot", "session", "seq", "timeout", "body", "items", "leases", "holds", "keys", "refs"]
)
trees = st.dictionaries(names, values | st.dictionaries(names, values | tags, max_size=5), max_size=8)


@pytest.mark.parametrize("channel", targets.DECODERS)
@given(trees, tags)
@settings(max_examples=200, deadline=None)
def test_anything_with_our_names_is_read_or_refused(channel: str, tree: dict[str, Any], tag: str) -> None:
    targets.DECODERS[channel](msgspec.msgpack.encode({**tree, "t": tag, "mmbroker": 1}))


numbers = st.lists(st.integers(0, 40) | st.integers(-(1 << 63), (1 << 64) - 1), max_size=4)
engines = st.sampled_from([None, "engine-a", "engine-a", "nobody", ""])
keys = st.builds(Key, st.sampled_from(list(Kind)), st.sampled_from([b"a" * 32, b"b" * 32, b"c" * 32]))
forms = st.builds(
    Form,
    st.sampled_from(["uint8", "float32", "list", "?"]),
    st.lists(st.sampled_from([0, 1, 1000, 1 << 40, -1]), max_size=3).map(tuple),
    st.sampled_from([0, 1, 4, 1000, 4000, 1 << 40, -1]),
)
calls = st.one_of(
    st.builds(m.Create, st.lists(st.builds(m.Item, keys, forms), max_size=4), engines, st.booleans()),
    st.builds(m.Lookup, st.lists(keys, max_size=4), engines),
    st.builds(m.Seal, st.lists(st.builds(m.Sealing, st.integers(0, 40), st.booleans()), max_size=4), engines),
    st.builds(m.Attach, st.text(max_size=3), st.integers(-1, 3), st.integers(-1, 3), st.text(max_size=3)),
    st.builds(m.Promise, st.lists(keys, max_size=4), engines),
    st.builds(m.Tier, st.booleans(), st.floats(), st.integers(-1, 3), st.integers(-1, 3)),
    st.builds(m.Ack, numbers, numbers, st.text(), numbers, numbers),
    st.builds(m.Released, st.integers(0, 9)),
    st.builds(m.Tally, st.dictionaries(st.text(), st.integers(0, 9))),
    *(
        st.builds(kind, numbers)
        for kind in (m.Abort, m.Drop, m.Unpin, m.Settle, m.Kept, m.Loaded, m.Park, m.Want)
    ),
    st.sampled_from([m.Detach(), m.Status(), m.Status(-1), m.Status(1 << 62)]),
)


@given(st.lists(st.tuples(st.integers(0, 9), calls), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_well_formed_calls_leave_the_books_in_order(heard: list[tuple[int, m.Body]]) -> None:
    machine = targets.Machine()
    for session, body in heard:
        assert machine.feed(m.encode(m.Call(PROTOCOL_VERSION, b"B" * 16, session, 1, 0.5, body))) == "heard"
    machine.end()
