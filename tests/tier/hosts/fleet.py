"""Three hosts, each with a broker, a mover and a worker; the store's master on a fourth; and a network between them.

Everything is a real process in its host's namespace. `Fleet.at_rest` is the search for leaks: what every host's broker
has in its books, and which processes live where.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.kit import PATIENCE, BrokerProcess, Puppet, eventually
from tests.tier import mooncake

from .network import ROOT, Network, possible

#: Of the network: the store's master is on a host of its own.
MASTER, HOSTS = "m", ("a", "b", "c")
PORT = 50051
#: What each host lends to the store, in MiB. Only one does, so that it is known where objects are.
LENT = {"c": 128}
#: How long a host waits for its mover unless a test says otherwise, in milliseconds: no test asserts that it is quick.
WAIT_MS = 2000
#: How long the store's master believes in a client that says nothing, and the least time an object is not dropped after
#: it was read, in seconds and milliseconds.
CLIENT_TTL, LEASE_TTL = 4, 1000
#: How long a store that was stopped, cut off or slow may take until everything works as before, in seconds.
RECOVERY = 60.0


def can_run() -> bool:
    """Can these hosts be had on this machine?"""
    return possible() and mooncake.installed()


class Program:
    """A process on a host; what it says is in `log`."""

    def __init__(
        self, prefix: list[str], command: list[str], log: Path, env: dict[str, str], **more: Any
    ) -> None:
        self._log = log
        with open(log, "ab") as lines:
            self.process = subprocess.Popen(
                [*prefix, *command],
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=lines,
                **more,
            )
        self.pid = self.process.pid

    def line(self) -> str:
        """The next one that it prints."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline().decode() if readable else ""
        assert line, f"it did not start: {self._log.read_text()[-3000:]}"
        return line

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self, signum: int = signal.SIGKILL) -> int:
        if self.lives:
            self.send(signum)
            if signum != signal.SIGKILL:
                with suppress(ProcessLookupError):
                    self.send(signal.SIGCONT)
        try:
            return self.process.wait(PATIENCE)
        finally:
            if self.lives:
                self.process.kill()
                self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


class Mover(Program):
    """`mmbroker tier`, which can be told to stop itself at a step (`stops`)."""

    def __init__(self, host: Host, options: tuple[str, ...]) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(PATIENCE)
        network = host.fleet.network
        arguments = [
            *("--master", host.fleet.master_at, "--address", network.address[host.name]),
            *("--store-mib", str(LENT.get(host.name, 0)), "--wait-ms", str(WAIT_MS), *options),
        ]
        with theirs:
            super().__init__(
                network.prefix[host.name],
                [sys.executable, "-m", "tests.tier.hosts.stops", str(theirs.fileno()), *arguments],
                host.root / "mover.log",
                {"MMBROKER_DIR": str(host.root)},
                pass_fds=[theirs.fileno()],
            )

    def stop_at(self, step: str) -> None:
        """From now on, once."""
        self.channel.send(step.encode())
        assert self.channel.recv(100).decode() == step

    def stopped(self, step: str) -> None:
        """Wait until it has stopped itself there."""
        assert self.channel.recv(100).decode() == step
        eventually(lambda: state(self.pid) == "T", f"a stop at {step}")

    def end(self, signum: int = signal.SIGKILL) -> int:
        try:
            return super().end(signum)
        finally:
            self.channel.close()


