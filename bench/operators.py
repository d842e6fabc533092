"""What looking costs: the broker's processor time while it is watched, against while it is not.

    python bench/operators.py [--json FILE] [--quick]

Features of 4 KiB come at 1,000 a second, and are held for two seconds. Then the broker is watched: by `top`, by an open
page, by a collector of metrics. Each is measured twice: under this load, against the load alone; and at rest, where
whatever the broker does is done for who watches. At rest it has as many features and holds as under load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

import mmbroker
from bench import machine
from bench.processes import Broker, Workshop

ENGINE = "bench"
BATCH = 8
RATE = 1000
HOLD_S = 2.0
#: How often metrics are collected, in seconds: oftener than usual.
SCRAPE_S = 5.0


class Load:
    """Two producers and an engine's rank in one process."""

    def __init__(self, broker: str) -> None:
        torch.set_num_threads(1)
        self._rank = mmbroker.connect(broker, name="bench/scheduler-0")
        self._table = self._rank.attach(engine=ENGINE, access="readonly")
        self._producers = [mmbroker.connect(broker, name=f"bench/worker-{number}") for number in range(2)]
        self._helds: deque[tuple[float, list[mmbroker.Held]]] = deque()
        self._number = 0

    def run(self, seconds: float) -> float:
        """Put and take at the rate; how many a second it was."""
        start = time.perf_counter()
        count = 0
        while (now := time.perf_counter() - start) < seconds:
            ahead = count / RATE - now
            if ahead > 0:
                time.sleep(ahead)
            count += self._put()
            while self._helds and self._helds[0][0] < time.perf_counter() - HOLD_S:
                for held in self._helds.popleft()[1]:
                    held.drop()
        return count / (time.perf_counter() - start)

    def _put(self) -> int:
        self._number += 1
        batch = torch.zeros((BATCH, 1024))
        batch[:, 0] = torch.arange(self._number * BATCH, (self._number + 1) * BATCH)
        helds = self._producers[self._number % 2].put_many(list(batch), to=ENGINE)
        for held in helds:
            self._table.take(held.ref).release()
        self._helds.append((time.perf_counter(), helds))
        return BATCH

    def close(self) -> None:
        for client in (*self._producers, self._rank):
            client.close()


# --- who watches ----------------------------------------------------------------------------------------------------


@contextmanager
def nobody(broker: Broker) -> Iterator[None]:
    yield


@contextmanager
def top(broker: Broker) -> Iterator[None]:
    """The same calls as `mmbroker top`, once a second."""
    from mmbroker.link import Link
    from mmbroker.proto.messages import Status

    link = Link(broker.path, "bench-top")
    with _every(1.0, lambda: link.call(Status())):
        yield
    link.close()


@contextmanager
def page(broker: Broker) -> Iterator[None]:
    """A reader of the page's feed."""
    with urllib.request.urlopen(_url(broker) + "events", timeout=30) as feed:
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set() and feed.readline():
                pass

        reader = threading.Thread(target=read)
        reader.start()
        yield
        ended.set()
        reader.join()


@contextmanager
def metrics(broker: Broker) -> Iterator[None]:
    url = _url(broker) + "metrics"

    def scrape() -> None:
        with urllib.request.urlopen(url, timeout=30) as answer:
            answer.read()

    with _every(SCRAPE_S, scrape):
        yield


@contextmanager
def everybody(broker: Broker) -> Iterator[None]:
    with top(broker), page(broker), metrics(broker):
        yield


@contextmanager
def _every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    ended.set()
    thread.join()


def _url(broker: Broker) -> str:
    url: str = broker.status()["daemon"]["page"]
    return url


WATCHERS = {"nobody": nobody, "top": top, "page": page, "metrics": metrics, "everybody": everybody}


# --- measuring ------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far, in seconds, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rate": RATE,
        "feature_bytes": 4096,
        "batch": BATCH,
        "hold_s": HOLD_S,
        "seconds": seconds,
        "rounds": rounds,
        "lines": [],
    }
    with Workshop() as shop, ExitStack() as stack:
        shared = {"host_mib": 64, "segment_mib": 4}
        shown = stack.enter_context(shop.broker(http="127.0.0.1:0", **shared))
        hidden = stack.enter_context(shop.broker(**shared))
        load = {
            broker.pid: stack.enter_context(shop.worker(f"load-{broker.pid}").make(Load, broker.path))
            for broker in (shown, hidden)
        }
        for pid in load:
            load[pid].call("run", 2 * HOLD_S)
        plan = [("no page offered", hidden, "nobody"), *((name, shown, name) for name in WATCHERS)]
        busy: dict[str, list[float]] = {name: [] for name, _, _ in plan}
        still: dict[str, list[float]] = {name: [] for name, _, _ in plan}
        rates: dict[str, list[float]] = {name: [] for name, _, _ in plan}
        for _ in range(rounds):
            for name, broker, watcher in plan:
                with WATCHERS[watcher](broker):
                    before, start = cpu_s(broker.pid), time.perf_counter()
                    rates[name].append(load[broker.pid].call("run", seconds))
                    busy[name].append(100 * (cpu_s(broker.pid) - before) / (time.perf_counter() - start))
                    before, start = cpu_s(broker.pid), time.perf_counter()
                    time.sleep(seconds)
                    still[name].append(100 * (cpu_s(broker.pid) - before) / (time.perf_counter() - start))
        status = shown.status()
        found |= {name: status[name] for name in ("features", "features_idle", "holds")}
        for name, _, _ in plan:
            found["lines"].append(
                {
                    "watched_by": name,
                    "features_per_s": round(min(rates[name])),
                    "busy_percent_of_a_core": round(min(busy[name]), 2),
                    "at_rest_percent_of_a_core": round(min(still[name]), 2),
                }
            )
        base = found["lines"][0]["at_rest_percent_of_a_core"]
        for line in found["lines"]:
            line["cost_percent_of_a_core"] = round(line["at_rest_percent_of_a_core"] - base, 2)
    return found


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['features']} features, {found['holds']} holds; shares of one core, in percent, the lowest of rounds"
    )
    print(f"{'watched by':18} {'features/s':>10} {'under load':>11} {'at rest':>8} {'cost':>6}")
    for line in found["lines"]:
        print(
            f"{line['watched_by']:18} {line['features_per_s']:10} {line['busy_percent_of_a_core']:11} "
            f"{line['at_rest_percent_of_a_core']:8} {line['cost_percent_of_a_core']:6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    options = parser.parse_args()
    found = measure(0.5, 1) if options.quick else measure(15.0, 2)
    show(found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)


if __name__ == "__main__":
    # Proxies are for elsewhere.
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
    main()
