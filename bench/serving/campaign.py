"""The run: server after server, load after load. What is done is kept, so that the next run goes on from there."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench import machine

from . import bodies, client, figures, inside, loop_probe
from .loads import Load
from .servers import Maker, Running
from .watch import Gpu, Watch

Say = Callable[[str], None]
#: One line for each run, with all times of all requests.
RAW: Final = "runs.jsonl"
#: The figures of all runs.
RESULT: Final = "serve.json"
#: Requests beside those that are measured: they keep the server busy while py-spy looks.
MORE: Final = 3
#: Seconds that a server may take to be ready.
START: Final = 240.0
#: A load is not begun if less is left, in seconds; nor a server.
LEAST: Final = 12.0
LEAST_FOR_A_SERVER: Final = 75.0


@dataclass(frozen=True)
class Plan:
    """`turns`: how often each load is run on each server. `look`: seconds that py-spy looks, 0: not at all.

    `limit`: seconds for everything; `load_limit`: for one load. `warm`: requests of each size before anything counts.
    `together`: all servers are there at once, and take turns at each load. `freeze`: what they have made while they
    became warm is no garbage any more.
    """

    transports: tuple[str, ...]
    loads: tuple[Load, ...]
    out: Path
    seed: int = 1
    turns: int = 1
    look: float = 5.0
    limit: float = float("inf")
    load_limit: float = 180.0
    warm: int = 8
    together: bool = False
    freeze: bool = True
    skip: frozenset[tuple[str, str]] = frozenset()


@dataclass
class Campaign:
    """Keeps `found`, which is written after every load."""

    plan: Plan
    say: Say
    #: For what is not kept.
    scratch: Path
    began: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan.out.mkdir(parents=True, exist_ok=True)
        self._raw = self.plan.out / RAW
        self.found = {
            "date": machine.date(),
            "machine": machine.describe(),
            "versions": machine.versions(),
            "plan": {"seed": self.plan.seed, "turns": self.plan.turns, "look_s": self.plan.look},
            "servers": {},
            "runs": [run for run in self._earlier() if not run["figures"]["cut"]],
            "left_out": [],
        }

    def left(self) -> float:
        """Seconds."""
        return self.began + self.plan.limit - time.monotonic()

    # --- one after the other ----------------------------------------------------------------------------------------

    def serve(self, maker: Maker) -> None:
        """All loads on every transport. A server that does not start is left out, and why is told."""
        self.found["gpu"] = maker.gpu
        self.found["plan"] |= {
            "together": self.plan.together,
            "freeze": self.plan.freeze,
            "flags": maker.flags,
        }
        self.found["plan"] |= {"transports": maker.transports(), "broker": dict(maker.broker)}
        asked = {transport: self._missing(transport) for transport in self.plan.transports}
        for transport in [transport for transport, missing in asked.items() if not missing]:
            self.say(f"{transport}: everything is there already")
            del asked[transport]
        if self.plan.together:
            self._take_turns(maker, asked)
            return
        for transport, missing in asked.items():
            if self.left() < LEAST_FOR_A_SERVER:
                self._leave_out(transport, missing, "the time was over")
                continue
            self.say(f"{transport}: starting")
            started = time.monotonic()
            self._prepare(missing, str(maker.model))
            try:
                with maker.start(transport, min(START, self.left())) as server:
                    seconds = round(time.monotonic() - started, 1)
                    self.say(f"{transport}: ready after {seconds:.0f} s")
                    self.found["servers"][transport] = {"ready_s": seconds}
                    self._load(transport, server, missing, maker.gpu)
            except Exception as error:  # the other servers are still worth their figures
                traceback.print_exc()
                missing = [(load, turn) for load, turn in missing if turn in self._turns(load, transport)]
                self._leave_out(transport, missing, f"{type(error).__name__}: {str(error)[-1500:]}")
            self.write()

    def _missing(self, transport: str) -> list[tuple[Load, int]]:
        wanted = [load for load in self.plan.loads if (transport, load.name) not in self.plan.skip]
        return [(load, turn) for load in wanted for turn in self._turns(load, transport)]

    def _take_turns(self, maker: Maker, asked: dict[str, list[tuple[Load, int]]]) -> None:
        """All servers at once, so that a change of the machine's mood meets them all; one at a time has work to do."""
        for missing in asked.values():
            self._prepare(missing, str(maker.model))
        started = time.monotonic()
        with ExitStack() as stack, ThreadPoolExecutor(max(1, len(asked))) as starters:
            contexts = {transport: maker.start(transport, min(START, self.left())) for transport in asked}
            starting = {transport: starters.submit(one.__enter__) for transport, one in contexts.items()}
            servers: dict[str, Running] = {}
            for transport, future in starting.items():
                try:
                    servers[transport] = future.result()
                    stack.push(contexts[transport])
                    seconds = round(time.monotonic() - started, 1)
                    self.say(f"{transport}: ready after {seconds:.0f} s")
                    self.found["servers"][transport] = {"ready_s": seconds}
                    self._warm(servers[transport], [load for load, _ in asked[transport]])
                except Exception as error:
                    traceback.print_exc()
                    servers.pop(transport, None)
                    self._leave_out(
                        transport, asked[transport], f"{type(error).__name__}: {str(error)[-1500:]}"
                    )
            for one in dict.fromkeys(one for missing in asked.values() for one in missing):
                for transport, server in servers.items():
                    if one in asked[transport]:
                        self._load(transport, server, [one], maker.gpu, warm=False)
        self.write()

    def ask(self, url: str, model: str, name: str) -> None:
        """All loads on a server that somebody else has started."""
        missing = [(load, turn) for load in self.plan.loads for turn in self._turns(load, name)]
        self._prepare(missing, model)
        self._load(name, Running(url.rstrip("/"), model), missing, "")
        self.write()

    def _load(
        self, transport: str, server: Running, missing: list[tuple[Load, int]], gpu: str, warm: bool = True
    ) -> None:
        if warm:
            self._warm(server, [load for load, _ in missing])
        for index, (load, turn) in enumerate(missing):
            if self.left() < LEAST:
                self._leave_out(transport, missing[index:], "the time was over")
                return
            last = warm and index == len(missing) - 1
            run = self._run(transport, server, load, turn, gpu, last)
            rate = run["figures"].get("requests_per_second", {}).get("value", 0.0)
            share = run["profile"].get("transport")
            self.say(
                f"{transport}, {load.name}: {run['figures']['answered']} answered in "
                f"{run['figures']['seconds']:.1f} s, {rate:.2f}/s, {run['figures']['failed']} failed"
                + (f", transport {share:.1%} of the thread" if share is not None else "")
                + (", CUT" if run["figures"]["cut"] else "")
            )

    # --- one load ---------------------------------------------------------------------------------------------------

    def _run(
        self, transport: str, server: Running, load: Load, turn: int, gpu: str, last: bool
    ) -> dict[str, Any]:
        """One load once, written down with all its times. `last`: the server has nothing more to do."""
        queue, loops = inside.queue(server.url), self._loops(server)
        broker = server.broker
        before = broker.counters() if broker is not None else {}
        watch = Watch(Gpu(gpu), server.pids(), [broker.pid] if broker is not None else [])
        stacks: list[str] = []
        tokenizer: list[str] = []
        run: dict[str, Any] = {
            "transport": transport,
            "load": load.shape(),
            "turn": turn,
            "date": machine.date(),
            "profile": {"left_out": "not asked for"},
            "loop_ms": None,
        }

        def measured() -> None:
            """The measured requests are answered, and others go on."""
            watch.__exit__(None, None, None)
            run["queue_ms"] = inside.waited(queue, inside.queue(server.url))
            if loops:
                now = self._loops(server)
                run["loop_ms"] = inside.turns(loops, now)
                run["collections"] = loop_probe.collections(loops, now)
            if broker is not None:
                run.update(_told(broker.status(), before))
            if self._looks(load) and server.engine is not None:
                run["profile"], stacks[:] = inside.profile(server.engine.process.pid, self.plan.look)
                tokenizer[:] = inside.busiest(watch.found["processes"], self.plan.look)

        limit = min(self.plan.load_limit, max(1.0, self.left() - self.plan.look - 2))
        watch.__enter__()
        sent = client.send(
            self._file(load, turn),
            server.url,
            load.concurrency,
            load.requests,
            limit,
            load.keep_texts,
            measured,
        )
        if sent.cut:
            watch.__exit__(None, None, None)
            run["queue_ms"] = run["loop_ms"] = None
        if not last:
            run["settled"] = inside.settle(server.url, server.model, min(30.0, max(1.0, self.left() - 5)))
        run["figures"] = figures.summary(sent, load.concurrency)
        run["watch"] = watch.found
        run["texts"] = [answer.text for answer in sent.answers] if load.keep_texts else None
        raw = {"run": run, "answers": [answer._asdict() for answer in sent.answers], "ends": sent.ends}
        with open(self._raw, "a") as file:
            file.write(json.dumps(raw | {"stacks": stacks, "tokenizer_stacks": tokenizer}) + os.linesep)
        self.found["runs"].append(run)
        self.write()
        return run

    def _warm(self, server: Running, loads: list[Load]) -> None:
        """Every size and number of pictures once: kernels are compiled when they are first needed."""
        seen: set[tuple[int, tuple[int, int]]] = set()
        started = time.monotonic()
        for load in loads:
            if (load.images, load.size) in seen or self.left() < LEAST:
                continue
            seen.add((load.images, load.size))
            few = replace(load, requests=self.plan.warm, repeats=1, keep_texts=False)
            path = self.scratch / "warm.bodies"
            bodies.write(path, few, load.seed(self.plan.seed + 1_000_000, 0), server.model, few.requests)
            together = min(load.concurrency, self.plan.warm)
            sent = client.send(path, server.url, together, few.requests, max(1.0, self.left()), senders=1)
            path.unlink()
            if bad := [answer.error for answer in sent.answers if answer.error]:
                raise RuntimeError(f"{len(bad)} of the first {few.requests} requests fail: {bad[0]}")
        frozen = self.plan.freeze and inside.freeze(server.url)
        self.say(
            f"warm after {time.monotonic() - started:.0f} s" + (", its garbage frozen" if frozen else "")
        )

    # --- what is kept -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """All figures so far, as one file that is whole at any time."""
        from . import goals

        self.found["goals"] = goals.judge(self.found)
        self.found["texts"] = goals.texts(self.found)
        self.found["seconds"] = round(time.monotonic() - self.began, 1)
        part = self.plan.out / f"{RESULT}.part"
        part.write_text(json.dumps(self.found, indent=1) + os.linesep)
        part.rename(self.plan.out / RESULT)

    def _earlier(self) -> Iterator[dict[str, Any]]:
        """The runs of before; a line that was cut off by an end is none."""
        if self._raw.exists():
            for line in self._raw.read_text().splitlines():
                if line.endswith("}"):
                    yield json.loads(line)["run"]

    def _turns(self, load: Load, transport: str) -> list[int]:
        """The turns of a load that are still to be run."""
        done = {
            run["turn"]
            for run in self.found["runs"]
            if run["transport"] == transport and run["load"] == load.shape() and not run["figures"]["cut"]
        }
        return [turn for turn in range(self.plan.turns) if turn not in done]

    def _leave_out(self, transport: str, missing: list[tuple[Load, int]], why: str) -> None:
        self.found["left_out"] += [
            {"transport": transport, "load": load.name, "turn": turn, "why": why} for load, turn in missing
        ]

    def _prepare(self, missing: list[tuple[Load, int]], model: str) -> None:
        """The requests of all loads, before any server is there to be disturbed."""
        for load, turn in missing:
            path = self._file(load, turn)
            if not path.exists():
                count = load.requests + (MORE * load.concurrency + 32 if self._looks(load) else 0)
                bodies.write(path, load, load.seed(self.plan.seed, turn), model, count)

    def _looks(self, load: Load) -> bool:
        """One request at a time says nothing about a thread under load."""
        return self.plan.look > 0 and load.concurrency > 1

    def _file(self, load: Load, turn: int) -> Path:
        return self.scratch / f"{load.name}-{load.requests}-{turn}.bodies"

    @staticmethod
    def _loops(server: Running) -> list[int]:
        return loop_probe.read(server.loops) if server.loops is not None else []


def _told(status: dict[str, Any], before: dict[str, int]) -> dict[str, Any]:
    """What a broker says of itself under load, and what it has counted since `before`."""
    counters = status["counters"]
    arenas = [arena["bytes"] for arena in status["arenas"] if arena["tier"] == "device"]
    return {
        "broker": {k: v - before.get(k, 0) for k, v in counters.items() if v != before.get(k, 0)},
        "tallies": {one["name"]: one["tally"] for one in status["sessions"]},
        "arenas": status["arenas"],
        "device_arena_mib": sum(arenas) / (1 << 20),
        "paths": [
            {key: rank.get(key) for key in ("path", "why", "access")}
            for engine in status["engines"]
            for rank in engine["ranks"]
        ],
    }