class Host:
    """`root` is its MMBROKER_DIR."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.root = Path(tempfile.mkdtemp(prefix=f"mmb-{name}-", dir="/tmp"))
        self.options: tuple[str, ...] = ()
        self._start_broker()
        self.worker: Puppet | None = None
        self.mover: Mover | None = None

    def _start_broker(self) -> None:
        settings = {"host_mib": 256, "segment_mib": 16, "producer_grace": 0.05}
        self.broker = BrokerProcess(self.root, settings, self.fleet.network.prefix[self.name], {})

    def start_worker(self) -> None:
        self.worker = Puppet(self.fleet.network.prefix[self.name])
        self.worker.post(
            f"from tests.tier.hosts.worker import Worker\nworker = Worker({str(self.broker.directory)!r})"
        )

    def start_mover(self, *options: str) -> None:
        """Another one; `ready` waits for it."""
        if self.mover is not None:
            self.mover.end()
        self.mover, self.options = Mover(self, options), options

    @property
    def well(self) -> bool:
        """Has it a mover that runs?"""
        return self.mover is not None and self.mover.lives and state(self.mover.pid) != "T"

    def ready(self) -> None:
        assert self.mover is not None
        self.mover.line()
        eventually(lambda: self.tier().get("open"), f"host {self.name}'s tier is open", RECOVERY)

    def restart_broker(self) -> None:
        self.broker.kill()
        self.broker.clean_up()
        shutil.rmtree(self.broker.directory, ignore_errors=True)
        self._start_broker()
        self.broker.wait_ready()
        eventually(self._worker_is_back, "the worker has come back")

    def _worker_is_back(self) -> bool:
        status = self.broker.status()
        names = {session["name"] for session in status["sessions"]}
        return {"worker", "rank"} <= names and any(one["complete"] for one in status["engines"])

    # --- what its worker does ---------------------------------------------------------------------------------------

    def want(self, *seeds: int, nbytes: int) -> list[str]:
        """What became of each: ``made`` here, or ``found``. A request that fails is an error, as is a wrong byte."""
        self.ask(*seeds, nbytes=nbytes)
        return self.answer()

    def ask(self, *seeds: int, nbytes: int, patient: bool = False) -> None:
        assert self.worker is not None
        self.worker.post(f"result = worker.want({list(seeds)}, {nbytes}, {patient})")

    def answer(self) -> list[str]:
        assert self.worker is not None
        words: list[str] = self.worker.answer()
        assert set(words) <= {"made", "found"}, "bytes, or what is beside them, are others"
        return words

    def read(self, *keys: str) -> list[str | None]:
        """A digest of what is under each derived key, from here or from elsewhere."""
        assert self.worker is not None
        found: list[str | None] = self.worker(f"result = worker.read({list(keys)})")
        return found

    def leave(self) -> None:
        """Its worker says goodbye."""
        assert self.worker is not None
        self.worker("worker.close()")

    # --- what its broker says ---------------------------------------------------------------------------------------

    def tier(self) -> dict[str, Any]:
        """What the broker reports of its tier; empty if there is none."""
        found: list[dict[str, Any]] = self.broker.status()["movers"]
        return found[0] if found else {}

    def sought(self) -> int:
        """How often the broker has asked its mover for something."""
        counters: dict[str, int] = self.broker.status()["counters"]
        return counters.get("tier_sought", 0)

    def tally(self) -> dict[str, int]:
        """The mover's own counters, as its session last told them."""
        movers = [s for s in self.broker.status()["sessions"] if s["engine"] == "tier"]
        return movers[0]["tally"] if movers else {}

    def has_stored(self, count: int, timeout: float = RECOVERY) -> None:
        """Wait until its mover says that it has stored so many."""
        with suppress(AssertionError):
            eventually(lambda: self.tally().get("tier_puts", 0) >= count, f"{count} are stored", timeout)
        assert self.tally().get("tier_puts", 0) >= count, (
            f"{count} are not stored: {self.tally()} {self.tier()}"
        )

    def imbalance(self) -> str:
        """What its broker still has in its books, though nobody asks for anything."""
        status = self.broker.status()
        for what in ("ghosts", "leases", "promises", "holds", "quarantined", "waiting_count"):
            if status[what]:
                return f"host {self.name}: {what}: {status[what]}"
        if busy := [session for session in status["sessions"] if session["grants"]]:
            return f"host {self.name}: grants of {busy}"
        if (tier := self.tier()) and tier["sought"]:
            return f"host {self.name}: sought: {tier}"
        if status["pool"]["used"] != status["pool"]["idle"]:
            return f"host {self.name}: pool: {status['pool']}"
        return ""

    def processes(self) -> set[int]:
        found = {self.broker.pid}
        found |= {self.worker.pid} if self.worker is not None else set()
        return found | ({self.mover.pid} if self.mover is not None else set())

    def close(self) -> None:
        if self.worker is not None:
            self.worker.kill()
        if self.mover is not None:
            self.mover.end()
        self.broker.kill()
        self.broker.clean_up()
        shutil.rmtree(self.root)


