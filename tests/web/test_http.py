"""The page's HTTP as a hostile or clumsy reader meets it: loopback only, GET only, everything bounded."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from mmbroker.web import http
from mmbroker.web.address import parse
from tests.conftest import StartBroker
from tests.kit import PATIENCE, BrokerProcess, Puppet, RawClient, eventually


@pytest.fixture
def paged(start_broker: StartBroker) -> BrokerProcess:
    return start_broker(http="127.0.0.1:0", stuck_after=0.05)


def url(broker: BrokerProcess) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+/", broker.ready)
    assert found is not None, broker.ready
    return found.group()


def port(broker: BrokerProcess) -> int:
    return int(url(broker).rstrip("/").rpartition(":")[2])


def get(broker: BrokerProcess, path: str) -> tuple[int, str, str]:
    """Status, content type, body."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url(broker) + path.lstrip("/"), timeout=PATIENCE) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def connect(broker: BrokerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port(broker)), timeout=PATIENCE)


def say(broker: BrokerProcess, words: bytes) -> bytes:
    """All that is answered to these bytes, until the end."""
    answer = b""
    deadline = time.monotonic() + PATIENCE
    with connect(broker) as line, suppress(ConnectionResetError, BrokenPipeError):
        line.sendall(words)
        while data := line.recv(1 << 16):
            answer += data
            assert time.monotonic() < deadline, "an answer without end"
    return answer


def request(
    path: str = "/healthz", method: str = "GET", host: str | None = "127.0.0.1", more: str = ""
) -> bytes:
    hosts = "" if host is None else f"Host: {host}\r\n"
    return f"{method} {path} HTTP/1.1\r\n{hosts}{more}\r\n".encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# --- where ---


@pytest.mark.parametrize("text", ["127.0.0.1:9400", "[::1]:0"])
def test_addresses_of_this_machine(text: str) -> None:
    assert parse(text).url == f"http://{text}/"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("10.0.0.1:9400", "10.0.0.1 can be reached"),
        ("127.0.0.2:9400", "127.0.0.2"),
        (":9400", "any address"),
        ("*:9400", r"\*"),
        ("localhost:9400", "localhost"),
        ("example.org:9400", "example.org"),
        ("9400", "127.0.0.1:PORT"),
        ("127.0.0.1", "127.0.0.1:PORT"),
        ("127.0.0.1:65536", "127.0.0.1:PORT"),
        ("127.0.0.1:-1", "127.0.0.1:PORT"),
        ("", "127.0.0.1:PORT"),
    ],
)
def test_other_addresses_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(text)


def test_nothing_listens_unless_asked(broker: BrokerProcess) -> None:
    assert "http" not in broker.ready
    assert broker.status()["daemon"]["page"] == ""
    assert listening(broker.pid) == []


def test_it_listens_on_loopback_only(paged: BrokerProcess) -> None:
    assert listening(paged.pid) == [f"0100007F:{port(paged):04X}"]
    assert paged.status()["daemon"]["page"] == url(paged)


