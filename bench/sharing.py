"""What sharing saves: the same pictures again, in one engine or two, through a broker and by SGLang's own transport.

    python bench/sharing.py [--json FILE] [--quick] [--requests N]

Real SGLang servers on the CPU with a tiny model, so what is compared is everything but a large model's own work. Each
request has one picture; some have come before (`repeats`). With two engines both get every request, as replicas do that
see the same documents. A line is one transport, one number of engines, one share of repeats, with pictures of its own.

`tokenizer CPU` is of the servers' main processes, which read requests, decode and preprocess: per request. `hit` says
the same of one picture of 1920x1080 that is there already, beside a new one and beside a request without a picture.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import psutil
from rich.console import Console

from bench import machine, tables
from bench.processes import Broker, Workshop
from mmbroker.demo import pictures
from mmbroker.demo.engine import Engine
from mmbroker.demo.model import tiny_model
from mmbroker.screen import table

OWN, SHARED = "sglang", "broker"
REPEATS = (0, 50, 90)
SIZE = (1280, 720)
LARGE = (1920, 1080)
IN_FLIGHT = 4
TOKENS = 4
#: Sizes of the broker's arena: every picture of a line fits.
HOST_MIB = 6144


def picture(seed: int, size: tuple[int, int]) -> str:
    """A JPEG picture as a data URL."""
    data = io.BytesIO()
    pictures.generated(seed, *size).save(data, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def traffic(requests: int, repeats: int, seed: int, size: tuple[int, int]) -> list[str]:
    """Pictures in an order in which `repeats` percent have come before."""
    fresh = max(1, round(requests * (100 - repeats) / 100))
    made = [picture(1000 * seed + number, size) for number in range(fresh)]
    draw = random.Random(seed)
    order = [*range(fresh), *(draw.randrange(fresh) for _ in range(requests - fresh))]
    return [made[number] for number in order]


class Servers:
    """Engines on one transport, and the broker between them if there is one."""

    def __init__(self, engines: Sequence[Engine], broker: Broker | None) -> None:
        self.engines = engines
        self.broker = broker

    def send(self, urls: Sequence[str], engines: int) -> float:
        """Every picture to each of the first so many engines; the seconds it took."""
        chosen = self.engines[:engines]
        start = time.perf_counter()
        with ThreadPoolExecutor(IN_FLIGHT * engines) as pool:
            todo = [(engine, url) for url in urls for engine in chosen]
            for _ in pool.map(lambda one: one[0].ask([one[1]], tokens=TOKENS, timeout=300.0), todo):
                pass
        return time.perf_counter() - start

    def cpu(self, engines: int) -> float:
        """Processor time of the main processes so far, in seconds."""
        times = [psutil.Process(engine.process.pid).cpu_times() for engine in self.engines[:engines]]
        return sum(one.user + one.system for one in times)

    def counted(self, engines: int) -> dict[str, int]:
        """The plugin's counters, summed over the processes of so many engines."""
        total: dict[str, int] = {}
        for engine in self.engines[:engines]:
            for counts in engine.counters().values():
                for name, value in counts.items():
                    total[name] = total.get(name, 0) + value
        return total

    def flush(self) -> None:
        """SGLang's caches of prefixes and embeddings, and the broker's features."""
        for engine in self.engines:
            request = urllib.request.Request(f"http://127.0.0.1:{engine.port}/flush_cache", b"")
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        if self.broker is not None:
            self.broker.evict()

    def live(self) -> dict[str, int]:
        """Bytes of features in the broker, by tier, in whole pages."""
        if self.broker is None:
            return {}
        status = self.broker.status()
        tiers = {"host": status["pool"], "device": status["device"]}
        return {tier: pool["used"] for tier, pool in tiers.items() if pool}


@contextmanager
def serving(transport: str, scratch: Path, shop: Workshop) -> Iterator[Servers]:
    """Two servers, started at once."""
    with ExitStack() as stack:
        broker = stack.enter_context(shop.broker(host_mib=HOST_MIB)) if transport == SHARED else None
        arguments = ["--mm-transport", "broker", "--mm-broker", broker.path] if broker else []
        engines = []
        for number in range(2):
            place = scratch / f"{transport}{number}"
            place.mkdir()
            engines.append(Engine(tiny_model(), place, arguments, measure=True))
            stack.callback(engines[-1].stop)
        for engine in engines:
            engine.wait_ready()
        yield Servers(engines, broker)


def line(
    servers: Servers, transport: str, engines: int, repeats: int, requests: int, seed: int
) -> dict[str, Any]:
    urls = traffic(requests, repeats, seed, SIZE)
    servers.flush()
    before, cpu = servers.counted(engines), servers.cpu(engines)
    seconds = servers.send(urls, engines)
    cpu = servers.cpu(engines) - cpu
    counted = {name: value - before.get(name, 0) for name, value in servers.counted(engines).items()}
    hits, made = counted.get("derived_hits", 0), counted.get("derived_made", 0)
    return {
        "transport": transport,
        "engines": engines,
        "repeats_percent": repeats,
        "requests": requests * engines,
        "pictures": len(set(urls)),
        "requests_per_s": round(requests * engines / seconds, 3),
        "tokenizer_cpu_ms": round(1000 * cpu / (requests * engines), 2),
        "preprocessed": made if transport == SHARED else requests * engines,
        "hit_percent": round(100 * hits / (hits + made), 1) if hits + made else 0.0,
        "encoder_runs": counted.get("encoded", 0),
        "fallbacks": sum(value for name, value in counted.items() if name.startswith("fallback_")),
        "live_bytes": servers.live(),
    }


