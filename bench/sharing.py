"""What sharing saves: the same pictures again, in one engine or two, through a broker and by SGLang's own transport.

    python bench/sharing.py --json FILE [--quick] [--requests N] [--time-limit SECONDS]

Real SGLang servers on the CPU. Each request has one screenshot of 1920x1080 as a PNG, which the servers bound to 512
visual tokens; some have come before (`repeats`). With two engines both get every request, as replicas do that see the
same documents. Every line has pictures of its own, the same for both transports, and the caches of prefixes and the
broker are emptied before it.

What is compared is everything but the model's own work, so the model is as small as its architecture can be: on a CPU
SGLang's attention takes seconds for what a GPU does beside the CPU's work. `tokenizer CPU` is of the servers' main
processes, which read requests, decode and preprocess; `scheduler CPU` is of the processes that run the model, too.
A known picture, beside a new one and a request without one, is measured on a server without a bound.

Results are written after each line; what FILE has already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from bench import machine, tables
from bench.processes import Broker, Workshop
from bench.screenshots import SIZE, Album, order
from mmbroker.demo.engine import Engine, EngineFailed
from mmbroker.demo.model import make
from mmbroker.screen import table

OWN, SHARED = "sglang", "broker"
REPEATS: Final = (0, 50, 90)
#: 512 visual tokens.
MAX_PIXELS: Final = 512 * 28 * 28
IN_FLIGHT: Final = 4
TOKENS: Final = 4
#: One layer, one head: as little of a model as there can be.
VISION: Final[dict[str, Any]] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "fullatt_block_indexes": [0],
}
#: The broker's arena: every picture of a line fits. The engines' caches of prefixes: so does every prompt.
HOST_MIB: Final = 2048
CACHED_TOKENS: Final = 131072
BOUNDED: Final = ("--mm-process-config", json.dumps({"image": {"max_pixels": MAX_PIXELS}}))
#: Pictures that warm the servers: none of a line.
WARM: Final = (500, 501)
#: How long a line may take, and anything else that servers are asked for, in seconds.
PATIENCE: Final = 90.0
BRIEFLY: Final = 15.0

#: A line: transport, engines, percent of repeats.
Part = tuple[str, int, int]


class Late(Exception):
    """It has taken too long; the message says what."""


# --- who it is sent to ----------------------------------------------------------------------------------------------


class Servers:
    """Two engines on one transport, one more without a bound, and the broker between them if there is one."""

    def __init__(self, engines: Sequence[Engine], broker: Broker | None) -> None:
        self.engines = engines[:2]
        self.unbounded = engines[2]
        self.broker = broker
        self._schedulers = [
            next(one.pid for one in engine.processes() if "scheduler" in " ".join(one.cmdline()))
            for engine in self.engines
        ]

    def send(self, urls: Sequence[str], engines: int) -> float:
        """Every picture to each of the first so many engines; the seconds it took. Raises `Late`, `OSError`."""
        start = time.perf_counter()

        def ask(one: tuple[Engine, str]) -> None:
            left = start + PATIENCE - time.perf_counter()
            if left <= 0:
                raise Late(f"not all of {len(urls) * engines} requests were answered within {PATIENCE:g} s")
            one[0].ask([one[1]], tokens=TOKENS, timeout=left)

        with ThreadPoolExecutor(IN_FLIGHT * engines) as pool:
            for _ in pool.map(ask, [(engine, url) for url in urls for engine in self.engines[:engines]]):
                pass
        return time.perf_counter() - start

    def cpu(self, engines: int) -> tuple[float, float]:
        """Processor time so far of the main processes, and of the schedulers', in seconds."""
        mains = sum(processor_time(engine.process.pid) for engine in self.engines[:engines])
        return mains, sum(processor_time(pid) for pid in self._schedulers[:engines])

    def counted(self, engines: int) -> dict[str, int]:
        """The plugin's counters, summed over the processes of so many engines."""
        total: dict[str, int] = {}
        for engine in self.engines[:engines]:
            for counts in engine.counters().values():
                for name, value in counts.items():
                    total[name] = total.get(name, 0) + value
        return total

    def flush(self) -> None:
        """Empty SGLang's caches of prefixes and embeddings, and the broker. Raises `Late`."""
        deadline = time.monotonic() + BRIEFLY
        for engine in (*self.engines, self.unbounded):
            while not _flushed(engine):  # it is not idle yet
                _still(deadline, "an engine was not idle")
        if self.broker is not None:
            self.broker.evict()
            while any(self.live().values()):  # features of the last answers are let go of just now
                _still(deadline, "the broker could not be emptied")
                self.broker.evict()

    def live(self) -> dict[str, int]:
        """Bytes of features in the broker, by tier, in whole pages."""
        if self.broker is None:
            return {}
        status = self.broker.status()
        tiers = {"host": status["pool"], "device": status["device"]}
        return {tier: pool["used"] for tier, pool in tiers.items() if pool}


