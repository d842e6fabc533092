"""A real broker under attack: damaged traffic on its lifeline and its control socket, from sessions and from strangers.

Meanwhile honest clients work beside it (`bystander`), and a judge asks how the broker is.
"""

from __future__ import annotations

import os
import select
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmbroker.proto import messages as m
from mmbroker.proto.errors import ProtocolError
from mmbroker.proto.reference import PROTOCOL_VERSION
from tests.kit import PATIENCE, BrokerProcess, Puppet, RawClient, dealer, eventually

from .mutator import Mutator, corpus

MIB = 1 << 20
#: What engines of attackers are called, so that what they put reaches one.
ENGINE = "besieged"
#: Settings of a broker that expects bad guests: what they share is bounded, so that there is room for the others.
SETTINGS: dict[str, Any] = {
    "host_mib": 128,
    "segment_mib": 4,
    "namespace_mib": 64,
    "client_budget_mib": 16,
    "features_per_namespace": 2000,
    "producer_grace": 0.5,
}


class Attacker:
    """One session after the other: it sends what it is given, and reads what it can get."""

    def __init__(self, directory: Path, answers: Counter[str]) -> None:
        self._directory = directory
        self._answers = answers
        self._client: RawClient | None = None
        self._last = 0
        self.known: dict[str, list[int]] = {"leases": [], "holds": []}

    @property
    def client(self) -> RawClient:
        if self._client is None or self._over(self._client):
            self.close()
            self._client = eventually(self._enter, "a place for an attacker")
            self._client.lifeline.setblocking(False)
        return self._client

    def _enter(self) -> RawClient | None:
        """A new session; it lets go of what the last one had, or the broker would soon let this process in no more."""
        client = RawClient(self._directory, name="attacker", namespace="attack")
        if client.refused is not None:
            return None
        assert client.call(m.Released(self._last)) == m.Done()
        self._last = client.welcome.session
        client.call(m.Attach(ENGINE, 0, 1))  # one of them gets it
        return client

    def _over(self, client: RawClient) -> bool:
        """Take the descriptors that have come; has the lifeline ended?"""
        while True:
            try:
                data, ancillary, _, _ = client.lifeline.recvmsg(1 << 16, socket.CMSG_SPACE(64))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            for _, _, fds in ancillary:
                for at in range(0, len(fds), 4):
                    os.close(int.from_bytes(fds[at : at + 4], "little"))
            if not data:
                return True

    def send(self, frames: list[bytes]) -> None:
        control = self.client.control
        assert control is not None
        control.send_multipart(frames)

    def listen(self) -> None:
        """Read everything that has been said to it."""
        control = self._client.control if self._client is not None else None
        while control is not None and control.poll(0):
            message = m.decode_downlink(control.recv())
            body = message.body if isinstance(message, m.Answer) else message
            self._answers[body.error if isinstance(body, m.Failed) else type(body).__name__] += 1
            match body:
                case m.Created(results):
                    self.known["leases"] += [r.lease for r in results if isinstance(r, m.Leased)]
                    self.known["holds"] += [r.ref.hold for r in results if isinstance(r, m.Hit)]
                case m.Found(refs) | m.Sealed(refs):
                    self.known["holds"] += [ref.hold for ref in refs if ref is not None]
                case m.Granted(grants):
                    self.known["holds"] += [grant.ref.hold for grant in grants]

    def close(self) -> None:
        if self._client is not None:
            self.listen()
            self._client.close()
            self._client = None
            self.known = {"leases": [], "holds": []}

    def leave(self) -> None:
        """Close, and let go of what the last session had: its process lives on, and could still touch it."""
        self.close()
        with RawClient(self._directory, name="attacker", namespace="attack") as client:
            assert client.call(m.Released(self._last)) == m.Done()