def hit(servers: Servers, transport: str, count: int, seed: int) -> dict[str, Any]:
    """Processor time of one server's main process for a request: without a picture, with new ones, with a known one."""
    engine = servers.engines[0]
    fresh = [picture(1000 * seed + number, LARGE) for number in range(count)]
    servers.flush()

    def per_request(asks: Sequence[Callable[[], Any]]) -> float:
        before = servers.cpu(1)
        for ask in asks:
            ask()
        return 1000 * (servers.cpu(1) - before) / len(asks)

    def ask(*urls: str) -> Callable[[], Any]:
        return lambda: engine.ask(urls, tokens=1, timeout=300.0)

    ask()()
    text = per_request([ask()] * (8 * count))
    new = per_request([ask(url) for url in fresh])
    known = per_request([ask(fresh[0])] * (8 * count))
    return {
        "transport": transport,
        "text_ms": round(text, 2),
        "new_ms": round(new, 2),
        "known_ms": round(known, 2),
        "url_bytes": len(fresh[0]),
        "times": round((new - text) / max(known - text, 0.01), 1),
    }


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was measured."""

    def of(transport: str, engines: int, repeats: int) -> dict[str, Any]:
        return next(
            each
            for each in found["lines"]
            if (each["transport"], each["engines"], each["repeats_percent"]) == (transport, engines, repeats)
        )

    def goal(what: str, bound: float, measured: float, at_most: bool) -> dict[str, Any]:
        met = measured <= bound if at_most else measured >= bound
        return {"what": what, "goal": bound, "at_most": at_most, "measured": round(measured, 2), "met": met}

    known = next(each for each in found["hits"] if each["transport"] == SHARED)
    one, two = (of(SHARED, engines, 0)["live_bytes"]["host"] for engines in (1, 2))
    faster = of(SHARED, 1, 90)["requests_per_s"] / of(OWN, 1, 90)["requests_per_s"]
    return [
        goal(
            "a known 1920x1080 picture against a new one, times less tokenizer CPU", 20, known["times"], False
        ),
        goal("live bytes of two engines on one broker, % of two alone", 55, 100 * two / (2 * one), True),
        goal("90 % repeats, one engine: requests a second, times SGLang's own transport", 2, faster, False),
    ]


def measure(requests: int, count: int, say: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "picture": list(SIZE),
        "in_flight": IN_FLIGHT,
        "tokens": TOKENS,
        "hits": [],
        "lines": [],
    }
    seeds = iter(range(1, 1000))
    with Workshop() as shop, tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as place:
        for transport in (SHARED, OWN):
            say(f"{transport}: two servers start")
            with serving(transport, Path(place), shop) as servers:
                servers.send(traffic(2, 0, next(seeds), SIZE), 2)  # warm
                say(f"{transport}: a known picture")
                found["hits"].append(hit(servers, transport, count, next(seeds)))
                for engines in (1, 2):
                    for repeats in REPEATS:
                        say(f"{transport}: {engines} engine(s), {repeats} % repeats")
                        seed = next(seeds)
                        found["lines"].append(line(servers, transport, engines, repeats, requests, seed))
    found["goals"] = goals(found)
    return found


def show(found: dict[str, Any]) -> None:
    console = Console(width=120, highlight=False, emoji=False)
    where = found["machine"]
    console.print(
        f"{found['date']}  {where['cpu']}, {where['cores']} cores, load before {where['load_before']}"
    )
    made = table(
        f"Pictures of {SIZE[0]}x{SIZE[1]}, {found['in_flight']} requests in flight for each engine",
        "transport", ">engines", ">repeats %", ">requests/s", ">tokenizer CPU ms", ">hits %", ">encoder runs",
        ">live MiB",
    )  # fmt: skip
    for each in found["lines"]:
        made.add_row(
            each["transport"],
            str(each["engines"]),
            str(each["repeats_percent"]),
            tables.number(each["requests_per_s"]),
            tables.number(each["tokenizer_cpu_ms"]),
            tables.number(each["hit_percent"]),
            str(each["encoder_runs"]),
            tables.number(each["live_bytes"].get("host", 0) / 2**20) if each["live_bytes"] else "-",
        )
    console.print(made)
    made = table(
        f"A picture of {LARGE[0]}x{LARGE[1]}: tokenizer CPU ms a request",
        "transport", ">no picture", ">new", ">known", ">times less",
    )  # fmt: skip
    for each in found["hits"]:
        figures = ("text_ms", "new_ms", "known_ms", "times")
        made.add_row(each["transport"], *(tables.number(each[name]) for name in figures))
    console.print(made)
    console.print(tables.goals_table(found["goals"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--quick", action="store_true", help="few requests, to see that it works")
    parser.add_argument("--requests", type=int, default=60, metavar="N", help="of a line, for each engine")
    options = parser.parse_args()
    requests, count = (10, 2) if options.quick else (options.requests, 5)
    found = measure(requests, count, lambda text: print(text, file=sys.stderr, flush=True))
    show(found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
