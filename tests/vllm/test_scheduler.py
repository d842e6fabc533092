"""The scheduler's half, step by step, with made-up requests: what it answers, what it holds, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mmbroker.adapters.vllm.lookups import TIMEOUT
from mmbroker.adapters.vllm.saying import Saying
from tests.kit import Puppet, eventually

from .fakes import Client, Scene, request

END = 100  # past every feature


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*there: str, **more: float) -> Scene:
        made.append(Scene(Client(there), **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
        eventually(lambda one=one: one.client.holding == 0, "holds that are given back")


@pytest.mark.parametrize("bare", [False, True])
def test_what_is_there_is_loaded(scene: Callable[..., Scene], bare: bool) -> None:
    s, one = scene("a", "b"), request("r", "a", "b", bare=bare)
    s.until_ready(one)
    assert s.schedule(one) == ["a", "b"]
    loads = s.half.build_loads([])
    assert [name for name, _ in loads] == ["a", "b"]
    assert s.half.build_loads([]) == []
    s.half.loaded(["a", "b"])
    assert s.half.ensure_cache_available(one, END)
    eventually(lambda: s.client.holding == 0, "holds end when the request is past its pictures")
    assert s.half.take_unavailable_requests() == set()


def test_a_request_waits_for_its_answer_and_others_do_not(scene: Callable[..., Scene]) -> None:
    s = scene("a")
    s.client.gate.clear()
    waiting, decoding = request("waiting", "a"), request("decoding", "z")
    assert not s.half.ensure_cache_available(waiting, 0)
    assert s.half.ensure_cache_available(decoding, END)
    s.client.gate.set()
    s.until_ready(waiting)
    assert s.schedule(waiting) == ["a"]
    s.half.build_loads([])
    s.half.loaded(["a"])
    s.half.request_finished("waiting")


def test_what_is_absent_is_encoded(scene: Callable[..., Scene]) -> None:
    s, one = scene("a"), request("r", "a", "absent")
    s.until_ready(one)
    assert s.schedule(one) == ["a"]
    s.half.build_loads([])
    s.half.loaded(["a"])
    s.half.request_finished("r")


def test_a_request_without_pixels_fails_alone(scene: Callable[..., Scene]) -> None:
    s, bad, good = scene("a"), request("bad", "a", "absent", bare=True), request("good", "a", bare=True)
    s.until_ready(good)
    s.half.ensure_cache_available(bad, 0)
    s.answered("a", "absent")
    assert not s.half.ensure_cache_available(bad, 0)
    assert s.schedule(good) == ["a"]
    assert s.half.take_unavailable_requests() == {"bad"}
    assert s.half.take_unavailable_requests() == set()
    s.half.request_finished("bad")
    s.half.build_loads([])
    s.half.loaded(["a"])
    s.half.request_finished("good")


def test_it_may_come_again_under_the_same_name(scene: Callable[..., Scene]) -> None:
    """As whoever sends it again with pixels does."""
    s, bare = scene(), request("r", "a", bare=True)
    s.half.ensure_cache_available(bare, 0)
    s.answered("a")
    assert not s.half.ensure_cache_available(bare, 0)
    s.half.take_unavailable_requests()
    s.half.request_finished("r")
    whole = request("r", "a")
    s.until_ready(whole)
    assert s.schedule(whole) == []
    s.half.request_finished("r")


@pytest.mark.parametrize(("bare", "patience"), [(False, 0.25), (True, TIMEOUT + 0.5)])
def test_a_silent_broker_is_waited_for_no_longer_than_told(
    scene: Callable[..., Scene], bare: bool, patience: float
) -> None:
    s, one = scene("a"), request("r", "a", bare=bare)
    s.client.gate.clear()
    assert not s.half.ensure_cache_available(one, 0)
    s.now += patience - 0.01
    assert not s.half.ensure_cache_available(one, 0)
    assert s.half.take_unavailable_requests() == set()
    s.now += 0.02
    assert s.half.ensure_cache_available(one, 0) is not bare
    assert s.half.take_unavailable_requests() == ({"r"} if bare else set())
    if not bare:
        s.client.gate.set()
        s.answered("a")
        assert s.schedule(one) == [], "what came too late was not checked: the encoder runs"
    s.half.request_finished("r")


def test_a_load_is_held_until_the_worker_says_so(scene: Callable[..., Scene]) -> None:
    """The scheduler runs a step ahead of its workers: its request may be past the picture before it is loaded."""
    s, one = scene("a"), request("r", "a")
    s.until_ready(one)
    s.schedule(one)
    s.half.build_loads([])
    assert s.half.ensure_cache_available(one, END)
    s.half.request_finished("r")
    assert "a" in s.lookups.answers and s.client.holding == 1
    s.half.loaded(["a"])
    eventually(lambda: s.client.holding == 0, "the hold ends with the load")


@pytest.mark.parametrize("step", ["asked", "answered", "ready", "scheduled", "sent", "loaded"])
def test_an_abort_at_any_step_leaves_nothing(scene: Callable[..., Scene], step: str) -> None:
    s, one = scene("a"), request("r", "a")
    if step == "asked":
        s.client.gate.clear()
    assert not s.half.ensure_cache_available(one, 0) or step != "asked"
    if step != "asked":
        s.answered("a")
    if step in ("ready", "scheduled", "sent", "loaded"):
        s.until_ready(one)
    if step in ("scheduled", "sent", "loaded"):
        s.schedule(one)
    if step in ("sent", "loaded"):
        s.half.build_loads([])
    if step == "loaded":
        s.half.loaded(["a"])
    s.half.request_finished("r")
    s.client.gate.set()
    if step in ("scheduled", "sent"):
        s.half.build_loads([])
        s.half.loaded(["a"])
    eventually(lambda: s.client.asked and s.client.holding == 0, "nothing is held")
    assert not s.lookups.answers


def test_two_requests_with_one_picture_share_its_hold(scene: Callable[..., Scene]) -> None:
    s, first, second = scene("a"), request("first", "a"), request("second", "a")
    s.until_ready(first)
    assert s.half.ensure_cache_available(second, 0)
    s.schedule(first)
    s.half.build_loads([])
    s.half.loaded(["a"])
    s.half.request_finished("first")
    assert s.client.holding == 1
    s.half.request_finished("second")
    eventually(lambda: s.client.holding == 0, "the hold ends with the last")
    assert s.client.asked == [["a"]]


def test_what_does_not_fit_is_absent(scene: Callable[..., Scene]) -> None:
    """Another number of tokens than the request has places: loading it would end the engine."""
    s, one = scene("a"), request("r", "a", tokens=7)
    s.until_ready(one)
    assert s.schedule(one) == []
    assert s.half.counts["misfits"] == 1
    s.half.request_finished("r")


def test_what_does_not_fit_one_request_is_held_for_another(scene: Callable[..., Scene]) -> None:
    """It may be on its way to the workers already."""
    s, fits, misfit = scene("a"), request("fits", "a"), request("misfit", "a", tokens=7)
    s.until_ready(fits)
    assert s.schedule(fits) == ["a"]
    assert s.half.ensure_cache_available(misfit, 0)
    assert s.schedule(misfit) == [] and s.half.counts["misfits"] == 1
    s.half.request_finished("misfit")
    s.half.request_finished("fits")
    s.arrive("b")
    s.arrive("c")  # so the thread has done what it had to do before
    assert [name for name, _ in s.half.build_loads([])] == ["a"]
    assert s.client.holding == 1
    s.half.loaded(["a"])
    eventually(lambda: s.client.holding == 0, "the hold ends with the load")


def test_a_hold_that_came_when_nobody_wanted_it_any_more(scene: Callable[..., Scene]) -> None:
    """Even if the thread comes upon the end of the want before it comes to ask."""
    s = scene("a")
    s.lookups.close()
    s.lookups.want("a")
    s.lookups.done("a")
    s.lookups._tidy()
    s.lookups._look_up()
    assert s.client.held and s.client.holding == 0


def test_what_vllm_has_is_not_asked_for_until_it_is_freed(scene: Callable[..., Scene]) -> None:
    s = scene()
    for name in ("first", "second"):
        one = request(name, "a")
        s.until_ready(one)
        s.schedule(one)
        s.half.build_loads([])
        s.half.request_finished(name)
    assert len(s.client.asked) == 1
    s.half.build_loads(["a"])
    third = request("third", "a")
    s.until_ready(third)
    assert len(s.client.asked) == 2
    s.half.request_finished("third")


def test_what_vllm_has_forgotten_is_asked_for_again(scene: Callable[..., Scene]) -> None:
    s, one = scene(), request("r", "a")
    s.until_ready(one)
    s.schedule(one)
    s.half.request_finished("r")
    s.half.forgotten()
    again = request("again", "a")
    assert not s.half.ensure_cache_available(again, 0)
    s.until_ready(again)
    s.half.request_finished("again")


def test_a_preempted_request_asks_anew(scene: Callable[..., Scene]) -> None:
    s, one = scene("a"), request("r", "a", bare=True)
    s.until_ready(one)
    s.schedule(one)
    s.half.build_loads([])
    s.half.loaded(["a"])
    assert s.half.ensure_cache_available(one, END)
    eventually(lambda: s.client.holding == 0, "past")
    s.until_ready(one, 0)
    assert s.schedule(one) == ["a"]
    s.half.build_loads(["a"])
    s.half.loaded(["a"])
    s.half.request_finished("r")


@pytest.mark.parametrize("loss", ["reconnected", "gone"])
def test_an_answer_of_a_lost_session_is_asked_for_anew(scene: Callable[..., Scene], loss: str) -> None:
    s, one = scene("a"), request("r", "a")
    s.until_ready(one)
    found = s.lookups.answers["a"]
    if loss == "gone":
        s.client.connected = False
    else:
        s.client.reconnects += 1
    eventually(lambda: found.expires is not None, "the loss is noticed")
    assert found.expires is not None
    s.client.connected = True
    s.now = found.expires + 1
    assert not s.half.ensure_cache_available(one, 0)
    s.until_ready(one) if loss == "gone" else None
    s.answered("a")
    s.half.request_finished("r")


def test_without_a_broker_nobody_waits(scene: Callable[..., Scene]) -> None:
    s = scene("a")
    s.client.connected = False
    one = request("r", "a")
    s.until_ready(one)
    assert s.schedule(one) == [] and s.client.asked == []
    s.half.request_finished("r")


def test_what_was_asked_ahead_wakes_nobody(scene: Callable[..., Scene]) -> None:
    s, one = scene("a"), request("r", "a")
    s.arrive("a")
    assert s.half.ensure_cache_available(one, 0), "at first sight"
    assert s.schedule(one) == ["a"]
    assert not s.lookups._asked and s.client.asked == [["a"]]
    s.half.build_loads([])
    s.half.loaded(["a"])
    s.half.request_finished("r")


def test_what_was_asked_ahead_in_vain_is_given_back(scene: Callable[..., Scene]) -> None:
    s = scene("a")
    s.lookups.expect(["a"])
    eventually(lambda: s.client.held and s.client.holding == 0, "nobody came for it")
    assert not s.lookups._ahead


def test_a_key_that_cannot_be_made_is_absent(scene: Callable[..., Scene]) -> None:
    """The thread goes on, whatever goes wrong in it."""
    s = scene("a")

    def broken(name: str) -> str:
        if name == "bad":
            raise OSError("no such file")
        return name

    s.lookups._key = broken  # type: ignore[assignment]
    bad, good = request("bad", "bad"), request("good", "a")
    assert not s.half.ensure_cache_available(bad, 0)
    eventually(lambda: s.lookups.counts["lookup_errors"], "the error is counted")
    s.now += 1
    assert s.half.ensure_cache_available(bad, 0)
    s.until_ready(good)
    s.half.request_finished("bad")
    s.half.request_finished("good")


def test_what_goes_its_own_way_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    saying = Saying("pictures went their own way", lambda: now[0])
    for moment in (0.0, 1.0, 59.0, 61.0):
        now[0] = moment
        saying.count(f"at {moment:g}", 2)
    assert [record.getMessage() for record in caplog.records] == [
        "mmbroker: pictures went their own way (2). The last one: at 0",
        "mmbroker: pictures went their own way (6). The last one: at 61",
    ]


def test_steps_make_no_system_call(puppet: Callable[..., Puppet]) -> None:
    """In a process whose kernel lets it only read and write: anything else kills it."""
    process = puppet()
    assert process(STRICT) == ["64 requests decoded, loaded and began"]


STRICT = """
import ctypes, gc, os, threading
from tests.vllm.fakes import Client, Scene, request

