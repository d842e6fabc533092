"""One of every message. `python -m tests.proto.samples` prints the golden file for them."""

from __future__ import annotations

import json

import msgspec

from mmbroker.proto import messages as m
from mmbroker.proto.form import list_form, tensor_form
from mmbroker.proto.keys import Key
from mmbroker.proto.reference import PROTOCOL_VERSION, Reference

BOOT = bytes(range(16))
DIGEST = bytes(range(32, 64))
FORM = tensor_form("float32", (4, 1176), "image")
PARTS = list_form([("bfloat16", (2, 3)), ("int64", ())], "audio")
REF = Reference(BOOT, 7, 1 << 40, (1 << 63) - 1, DIGEST, FORM.dtype, FORM.shape, FORM.nbytes)
REF_PARTS = Reference(BOOT, 8, 9, 10, DIGEST, PARTS.dtype, PARTS.shape, PARTS.nbytes, PARTS.parts)
KEYS = [Key.content(DIGEST), Key.derived(DIGEST), Key.caller("a name")]

LIFELINE: dict[str, msgspec.Struct] = {
    "hello": m.Hello(PROTOCOL_VERSION, "worker-0"),
    "hello with a namespace": m.Hello(PROTOCOL_VERSION, "worker-0", "uid-1000"),
    "welcome": m.Welcome(PROTOCOL_VERSION, BOOT, (1 << 62) + 1, bytes(16), "control.sock", "uid-1000", "cpu"),
    "refused": m.Refused("QuotaExceeded", "64 sessions are connected", {"used": 64, "limit": 64}),
    "welcome, with a GPU": m.Welcome(
        PROTOCOL_VERSION, BOOT, 2, bytes(16), "control.sock", "team", "gpu-1", "GPU-1"
    ),
    "segment": m.SegmentFd(3, 64 << 20, True),
    "segment of the device": m.SegmentFd(4, 64 << 20, True, "device"),
}

BODIES: dict[str, m.Body] = {
    "create": m.Create([m.Item(KEYS[0], FORM), m.Item(KEYS[2], PARTS)], "engine-a"),
    "create, private": m.Create([m.Item(KEYS[1], FORM)], private=True),
    "create, of a promise": m.Create([m.Item(KEYS[1], FORM, 4)]),
    "lookup": m.Lookup(KEYS, "engine-a", True),
    "promise": m.Promise(KEYS[1:2], "engine-a"),
    "seal": m.Seal([m.Sealing(5), m.Sealing(6, True, b"beside")], "engine-a"),
    "seal, with its cost": m.Seal([m.Sealing(5, cost=68_000)]),
    "attach": m.Attach("engine-a", 1, 2),
    "attach, read-only": m.Attach("engine-a", 0, 1, "GPU-1", "readonly", True, "device"),
    "attach, on the host": m.Attach("engine-a", 0, 1, "cpu", path="host", why="cuInit: no driver"),
    "detach": m.Detach(),
    "released": m.Released((1 << 62) + 1),
    "status": m.Status(20),
    "shutdown": m.Shutdown(),
    "abort": m.Abort([5]),
    "drop": m.Drop([7, 1 << 40]),
    "unpin": m.Unpin([6]),
    "ack": m.Ack([7]),
    "ack, failed": m.Ack([], [8], "out of memory"),
    "ack, settled": m.Ack([7], settled=[5, 6]),
    "ack, loaded": m.Ack([7], loaded=[6]),
    "settle": m.Settle([7]),
    "kept": m.Kept([7, 8]),
    "loaded": m.Loaded([7, 8]),
    "park": m.Park([7]),
    "want": m.Want([7]),
    "tally": m.Tally({"takes": 12, "fallbacks": 0}),
    "drain": m.Drain(),
    "drain no more": m.Drain(False),
    "evict": m.Evict(1024),
    "evict one namespace": m.Evict(10, "uid-1000"),
    "tier": m.Tier(True),
    "tier, closed, with its figures": m.Tier(False, 0.05, 8, 3),
}
CALLS: dict[str, msgspec.Struct] = {
    f"call: {name}": m.Call(PROTOCOL_VERSION, BOOT, 11, seq, 2.5, body)
    for seq, (name, body) in enumerate(BODIES.items())
}

REPLIES: dict[str, m.Reply] = {
    "created": m.Created([m.Hit(REF), m.Leased(5, 3, 4096, 6), m.Pending()]),
    "created on the device": m.Created([m.Leased(5, 4, 0, 6, "device")]),
    "found": m.Found([REF, None]),
    "found, with extras": m.Found([REF, None], [b"beside", b""]),
    "promised": m.Promised([m.Hit(REF, b"beside"), m.Due(4), m.Pending()]),
    "sealed": m.Sealed([REF, REF_PARTS]),
    "attached": m.Attached(True),
    "attached on the device": m.Attached(False, "device"),
    "done": m.Done(),
    "evicted": m.Evicted(3, 12 << 20),
    "report": m.Report({"boot": "00", "arenas": [{"used": 1}], "share": 0.5, "none": None}),
    "failed": m.Failed("PoolFull", "no room", {"requested": 3, "free": 2, "limit": 1}),
}
NOTICES: dict[str, msgspec.Struct] = {
    "granted": m.Granted([m.Grant(REF, "image", 3, 4096), m.Grant(REF_PARTS, "audio", 0, 0, True)]),
    "granted on the device": m.Granted(
        [
            m.Grant(REF, "image", 3, 4096, device=m.DevicePlace(4, 0, True)),
            m.Grant(REF, "image", 4, 0, tier="device"),
        ]
    ),
    "offered": m.Offered([m.Offer(7, m.DevicePlace(4, 8192, False))]),
    "dismissed": m.Dismissed([7, 8]),
    "granted, dismissed": m.Granted([m.Grant(REF, "image", 3, 4096)], [5, 6]),
    "broken": m.Broken([5]),
    "retired": m.Retired([3]),
    "sought": m.Sought([m.Wanted(KEYS[1], 4), m.Wanted(KEYS[1], 5)]),
    "fresh": m.Fresh([m.Worth(KEYS[1], 4704, 68_000, 0), m.Worth(KEYS[1], 4704, None, 2)]),
}
DOWNLINK = {f"answer: {name}": m.Answer(4, body) for name, body in REPLIES.items()} | NOTICES

DECODERS = {"lifeline": m.decode_lifeline, "call": m.decode_call, "downlink": m.decode_downlink}
SAMPLES = {
    (channel, name): message
    for channel, samples in {"lifeline": LIFELINE, "call": CALLS, "downlink": DOWNLINK}.items()
    for name, message in samples.items()
}


def view(message: msgspec.Struct) -> object:
    """What a reader sees, as JSON has it (bytes in base64)."""
    return json.loads(msgspec.json.encode(message))


def golden() -> list[dict[str, object]]:
    """Every sample as bytes, and as what a reader sees."""
    return [
        {
            "channel": channel,
            "name": name,
            "hex": m.encode(message).hex(),
            "view": view(message),
        }
        for (channel, name), message in SAMPLES.items()
    ]


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