class Siege:
    """`strike` sends messages; `judge` fails unless the broker answers, and `lift` unless it is as it was before."""

    ATTACKERS = 3
    #: Each attacker's session lasts for so many messages.
    SESSION = 3000

    def __init__(self, broker: BrokerProcess, bystander: Puppet, seed: int) -> None:
        self.broker = broker
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self._bystander = bystander
        self._judge = RawClient(broker.directory, name="judge", namespace="judge")
        self._bystander.post("from tests.fuzz.bystander import Bystander")
        select.select(
            [bystander.process.stdout], [], [], 10 * PATIENCE
        )  # torch comes slowly on a busy machine
        self._bystander.answer()
        self._bystander(f"b = Bystander({str(broker.directory)!r})")
        self._wait_for_rounds(3)
        self.before = self.judge()
        self._attackers = [Attacker(broker.directory, self.answers) for _ in range(self.ATTACKERS)]
        self._turn = 0
        self._calls = Mutator(seed, corpus("call"), self._fix)
        self._hellos = Mutator(seed + 1, corpus("lifeline"))
        self._noise = Mutator(seed + 2, [*corpus("call"), *corpus("downlink"), *corpus("reference")])
        self._random = self._calls.random

    def _fix(self, tree: dict[str, Any]) -> None:
        """Put the envelope right, so that what is inside is looked at."""
        attacker = self._attackers[self._turn]
        welcome = attacker.client.welcome
        tree.update(v=PROTOCOL_VERSION, boot=welcome.boot, session=welcome.session, timeout=0.05)
        body = tree.get("body")
        if isinstance(body, dict) and self._random.random() < 0.5:
            for name, known in attacker.known.items():
                if isinstance(body.get(name), list) and known:
                    number = known[self._random.randrange(len(known))]
                    body[name] = [{"lease": number}] if body.get("t") == "seal" else [number]
            if body.get("t") == "attach":
                body.update(engine=ENGINE, rank=0, world=1)
            elif "to" in body:  # one that is attached, now and then
                body["to"] = ENGINE

    # --- attack -----------------------------------------------------------------------------------------------------

    def strike(self, count: int) -> None:
        """Send so many messages, by all ways that there are."""
        for _ in range(count):
            self._turn = (self._turn + 1) % self.ATTACKERS
            chance = self._random.random()
            if chance < 0.94:
                self._call()
            elif chance < 0.96:
                self._send("noise", [self._noise.next()])
            elif chance < 0.98:
                self._send("frames", [self._noise.next() for _ in range(self._random.choice((2, 3, 30)))])
            elif chance < 0.99:
                self._hello()
            elif chance < 0.998:
                self._stranger()
            else:
                self._word()
        for attacker in self._attackers:
            attacker.listen()

    def _call(self) -> None:
        data = self._calls.next()
        with suppress(ProtocolError):
            if isinstance(m.decode_call(data).body, m.Shutdown | m.Drain):
                return  # of this user: it would be obeyed
        self._send("calls", [data])

    def _send(self, kind: str, frames: list[bytes]) -> None:
        attacker = self._attackers[self._turn]
        attacker.send(frames)
        self.sent[kind] += 1
        if sum(self.sent.values()) % self.SESSION == 0:
            attacker.close()

    def _hello(self) -> None:
        """A lifeline whose first word is nonsense; now and then with descriptors."""
        with self._connect("lifeline.sock", socket.SOCK_SEQPACKET) as sock:
            data = self._hellos.next()[: 1 << 16]
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(sock, [data], [0] * self._random.choice((0, 0, 0, 1, 7)))
                if self._random.random() < 0.5:
                    sock.recv(1 << 16)
        self.sent["hellos"] += 1

    def _word(self) -> None:
        """Something said on a session's lifeline, which ends it."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._attackers[self._turn].client.lifeline.send(self._hellos.next()[: 1 << 16] or b"x")
        self.sent["words"] += 1

    def _stranger(self) -> None:
        """Somebody without a session on the control socket: with ZeroMQ's own protocol, or with noise instead."""
        if self._random.random() < 0.5:
            with self._connect("control.sock", socket.SOCK_STREAM) as sock:
                greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
                cut = self._random.randrange(len(greeting))
                with suppress(BrokenPipeError, ConnectionResetError):
                    sock.send(greeting[:cut] + self._noise.next())
        else:
            stranger = dealer(self.broker.directory / "control.sock", self._random.randbytes(16))
            try:
                stranger.send(self._noise.next())
                stranger.send(b"\xc1")  # is answered in any case
                answer = m.decode_downlink(stranger.recv()) if stranger.poll(int(PATIENCE * 1000)) else None
                assert isinstance(answer, m.Answer) and isinstance(answer.body, m.Failed), (
                    "no answer to a stranger"
                )
            finally:
                stranger.close(linger=0)
        self.sent["strangers"] += 1

    def _connect(self, name: str, kind: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, kind)
        sock.settimeout(PATIENCE)
        sock.connect(str(self.broker.directory / name))
        return sock

    # --- defence ----------------------------------------------------------------------------------------------------

    def judge(self) -> dict[str, Any]:
        """The broker's own report: it answers, and it is well. The honest have done no wrong."""
        report = self._judge.call(m.Status(), timeout=PATIENCE)
        assert isinstance(report, m.Report), report
        self._honest_are_well()
        return report.status

    def _honest_are_well(self) -> None:
        error = self._bystander("result = b.error")
        assert not error, error

    def _wait_for_rounds(self, more: int) -> None:
        """The honest get on."""
        wanted = self._bystander("result = b.rounds") + more
        eventually(
            lambda: self._bystander("result = b.error or b.rounds >= " + str(wanted)), "an honest round"
        )
        self._honest_are_well()

    def lift(self) -> dict[str, Any]:
        """The attackers are gone, and so is everything they had; returns the last report, and the honest's rounds."""
        self._wait_for_rounds(3)
        for attacker in self._attackers:
            attacker.leave()
        rounds: int = self._bystander("result = b.stop()")

        def empty() -> dict[str, Any] | None:
            status = self.judge()
            names = [session["name"] for session in status["sessions"]]
            return status if names == ["judge"] and not (status["leases"] or status["holds"]) else None

        after: dict[str, Any] = eventually(empty, "an empty broker")
        self._judge.close()
        descriptors = after["daemon"]["descriptors"] - after["daemon"]["segment_descriptors"]
        before = self.before["daemon"]["descriptors"] - self.before["daemon"]["segment_descriptors"]
        assert descriptors <= before, f"{descriptors} descriptors, {before} before"
        assert "internal error" not in self.broker.log() and "Traceback" not in self.broker.log()
        return {**after, "rounds": rounds}
