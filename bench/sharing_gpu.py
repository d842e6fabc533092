"""GPU memory for transport: two engines on one broker, and the same two with a broker each, under the same traffic.

    python -m bench.sharing_gpu --model PATH --gpu 0 --out DIRECTORY [--only NAME ...] [--at-once N]
    python -m bench.sharing_gpu --out DIRECTORY       # a tiny model on the CPU: host memory, to see that it works

Two real SGLang servers get every request together: the next is sent when both have answered. No picture comes twice to
an engine, so what is saved is saved by sharing alone. Arrangements: `shared`, one broker; `alone`, a broker for each
server; `shared-gpu` and `alone-gpu`, the same with features that stay on the GPU; `cuda_ipc` and `cpu`, SGLang's own.

What brokers take is what their own books say, at its most, of all brokers together at one moment: the driver counts
memory by context, and a broker has none. Beside it stands what the driver says: by process, and what it counts for no
process, which brokers' segments are part of. Limits are so high that none is reached; a row whose broker has reached
one, or whose features went another way, says so, and no goal is judged by it.

DIRECTORY gets `sharing-gpu.json` after each arrangement, and the ends of all logs. What is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from bench import machine, tables
from bench.processes import Workshop
from bench.serving import books, pairs
from bench.serving.pairs import ARRANGEMENTS, ENGINES, Pair, Traffic
from bench.serving.servers import Maker
from bench.serving.watch import Gpu, Watch
from mmbroker.screen import table

RESULT: Final = "sharing-gpu.json"
MIB: Final = 1 << 20
#: Which is compared with which, and what that is about.
PAIRS: Final = (
    ("shared", "alone", "features made on the CPU"),
    ("shared-gpu", "alone-gpu", "features that stay on the GPU"),
)
GOAL: Final = 55.0
#: Counted by a broker when a limit has shaped what it holds.
LIMITED: Final = (
    *("replicas_evicted_room", "evictions_room", "evictions_watermark", "evictions_count"),
    *("segments_refused", "device_too_large", "pool_full", "quota_refusals"),
)
#: The share of features that may have gone another way in a row that counts: too few to matter for a goal.
FEW: Final = 0.01
#: Two servers fit on one GPU, and start fast.
GPU_FLAGS: Final = "--disable-cuda-graph --max-total-tokens 131072 --sleep-on-idle"
#: Seconds: for a start, for the first requests, for the traffic, and until brokers are empty. With less than the last
#: nothing is started.
START, WARM, TRAFFIC, EMPTY, LEAST = 240.0, 120.0, 120.0, 10.0, 90.0
#: Requests of an engine before anything counts, with pictures of their own.
FIRST: Final = 2

Say = Callable[[str], None]

ON_A_GPU: Final = Traffic(96, 32, 8, (640, 480), 32, 4, 16384, 16384)
ON_A_CPU: Final = Traffic(12, 3, 2, (112, 84), 4, 0, 512, 0)


def warm(pair: Pair, asked: Sequence[Sequence[str]], traffic: Traffic, deadline: float) -> None:
    """Until both servers are ready and have answered their first requests, for which kernels are compiled."""
    for engine in pair.engines():
        engine.wait_ready(max(1.0, min(START, deadline - time.monotonic())))
    pair.ready_s = round(time.monotonic() - pair.began, 1)
    if wrong := pairs.send(pair.engines(), asked, FIRST, traffic.tokens, WARM)[1]:
        raise RuntimeError(f"{len(wrong)} of the first {len(asked) * ENGINES} requests fail: {wrong[0]}")
    pair.warm_s = round(time.monotonic() - pair.began, 1)


def measure(pair: Pair, traffic: Traffic, gpu: str, asked: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A row: whatever there was is dropped, and then comes the traffic."""
    empty = books.emptied(pair.brokers, EMPTY)
    counts = [engine.counters() for engine in pair.engines()]
    watch = Watch(Gpu(gpu), pair.pids(), [broker.pid for broker in pair.brokers])
    with books.Books(pair.brokers) as told, watch:
        seconds, wrong = pairs.send(pair.engines(), asked, traffic.in_flight, traffic.tokens, TRAFFIC)
    transport, brokers = ARRANGEMENTS[pair.name]
    row: dict[str, Any] = {
        "arrangement": pair.name,
        "transport": transport,
        "brokers": brokers,
        "date": machine.date(),
        "ready_s": pair.ready_s,
        "warm_s": pair.warm_s,
        "empty_before": empty,
        "requests": len(asked) * ENGINES,
        "failed": len(wrong),
        "failures": wrong[:3],
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(asked) * ENGINES / seconds, 2),
        "books": told.found if brokers else None,
        "watch": watch.found,
        "counters": [
            {role: _risen(now[role], before.get(role, {})) for role in now}
            for now, before in zip((engine.counters() for engine in pair.engines()), counts, strict=True)
        ],
    }
    return row | {"gpu_mib": gpu_mib(row), "problems": problems(row, bool(gpu))}


