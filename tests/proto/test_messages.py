"""The wire, byte for byte, and what it refuses."""

from __future__ import annotations

import json
import math
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbroker.proto import messages as m
from mmbroker.proto.errors import InvalidMessage, VersionMismatch
from mmbroker.proto.reference import PROTOCOL_VERSION

from .samples import BOOT, CALLS, DECODERS, SAMPLES, golden, view

GOLDEN: list[dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())

every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=" | ".join)


def fields(message: msgspec.Struct) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(m.encode(message))
    return decoded


def structs(value: Any) -> set[type]:
    """Every message type within a message."""
    if isinstance(value, msgspec.Struct):
        inner = (structs(getattr(value, name)) for name in value.__struct_fields__)
        return {type(value)}.union(*inner)
    if isinstance(value, list | tuple):
        return set().union(*(structs(v) for v in value))
    return set()


def test_the_wire_has_not_changed() -> None:
    """A change here is a new PROTOCOL_VERSION, or a mistake."""
    assert golden() == GOLDEN


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda e: e["name"])
def test_recorded_bytes_are_read_back(entry: dict[str, Any]) -> None:
    message = DECODERS[entry["channel"]](bytes.fromhex(entry["hex"]))
    assert message == SAMPLES[entry["channel"], entry["name"]]
    assert view(message) == entry["view"]


def test_there_is_a_sample_of_every_message() -> None:
    unions = (m.Lifeline, m.Body, m.Reply, m.Result, m.Downlink)
    wanted = {t for union in unions for t in typing.get_args(union)} | {
        m.Call,
        m.Item,
        m.Sealing,
        m.Grant,
        m.Wanted,
        m.Worth,
    }
    assert set().union(*(structs(message) for message in SAMPLES.values())) >= wanted


@every_sample
def test_an_unknown_field_is_refused(sample: tuple[str, str]) -> None:
    data = msgspec.msgpack.encode({**fields(SAMPLES[sample]), "extra": 1})
    with pytest.raises(InvalidMessage, match="extra"):
        DECODERS[sample[0]](data)


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_field_in_a_body_is_refused(name: str) -> None:
    call = fields(CALLS[name])
    call["body"]["extra"] = 1
    with pytest.raises(InvalidMessage, match="extra"):
        m.decode_call(msgspec.msgpack.encode(call))


@every_sample
def test_an_unknown_type_is_refused(sample: tuple[str, str]) -> None:
    message = fields(SAMPLES[sample])
    (message if "t" in message else message["body"])["t"] = "surprise"
    with pytest.raises(InvalidMessage, match="surprise"):
        DECODERS[sample[0]](msgspec.msgpack.encode(message))


@every_sample
def test_a_missing_field_is_refused(sample: tuple[str, str]) -> None:
    message = fields(SAMPLES[sample])
    required = [k for k in message if k == "t" or k in ("v", "boot", "seq", "body", "segment", "error")]
    for name in required:
        data = msgspec.msgpack.encode({k: v for k, v in message.items() if k != name})
        with pytest.raises(InvalidMessage):
            DECODERS[sample[0]](data)


@pytest.mark.parametrize("channel", DECODERS)
def test_a_message_of_another_channel_is_refused(channel: str) -> None:
    for (other, _), message in SAMPLES.items():
        if other != channel:
            with pytest.raises(InvalidMessage):
                DECODERS[channel](m.encode(message))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -7, 1 << 62])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if "v" in fields(SAMPLES[s])], ids=" | ".join)
def test_another_version_is_named(sample: tuple[str, str], version: int) -> None:
    """Also when the other version has fields and types that this one does not know."""
    for strange in ({}, {"t": "from the future"}, {"new": [1]}):
        data = msgspec.msgpack.encode({**fields(SAMPLES[sample]), **strange, "v": version})
        with pytest.raises(VersionMismatch, match=str(version)) as caught:
            DECODERS[sample[0]](data)
        assert caught.value.figures == {"theirs": version, "ours": PROTOCOL_VERSION}


@pytest.mark.parametrize("channel", DECODERS)
def test_an_oversized_message_is_refused_unread(channel: str) -> None:
    largest = m.encode(m.Refused("x", "y" * m.MAX_MESSAGE))[: m.MAX_MESSAGE]
    with pytest.raises(InvalidMessage, match="cannot be decoded"):
        DECODERS[channel](largest)
    with pytest.raises(InvalidMessage, match="exceeds the limit") as caught:
        DECODERS[channel](largest + b"!")
    assert caught.value.figures == {"nbytes": m.MAX_MESSAGE + 1, "limit": m.MAX_MESSAGE}


@pytest.mark.parametrize("nbytes", [0, 15, 17])
def test_a_boot_id_has_sixteen_bytes(nbytes: int) -> None:
    with pytest.raises(InvalidMessage, match="boot"):
        m.decode_call(m.encode(m.Call(PROTOCOL_VERSION, BOOT[:1] * nbytes, 1, 1, 1.0, m.Status())))


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -math.inf, -0.5])
def test_a_timeout_is_a_number_of_seconds(timeout: float) -> None:
    """NaN compares with nothing: one in a queue of deadlines would stop the whole queue."""
    with pytest.raises(InvalidMessage, match="timeout"):
        m.decode_call(m.encode(m.Call(PROTOCOL_VERSION, BOOT, 1, 1, timeout, m.Status())))


