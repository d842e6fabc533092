"""A broker that answers nonsense, too late or not at all: the caller gets a typed error, and nothing is leaked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mmbroker
from mmbroker import receiver
from mmbroker.link import Link
from mmbroker.proto import messages as m
from mmbroker.proto.errors import (
    BrokerLost,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidMessage,
    PoolFull,
)
from mmbroker.proto.reference import Reference
from tests.client.peer import Handler, Peer
from tests.kit import Leaks, eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def client(peer: Callable[..., Peer]) -> Iterator[Callable[[Handler], tuple[Peer, mmbroker.Client]]]:
    made: list[mmbroker.Client] = []

    def make(handler: Handler) -> tuple[Peer, mmbroker.Client]:
        it = peer(handler)
        made.append(mmbroker.connect(it.directory))
        return it, made[-1]

    yield make
    for one in made:
        one.close()


def reference(boot: bytes, hold: int = 1) -> Reference:
    return Reference(boot, hold, 1, 1, bytes(32), "float32", (1,), 4)


# --- answers --------------------------------------------------------------------------------------------------------


def lease(call: m.Call, **changes: int) -> m.Created:
    fields = {"lease": 1, "segment": 1, "offset": 0, "generation": 1, **changes}
    assert isinstance(call.body, m.Create)
    return m.Created([m.Leased(**fields) for _ in call.body.items])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"x" * 100,
        m.encode(m.Hello(1, "hello")),
        m.encode(m.Answer(1, m.Done()))[:-1],
        b"\x00" * (m.MAX_MESSAGE + 1),
    ],
    ids=["empty", "byte", "map", "text", "another's", "cut short", "too long"],
)
def test_nonsense_fails_the_call_and_the_session(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]], answer: bytes
) -> None:
    def handler(peer: Peer, call: m.Call) -> m.Reply | bytes:
        return answer if len(peer.calls) == 1 else m.Found([None])

    it, mine = client(handler)
    with pytest.raises(InvalidMessage):
        mine.lookup("k")
    eventually(lambda: mine.connected and it.sessions == 2, "a new session")
    assert mine.lookup("k") is None


@pytest.mark.parametrize(
    "answer",
    [m.Done(), m.Created([]), m.Found([]), m.Found([None, None]), m.Sealed([])],
    ids=["another kind", "other items", "too few", "too many", "sealed"],
)
def test_answers_that_do_not_fit(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]], answer: m.Reply
) -> None:
    _, mine = client(lambda peer, call: answer)
    with pytest.raises(InvalidMessage, match="does not fit"):
        mine.lookup("k")


def test_errors_come_with_their_figures(client: Callable[[Handler], tuple[Peer, mmbroker.Client]]) -> None:
    _, mine = client(lambda peer, call: m.Failed("PoolFull", "full", {"requested": 3, "free": 2, "limit": 1}))
    with pytest.raises(PoolFull) as caught:
        mine.put(torch.ones(1))
    assert (caught.value.requested, caught.value.free, caught.value.limit) == (3, 2, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.put(torch.ones(1), timeout=0.05),
        lambda c: c.lookup("k", timeout=0.05),
        lambda c: c.get_or_create("k", (1,), torch.uint8, timeout=0.05),
        lambda c: c.attach(engine="e", timeout=0.05),
    ],
    ids=["put", "lookup", "get_or_create", "attach"],
)
def test_silence_is_named(client: Callable[[Handler], tuple[Peer, mmbroker.Client]], call: Any) -> None:
    _, mine = client(lambda peer, call: None)
    with pytest.raises(DeadlineExceeded, match=r"did not answer the (request|lookup|attachment)") as caught:
        call(mine)
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("kind", [m.Created, m.Found, m.Sealed, m.Attached])
def test_late_answers_are_undone(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]], kind: type
) -> None:
    """Holds are dropped, leases aborted, an attachment detached."""
    late: list[m.Call] = []

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        match call.body:
            case m.Create() if kind is m.Sealed:
                peer.segment(1, 4096)
                return lease(call)
            case m.Create() | m.Lookup() | m.Seal() | m.Attach():
                late.append(call)
            case m.Status():
                ref = reference(peer.boot, 77)
                answer: m.Reply = {
                    m.Created: m.Created([m.Hit(ref), m.Leased(88, 0, 0, 1), m.Pending()]),
                    m.Found: m.Found([ref, None]),
                    m.Sealed: m.Sealed([ref]),
                    m.Attached: m.Attached(True),
                }[kind]
                peer.tell(m.Answer(late[0].seq, answer))
                return m.Done()
        return None

    it, mine = client(handler)
    with pytest.raises(DeadlineExceeded):
        match kind:
            case m.Attached:
                mine.attach(engine="e", timeout=0.1)
            case m.Found:
                mine.lookup_many(["k", "l"], timeout=0.1)
            case m.Sealed:  # the lease must have come by then, or nothing is sealed
                mine.put_many([torch.ones(1)], timeout=2)
            case _:
                mine.put_many([torch.ones(1)] * 3, timeout=0.1)
    mine._link.call(m.Status())
    match kind:
        case m.Attached:
            it.wait_for(m.Detach)
        case _:
            call = it.wait_for(m.Drop)
            assert isinstance(call.body, m.Drop)
            assert call.body.holds == [77]
    if kind is m.Created:
        aborted = it.wait_for(m.Abort).body
        assert isinstance(aborted, m.Abort)
        assert aborted.leases == [88]
    assert mine.stats()["late_answers"] == 1
    assert mine.stats()["holds"] == 0


def test_an_interrupted_wait_is_undone(client: Callable[[Handler], tuple[Peer, mmbroker.Client]]) -> None:
    """Control-C while a call waits: what its answer brings is given back."""
    waiting = threading.Event()
    go = threading.Event()

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Lookup) and call.body.keys:
            waiting.set()
            go.wait(20)
            return m.Found([reference(peer.boot, 5)])
        return m.Found([])

    it, mine = client(handler)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        waiting.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            mine.lookup("k", timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    killer.join()
    go.set()
    dropped = it.wait_for(m.Drop).body
    assert isinstance(dropped, m.Drop)
    assert dropped.holds == [5]


# --- segments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda peer: None, "did not send its descriptor"),
        (lambda peer: peer.segment(2, 4096), "did not send its descriptor"),
        (lambda peer: peer.segment(1, 4096, writable=False), "did not send its descriptor"),
    ],
    ids=["none", "another", "read-only"],
)
def test_a_lease_without_its_segment(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]],
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Peer], None],
    match: str,
) -> None:
    monkeypatch.setattr("mmbroker.connection._DESCRIPTOR_PATIENCE", 0.05)

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Create):
            prepare(peer)
            return lease(call)
        return m.Found([])

    it, mine = client(handler)
    with pytest.raises(InvalidMessage, match=match):
        mine.put(torch.ones(1))
    aborted = it.wait_for(m.Abort).body
    assert isinstance(aborted, m.Abort)
    assert aborted.leases == [1]


@pytest.mark.parametrize(
    "place", [{"offset": 4096}, {"offset": -4}, {"offset": 4093}, {"offset": 1 << 62}], ids=str
)
def test_a_lease_outside_its_segment(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]], place: dict[str, int]
) -> None:
    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Create):
            peer.segment(1, 4096)
            return lease(call, **place)
        return m.Found([])

    it, mine = client(handler)
    with pytest.raises(InvalidMessage, match="outside a segment"):
        mine.put(torch.ones(1))
    it.wait_for(m.Abort)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda peer: peer.segment(1, 4096, descriptors=2),
        lambda peer: (peer.segment(3, 4096), peer.segment(3, 4096)),
        lambda peer: peer._lifelines[-1].send(m.encode(m.SegmentFd(1, 4096, True))),
        lambda peer: peer._lifelines[-1].send(b"nonsense"),
        lambda peer: peer._lifelines[-1].send(m.encode(m.Refused("PoolFull", "now?"))),
        lambda peer: peer.hang_up(),
    ],
    ids=["two descriptors", "twice", "no descriptor", "nonsense", "refusal", "end"],
)
def test_a_broken_lifeline_ends_the_session(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]], spoil: Callable[[Peer], object]
) -> None:
    before: list[Leaks] = []

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Status):
            spoil(peer)
            return None
        return m.Found([None])

    it, mine = client(handler)
    before.append(Leaks())
    with pytest.raises((BrokerLost, InvalidMessage)):
        mine._link.call(m.Status())
    eventually(lambda: mine.connected and it.sessions == 2, "a new session")
    assert mine.lookup("k") is None
    descriptors = len(os.listdir("/proc/self/fd"))
    assert mine.lookup("k") is None
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_segment_that_retires_before_its_descriptor_is_read(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]],
) -> None:
    """The two come by different ways: the descriptor, which was sent first, may be read last."""
    it, mine = client(lambda peer, call: m.Found([]))
    link = mine._link
    before = Leaks()

    def retire() -> None:
        it.segment(1, 4096, writable=False)
        link._dispatch(link._connection, m.Retired([1]))
        assert not link._connection._segments
        assert not link.fresh_segments()

    link.run(retire, 20)
    mine._link.call(m.Lookup([]))
    assert not link._connection._segments
    before.check()


# --- the outbox -----------------------------------------------------------------------------------------------------


def test_casts_to_a_peer_that_does_not_read_are_kept_in_order(
    client: Callable[[Handler], tuple[Peer, mmbroker.Client]],
) -> None:
    """More than ZeroMQ takes in: the rest waits its turn, and a caller is told in time."""
    stuck, go = threading.Event(), threading.Event()

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Status):
            stuck.set()
            go.wait(30)
        return m.Found([])

    it, mine = client(handler)
    with pytest.raises(DeadlineExceeded):
        mine._link.call(m.Status(), 0.01)
    assert stuck.wait(20)
    for n in range(6000):
        mine._link.cast(m.Drop([n]))
    assert mine._link.backlog > 0
    with pytest.raises(DeadlineExceeded):
        mine.lookup("k", timeout=0.05)
    go.set()
    eventually(lambda: sum(isinstance(c.body, m.Drop) for c in it.calls) == 6000, "all casts")
    assert [c.body.holds[0] for c in it.calls if isinstance(c.body, m.Drop)] == list(range(6000))
    assert mine._link.backlog == 0


@pytest.mark.parametrize("who", ["caller", "receiver"])
def test_room_that_comes_while_it_is_looked_for(
    peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """ZeroMQ signals each change once. What it signals while a message is refused is not missed by those who look."""
    monkeypatch.setattr("mmbroker.receiver._TICK", 600.0)  # nobody looks by chance
    stuck, go = threading.Event(), threading.Event()

    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Status):
            stuck.set()
            go.wait(30)
        return None

    it = peer(handler)
    link = Link(it.directory)
    quick = link._connection._quick
    assert quick is not None
    busy, free = threading.Event(), threading.Event()
    looking = [who == "caller"]
    taken: list[bytes] = []

    def drops() -> int:
        return sum(isinstance(call.body, m.Drop) for call in it.calls)

    class Late:
        """Is refused, and there is room before anybody looks again."""

        def send(self, data: bytes) -> bool:
            if quick.send(data):
                taken.append(data)
                return True
            if looking[0] and not go.is_set():
                go.set()
                eventually(lambda: drops() == len(taken), "all that was taken, which is signalled by then")
            return False

        def __getattr__(self, name: str) -> Any:
            return getattr(quick, name)

    def fill(full: Callable[[], bool]) -> int:
        for n in range(100_000):
            if full():
                return n
            link.cast(m.Drop([n]))
        raise AssertionError("a pipe without an end")

    try:
        link.cast(m.Status())
        assert stuck.wait(20)
        link.later(lambda: (busy.set(), free.wait(20), None)[-1])  # the receiver thread is at something else
        assert busy.wait(20)
        monkeypatch.setattr(link._connection, "_quick", Late())
        sent = fill(go.is_set if who == "caller" else lambda: link.backlog > 5000)
        if who == "receiver":
            looking[0] = True
            link.wake()
        free.set()
        eventually(lambda: drops() == sent, "all casts")
    finally:
        go.set()
        free.set()
        monkeypatch.undo()
        link.close()


def test_a_call_too_long_to_be_read(client: Callable[[Handler], tuple[Peer, mmbroker.Client]]) -> None:
    _, mine = client(lambda peer, call: m.Found([None]))
    with pytest.raises(InvalidMessage, match=r"exceeds the limit of 1048576.*fewer"):
        mine.lookup_many([f"{n}" for n in range(40_000)])
    assert mine.lookup("k") is None


# --- hooks ----------------------------------------------------------------------------------------------------------


def test_a_failing_hook_costs_the_session_not_the_thread(
    peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    def handler(peer: Peer, call: m.Call) -> m.Reply | None:
        if isinstance(call.body, m.Status):
            peer.tell(m.Dismissed([1]))
        return m.Found([None])

    it = peer(handler)
    link = Link(it.directory)
    try:
        broken = link.on_dismissed

        def fail(holds: list[int]) -> None:
            link.on_dismissed = broken
            raise ZeroDivisionError("a hook")

        link.on_dismissed = fail
        with pytest.raises(BrokerLost):
            link.call(m.Status())
        eventually(lambda: link.connected, "a new session")
        assert isinstance(link.call(m.Lookup([])), m.Found)
        assert "a hook" in caplog.text
    finally:
        link.close()


def test_closing_while_the_broker_is_gone(client: Callable[[Handler], tuple[Peer, mmbroker.Client]]) -> None:
    it, mine = client(lambda peer, call: m.Found([]))
    it._listener.close()
    it._lifelines[0].close()
    eventually(lambda: not mine.connected, "the loss")
    with pytest.raises(BrokerLost, match="reconnect"):
        mine.lookup("k")
    mine.close()
    with pytest.raises(BrokerUnavailable):
        mine.lookup("k")


def test_dismissals_that_come_together_are_handled_together() -> None:
    """And where they came: what was said before them is heard before them, and what was said after them after."""
    said = [
        *(
            m.Dismissed([1]),
            m.Dismissed([2, 3]),
            m.Broken([4]),
            m.Dismissed([6]),
            m.Broken([7]),
            m.Broken([8]),
        ),
        *(m.Dismissed([9]), m.Dismissed([10])),
    ]
    assert list(receiver._joined(said)) == [
        *(m.Dismissed([1, 2, 3]), m.Broken([4]), m.Dismissed([6]), m.Broken([7]), m.Broken([8])),
        m.Dismissed([9, 10]),
    ]
    assert list(receiver._joined([])) == []