def listening(pid: int) -> list[str]:
    """Addresses of the process's listening TCP sockets, as the kernel writes them."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1])
    return found


def test_a_port_that_is_taken_is_named(start_broker: StartBroker, paged: BrokerProcess) -> None:
    other = start_broker(wait=False, name="other", http=f"127.0.0.1:{port(paged)}")
    assert other.wait() == 1
    assert f"cannot listen at {url(paged)}" in other.log() and "--http" in other.log()
    assert not other.directory.exists()


# --- what ---


def test_what_there_is(paged: BrokerProcess) -> None:
    code, kind, body = get(paged, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8") and "<title>mmbroker</title>" in body
    code, kind, body = get(paged, "/metrics?x=1")
    assert code == 200 and kind.startswith("text/plain") and "mmbroker_healthy 1.0" in body
    code, kind, body = get(paged, "/healthz")
    assert (code, kind) == (200, "application/json")
    assert json.loads(body)["ok"] is True and json.loads(body)["stuck"] == []
    assert get(paged, "/favicon.ico")[0] == get(paged, "/../../etc/passwd")[0] == 404


def test_health_is_bad_when_work_does_not_get_on(paged: BrokerProcess) -> None:
    with RawClient(paged.directory, name="worker") as worker, RawClient(paged.directory) as rank:
        rank.call(m.Attach("engine-a", 0, 1))
        created = worker.call(m.Create([m.Item(Key.caller("x"), tensor_form("uint8", (1024,), "image"))]))
        assert isinstance(created, m.Created) and isinstance(created.results[0], m.Leased)
        worker.post(m.Seal([m.Sealing(created.results[0].lease)], "engine-a"), timeout=60)
        code, _, body = eventually(lambda: (a := get(paged, "/healthz"))[0] == 503 and a, "bad health")
        assert "engine-a" in json.loads(body)["stuck"][0]
        assert "mmbroker_healthy 0.0" in get(paged, "/metrics")[2]
        rank.cast(m.Ack([rank.notice(m.Granted).grants[0].ref.hold]))
        eventually(lambda: get(paged, "/healthz")[0] == 200, "good health again")
    assert code == 503


def test_the_page_may_use_nothing_but_itself(paged: BrokerProcess) -> None:
    answer = say(paged, request("/"))
    policy = re.search(rb"Content-Security-Policy: ([^\r]*)", answer)
    assert policy is not None
    assert b"default-src 'none'" in policy[1] and b"connect-src 'self'" in policy[1]
    assert b"unsafe" not in policy[1] and policy[1].count(b"'sha256-") == 2
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"X-Content-Type-Options: nosniff" in head and b"Access-Control" not in head
    addresses = set(re.findall(rb"https?://[^\"'\s<>)]*", body))
    assert addresses == {b"http://www.w3.org/2000/svg"}, "names of a language, not requests"


# --- who asks, and how ---


def test_another_user_sees_figures_and_not_whose_they_are(
    paged: BrokerProcess, puppet: Callable[..., Puppet]
) -> None:
    """The tests run as root or as one user; another one can only be had by root."""
    with connect(paged) as line:
        assert http.owner(line.getsockname(), line.getpeername()) == os.geteuid()
        assert http.owner(("127.0.0.1", 1), line.getpeername()) is None
    if os.geteuid() == 0:
        stranger = puppet(["setpriv", "--reuid=1234", "--clear-groups"])
        ask = f"""
            import urllib.request, urllib.error
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
            def ask(path):
                try:
                    return opener.open({url(paged)!r} + path).status
                except urllib.error.HTTPError as error:
                    return error.code
        """
        stranger(ask)
        assert stranger("result = [ask(p) for p in ('', 'events', 'metrics', 'healthz')]") == [
            403,
            403,
            200,
            200,
        ]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_who_owns_a_connection(family: int) -> None:
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen(1)
        with socket.create_connection(server.getsockname()[:2]) as line:
            assert http.owner(line.getsockname()[:2], line.getpeername()[:2]) == os.geteuid()
            assert http.owner(line.getsockname()[:2], (host, 1)) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:80"])
def test_this_machines_names(paged: BrokerProcess, host: str) -> None:
    assert status(say(paged, request(host=host))) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "", "127.0.0.1:"],
)
def test_another_name_is_refused(paged: BrokerProcess, host: str) -> None:
    """A page from elsewhere whose own name resolves to this machine reads nothing."""
    answer = say(paged, request(host=host))
    assert status(answer) == 421 and b"127.0.0.1 and localhost only" in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "BREW"])
def test_only_get(paged: BrokerProcess, method: str) -> None:
    answer = say(paged, request(method=method))
    assert status(answer) == 405 and b"Allow: GET" in answer


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (request(host=None), 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 421),
        (b"GET /" + b"x" * 10_000, 431),
        (request(more="X: " + "y" * 10_000)[:-2], 431),
        (request(more="Transfer-Encoding: gzip\r\n"), 501),
    ],
    ids=["nonsense", "TLS", "no host", "two hosts", "old", "long target", "long header", "encoded"],
)
def test_nonsense_is_refused(paged: BrokerProcess, words: bytes, code: int) -> None:
    assert status(say(paged, words)) == code
    assert get(paged, "/healthz")[0] == 200


def test_one_answer_a_connection(paged: BrokerProcess) -> None:
    answer = say(paged, request() + request("/metrics"))
    assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer


def test_a_request_in_pieces(paged: BrokerProcess) -> None:
    with connect(paged) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request():
            line.sendall(bytes([byte]))
        assert line.recv(12) == b"HTTP/1.1 200"


@pytest.fixture
def crowd(paged: BrokerProcess) -> Iterator[list[socket.socket]]:
    found = [connect(paged) for _ in range(http.CONNECTIONS)]
    yield found
    for line in found:
        line.close()


def test_connections_are_bounded(paged: BrokerProcess, crowd: list[socket.socket]) -> None:
    """Readers that never ask keep others out, for as long as they are heard; the broker serves on."""
    assert status(say(paged, request())) == 503
    assert paged.status()["daemon"]["pid"] == paged.pid
    for _ in range(http.CONNECTIONS):
        crowd.append(connect(paged))
    assert say(paged, request()) == b""
    while crowd:
        crowd.pop().close()
    eventually(lambda: status(say(paged, request())) == 200, "room again")


def test_feeds_are_bounded_and_leave_room_for_metrics(paged: BrokerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(http.FEEDS):
            line = stack.enter_context(closing(connect(paged)))
            line.sendall(request("/events"))
            assert line.recv(12) == b"HTTP/1.1 200"
        assert status(say(paged, request("/events"))) == 503
        assert get(paged, "/metrics")[0] == 200
    eventually(lambda: feed_opens(paged), "feeds again")


def feed_opens(broker: BrokerProcess) -> bool:
    with connect(broker) as line:
        line.sendall(request("/events"))
        return line.recv(12) == b"HTTP/1.1 200"


def test_the_feed_begins_with_all_there_is(paged: BrokerProcess) -> None:
    with connect(paged) as line, line.makefile("rb") as lines:
        line.sendall(request("/events"))
        events = []
        while len(events) < 2:
            if (words := lines.readline()).startswith((b"event: ", b"data: ")):
                events.append(words)
    assert events[0] == b"event: hello\n"
    told = json.loads(events[1].removeprefix(b"data: "))
    assert told["now"]["pid"] == paged.pid and told["rows"] == []


def test_the_feed_goes_on(paged: BrokerProcess) -> None:
    with connect(paged) as line, line.makefile("rb") as lines:
        line.sendall(request("/events"))
        while lines.readline() != b"event: now\n":
            pass
        told = json.loads(lines.readline().removeprefix(b"data: "))
    assert told["row"]["ok"] is True and told["now"]["segments"] == []


def test_the_end_cuts_readers_off(paged: BrokerProcess) -> None:
    with connect(paged) as feed, connect(paged) as silent:
        feed.sendall(request("/events"))
        assert feed.recv(12) == b"HTTP/1.1 200"
        assert paged.stop() == 0
        for line in (feed, silent):
            with suppress(ConnectionResetError):
                while line.recv(1 << 16):
                    pass


def test_names_reach_the_page_as_text_only(paged: BrokerProcess) -> None:
    """The page makes text of what it is told; a client's name in JSON cannot end the feed's line."""
    with (
        RawClient(paged.directory, name="<b>&quot;&</script>"),
        connect(paged) as line,
        line.makefile("rb") as lines,
    ):
        line.sendall(request("/events"))
        while not (words := lines.readline()).startswith(b"data: "):
            pass
    told = json.loads(words.removeprefix(b"data: "))
    assert [client["name"] for client in told["now"]["clients"]] == ["<b>&quot;&</script>"]