def processor_time(pid: int) -> float:
    """Of all threads of a process, in seconds, to the nanosecond: `psutil` has it to ten milliseconds."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), as the kernel numbers it


def _flushed(engine: Engine) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{engine.port}/flush_cache", b"")
    try:
        with urllib.request.urlopen(request, timeout=BRIEFLY) as answer:
            answer.read()
    except OSError:
        return False
    return True


def _still(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise Late(f"{what} within {BRIEFLY:g} s")
    time.sleep(0.1)


@contextmanager
def serving(transport: str, model: Path, shop: Workshop) -> Iterator[Servers]:
    """Three servers, started at once."""
    with ExitStack() as stack:
        broker = stack.enter_context(shop.broker(host_mib=HOST_MIB)) if transport == SHARED else None
        engines = []
        for bound in (BOUNDED, BOUNDED, ()):
            place = Path(shop.place("e"))
            place.mkdir()
            flags = ["--max-total-tokens", str(CACHED_TOKENS), *bound]
            flags += ["--mm-transport", "broker", "--mm-broker", broker.path] if broker else []
            engines.append(Engine(model, place, flags, measure=True))
            stack.callback(engines[-1].stop)
        for engine in engines:
            engine.wait_ready()
        yield Servers(engines, broker)


# --- what is measured -----------------------------------------------------------------------------------------------


def numbers_of(part: Part, requests: int) -> list[int]:
    """The pictures of a line, which are no other's: SGLang's cache of embeddings cannot be emptied."""
    _, engines, repeats = part
    return [1000 * (100 * engines + repeats) + number for number in order(requests, repeats)]


def line(servers: Servers, album: Album, name: Part, requests: int) -> dict[str, Any]:
    """Requests at one rate of repeats, to one engine or two."""
    transport, engines, repeats = name
    numbers = numbers_of(name, requests)
    urls = [album[number] for number in numbers]
    servers.flush()
    load, before, cpu = os.getloadavg()[0], servers.counted(engines), servers.cpu(engines)
    seconds = servers.send(urls, engines)
    spent = [now - then for now, then in zip(servers.cpu(engines), cpu, strict=True)]
    counted = {key: value - before.get(key, 0) for key, value in servers.counted(engines).items()}
    hits, made = counted.get("derived_hits", 0), counted.get("derived_made", 0)
    total = requests * engines
    return {
        "transport": transport,
        "engines": engines,
        "repeats_percent": repeats,
        "requests": total,
        "pictures": len(set(numbers)),
        "seconds": round(seconds, 3),
        "requests_per_s": round(total / seconds, 3),
        "tokenizer_cpu_ms": round(1000 * spent[0] / total, 2),
        "scheduler_cpu_ms": round(1000 * spent[1] / total, 2),
        "preprocessed": made if transport == SHARED else total,
        "hit_percent": round(100 * hits / (hits + made), 1) if hits + made else 0.0,
        "encoder_runs": counted.get("encoded", 0),
        "fallbacks": sum(value for key, value in counted.items() if key.startswith("fallback_")),
        "live_bytes": servers.live(),
        "load_before": round(load, 2),
    }


def hit(servers: Servers, album: Album, transport: str, count: int) -> dict[str, Any]:
    """Processor time of a server's main process, p50: without a picture, with a new one, with a known one."""
    engine = servers.unbounded
    fresh = [album[number] for number in range(count)]
    servers.flush()

    def per_request(asked: Sequence[Sequence[str]]) -> float:
        spent = []
        for urls in asked:
            before = processor_time(engine.process.pid)
            engine.ask(urls, tokens=1, timeout=PATIENCE)
            spent.append(processor_time(engine.process.pid) - before)
        return 1000 * statistics.median(spent)

    per_request([()])
    text = per_request([()] * (8 * count))
    new = per_request([[url] for url in fresh])
    known = per_request([fresh[:1]] * (8 * count))
    return {
        "transport": transport,
        "text_ms": round(text, 3),
        "new_ms": round(new, 3),
        "known_ms": round(known, 3),
        "url_bytes": len(fresh[0]),
    }


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was measured; of what was measured."""
    lines = {(one["transport"], one["engines"], one["repeats_percent"]): one for one in found["lines"]}
    hits = {one["transport"]: one for one in found["hits"]}
    made: list[dict[str, Any]] = []

    def goal(what: str, bound: float, measured: float, at_most: bool) -> None:
        met = measured <= bound if at_most else measured >= bound
        made.append(
            {"what": what, "goal": bound, "at_most": at_most, "measured": round(measured, 2), "met": met}
        )

    if SHARED in hits:
        one = hits[SHARED]
        saved = (one["new_ms"] - one["text_ms"]) / max(one["known_ms"] - one["text_ms"], 0.01)
        goal("a known 1920x1080 picture against a new one, times less tokenizer CPU", 20, saved, False)
    for repeats in REPEATS:
        one, two = ((SHARED, engines, repeats) for engines in (1, 2))
        if one in lines and two in lines:
            share = 100 * lines[two]["live_bytes"]["host"] / (2 * lines[one]["live_bytes"]["host"])
            goal(f"{repeats} % repeats: live bytes of two engines, % of two alone", 55, share, True)
    ours, theirs = ((transport, 1, 90) for transport in (SHARED, OWN))
    if ours in lines and theirs in lines:
        faster = lines[ours]["requests_per_s"] / lines[theirs]["requests_per_s"]
        goal("90 % repeats, one engine: requests a second, times SGLang's own transport", 2, faster, False)
    return made


def parts(found: dict[str, Any], transport: str) -> list[Part]:
    """What is still to be measured; no engines: a known picture."""
    wanted = [
        (transport, 0, 0),
        *((transport, engines, repeats) for engines in (1, 2) for repeats in REPEATS),
    ]
    there = {(one["transport"], one["engines"], one["repeats_percent"]) for one in found["lines"]}
    there |= {(one["transport"], 0, 0) for one in found["hits"]}
    return [part for part in wanted if part not in there]


def measure(
    found: dict[str, Any],
    model: Path,
    shop: Workshop,
    deadline: float,
    say: Callable[[str], None],
    keep: Callable[[], None],
) -> None:
    """All that `found` lacks. What fails or is late is said, and left out; it gets new servers, once."""
    album = Album()
    requests, count = found["settings"]["requests"], found["settings"]["hits"]
    todo = [part for transport in (SHARED, OWN) for part in parts(found, transport)]
    say(f"pictures for {len(todo)} lines are drawn")  # beforehand, because it takes the processor's time
    for part in todo:
        album.draw(numbers_of(part, requests) if part[1] else range(count))
    album.draw(WARM)
    for _ in range(2):
        for transport in (SHARED, OWN):
            if not parts(found, transport) or time.monotonic() > deadline:
                continue
            say(f"{transport}: three servers start")
            try:
                with serving(transport, model, shop) as servers:
                    for engine in (*servers.engines, servers.unbounded):  # warm
                        for number in WARM:
                            engine.ask([album[number]], tokens=TOKENS, timeout=PATIENCE)
                    for part in parts(found, transport):
                        if time.monotonic() > deadline:
                            break
                        _, engines, repeats = part
                        if engines:
                            say(f"{transport}: {engines} engine(s), {repeats} % repeats")
                            found["lines"].append(line(servers, album, part, requests))
                        else:
                            say(f"{transport}: a known picture")
                            found["hits"].append(hit(servers, album, transport, count))
                        keep()
            except (Late, OSError, EngineFailed) as error:
                say(f"{transport}: {type(error).__name__}: {error}")
    found["left_out"] = [list(part) for transport in (SHARED, OWN) for part in parts(found, transport)]
    found["goals"] = goals(found)
    keep()


def show(found: dict[str, Any]) -> None:
    console = Console(width=120, highlight=False, emoji=False)
    where = found["machine"]
    console.print(
        f"{found['date']}  {where['cpu']}, {where['cores']} cores, load before {where['load_before']}"
    )
    made = table(
        f"Screenshots of {SIZE[0]}x{SIZE[1]}, {IN_FLIGHT} requests in flight for each engine",
        "transport", ">engines", ">repeats %", ">requests/s", ">CPU ms, tokenizer", ">scheduler", ">hits %", ">made",
        ">encoded", ">live MiB",
    )  # fmt: skip
    for each in found["lines"]:
        made.add_row(
            each["transport"],
            str(each["engines"]),
            str(each["repeats_percent"]),
            *(
                tables.number(each[name])
                for name in ("requests_per_s", "tokenizer_cpu_ms", "scheduler_cpu_ms")
            ),
            tables.number(each["hit_percent"]),
            str(each["preprocessed"]),
            str(each["encoder_runs"]),
            tables.number(each["live_bytes"]["host"] / 2**20) if each["live_bytes"] else "-",
        )
    console.print(made)
    made = table(
        f"A picture of {SIZE[0]}x{SIZE[1]}, not bounded: tokenizer CPU ms a request",
        "transport", ">no picture", ">new", ">known",
    )  # fmt: skip
    for each in found["hits"]:
        made.add_row(
            each["transport"], *(tables.number(each[name]) for name in ("text_ms", "new_ms", "known_ms"))
        )
    console.print(made)
    console.print(tables.goals_table(found["goals"]))
    for left in found["left_out"]:
        console.print(f"left out: {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures here, and go on from there")
    parser.add_argument("--quick", action="store_true", help="few requests, to see that it works")
    parser.add_argument("--requests", type=int, default=40, metavar="N", help="of a line, for each engine")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="SECONDS", help="begin nothing later"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up on the way
    deadline = time.monotonic() + options.time_limit
    requests, count = (10, 2) if options.quick else (options.requests, 4)
    settings = {
        "requests": requests, "hits": count, "picture": list(SIZE), "max_pixels": MAX_PIXELS, "in_flight": IN_FLIGHT,
        "tokens": TOKENS, "vision": VISION,
    }  # fmt: skip
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "settings": settings,
        "hits": [],
        "lines": [],
    }
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
        if found["settings"] != settings:
            parser.error(f"{options.json} has other settings: {found['settings']}; name another file")

    def keep() -> None:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + os.linesep)

    start = time.monotonic()
    with Workshop() as shop, tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as model:
        make(Path(model), **VISION)
        measure(
            found,
            Path(model),
            shop,
            deadline,
            lambda text: print(f"{time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True),
            keep,
        )
    show(found)


if __name__ == "__main__":
    main()