scene = Scene(Client({f"i{n}" for n in range(8)}))
half = scene.half
running = [request(f"r{n}", f"i{n % 8}") for n in range(64)]

def step(fresh, decoding):
    for one in decoding:
        assert half.ensure_cache_available(one, 100)
    loaded = []
    for one in fresh:
        assert half.ensure_cache_available(one, 0)
        loaded += scene.schedule(one)
    half.build_loads([])
    half.take_unavailable_requests()
    half.loaded([identifier for identifier in loaded])
    for one in fresh:
        half.request_finished(one.request_id)

for one in running:
    scene.until_ready(one)
    scene.schedule(one)
half.loaded([name for name, _ in half.build_loads([])])
for one in running:
    assert half.ensure_cache_available(one, 100)
keeper = request("keeper", *(f"i{n}" for n in range(8)))
scene.until_ready(keeper)                   # so that the answers stand there
fresh = [[request(f"f{t}-{n}", f"i{n}") for n in range(8)] for t in range(200)]
for t in range(100):
    step(fresh[t], running)
half.request_finished("none")
gc.collect(); gc.disable()
out, done = os.pipe(), []

def strict():
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    scene.lookups._stop = True              # nobody else wants the interpreter's lock
    scene.lookups._bell.set()
    scene.lookups._thread.join()
    assert prctl(22, 1, 0, 0, 0) == 0, "the kernel has no strict mode"
    for t in range(100, 200):
        step(fresh[t], running)
    os.write(out[1], b"64 requests decoded, loaded and began")

child = os.fork()
if not child:
    scene.lookups._thread = threading.Thread(target=lambda: None)
    scene.lookups._thread.start()
    strict()
    os._exit(0)                             # not allowed any more, and that is fine
os.waitpid(child, 0)
os.close(out[1])
result = [os.read(out[0], 100).decode()]
scene.lookups.close()
"""