@pytest.mark.parametrize("nbytes", [0, 31, 33])
def test_a_key_has_thirty_two_bytes(nbytes: int) -> None:
    call = fields(CALLS["call: lookup"])
    call["body"]["keys"] = [[0, b"k" * nbytes]]
    with pytest.raises(InvalidMessage, match="32 bytes"):
        m.decode_call(msgspec.msgpack.encode(call))


def test_an_unknown_kind_of_key_is_refused() -> None:
    call = fields(CALLS["call: lookup"])
    call["body"]["keys"] = [[3, b"k" * 32]]
    with pytest.raises(InvalidMessage):
        m.decode_call(msgspec.msgpack.encode(call))


def test_what_a_refusal_quotes_is_short_and_printable() -> None:
    """It goes into logs, and onto screens."""
    for nasty in ("\x1b[2J\x07\n", "x" * 100_000):
        for field in ({"t": nasty}, {"t": "status", nasty: 1}):
            data = msgspec.msgpack.encode({**fields(CALLS["call: status"]), "body": field})
            with pytest.raises(InvalidMessage) as caught:
                m.decode_call(data)
            assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_nesting_without_end_is_refused() -> None:
    deep = b"\x91" * 100_000 + b"\x90"
    report = m.encode(m.Answer(1, m.Report({"deep": 1})))
    for data in (deep, report.replace(b"\xa4deep\x01", b"\xa4deep" + deep)):
        for decode in DECODERS.values():
            with pytest.raises(InvalidMessage):
                decode(data)


def test_a_header_that_claims_billions_of_items_costs_nothing() -> None:
    """The claim is larger than the message can be: it has to fail on the data, not on memory."""
    drop = m.encode(m.Call(PROTOCOL_VERSION, BOOT, 1, 0, 0.0, m.Drop([1])))
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(InvalidMessage):
            m.decode_call(drop.replace(b"\x91\x01", claim + b"\x01"))


@pytest.mark.parametrize("name", CALLS)
def test_the_sender_of_a_bad_call_can_be_told(name: str) -> None:
    call = fields(CALLS[name])
    assert m.seq_of(msgspec.msgpack.encode({**call, "body": {"t": "surprise"}})) == call["seq"]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"\x81\xa3seq\xa1x", b"\x91" * 9999]
)
def test_seq_is_0_where_there_is_none(data: bytes) -> None:
    assert m.seq_of(data) == 0


# --- anything at all ------------------------------------------------------------------------------------------------


def decode_or_refuse(channel: str, data: bytes) -> msgspec.Struct | None:
    """The message, or None for one that was refused in the right way. Anything else is an exception."""
    m.seq_of(data)
    try:
        return DECODERS[channel](data)
    except (InvalidMessage, VersionMismatch) as refusal:
        assert str(refusal)
        m.encode(m.Failed(type(refusal).__name__, str(refusal), refusal.figures))  # it can be sent back
        return None


@given(st.binary(max_size=200), st.sampled_from(sorted(DECODERS)))
def test_any_bytes_are_read_or_refused(data: bytes, channel: str) -> None:
    decode_or_refuse(channel, data)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
@settings(deadline=None)
def test_damaged_messages_are_read_or_refused(sample: tuple[str, str], data: st.DataObject) -> None:
    damaged = bytearray(m.encode(SAMPLES[sample]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[at] = data.draw(st.integers(0, 255))
        else:
            damaged[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
        if not damaged:
            break
    message = decode_or_refuse(sample[0], bytes(damaged))
    if message is not None:  # what was read says everything that was in the bytes
        assert DECODERS[sample[0]](m.encode(message)) == message


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_any_value_in_any_field_is_read_or_refused(sample: tuple[str, str], data: st.DataObject) -> None:
    message = fields(SAMPLES[sample])
    target = message
    if isinstance(message.get("body"), dict) and data.draw(st.booleans()):
        target = message["body"]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(json_like)
    decode_or_refuse(sample[0], msgspec.msgpack.encode(message))


numbers = st.integers(0, (1 << 63) - 1)


@given(st.lists(numbers), st.lists(numbers), st.text(), st.floats(0, 1e9))
def test_calls_come_back_as_they_were(
    holds: list[int], failed: list[int], reason: str, timeout: float
) -> None:
    call = m.Call(PROTOCOL_VERSION, BOOT, 1, 0, timeout, m.Ack(holds, failed, reason))
    assert m.decode_call(m.encode(call)) == call


@given(st.text(), st.none() | st.text())
def test_hellos_come_back_as_they_were(name: str, namespace: str | None) -> None:
    hello = m.Hello(PROTOCOL_VERSION, name, namespace)
    assert m.decode_lifeline(m.encode(hello)) == hello


def test_samples_differ_from_each_other() -> None:
    """Else the tests above test less than they say."""
    assert len({m.encode(message) for message in SAMPLES.values()}) == len(SAMPLES)