class Fleet:
    def __init__(self) -> None:
        self._seeds = iter(range(1, 1 << 30))
        self._stack = ExitStack()
        self.master: Program | None = None
        self.hosts: dict[str, Host] = {}
        with ExitStack() as stack:
            self.network = stack.enter_context(Network([MASTER, *HOSTS]))
            self._scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp")))
            stack.callback(self.end_master)
            self.start_master()
            for name in HOSTS:
                self.hosts[name] = Host(self, name)
                stack.callback(self.hosts[name].close)
            for host in self.hosts.values():
                host.broker.wait_ready()
                host.start_mover()
                host.start_worker()
            for host in self.hosts.values():
                host.ready()
                assert host.worker is not None and host.worker.answer() is None
            self._stack = stack.pop_all()

    def start_master(self) -> None:
        address = self.network.address[MASTER]
        self.master = Program(
            self.network.prefix[MASTER],
            [
                str(mooncake.master_program()),
                *(f"--rpc_address={address}", f"--rpc_port={PORT}", f"--metrics_host={address}"),
                *(f"--client_ttl={CLIENT_TTL}", f"--default_kv_lease_ttl={LEASE_TTL}"),
                *("--put_start_discard_timeout_sec=2", "--put_start_release_timeout_sec=4", "--logtostderr"),
            ],
            self._scratch / "master.log",
            {},
        )
        pid = self.master.pid
        eventually(lambda: listens(pid, PORT), "the master listens")

    def end_master(self) -> None:
        if self.master is not None:
            self.master.end()
            self.master = None

    def empty(self) -> None:
        """The store begins anew: it has all its room, and nothing of what other tests have stored."""
        self.end_master()
        self.mend()
        self.serves()
        self.refresh()

    def seeds(self, count: int) -> list[int]:
        """Numbers of features that nobody has asked for yet."""
        return [next(self._seeds) for _ in range(count)]

    def mend(self) -> None:
        """Everything is as it was before any test: the network, the master, a living mover for each broker."""
        self.mend_all_but_movers()
        self._start_movers([host for host in self.hosts.values() if host.options or not host.well])

    def refresh(self) -> None:
        """Others in the place of movers that have left the store alone: the next time they would do so for longer."""
        self._start_movers([h for h in self.hosts.values() if "tier_breaker_opened" in h.tally()])

    def _start_movers(self, hosts: list[Host]) -> None:
        for host in hosts:
            host.start_mover()
        for host in hosts:
            host.ready()

    def mend_all_but_movers(self) -> None:
        """The network and the master; movers that were stopped go on."""
        self.network.heal()
        for host in self.hosts.values():
            if host.mover is not None and host.mover.lives:
                host.mover.send(signal.SIGCONT)
        if self.master is not None:
            self.master.send(signal.SIGCONT)
        if self.master is None or not self.master.lives:
            self.end_master()
            self.start_master()

    @property
    def master_at(self) -> str:
        return f"{self.network.address[MASTER]}:{PORT}"

    @property
    def namespace(self) -> str:
        """Of all workers."""
        return f"uid-{os.getuid()}"

    # --- what tests wait for ----------------------------------------------------------------------------------------

    def stored(self, count: int, nbytes: int) -> list[int]:
        """Numbers of features that host a has made and stored: of others, if the store did not take them all."""
        host = self.hosts["a"]
        done: list[int] = []

        def all_are() -> bool:
            done[:] = self.seeds(count)
            before = host.tally().get("tier_puts", 0)
            assert host.want(*done, nbytes=nbytes) == ["made"] * count
            with suppress(AssertionError):
                host.has_stored(before + count, 4.0)
            return host.tally().get("tier_puts", 0) == before + count

        eventually(all_are, f"{count} features are stored", RECOVERY)
        return done

    def serves(self, nbytes: int = 600_000) -> None:
        """Wait until what each host makes is found by the others: everything works, whatever has happened before."""

        def works() -> bool:
            seeds = dict(zip(HOSTS, self.seeds(len(HOSTS)), strict=True))
            before = {name: self.hosts[name].tally().get("tier_puts", 0) for name in HOSTS}
            for name, host in self.hosts.items():
                host.want(seeds[name], nbytes=nbytes)
            with suppress(AssertionError):
                for name in HOSTS:
                    self.hosts[name].has_stored(before[name] + 1, 2.0)
            words = [host.want(*seeds.values(), nbytes=nbytes) for host in self.hosts.values()]
            return words == [["found"] * len(HOSTS)] * len(HOSTS)

        eventually(works, "each host finds what the others have made", RECOVERY)

    def at_rest(self) -> None:
        """Nothing is left of what was asked for on any host, and nobody lives there who should not."""
        for host in self.hosts.values():
            with suppress(AssertionError):
                eventually(lambda host=host: not host.imbalance(), "books in balance")
            assert not (problem := host.imbalance()), problem
        eventually(lambda: self.network.members() == self.processes(), "nobody else lives there")

    def processes(self) -> dict[str, set[int]]:
        """Those that we have started, by host."""
        found = {name: host.processes() for name, host in self.hosts.items()}
        return found | {MASTER: {self.master.pid} if self.master is not None else set()}

    def close(self) -> None:
        self._stack.close()


def state(pid: int) -> str:
    """Of a process: as `ps` says it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def listens(pid: int, port: int) -> bool:
    """Does anybody in the namespace of this process listen on a port?"""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return any(int(line.split()[1].split(":")[1], 16) == port and line.split()[3] == "0A" for line in lines)
