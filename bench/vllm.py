"""What a broker saves a real vLLM on the CPU, against vLLM's own caches and its example connector.

    python bench/vllm.py [--json FILE] [--raw FILE] [--only WAY] [--quick] [--step]

In the environment of `make env-vllm`. Each way serves requests of one picture each, of which none, half, or nine of ten
repeat an earlier one, by one and by two engines with one API server each, and by one with two. Counted are requests a
second, encoder runs, processor seconds in the preprocessing of pictures, and the time in the connector's scheduler
half. The model is tiny, so requests a second say what the way costs, not what a large encoder saves: that is the
encoder runs.

With `--raw` each line is kept as soon as it is measured, and a run leaves out what is there: whatever stops it, the
same command goes on. No engine is started later than `--minutes` after the beginning.

And the scheduler half alone, without vLLM: one step with 64 requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import machine, stats
from tests.vllm import fakes, kit, serving

WAYS: Final = ("lru", "shm", "example", "mmbroker")
RATES: Final = (0, 50, 90)
#: Engines, and API servers of each.
COUNTS: Final = (1, 2)
#: Requests to each API server before anything is counted.
WARMING: Final = 4
#: Requests that are under way at once.
CLIENTS: Final = 4
#: Requests in the step that is measured alone; steps in which they decode, and in which all are new.
RUNNING, STEPS, FRESH = 64, 5000, 300


# --- the scheduler half alone ---------------------------------------------------------------------------------------


def measure_step() -> list[dict[str, Any]]:
    """Microseconds of all calls of one step, by what its requests do in it: all decode; all are new, each with a
    picture that was looked up while the request was on its way; or what was loaded is reported, and all end."""
    scene = fakes.Scene(fakes.Client(f"{n}-{m}" for n in range(-1, FRESH) for m in range(RUNNING)))
    half = scene.half
    times: dict[str, list[int]] = {"decode": [], "first sights": [], "loaded and ended": []}

    def arrive(number: int) -> list[fakes.Request]:
        names = [f"{number}-{n}" for n in range(RUNNING)]
        scene.arrive(*names)
        return [fakes.request(f"r{name}", name) for name in names]

    def step(what: str, requests: list[fakes.Request], computed: int = 0) -> list[str]:
        started = time.perf_counter_ns()
        for one in requests:
            half.ensure_cache_available(one, computed)
        if not computed:
            for one in requests:
                half.has_cache_item(one.mm_features[0].identifier)
                half.update_state_after_alloc(one, 0)
        loads = half.build_loads([])
        half.take_unavailable_requests()
        times[what].append(time.perf_counter_ns() - started)
        return [name for name, _ in loads]

    def end(requests: list[fakes.Request], loads: list[str]) -> None:
        started = time.perf_counter_ns()
        half.loaded(loads)
        for one in requests:
            half.request_finished(one.request_id)
        times["loaded and ended"].append(time.perf_counter_ns() - started)

    running = arrive(-1)
    loads = step("first sights", running)
    for _ in range(STEPS):
        step("decode", running, 100)
    end(running, loads)
    for number in range(FRESH):
        fresh = arrive(number)
        loads = step("first sights", fresh)
        assert len(loads) == RUNNING
        end(fresh, loads)
        half.build_loads(loads)  # vLLM has forgotten them
    scene.close()
    return [{"step": what, **stats.us(taken)} for what, taken in times.items()]


# --- real engines ---------------------------------------------------------------------------------------------------


class Fleet:
    """Engines of one way, with a probe in all their processes. Lines of one engine leave the second idle."""

    def __init__(self, stack: ExitStack, way: str, servers: int, engines: int) -> None:
        self.directory = stack.enter_context(kit.scratch())
        self.probe = kit.Probe(self.directory)
        transfer: dict[str, Any] | None = None
        flags: list[str] = []
        if way == "mmbroker":
            broker = stack.enter_context(kit.running_broker(self.directory / "broker", host_mib=1024))
            transfer = kit.transfer(broker.directory)
        elif way == "example":
            transfer = {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_both",
                "ec_connector_extra_config": {"shared_storage_path": str(self.directory / "outputs")},
            }
            (self.directory / "outputs").mkdir()
        elif way == "shm":
            flags = ["--mm-processor-cache-type", "shm"]
        flags += ["--api-server-count", str(servers)]
        made = [serving.Server(self.directory, self.probe, *flags, transfer=transfer) for _ in range(engines)]
        for server in made:
            stack.callback(server.close)
        stack.callback(lambda: [server.hang_up() for server in made])  # they end side by side
        self.servers = [server.ready() for server in made]
        with ThreadPoolExecutor(CLIENTS) as pool:  # what is loaded at the first request
            warm = [server for server in self.servers for _ in range(WARMING * servers)]
            list(pool.map(lambda number: warm[number].ask([number]), range(len(warm))))
        self.figures()

    def figures(self) -> dict[str, float]:
        """Since this was last asked: encoder runs, pictures preprocessed, seconds of that, and the scheduler half's
        time in each step that had requests with pictures."""
        counts = {name: self.probe.count(name) for name in ("encoded", "processed")}
        found: dict[str, float] = {n: v - getattr(self, f"_{n}", 0) for n, v in counts.items()}
        for name, value in counts.items():
            setattr(self, f"_{name}", value)
        for name in ("cpu_ns", "half_ns"):
            path = self.probe.directory / name
            values = [int(line) for line in path.read_text().split()] if path.exists() else []
            seen = getattr(self, f"_{name}", 0)
            setattr(self, f"_{name}", len(values))
            fresh = values[seen:]
            found[name] = sum(fresh)
            if name == "half_ns" and fresh:
                found["half_us_p50"] = statistics.median(fresh) / 1000
                found["half_us_p99"] = stats.percentile(fresh, 99) / 1000
        return found


def pictures(count: int, rate: int, seed: int) -> list[int]:
    """Which picture each request has: `rate` of a hundred repeat one before."""
    draw = random.Random(seed)
    fresh = iter(range(seed * 10_000 + 1000, seed * 10_000 + 10_000))
    asked = [next(fresh)]
    while len(asked) < count:
        asked.append(draw.choice(asked) if draw.random() * 100 < rate else next(fresh))
    return asked


def measure(fleet: Fleet, engines: int, asked: list[int]) -> dict[str, Any]:
    """Figures of requests to the first `engines` of a fleet, in turn."""
    for seed in set(asked):
        serving.url(seed)
    turns = threading.Lock()
    order = iter(enumerate(asked))

    def client() -> None:
        while True:
            with turns:
                turn = next(order, None)
            if turn is None:
                return
            fleet.servers[turn[0] % engines].ask([turn[1]])

    started = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client) for _ in range(CLIENTS)]:
            done.result()
    took = time.monotonic() - started
    found = fleet.figures()
    return {
        "requests": len(asked),
        "pictures": len(set(asked)),
        "requests_per_s": round(len(asked) / took, 2),
        "encoder_runs": int(found["encoded"]),
        "preprocessed": int(found["processed"]),
        "preprocessing_cpu_s": round(found["cpu_ns"] / 1e9, 3),
        "half_us_p50": round(found["half_us_p50"], 1) if "half_us_p50" in found else None,
        "half_us_p99": round(found["half_us_p99"], 1) if "half_us_p99" in found else None,
    }


class Lines:
    """What has been measured, by what it is of; kept in a file from the moment it is there, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.all: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.all = [json.loads(line) for line in path.read_text().splitlines()]
        self._known = {self._of(line) for line in self.all}

    @staticmethod
    def _of(line: dict[str, Any]) -> tuple[Any, ...]:
        names = ("way", "side", "api_servers", "engines", "repeats_percent", "requests")
        return tuple(line[name] for name in names)

    def __contains__(self, line: dict[str, Any]) -> bool:
        return self._of(line) in self._known

    def add(self, line: dict[str, Any]) -> None:
        self.all.append(line)
        self._known.add(self._of(line))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def measure_fleet(
    way: str,
    side: int,
    servers: int,
    engines: Sequence[int],
    requests: int,
    lines: Lines,
    say: Callable[[str], None],
) -> None:
    """All lines of a way with so many API servers that are not there yet, with pictures of `side` pixels a side."""
    todo = [
        {
            "way": way,
            "side": side,
            "engines": count,
            "api_servers": servers,
            "repeats_percent": rate,
            "requests": requests,
        }
        for count in engines
        for rate in RATES
    ]
    todo = [line for line in todo if line not in lines]
    if not todo:
        return
    say(f"{way}: starting {max(engines)} engine(s) with {servers} API server(s) each")
    with ExitStack() as stack:
        fleet = Fleet(stack, way, servers, max(engines))
        for line in todo:
            count, rate = line["engines"], line["repeats_percent"]
            found = measure(fleet, count, pictures(requests, rate, servers * 1000 + count * 100 + rate))
            lines.add({**line, **found})
            say(f"{way}: {count} engine(s), {rate} % repeats: {found['requests_per_s']} requests/s")


