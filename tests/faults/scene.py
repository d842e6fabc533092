"""A broker, two bystanders who must not notice anything, and the lives that faults are tried on.

A `Stage` has the broker and a producer and an engine that work on throughout. A `Life` is one producer and one engine
from their first to their last step, with a fault in one of them or in the broker. `Stage.audit` compares the broker's
own report with what the kernel says about its process and about its clients'.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmbroker.proto import messages as m
from tests.kit import PATIENCE, RawClient, eventually

from .zygote import Child, Lost, Zygote, readable, state

MIB = 1 << 20
ARENA = 16 * MIB
#: Of a broker on the stage: everything that lingers does so briefly.
SETTINGS = {
    "host_mib": ARENA // MIB,
    "segment_mib": 4,
    "segment_linger": 0.05,
    "producer_grace": 0.05,
    "grow_retry": 0.05,
}
#: How long a call may fail because of a connection that was cut or a broker that was killed.
RECOVERY = PATIENCE

#: What a client is told while it has no working connection.
OUTAGE = {
    "BrokerLost",
    "BrokerUnavailable",
    "ConnectTimeout",
    "DeadlineExceeded",
    "LeaseBroken",
    "LeaseClosed",
}
#: What a producer is told about an engine that has gone away, or that has lost its connection.
ENGINE_AWAY = {"NoSuchEngine", "EngineLagging", "FeatureError"}


class Stage:
    """`settings` are those of the broker's settings file, beside `SETTINGS`."""

    def __init__(self, **settings: Any) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
        self.directory = self.root / "cpu"
        self.log = self.root.parent / f"{self.root.name}.log"
        chosen = {**SETTINGS, **settings}
        self.config = self.root.parent / f"{self.root.name}.toml"
        self.config.write_text("".join(f"{name} = {value}\n" for name, value in chosen.items()))
        self.limit = chosen["host_mib"] * MIB
        self.brokers = Zygote("broker", self.log)
        self.clients = Zygote("client", self.log)
        self.broker: Child | None = None
        self.others: list[Child] = []
        self.traceable = True  # the kernel tells when a client's process has gone
        self.life: Life | None = None  # on this stage
        self.longest = Counter[str]()  # the longest that something took, in milliseconds
        self.seeds = iter(range(1 << 40, 1 << 41))

    # --- the broker -------------------------------------------------------------------------------------------------

    def start(self, traceable: bool = True) -> Child:
        assert self.broker is None
        self.traceable = traceable
        self.broker = self.brokers.spawn(
            {"MMBROKER_DIR": str(self.root)}, settings=str(self.config), traceable=traceable
        )
        try:
            self.broker.answer()
        except Lost:
            raise AssertionError(f"the broker did not start: {self.log.read_text()}") from None
        return self.broker

    def kill_broker(self) -> None:
        if self.broker is not None:
            self.broker.end()
            self.broker = None

    def restart(self) -> Child:
        self.kill_broker()
        return self.start()

    def seen(self) -> list[str]:
        """Steps that the broker has gone through, but for those of a status."""
        steps: list[str] = self.living.ask("seen")
        return [step for step in steps if not step.startswith(("report.", "status"))]

    def status(self) -> dict[str, Any]:
        with RawClient(self.directory, name="status") as client:
            body = client.call(m.Status())
        assert isinstance(body, m.Report), body
        return body.status

    # --- clients ----------------------------------------------------------------------------------------------------

    def spawn(self, **arm: Any) -> Child:
        return self.clients.spawn(**arm)

    def bystanders(self) -> None:
        """A producer, and an engine ``c`` of its own."""
        producer, engine = self.spawn(), self.spawn()
        self.others = [producer, engine]
        producer.ask("connect", path=str(self.directory), name="bystander")
        engine.ask("connect", path=str(self.directory), name="engine-c")
        engine.ask("attach", engine="c", access="readonly")
        self.round()
        self.sweep()
        eventually(lambda: not self.status()["pool"]["capacity"], "an empty arena")
        self._usual = {child.pid: descriptors(child.pid) for child in (*self.others, self.living)}

    @property
    def living(self) -> Child:
        assert self.broker is not None
        return self.broker

    def ask(self, child: Child, verb: str, /, **arguments: Any) -> Any:
        """What a bystander answers. It has no errors of its own; but the broker may stop or die at this moment."""
        end = time.monotonic() + RECOVERY
        while True:
            child.post(verb, **arguments)
            while (answer := child.answered()) is None:
                ready = readable([child.channel, self.living.channel], 2 * PATIENCE)
                assert ready, f"a bystander does not answer to {verb}"
                if child.channel in ready:
                    child.receive()
                elif self.life is not None:
                    self.life.react()
            has_everything = verb == "lease" and "result" in answer
            if self.life is not None and not has_everything:
                self.life.examine()
            if "result" in answer:
                return answer["result"]
            excused = (
                self.life is not None and self.life.restarted and answer.get("error") in OUTAGE | ENGINE_AWAY
            )
            assert excused and time.monotonic() < end, f"a bystander could not {verb}: {answer}"

    def reunited(self) -> None:
        """The bystanders have come back to a new broker, by themselves."""
        for child in self.others:
            before = child.ask("reconnects")
            assert child.ask("connected", reconnects=max(1, before)), "a bystander did not come back"
        self.ready_for("c")

    def ready_for(self, engine: str) -> None:
        eventually(
            lambda: any(e["engine"] == engine and e["complete"] for e in self.status()["engines"]),
            f"engine {engine}",
        )

    def round(self, sizes: tuple[int, ...] = (1, 5000, 300_000)) -> None:
        """The bystanders carry a few features: nothing may fail, and every byte must be right."""
        producer, engine = self.others
        seeds = [next(self.seeds) for _ in sizes]
        refs = self.ask(producer, "put", seeds=seeds, sizes=sizes, to="c")
        read = self.ask(engine, "check", refs=refs, seeds=seeds, sizes=sizes)
        assert read == {"missing": [], "wrong": []}, read
        self.ask(producer, "drop")

    def sweep(self) -> None:
        """One bystander takes the whole arena: everybody's space is reusable."""
        started = time.monotonic()
        self.ask(self.others[0], "lease", seed=next(self.seeds), nbytes=self.limit, timeout=PATIENCE / 2)
        self.note("space reusable", started)
        self.ask(self.others[0], "let_go")

    def note(self, what: str, started: float) -> None:
        self.longest[what] = max(self.longest[what], int((time.monotonic() - started) * 1000))

    # --- the books --------------------------------------------------------------------------------------------------

    def audit(self, spare: int = 0) -> None:
        """The broker's report, the kernel's view of it, and the kernel's view of the bystanders agree, soon."""
        started = time.monotonic()
        problem = ""
        end = started + PATIENCE
        while problem := self._imbalance():
            assert time.monotonic() < end, f"{problem}\n{self.status()}"
            readable([], 0.005)
        self.note("books balanced", started)

    def _imbalance(self) -> str:
        status = self.status()
        pool = status["pool"]
        names = sorted(session["name"] for session in status["sessions"])
        if names != ["bystander", "engine-c", "status"]:
            return f"sessions: {names}"
        for what in ("ghosts", "leases", "holds", "quarantined", "writer_pins", "waiting_count"):
            if status[what]:
                return f"{what}: {status[what]}"
        for engine in status["engines"]:
            if engine["engine"] != "c" or engine["in_flight"] or any(r["grants"] for r in engine["ranks"]):
                return f"engine: {engine}"
        if pool["used"] != pool["idle"]:
            return f"pool: {pool}"
        segments = sum(arena["segments"] for arena in status["arenas"])
        pid = self.living.pid
        owned = memfds(pid)
        if len(owned) != 2 * segments or sum(dict(owned).values()) != pool["capacity"]:
            return f"the broker has descriptors {owned}, and reports {segments} segments, {pool['capacity']} bytes"
        if mapped(pid):
            return "the broker maps a segment"
        inodes = {inode for inode, _ in owned}
        for child in self.others:
            if strange := (mapped(child.pid) | {inode for inode, _ in memfds(child.pid)}) - inodes:
                return f"a bystander has segments that the broker has not: {strange}"
        for child in (*self.others, self.living):
            if found := descriptors(child.pid) - self._usual.get(child.pid, descriptors(child.pid)):
                return f"process {child.pid} has more descriptors than before: {found}"
        return ""

    def settle_in(self) -> None:
        """After a new broker: what is usual for it now."""
        eventually(lambda: not self.status()["pool"]["capacity"], "an empty arena")
        self._usual[self.living.pid] = descriptors(self.living.pid)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for child in self.others:
            child.end()
        self.kill_broker()
        for zygote in (self.brokers, self.clients):
            zygote.close()
        shutil.rmtree(self.root)
        self.config.unlink()
        self.log.unlink()


