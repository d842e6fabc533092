"""What the scheduler thread pays for one feature, from its message being read to a tensor with its hash.

The first read of all its bytes and the end of its use stand apart: SGLang maps the file privately, so that its first
read takes page faults, unless hashing has read the bytes already.
"""

from __future__ import annotations

import math
import time
from typing import Any

from . import stats, ways
from .peers import Scheduler, Source
from .processes import Board, Workshop

#: Different features in turn.
FEATURES = 8
#: The transports take turns so many times, so that a change of the machine's mood meets all of them.
BLOCKS = 5


class RowScheduler(Scheduler):
    """Measures one arrival after the other, with nothing beside it."""

    def measure(self, way: str) -> dict[str, list[int]]:
        """Nanoseconds of opening, first read and end of use of each arrival of a round."""
        opener, clock, board = self.opener(way), time.perf_counter_ns, self.board.numbers
        opened, read, closed = [], [], []
        for message in self.arrivals():
            started = clock()
            ((tensor, _, use),) = opener.open(message)
            ready = clock()
            tensor.sum()
            seen = clock()
            del tensor
            opener.close(use)
            over = clock()
            del use
            opened.append(ready - started)
            read.append(seen - ready)
            closed.append(over - seen)
            board[Board.RELEASED] += 1
        return {"open": opened, "read": read, "close": closed}

    def takes(self, way: str, count: int) -> dict[str, list[int]]:
        """Nanoseconds of take and release alone, of one entry again and again; with and without its tensor."""
        clock, board = time.perf_counter_ns, self.board.numbers
        table = self.table(way)
        alone, with_tensor = [], []
        for message in self.arrivals():
            ref = ways.request(message).items[0].feature
            for _ in range(count):
                started = clock()
                table.take(ref).release()
                alone.append(clock() - started)
            for _ in range(count):
                started = clock()
                use = table.take(ref)
                use.tensor.size()
                use.release()
                with_tensor.append(clock() - started)
            board[Board.RELEASED] += 1
        return {"take_release": alone, "take_tensor_release": with_tensor}


def measure(
    shop: Workshop, sizes: list[float], count: int, takes: int, sglang: bool, say: Any
) -> dict[str, Any]:
    """`count` arrivals of the smallest size for each transport, fewer of larger ones."""
    most = round(FEATURES * max(sizes) * 3 + 64)
    rows: list[dict[str, Any]] = []
    place, board_path = shop.place("rows"), shop.place("board")
    board = Board(board_path)
    with (
        shop.broker(host_mib=most, max_timeout=120) as broker,
        shop.worker("scheduler").make(RowScheduler, broker.path, place, board_path, sglang) as scheduler,
        shop.worker("source").make(Source, broker.path, place, board_path, sglang) as source,
    ):

        def round_of(way: str, arrivals: int, method: str, *args: Any) -> dict[str, list[int]]:
            board.numbers[Board.RELEASED] = board.numbers[Board.STOP] = 0
            scheduler.start(method, way, *args)
            source.call("feed", way, 0.0, 1, arrivals)
            times: dict[str, list[int]] = scheduler.result()
            return times

        for mb in sizes:
            say(f"rows: {mb} MB")
            for side in (scheduler, source):
                side.call("load", mb, FEATURES)
            arrivals = max(2, round(count * math.sqrt(min(sizes) / mb)) // BLOCKS)
            found: dict[str, dict[str, list[int]]] = {
                way: {} for way in (ways.PRIVATE, *ways.variants(sglang))
            }
            for way in found:  # warm every path
                round_of(way, 2, "measure")
            for _ in range(BLOCKS):
                for way, times in found.items():
                    for name, values in round_of(way, arrivals, "measure").items():
                        times.setdefault(name, []).extend(values)
            rows += [_row(mb, way, times) for way, times in found.items()]
        taken = {
            ways.ACCESS[way]: {
                name: stats.us(values) for name, values in round_of(way, 1, "takes", takes).items()
            }
            for way in ways.ACCESS
        }
        tables = scheduler.call("stats")
    board.close()
    return {"rows": rows, "take": taken, "tables": tables}


def _row(mb: float, way: str, times: dict[str, list[int]]) -> dict[str, Any]:
    opened, read, closed = (stats.us(times[name]) for name in ("open", "read", "close"))
    return {
        "mb": mb,
        "transport": way,
        "n": opened["n"],
        "scheduler_us_p50": opened["p50"],
        "scheduler_us_p99": opened["p99"],
        "first_read_us_p50": read["p50"],
        "first_read_us_p99": read["p99"],
        "end_us_p50": closed["p50"],
        "end_us_p99": closed["p99"],
    }