def show(found: dict[str, Any]) -> None:
    print(f"\nscheduler half, us a step of {RUNNING} requests")
    for line in found["step"]:
        print(f"  {line['step']:<16} p50 {line['p50']:>8} p99 {line['p99']:>8}")
    if not found["lines"]:
        return
    names = list(found["lines"][0])
    widths = {name: max(len(name), 9) for name in names}
    print("\n" + "  ".join(name.rjust(widths[name]) for name in names))
    for line in found["lines"]:
        cells = ("-" if line[name] is None else str(line[name]) for name in names)
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths.values(), strict=True)))


@contextmanager
def larger_pictures(side: int) -> Iterator[None]:
    """Of so many pixels a side, so that there is something to preprocess."""
    from PIL import Image

    before = serving.picture
    serving.picture = lambda seed: Image.frombytes(
        "RGB", (side, side), random.Random(seed).randbytes(side * side * 3)
    )
    try:
        yield
    finally:
        serving.picture = before
        serving.url.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="keep each line here, and leave out what is")
    parser.add_argument("--only", choices=WAYS, action="append", help="this way alone; may be repeated")
    parser.add_argument("--servers", type=int, choices=COUNTS, help="API servers of each engine (1, and 2)")
    parser.add_argument(
        "--engines", type=int, choices=COUNTS, help="engines (1 and 2; with two API servers 1)"
    )
    parser.add_argument("--requests", type=int, default=32, help="in each line (32)")
    parser.add_argument("--side", type=int, default=336, help="of a picture, in pixels (336)")
    parser.add_argument("--minutes", type=float, default=6.0, help="start no engine later than that (6)")
    parser.add_argument("--quick", action="store_true", help="one engine, one API server, few requests")
    parser.add_argument("--step", action="store_true", help="the scheduler half alone: needs no vLLM")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what was started
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    lines = Lines(options.raw)
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": {**machine.versions(), "vllm": machine.version("vllm")},
        "step": measure_step(),
    }
    failed = False
    if not options.step:
        if options.quick:
            options.engines = options.servers = 1
            options.requests = 12
        os.environ["TEST_PROBE_TIMES"] = "1"
        with larger_pictures(options.side):
            for servers in COUNTS if options.servers is None else (options.servers,):
                # What a second API server changes, one engine shows; two of each are a machine's worth of processes.
                usual = COUNTS if servers == 1 else COUNTS[:1]
                engines = usual if options.engines is None else (options.engines,)
                for way in options.only or WAYS:
                    if way == "shm" and servers > 1:
                        say("shm: needs one API server, so there is nothing to measure with two")
                    elif time.monotonic() - started > 60 * options.minutes:
                        say(
                            f"{way} with {servers} API server(s) is left out: the time is over; run this again"
                        )
                    else:
                        try:
                            measure_fleet(way, options.side, servers, engines, options.requests, lines, say)
                        except (AssertionError, OSError) as error:
                            failed = True
                            say(f"{way} with {servers} API server(s) failed: {str(error)[-400:]}")
    found["lines"] = lines.all
    found["seconds"] = round(time.monotonic() - started, 1)
    show(found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)
    sys.exit(failed)


if __name__ == "__main__":
    main()
