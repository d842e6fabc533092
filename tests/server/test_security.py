"""What a client cannot have: another user's bytes, another namespace's, or anything for a number that it was not given.

`docs/security.md` says who is trusted with what, and names the tests here and elsewhere that show it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker.proto import messages as m
from mmbroker.proto.errors import FeatureMissing, StaleReference
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, Puppet, RawClient, dealer, eventually
from tests.server.items import an_item, lease_one

MIB = 1 << 20
StartPuppet = Callable[..., Puppet]
NOBODY = 65534


def put(client: RawClient, key: bytes, nbytes: int = 4096, to: str | None = None) -> int:
    """A sealed feature's segment."""
    created = client.call(m.Create([an_item(nbytes, key)]))
    assert isinstance(created, m.Created)
    (leased,) = created.results
    assert isinstance(leased, m.Leased)
    assert isinstance(client.call(m.Seal([m.Sealing(leased.lease)], to)), m.Sealed)
    return leased.segment


def inode(client: RawClient, segment: int, writable: bool) -> int:
    return os.fstat(client.segment(segment, writable)[0]).st_ino


# --- namespaces -----------------------------------------------------------------------------------------------------


def test_a_segment_goes_to_one_namespace_only(broker: BrokerProcess) -> None:
    """Whatever another namespace's client asks for, it gets no descriptor of ours."""
    with RawClient(broker.directory) as mine, RawClient(broker.directory, namespace="other") as other:
        segment = put(mine, b"k" * 32)
        ours = {inode(mine, segment, True)}
        assert isinstance(other.call(m.Attach("e", 0, 1)), m.Attached)
        assert other.call(m.Lookup([Key.caller(b"k" * 32)])) == m.Found([None])
        theirs = {inode(other, put(other, key), True) for key in (b"k" * 32, b"x" * 32)}
        assert not ours & theirs
        failed = mine.call(m.Create([an_item(4096)], "e"))
        assert isinstance(failed, m.Failed) and failed.error == "NoSuchEngine"
        assert "attached engines: none" in failed.message, "their engine does not exist for us"
        assert not other.notices


def test_a_miss_and_another_namespaces_feature_look_the_same(broker: BrokerProcess) -> None:
    with RawClient(broker.directory, namespace="other") as other, RawClient(broker.directory) as mine:
        put(other, b"theirs" + bytes(26))
        answers = []
        for key in (b"theirs" + bytes(26), b"nobodys" + bytes(25)):
            found = mine.call(m.Lookup([Key.caller(key)]))
            created = mine.call(m.Create([an_item(4096, key)]))
            assert isinstance(created, m.Created)
            (leased,) = created.results
            answers.append((found, type(leased)))
            mine.cast(m.Abort([leased.lease]))  # type: ignore[union-attr]
        assert answers[0] == answers[1] == (m.Found([None]), m.Leased)


def test_another_users_things_are_not_in_the_status(
    start_broker: StartBroker, puppet: StartPuppet, broker_root: Path
) -> None:
    """The broker's own user sees everything; whoever else may connect, its own namespace's and sums."""
    broker_root.chmod(0o711)
    broker = start_broker(allow_uid=[NOBODY], stuck_after=0.01)
    with (
        RawClient(broker.directory, name="secret worker") as mine,
        RawClient(broker.directory, name="r") as rank,
        RawClient(broker.directory, name="secret mover") as mover,
    ):
        mover.call(m.Tier(True))
        rank.call(m.Attach("secret engine", 0, 1))
        put(mine, b"secret" + bytes(26))
        leased = lease_one(mine, 4096)
        mine.post(m.Seal([m.Sealing(leased.lease)], "secret engine"), timeout=60.0)
        told = eventually(lambda: not (s := broker.status(9))["health"]["ok"] and s, "a bad health")
        assert (
            "secret engine" in str(told)
            and "secret mover" in str(told["movers"])
            and len(told["largest"]) == 2
        )
        client = puppet(prefix=["setpriv", f"--reuid={NOBODY}", "--clear-groups"])
        client(f"c = RawClient(Path({str(broker.directory)!r}), name='guest')")
        status: dict[str, Any] = client("result = c.call(m.Status(9)).status")
    assert "secret" not in str(status)
    assert [session["name"] for session in status["sessions"]] == ["guest"]
    for what in ("engines", "movers", "largest", "waiting", "ghosts", "arenas"):
        assert status[what] == [], what
    assert [n["namespace"] for n in status["namespaces"]] == [f"uid-{NOBODY}"]
    assert status["features"] == 2 and status["health"]["ok"] is False


# --- descriptors ----------------------------------------------------------------------------------------------------


def test_a_reader_of_another_user_cannot_become_a_writer(
    start_broker: StartBroker, puppet: StartPuppet, broker_root: Path
) -> None:
    """A read-only descriptor stays one: it can be opened again for writing by its owner only."""
    broker_root.chmod(0o711)
    broker = start_broker(allow_uid=[NOBODY])
    rank = puppet(prefix=["setpriv", f"--reuid={NOBODY}", "--clear-groups"])
    rank(f"c = RawClient(Path({str(broker.directory)!r}), namespace='shared')\nc.call(m.Attach('e', 0, 1))")
    with RawClient(broker.directory, namespace="shared") as mine:
        leased = lease_one(mine, 4096)
        mine.post(m.Seal([m.Sealing(leased.lease)], "e"))
        rank("(grant,) = c.notice(m.Granted).grants\nfd, _ = c.segment(grant.segment, False)")
        rank("import mmap, os\nview = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)")
        for attempt in (
            "mmap.mmap(fd, 4096)",
            "os.open(f'/proc/self/fd/{fd}', os.O_RDWR)",
            "os.write(fd, b'x')",
            "os.ftruncate(fd, 0)",
            "os.fchmod(fd, 0o666)",
        ):
            code = f"try:\n    {attempt}\nexcept OSError as error:\n    result = error.errno\nelse:\n    result = 0"
            assert rank(code) in (errno.EACCES, errno.EPERM, errno.EBADF, errno.EINVAL), attempt


