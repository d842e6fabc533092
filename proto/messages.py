"""The messages, and how they become bytes.

Two channels carry them (design: lifeline and control). The lifeline carries a `Hello`, one `Welcome` or `Refused`, and
then `SegmentFd`s, each with one file descriptor. Control carries `Call`s from the client, `Answer`s and `Notice`s from
the broker. Everything is msgpack; unknown fields, unknown types and wrong sizes are refused with `InvalidMessage`.

A `Call` with `seq` 0 wants no answer. Every other `seq` is answered exactly once, at the latest when `timeout` seconds
have passed since the broker read it; a repeat of an answered `seq` gets the same answer again.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from .answers import *  # noqa: F403
from .answers import Downlink
from .calls import *  # noqa: F403
from .calls import Call
from .errors import InvalidMessage, VersionMismatch, plain
from .reference import BOOT_BYTES, PROTOCOL_VERSION

#: Longest message on either channel, in bytes.
MAX_MESSAGE: Final = 1 << 20


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    pass


# --- the lifeline ---------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """First words of a client. `namespace` None: the one of its own uid. Sent before anything else is."""

    v: int
    name: str
    namespace: str | None = None


class Welcome(_Message, frozen=True, tag="welcome"):
    """The session: `routing` is the control socket's identity, `control` its file name in the instance directory,
    `device` the UUID of the GPU that is served."""

    v: int
    boot: bytes
    session: int
    routing: bytes
    control: str
    namespace: str
    instance: str
    device: str = ""


class Refused(_Message, frozen=True, tag="refused"):
    """No session: an error by its name (`errors.BY_NAME`)."""

    error: str
    message: str
    figures: dict[str, int] = {}


class SegmentFd(_Message, frozen=True, tag="segment"):
    """Comes with one descriptor. `writable` says how it may be mapped; `nbytes` is the segment's size."""

    segment: int
    nbytes: int
    writable: bool
    tier: str = "host"


Lifeline = Hello | Welcome | Refused | SegmentFd


# --- bytes ----------------------------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    v: int = -1


_encoder = msgspec.msgpack.Encoder()
_lifeline = msgspec.msgpack.Decoder(Lifeline)
_call = msgspec.msgpack.Decoder(Call)
_downlink = msgspec.msgpack.Decoder(Downlink)
_version = msgspec.msgpack.Decoder(_Version)


def encode(message: msgspec.Struct) -> bytes:
    """Any message as bytes."""
    return _encoder.encode(message)


def _refusal(data: bytes, error: Exception, what: str) -> Exception:
    """Why `data` was refused: another version's message is told apart from nonsense."""
    try:
        version = _version.decode(data).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        version = -1
    if version not in (-1, PROTOCOL_VERSION):
        return VersionMismatch(
            f"the two sides speak protocol versions {min(version, PROTOCOL_VERSION)} and "
            f"{max(version, PROTOCOL_VERSION)}: upgrade mmbroker where version {min(version, PROTOCOL_VERSION)} is "
            "spoken, and restart what runs there",
            theirs=version,
            ours=PROTOCOL_VERSION,
        )
    return InvalidMessage(f"{what} of {len(data)} bytes cannot be decoded: {plain(error)}", nbytes=len(data))


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, what: str) -> Any:
    if len(data) > MAX_MESSAGE:
        raise InvalidMessage(
            f"{what} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}: send fewer items at once",
            nbytes=len(data),
            limit=MAX_MESSAGE,
        )
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(data, error, what) from None
    if getattr(message, "v", PROTOCOL_VERSION) != PROTOCOL_VERSION:
        raise _refusal(data, ValueError("version"), what)
    return message


def decode_lifeline(data: bytes) -> Lifeline:
    """A message from the lifeline; raises `InvalidMessage` or `VersionMismatch`."""
    message: Lifeline = _decode(_lifeline, data, "a lifeline message")
    return message


def decode_call(data: bytes) -> Call:
    """A message from a client; raises `InvalidMessage` or `VersionMismatch`."""
    call: Call = _decode(_call, data, "a call")
    if len(call.boot) != BOOT_BYTES:
        raise InvalidMessage(f"a boot id has {BOOT_BYTES} bytes, not {len(call.boot)}")
    if not 0 <= call.timeout < math.inf:  # not a number, too
        raise InvalidMessage(f"a call's timeout is a number of seconds from 0, not {call.timeout}")
    return call


def decode_downlink(data: bytes) -> Downlink:
    """A message from the broker; raises `InvalidMessage` or `VersionMismatch`."""
    message: Downlink = _decode(_downlink, data, "a broker message")
    return message


class _Seq(msgspec.Struct):
    seq: int = 0


_seq = msgspec.msgpack.Decoder(_Seq)


def seq_of(data: bytes) -> int:
    """The `seq` of a call that could not be decoded, so that its sender can be told; 0 if there is none."""
    try:
        return _seq.decode(data).seq
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
