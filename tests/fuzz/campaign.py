"""The long form: so many messages for every decoder, the state machine, and the sockets of a real broker.

`make fuzz COUNT=5000000 SEED=1` runs it. A message that makes a target raise is a finding: it is printed, kept in the
result, and the rest goes on; then it belongs into `corpus/found.hex`, where the tests try it for ever.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mmbroker.vitals import resident, version
from tests.kit import BrokerProcess, Puppet

from . import targets
from .mutator import CORPUS, Mutator, corpus
from .siege import SETTINGS, Siege

#: Of all messages, how many go to the state machine and over the sockets.
MACHINE, SOCKETS = 0.1, 0.1
#: Address space that one message may make a decoder ask for at most, in bytes.
ROOM = 512 << 20
#: Resident memory that a part may gain after its first tenth, in bytes.
GROWTH = 64 << 20
_BATCH = 500
_PROGRESS = 5.0


class Part:
    """One part of the campaign: says how far it is, and keeps what it found."""

    def __init__(self, name: str, count: int, say: Callable[[str], None]) -> None:
        self.name, self.count = name, count
        self.done = 0
        self.outcomes: Counter[str] = Counter()
        self.findings: list[dict[str, str]] = []
        self._say = say
        self._began = self._said = time.monotonic()
        self._resident = 0

    def step(self, count: int = 1) -> None:
        self.done += count
        if not self._resident and self.done * 10 >= self.count:
            self._resident = resident()
        now = time.monotonic()
        if now - self._said >= _PROGRESS:
            self._said = now
            rate = self.done / (now - self._began)
            self._say(
                f"{self.name}: {self.done:,} of {self.count:,}, {rate:,.0f}/s, {len(self.findings)} found"
            )

    def found(self, data: bytes, error: BaseException) -> None:
        self.findings.append(
            {"part": self.name, "hex": data.hex(), "error": f"{type(error).__name__}: {error}"}
        )
        self._say(f"FOUND in {self.name}: {type(error).__name__}: {error}\n  {data.hex()}")

    def result(self, **more: Any) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        gained = resident() - self._resident
        if gained > GROWTH:
            self.findings.append({"part": self.name, "hex": "", "error": f"memory grew by {gained} bytes"})
        return {
            "messages": self.done,
            "seconds": round(seconds, 1),
            "per_second": round(self.done / seconds),
            "memory_gained": gained,
            "outcomes": dict(self.outcomes.most_common()),
            **more,
        }


@contextmanager
def little_room() -> Iterator[None]:
    """Whoever wants much memory at once gets a MemoryError, which is a finding."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def feed(part: Part, target: targets.Target, mutator: Mutator) -> None:
    """Give a target what the mutator makes, until the part is done."""
    while part.done < part.count and len(part.findings) < 20:
        data = mutator.next()
        try:
            part.outcomes[target(data)] += 1
        except Exception as error:
            part.found(data, error)
        part.step()


def besiege(part: Part, seed: int) -> dict[str, Any]:
    """The siege of a real broker."""
    root = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
    broker, bystander = BrokerProcess(root, SETTINGS, [], {}), Puppet()
    try:
        siege = Siege(broker.wait_ready(), bystander, seed)
        while part.done < part.count:
            siege.strike(_BATCH)
            status = siege.judge()
            part.step(_BATCH)
        after = siege.lift()
        part.outcomes.update(siege.answers)
        return {
            "sent": dict(siege.sent),
            "honest_rounds": after["rounds"],
            "broker_memory": [siege.before["daemon"]["rss"], status["daemon"]["rss"], after["daemon"]["rss"]],
            "broker_descriptors": [siege.before["daemon"]["descriptors"], after["daemon"]["descriptors"]],
            "worst_loop_lag": after["daemon"]["loop_lag_worst"],
            "broker_counters": after["daemon"]["counters"],
        }
    except Exception as error:
        part.found(b"", error)
        return {"log": broker.log()[-2000:]}
    finally:
        bystander.kill()
        broker.kill()
        broker.clean_up()
        shutil.rmtree(root)


def run(count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole campaign; its result has every figure, and what was found."""
    sockets, machine = int(count * SOCKETS), int(count * MACHINE)
    each = -(-(count - sockets - machine) // len(targets.DECODERS))
    parts: dict[str, Any] = {}
    findings: list[dict[str, str]] = []
    with little_room():
        for n, (name, target) in enumerate(targets.DECODERS.items()):
            part = Part(f"decoder of {name}", each, say)
            feed(part, target, Mutator(seed + n, corpus(name)))
            parts[part.name] = part.result()
            findings += part.findings
        part = Part("state machine", machine, say)
        state = targets.Machine()
        feed(part, state.feed, Mutator(seed + 100, corpus("call"), targets.envelope))
        parts[part.name] = part.result(lives=state.lives, answers=dict(state.answers.most_common()))
        findings += part.findings
    part = Part("sockets", sockets, say)
    more = besiege(part, seed + 200)
    parts[part.name] = part.result(**more)
    findings += part.findings
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "mmbroker": version(),
        "python": platform.python_version(),
        "msgspec": msgspec.__version__,
        "zeromq": zmq.zmq_version(),
        "seed": seed,
        "messages": sum(part["messages"] for part in parts.values()),
        "over_sockets": parts["sockets"]["messages"],
        "corpus": {path.stem: len(path.read_text().split()) for path in sorted(CORPUS.glob("*.hex"))},
        "found": findings,
        "parts": parts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.campaign", description=__doc__)
    parser.add_argument("--count", type=int, default=5_000_000, help="messages in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same messages")
    parser.add_argument("--json", type=Path, help="where the result goes")
    chosen = parser.parse_args()
    result = run(chosen.count, chosen.seed, lambda text: print(text, flush=True))
    text = json.dumps(result, indent=1) + "\n"
    if chosen.json is not None:
        chosen.json.write_text(text)
    print(text if chosen.json is None else f"{result['messages']:,} messages, {len(result['found'])} found")
    return 1 if result["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