def _risen(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}


def gpu_mib(row: dict[str, Any]) -> dict[str, float | None]:
    """MiB of GPU memory at their peak. `brokers`: by their books, or by the driver if that is more; the others by the
    driver. `unattributed`: how much more there was of what the driver counts for no process. None: it does not tell."""
    watch = row["watch"]
    told = not watch["gpu_left_out"]

    def of(role: str) -> float:
        return sum(one["gpu_mib"] or 0.0 for one in watch["processes"] if one["role"] == role)

    device = row["books"]["together"].get("device") if row["books"] else None
    own = device["capacity"] / MIB if device else 0.0
    grown = None
    if "gpu_unattributed_before_mib" in watch:
        grown = round(watch["gpu_unattributed_most_mib"] - watch["gpu_unattributed_before_mib"], 1)
    return {
        "brokers": round(max(own, of("broker")), 1) if device or told else None,
        "tokenizers": round(of("tokenizer"), 1) if told else None,
        "schedulers": round(of("scheduler"), 1) if told else None,
        "unattributed": grown,
    }


def problems(row: dict[str, Any], on_gpu: bool) -> list[str]:
    """Why a row is not what it seems."""
    found = []
    if row["failed"]:
        found.append(f"{row['failed']} requests failed: {row['failures'][0]}")
    if not row["books"]:
        return found
    told: Counter[str] = Counter()
    for roles in row["counters"]:
        for counts in roles.values():
            told.update(counts)
    astray = {name: n for name, n in told.items() if name.startswith("fallback_") or name == "through_host"}
    if sum(astray.values()) > FEW * told["features"]:
        found.append(f"of {told['features']} features some went another way: {astray}")
    ranks = row["books"]["ranks"]
    if len(ranks) != ENGINES or (on_gpu and any(rank["path"] != "device" for rank in ranks)):
        found.append(f"not every rank reads features where it should: {ranks}")
    for number, counts in enumerate(row["books"]["counters"], 1):
        if limited := {name: counts[name] for name in LIMITED if name in counts}:
            found.append(f"broker {number} was at a limit: {limited}")
    return found


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was measured; of rows without problems."""
    rows = {row["arrangement"]: row for row in found["rows"] if not row["problems"]}
    made: list[dict[str, Any]] = []

    def goal(what: str, one: float | None, two: float | None) -> None:
        if one is not None and two:
            share = round(100 * one / two, 2)
            line = {"what": f"{what}, % of two brokers", "goal": GOAL, "at_most": True}
            made.append({**line, "measured": share, "met": share <= GOAL})

    for shared, alone, what in PAIRS:
        if shared in rows and alone in rows:
            one, two = rows[shared], rows[alone]
            goal(f"{what}: GPU memory for transport", one["gpu_mib"]["brokers"], two["gpu_mib"]["brokers"])
            for tier, bytes_of in two["books"]["together"].items():
                mine = one["books"]["together"].get(tier, {}).get("used")
                goal(f"{what}: bytes of live features, {tier}", mine, bytes_of["used"])
    return made


# --- all of them ----------------------------------------------------------------------------------------------------


def groups(names: Sequence[str], at_once: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), at_once):
        yield names[start : start + at_once]


def run(
    found: dict[str, Any],
    names: Sequence[str],
    maker: Maker,
    traffic: Traffic,
    at_once: int,
    deadline: float,
    say: Say,
    keep: Callable[[], None],
) -> None:
    """Every arrangement that `found` lacks. One that fails is left out, and why is told."""
    asked: list[list[str]] = []
    found["left_out"] = []

    def leave_out(name: str, why: str) -> None:
        say(f"{name}: left out: {why.splitlines()[-1]}")
        found["left_out"].append({"arrangement": name, "why": why})

    @contextmanager
    def attempt(name: str, servers: ExitStack) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the others are still worth their figures
            traceback.print_exc()
            leave_out(name, f"{type(error).__name__}: {str(error)[-1500:]}")
            servers.close()

    there = {row["arrangement"] for row in found["rows"]}
    for group in groups([name for name in names if name not in there], at_once):
        if deadline - time.monotonic() < LEAST:
            for name in group:
                leave_out(name, "the time was over")
            continue
        with ExitStack() as stack:
            begun: list[tuple[Pair, ExitStack]] = []
            ready: list[tuple[Pair, ExitStack]] = []
            for name in group:
                say(f"{name}: {ENGINES} servers start")
                servers = stack.enter_context(ExitStack())
                with attempt(name, servers):
                    begun.append((pairs.begin(servers, maker, name), servers))
            asked = asked or pairs.pictures(traffic, 0, FIRST + traffic.requests)  # while servers start
            for pair, servers in begun:  # all before any traffic, which a start would disturb
                with attempt(pair.name, servers):
                    warm(pair, asked[:FIRST], traffic, deadline)
                    say(f"{pair.name}: ready after {pair.ready_s:.0f} s, warm after {pair.warm_s:.0f} s")
                    ready.append((pair, servers))
            for pair, servers in ready:
                with attempt(pair.name, servers):
                    row = measure(pair, traffic, maker.gpu, asked[FIRST:])
                    found["rows"].append(row)
                    keep()
                    say(f"{pair.name}: {row['seconds']:.1f} s, GPU MiB {row['gpu_mib']}")
                    servers.close()
    keep()


def show(found: dict[str, Any]) -> None:
    console = Console(width=120, highlight=False, emoji=False)
    where, load = found["machine"], found["settings"]
    console.print(
        f"{found['date']}  {where['cpu']}, {where['cores']} cores, load before {where['load_before']}"
    )
    made = table(
        f"{ENGINES} engines, MiB at their peak: {load['requests']} requests each with {load['images']} pictures of "
        f"{load['size'][0]}x{load['size'][1]}, {load['in_flight']} in flight",
        "", ">brokers", ">GPU: theirs", ">no process", ">tokenizers", ">schedulers", ">GPU: live", ">in use",
        ">host: live", ">requests/s",
    )  # fmt: skip
    for row in found["rows"]:
        made.add_row(*cells(row))
    console.print(made)
    if found["goals"]:
        console.print(tables.goals_table(found["goals"]))
    for row in found["rows"]:
        for problem in row["problems"]:
            console.print(f"{row['arrangement']}: {problem}")
    for left in found["left_out"]:
        console.print(f"left out: {left['arrangement']}: {left['why']}")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table: MiB but for the first two and the last."""
    together = row["books"]["together"] if row["books"] else {}
    memory = (
        row["gpu_mib"][name] if row["brokers"] or name not in ("brokers", "unattributed") else None
        for name in ("brokers", "unattributed", "tokenizers", "schedulers")
    )
    live = (together.get(tier, {}).get(what) for tier, what in
            (("device", "used"), ("device", "held"), ("host", "used")))  # fmt: skip
    return [
        row["arrangement"],
        str(row["brokers"]),
        *map(tables.number, memory),
        *(tables.number(None if nbytes is None else nbytes / MIB) for nbytes in live),
        tables.number(row["requests_per_s"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="sharing_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--model", type=Path, help="a model's directory; without a GPU a tiny one is made")
    parser.add_argument("--gpu", default="", help="without it everything is on the CPU")
    parser.add_argument(
        "--only", action="append", default=[], choices=ARRANGEMENTS, help="this one; may be repeated"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="start so many arrangements together"
    )
    parser.add_argument("--flags", default="", help="for every server, beside those that suit the machine")
    parser.add_argument("--requests", type=int, metavar="N", help="to each engine")
    parser.add_argument("--in-flight", type=int, metavar="N", help="of these, at a time")
    parser.add_argument("--layers", type=int, metavar="N", help="of each half of the model; 0: all it has")
    parser.add_argument("--time-limit", type=float, default=570.0, metavar="SECONDS", help="for everything")
    options = parser.parse_args()
    if options.gpu and options.model is None:
        parser.error("--model is needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up on the way
    start = time.monotonic()
    changed = {name: value for name in ("requests", "in_flight", "layers")
               if (value := getattr(options, name)) is not None}  # fmt: skip
    traffic = replace(ON_A_GPU if options.gpu else ON_A_CPU, **changed)
    default = (
        ("shared", "alone", "cuda_ipc", "shared-gpu", "alone-gpu") if options.gpu else ("shared", "alone")
    )
    settings = {**traffic.shape(), "gpu": bool(options.gpu), "flags": options.flags}
    file = options.out / RESULT
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "settings": settings,
        "rows": [],
        "goals": [],
        "left_out": [],
    }
    if file.exists():
        found = json.loads(file.read_text())
        if found["settings"] != settings:
            parser.error(f"{file} has other settings: {found['settings']}; name another directory")

    def keep() -> None:
        found["goals"] = goals(found)
        found["seconds"] = round(time.monotonic() - start, 1)
        options.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + os.linesep)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    with Workshop() as shop, tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as place:
        model = options.model
        if model is None:
            from mmbroker.demo.model import tiny_model

            model = tiny_model()
        flags = f"{GPU_FLAGS} {options.flags}" if options.gpu else options.flags
        if traffic.layers:
            model = pairs.shallow(model, traffic.layers, Path(place, "model"))
            flags += " --load-format dummy"  # which it has no weights for
        limits = {"host_mib": traffic.host_mib, **({"device_mib": traffic.device_mib} if options.gpu else {})}
        broker = tuple((name, str(value)) for name, value in limits.items())
        maker = Maker(shop, model, options.gpu, flags, broker, logs=options.out, measure=True)
        names = options.only or default
        run(found, names, maker, traffic, options.at_once, start + options.time_limit, say, keep)
    show(found)
    say("done")
    return int(bool(found["left_out"]) or any(row["problems"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