def descriptors(pid: int) -> Counter[str]:
    """What a process has open beside segments, by kind."""
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if "memfd:" not in target:
                found[re.sub(r"\d+", "", target)] += 1
    return found


def memfds(pid: int) -> list[tuple[int, int]]:
    """Inode and size of each segment that a process has a descriptor of."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            if "memfd:mmbroker" in os.readlink(path := f"/proc/{pid}/fd/{fd}"):
                info = os.stat(path)
                found.append((info.st_ino, info.st_size))
    return found


def mapped(pid: int) -> set[int]:
    """Inodes of the segments that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:mmbroker" in line}


class Life:
    """One producer and one engine ``a``, from beginning to end, with one fault.

    `role` is who it happens to; `step` and `action` are what and where. `seed` chooses sizes, ways of access, and whose
    connection a broker cuts.
    """

    def __init__(self, stage: Stage, role: str, step: str, action: str, seed: int) -> None:
        self.stage, self.role, self.step, self.action = stage, role, step, action
        self.random = random.Random(f"{seed}/{role}/{step}/{action}")
        self.seeds = iter(range(self.random.randrange(1 << 30) << 8, 1 << 62))
        self.tripped = self._unexamined = False
        self.forked = 0
        self._open: socket.socket | None = None
        self.restarted = False
        self.dead: set[str] = set()
        self.seen: dict[str, list[str]] = {}  # steps that both have gone through
        self.shaken = False  # both have lost their connection on purpose
        arm = {"step": step, "action": action} if step else {}
        self.cast = {name: stage.spawn(**(arm if role == name else {})) for name in ("producer", "engine")}
        if role == "broker" and step:
            target = self.cast[self.random.choice(["producer", "engine"])].pid
            stage.living.ask("arm", **arm, pids=[target])

    @property
    def victim(self) -> Child:
        return self.stage.living if self.role == "broker" else self.cast[self.role]

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(self, name: str, verb: str, /, **arguments: Any) -> Any:
        """What an actor answers, as often as it takes; None if it is dead. An error that it must not see fails."""
        end = time.monotonic() + RECOVERY
        while name not in self.dead:
            answer = self._once(name, verb, arguments)
            if answer is None or "result" in answer:
                return answer and answer["result"]
            assert answer.get("error") in self._allowed(name), f"{name} could not {verb}: {answer}"
            assert time.monotonic() < end, f"{name} still cannot {verb}: {answer}"
            if arguments.get("to") == "a" and "engine" in self.dead:
                arguments["to"] = None
            readable([], 0.005)
        return None

    def _once(self, name: str, verb: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        actor = self.cast[name]
        try:
            actor.post(verb, **arguments)
            while (answer := actor.answered()) is None:
                victim = self.victim
                ready = readable(
                    [actor.channel, *([] if victim is actor else [victim.channel])], 2 * PATIENCE
                )
                assert ready, f"{name} does not answer to {verb}"
                if actor.channel in ready:
                    actor.receive()
                self.react()
                self.examine()
        except Lost:
            self.react()
            assert self.action == "kill" and self.role == name and self.tripped, f"{name} died"
            self.examine()
            return None
        self.react()
        self.examine()
        return answer

    def _allowed(self, name: str) -> set[str]:
        """Errors that an actor may see, given what has happened."""
        cut = self.tripped and self.action.startswith("cut")
        killed = self.tripped and self.action == "kill"
        if self.shaken or (self.role == "broker" and (cut or killed)):
            return OUTAGE | ENGINE_AWAY
        if name == self.role and cut:
            return OUTAGE
        if name == "producer" and self.role == "engine" and (cut or killed):
            return ENGINE_AWAY
        return set()

    # --- the fault --------------------------------------------------------------------------------------------------

    def react(self) -> None:
        """If the victim has tripped, do at once what has to be done, so that everybody goes on."""
        victim = self.victim
        with suppress(Lost):
            while readable([victim.channel], 0):
                victim.receive()
        if not victim.trips:
            return
        assert not self.tripped
        self.tripped = self._unexamined = True
        self.forked = victim.trips.popleft()["child"]
        self._open = victim.channel.dup()  # or the forked child would end with its parent
        if self.action == "kill":
            victim.wait()
            if self.role == "broker":
                self.restarted = True
                self.stage.restart()
            else:
                self.dead.add(self.role)
        elif self.action == "stop":
            eventually(lambda: victim.stopped, "a stop")
            if self.role != "broker":
                self.examine()
            victim.signal(signal.SIGCONT)

    def examine(self) -> None:
        """Once after the fault: the bystanders have not noticed it, or have come back to the new broker."""
        if self._unexamined:
            self._unexamined = False
            if self.restarted:
                self.stage.reunited()
            self.stage.round()

    # --- the life ---------------------------------------------------------------------------------------------------

    def live(self, copy: bool = False) -> None:
        """Everything that a producer and an engine do, in order."""
        copy = copy or self.step in ("copy", "copied")
        path = str(self.stage.directory)
        self.ask("engine", "connect", path=path, name="engine-a")
        access = self.random.choice(["readonly", "copy"])
        self.ask("engine", "attach", engine="a", access="copy" if copy else access)
        self.ask("producer", "connect", path=path, name="producer")
        for _ in range(2):  # the second time with hits
            seeds, sizes = self._features()
            for _ in range(2):
                self._check(
                    self.ask("producer", "put", seeds=seeds, sizes=sizes, to=self._to()), seeds, sizes
                )
        seed, size = next(self.seeds), self.random.randint(1, 200_000)
        ref = self.ask("producer", "write", seed=seed, nbytes=size, to=self._to())
        self._check([ref], [seed], [size])
        self.ask("producer", "abort", seed=next(self.seeds), nbytes=9000)
        ref = self.ask("producer", "lookup", seed=seeds[0], nbytes=sizes[0], to=self._to())
        self._check([ref], seeds[:1], sizes[:1])
        self.ask("producer", "lookup", seed=next(self.seeds), nbytes=77, to=None)
        self._rest()
        self._shake()
        for name in ("producer", "engine"):
            self.seen[name] = self.ask(name, "seen") or []
            self.ask(name, "close")
            self._has_left(name)

    def _has_left(self, name: str) -> None:
        """Its session is over, also while its process and a forked child of it live."""
        if name not in self.dead and (self.role != "broker" or self.tripped):
            called = {"producer": "producer", "engine": "engine-a"}[name]
            eventually(
                lambda: called not in {session["name"] for session in self.stage.status()["sessions"]},
                f"the end of the {name}'s session",
            )

    def _features(self) -> tuple[list[int], list[int]]:
        sizes = [0, 1, *(self.random.randint(2, 400_000) for _ in range(2))]
        return [next(self.seeds) for _ in sizes], sizes

    def _to(self) -> str | None:
        return None if "engine" in self.dead else "a"

    def _check(self, refs: list[Any] | None, seeds: list[int], sizes: list[int]) -> None:
        """The engine reads what it was sent: no wrong byte, and nothing missing unless its producer was cut off."""
        if refs is None or None in refs or "engine" in self.dead:
            return
        read = self.ask("engine", "check", refs=refs, seeds=seeds, sizes=sizes)
        if read is not None:
            assert not read["wrong"], read
            lost = self.shaken or (
                self.tripped and self.role != "engine" and self.action not in ("stop", "fork")
            )
            assert lost or not read["missing"], read

    def _rest(self) -> None:
        """Nothing is held any more, and its space goes to somebody else."""
        self.ask("producer", "drop")
        # An earlier broker's entries stay, for those who have references to them.
        assert self.restarted or self.ask("engine", "at_rest") in (True, None) or self.restarted
        self.stage.sweep()

    def _shake(self) -> None:
        """Both lose their connection once, with something in their hands, and come back by themselves."""
        seeds, sizes = self._features()
        self._check(self.ask("producer", "put", seeds=seeds, sizes=sizes, to=self._to()), seeds, sizes)
        self.ask("producer", "lease", seed=next(self.seeds), nbytes=5000)
        self.shaken = True
        for name in ("engine", "producer"):  # so that the engine still has entries when it comes back
            before = self.ask(name, "reconnects")
            self.ask(name, "cut", which="lifeline")
            if before is not None:
                assert self.ask(name, "connected", reconnects=before + 1) in (True, None), (
                    f"{name} stays away"
                )
        self.ask("producer", "scribble", value=0xEE)
        self.ask("producer", "let_go")
        seeds, sizes = self._features()
        self._check(self.ask("producer", "put", seeds=seeds, sizes=sizes, to=self._to()), seeds, sizes)
        self._rest()

    # --- afterwards -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Now both are gone: the books balance, also while a forked child lives, and the space is everybody's."""
        for actor in self.cast.values():
            actor.end()
        if self.role == "broker" and not self.tripped:
            self.stage.living.ask("disarm")
        assert self.tripped == bool(self.step), f"the {self.role} never came to {self.step}"
        self.stage.round()
        self.stage.sweep()
        self.stage.settle_in() if self.restarted else None
        self.stage.audit()
        if self.forked and self.role == "broker":
            self.stage.restart()
            self.stage.reunited()
            self.stage.settle_in()
        if self.forked:
            os.kill(self.forked, signal.SIGKILL)
            eventually(lambda: state(self.forked) == "Z", "the end of the forked child")

    def __enter__(self) -> Life:
        self.stage.life = self
        return self

    def __exit__(self, *exc: object) -> None:
        self.stage.life = None
        for actor in self.cast.values():
            actor.end()
        if self.forked:
            with suppress(ProcessLookupError):
                os.kill(self.forked, signal.SIGKILL)
        if self._open is not None:
            self._open.close()