@pytest.mark.parametrize(
    "change", ["os.ftruncate(fd, 0)", "os.ftruncate(fd, 1 << 30)", "fcntl.fcntl(fd, 1033, 8)"]
)
def test_a_writer_cannot_change_a_segments_size_or_seals(
    broker: BrokerProcess, puppet: StartPuppet, change: str
) -> None:
    """Else its readers would die of a SIGBUS."""
    writer = puppet()
    writer(f"from tests.server.items import lease_one\nc = RawClient(Path({str(broker.directory)!r}))")
    writer("import fcntl, os\nfd, size = c.segment(lease_one(c, 4096).segment, True)")
    code = f"try:\n    {change}\nexcept OSError as error:\n    result = error.errno\nelse:\n    result = 0"
    assert writer(code) == errno.EPERM
    assert writer("result = os.fstat(fd).st_size == size")


# --- stolen numbers -------------------------------------------------------------------------------------------------


def test_who_stole_every_number_of_a_session_still_gets_no_bytes(broker: BrokerProcess) -> None:
    """Routing id, session and boot id, all right, and the owner's own socket is gone: what the thief may hear about are
    places in segments. Their descriptors go over the owner's lifeline."""
    with RawClient(broker.directory, name="owner") as owner:
        welcome = owner.welcome
        assert owner.control is not None
        owner.control.close(linger=0)

        def steal() -> m.Downlink | None:
            thief = dealer(broker.directory / welcome.control, welcome.routing)
            try:
                call = m.Call(1, welcome.boot, welcome.session, 7, 1.0, m.Create([an_item(4096)]))
                thief.send(m.encode(call))
                return m.decode_downlink(thief.recv()) if thief.poll(500) else None
            finally:
                thief.close(linger=0)

        answer = eventually(steal, "an answer to the thief")
        if isinstance(answer.body, m.Created):
            assert owner.segment_next().segment == answer.body.results[0].segment
        else:
            assert answer.body.error == "UnknownSession"


@pytest.mark.parametrize(
    "kind", [m.Drop, m.Settle, m.Ack, m.Kept, m.Abort, m.Unpin, m.Park, m.Want, m.Loaded]
)
def test_no_number_of_anothers_does_anything(broker: BrokerProcess, kind: Any) -> None:
    """All small numbers, as anybody may guess them, from a client of the same namespace."""
    with (
        RawClient(broker.directory, name="owner") as owner,
        RawClient(broker.directory, name="rank") as rank,
        RawClient(broker.directory, name="guesser") as guesser,
    ):
        rank.call(m.Attach("e", 0, 1))
        open_lease = lease_one(owner, 4096)
        seq = owner.post(m.Seal([m.Sealing(lease_one(owner, 4096).lease, retained=True)], "e"))
        (grant,) = rank.notice(m.Granted).grants
        guesser.cast(kind(list(range(100))))
        assert isinstance(guesser.call(m.Released(owner.welcome.session)), m.Done | m.Failed)
        before = broker.status()
        assert (before["leases"], before["holds"], before["engines"][0]["ranks"][0]["unacked"]) == (1, 1, 1)
        rank.cast(m.Ack([grant.ref.hold]))
        assert isinstance(owner.answer(seq), m.Sealed)
        assert isinstance(owner.call(m.Seal([m.Sealing(open_lease.lease)])), m.Sealed)
        rank.call(m.Status())  # it has heard everything that was said before
        assert not [notice for notice in rank.notices if isinstance(notice, m.Dismissed)]


def test_a_reference_of_another_engine_yields_nothing(start_broker: StartBroker) -> None:
    """Nor does one of another namespace's, or one that was good until its slot was used for something else."""
    broker = start_broker(host_mib=8, segment_mib=8)
    with (
        mmbroker.connect(broker.directory, name="worker") as worker,
        mmbroker.connect(broker.directory, name="a") as a,
        mmbroker.connect(broker.directory, name="b") as b,
        mmbroker.connect(broker.directory, name="c", namespace="other") as c,
    ):
        tables = [
            client.attach(engine=name, access="readonly")
            for client, name in ((a, "ea"), (b, "eb"), (c, "ea"))
        ]
        held = worker.put(torch.full((6 * MIB,), 42, dtype=torch.uint8), to="ea")
        for table in tables[1:]:
            with pytest.raises(FeatureMissing):
                table.take(held.ref)
        with tables[0].take(held.ref) as use:
            assert use.tensor[0] == 42
        del use
        old = held.ref.to_wire()
        held.drop()
        later = worker.put(torch.full((7 * MIB,), 43, dtype=torch.uint8), to="ea")
        assert broker.status()["counters"]["evictions"] == 1, "it has the place of the first"
        with pytest.raises(FeatureMissing):
            tables[0].take(old)
        with pytest.raises(StaleReference):
            tables[0].take({**old, "hold": later.ref.hold})
        later.drop()
