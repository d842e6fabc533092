"""Servers under load: what is sent, what is made of what came back, and one real server on the CPU in front of it."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.serving import bodies, client, figures, goals, inside, loads, loop_probe, plots, tables
from bench.serving.campaign import Campaign, Plan
from bench.serving.client import Answer, Sent
from bench.serving.compare import compare, differences
from bench.serving.servers import HOST_MIB, Maker

ROOT = Path(__file__).resolve().parents[2]
SMALL = replace(loads.SMOKE, images=1, size=(32, 32), requests=6, concurrency=3, tokens=3)


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_the_matrix_has_every_combination_and_a_name_for_each() -> None:
    assert len(loads.MATRIX) == 3 * 3 * 2 * 3 * 2 == len({load.name for load in loads.MATRIX})
    assert {load.name for load in loads.GOALS} | set(loads.SPAN) < set(loads.DEFAULT)
    spanned = loads.named(list(loads.SPAN))
    for what in ("images", "concurrency", "repeats", "words", "size"):
        assert {getattr(load, what) for load in spanned} == {getattr(load, what) for load in loads.MATRIX}
    with pytest.raises(ValueError, match="there is no load nonsense"):
        loads.named(["one", "nonsense"])


def test_no_two_loads_or_turns_have_a_seed_in_common() -> None:
    seeds = [load.seed(1, turn) for load in loads.matrix() for turn in range(3)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("repeats", [1, 4])
def test_pictures_come_as_often_as_they_should(repeats: int, tmp_path: Path) -> None:
    load = replace(SMALL, images=2, requests=8, repeats=repeats)
    bodies.write(tmp_path / "b", load, 5, "m", load.requests)
    count, read = bodies.read(tmp_path / "b")
    assert count == 8
    seen: dict[str, int] = {}
    for number in range(count):
        asked = json.loads(read(number))
        assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("m", load.tokens, 0)
        *pictures, text = asked["messages"][0]["content"]
        assert len(pictures) == 2 and len(text["text"].split()) == load.words
        for one in pictures:
            seen[one["image_url"]["url"]] = seen.get(one["image_url"]["url"], 0) + 1
    assert set(seen.values()) == {repeats}


# --- the senders, and a server of two words -------------------------------------------------------------------------


class Words(BaseHTTPRequestHandler):
    """Answers every request with two words; fails those whose text has the word that says so."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = asked["messages"][0]["content"]
        if any(part == {"type": "text", "text": "w31"} for part in content):
            self._send(500, b"this one fails")
            return
        lines = [{"choices": [{"delta": {"content": word}}]} for word in ("", "one", " two")]
        lines.append({"choices": [], "usage": {"completion_tokens": 3}})
        self._send(
            200, b"".join(b"data: " + json.dumps(x).encode() + b"\n\n" for x in lines) + b"data: [DONE]\n\n"
        )

    def do_GET(self) -> None:
        self._send(404, b"no metrics")

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def a_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Words)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.usefixtures("no_leaks")
def test_all_is_sent_and_what_fails_is_told(tmp_path: Path) -> None:
    load = replace(SMALL, words=1)  # the text of request 1 is w31
    bodies.write(tmp_path / "b", load, 1, "m", 200)
    lingered = threading.Event()
    with a_server() as url:
        sent = client.send(tmp_path / "b", url, 3, load.requests, 60.0, True, lingered.set, senders=2)
    assert lingered.is_set() and not sent.cut
    assert [answer.number for answer in sent.answers] == list(range(load.requests))
    failed = [answer for answer in sent.answers if answer.error]
    assert [(answer.number, answer.error) for answer in failed] == [(1, "HTTP 500: this one fails")]
    for answer in sent.answers:
        if not answer.error:
            assert (answer.text, answer.tokens, len(answer.gaps)) == ("one two", 3, 1)
            assert 0 < answer.sent <= answer.first <= answer.end
    assert len(sent.ends) >= load.requests - 1


@pytest.mark.usefixtures("no_leaks")
def test_a_server_that_says_nothing_is_cut_off(tmp_path: Path) -> None:
    bodies.write(tmp_path / "b", SMALL, 1, "m", SMALL.requests)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sent = client.send(tmp_path / "b", url, 3, SMALL.requests, 0.2, senders=1)
    assert sent.cut and sent.answers == []
    assert figures.summary(sent, 3)["answered"] == 0


@pytest.mark.usefixtures("no_leaks")
def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """With somebody else's server; a line that was cut off while it was written is no run."""
    said: list[str] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    plan = Plan(("url",), (SMALL,), tmp_path / "out", look=0.0, warm=2)
    with a_server() as url:
        Campaign(plan, said.append, scratch).ask(url, "m", "url")
        raw = tmp_path / "out" / "runs.jsonl"
        first = raw.read_text()
        raw.write_text(first + '{"run": {"tran')
        longer = replace(plan, loads=(SMALL, replace(SMALL, name="other")))
        again = Campaign(longer, said.append, scratch)
        again.ask(url, "m", "url")
    assert [run["load"]["name"] for run in again.found["runs"]] == ["smoke", "other"]
    assert json.loads((tmp_path / "out" / "serve.json").read_text())["runs"] == again.found["runs"]
    answers = json.loads(first)["answers"]
    assert [answer["number"] for answer in answers] == list(range(SMALL.requests))


# --- what is made of it ---------------------------------------------------------------------------------------------


def sent(seconds: float, n: int = 160, text: str = "t") -> Sent:
    """Answers that take about so long each, four at a time."""
    answers = []
    for number in range(n):
        start, jitter = number // 4 * seconds, 1 + 0.05 * (number % 7)
        first, end = start + seconds * jitter / 4, start + seconds * jitter
        gaps = [(end - first) / 3] * 3
        answers.append(Answer(number, start, first, end, gaps, 4, text, ""))
    return Sent(answers, sorted(answer.end for answer in answers), answers[-1].end, False)


def result(**seconds: float) -> dict[str, Any]:
    """Runs of the goals' loads by transport, with what else a run has."""
    runs = []
    for transport, each in seconds.items():
        transport = transport.replace("_gpu", "-gpu")
        ours = transport.startswith("broker")
        for load in (loads.TEXT, *loads.GOALS):
            mib = {"cpu": 1700.0, "cuda_ipc": 2900.0}.get(transport, 1710.0)
            processes = [
                {"pid": 1, "role": "tokenizer", "cores": 0.5, "gpu_mib": mib},
                {"pid": 2, "role": "scheduler", "cores": 1.0, "gpu_mib": 9000.0},
                *([{"pid": 3, "role": "broker", "cores": 0.1, "gpu_mib": None}] if ours else []),
            ]
            shares = {"transport": 0.0 if ours else 0.3, "broker": 0.01 if ours else 0.0, "forward": 0.6}
            runs.append(
                {
                    "transport": transport,
                    "load": load.shape(),
                    "turn": 0,
                    "figures": figures.summary(sent(each), 4, draws=50),
                    "profile": {
                        "samples": 500,
                        "shares": shares,
                        "transport": shares["transport"] + shares["broker"],
                    },
                    "watch": {"processes": processes, "gpu_left_out": ""},
                    "device_arena_mib": 300.0 if ours else None,
                    "queue_ms": {"p50": 1.0, "p99": 2.0, "mean": 1.1, "n": 40},
                    "loop_ms": None,
                    "texts": ["t"] * 160 if load.keep_texts else None,
                    "paths": [{"path": "device", "why": ""}] if ours else [],
                }
            )
    machine = {"cpu": "c", "cores": 2, "memory_gib": 1.0, "kernel": "k", "load_before": 0.0}
    found = {"date": "today", "machine": machine, "versions": {"mmbroker": "1"}, "runs": runs, "left_out": []}
    return found | {"goals": goals.judge(found), "texts": goals.texts(found)}


def test_nine_of_ten_pictures_have_come_before() -> None:
    (load,) = loads.named(["eight-x10"])
    sent = [picture for number in range(load.requests) for picture in bodies.which(load, number)]
    assert 1 - len(set(sent)) / len(sent) == pytest.approx(0.9, abs=0.005)


def test_a_broker_has_the_settings_of_its_transport() -> None:
    given: list[dict[str, object]] = []
    shop = SimpleNamespace(broker=lambda **settings: given.append(settings))
    settings = (("device_mib", "512"), ("mine:device_mib", "64"), ("other:host_mib", "7"))
    maker = Maker(cast(Any, shop), Path("model"), "GPU-1", broker=settings)
    maker.beside("mine")
    maker.beside("other")
    common = {"gpu": "GPU-1", "host_mib": HOST_MIB}
    assert given == [{**common, "device_mib": "64"}, {**common, "device_mib": "512", "host_mib": "7"}]


def test_figures_have_a_value_within_their_bounds() -> None:
    made = figures.summary(sent(1.0), 4)
    assert (made["answered"], made["failed"]) == (160, 0)
    rate = made["requests_per_second"]
    assert rate["low"] <= rate["value"] == pytest.approx(4 / 1.15, rel=0.05) and rate["value"] <= rate["high"]
    for time in figures.TIMES:
        for one in made[f"{time}_ms"].values():
            assert one["low"] <= one["value"] <= one["high"]
    assert made["e2e_ms"]["mean"]["value"] == pytest.approx(1150, rel=0.05)


def test_a_rate_is_none_of_chance_where_answers_end_in_waves() -> None:
    """An engine that first prefills whatever is in flight, 8 a second of 64, and then ends all of it at once."""
    rates, ended = [], []
    for measured in (100, 120, 128, 140):
        answers = []
        for number in range(measured):
            wave = number // 64
            first, end = 8.0 * wave + 0.125 * (number % 64), 8.0 * (wave + 1)
            answers.append(Answer(number, 8.0 * wave, first, end, [], 4, "", ""))
        made = figures.summary(Sent(answers, [a.end for a in answers], answers[-1].end, False), 64, draws=50)
        rates.append(made["requests_per_second"]["value"])
        ended.append(made["answers_per_second"]["value"])
    assert rates == pytest.approx([8.0] * 4)
    assert max(ended) > 1.3 * min(ended)  # which is no change of the engine


def test_the_goals_are_judged_for_each_way_through_the_broker() -> None:
    found = result(cpu=3.0, cuda_ipc=1.5, broker_gpu=1.0)
    judged = {goal["what"]: goal for goal in found["goals"]}
    assert judged["broker-gpu, one: times the requests/s of cpu"]["met"]
    assert judged["broker-gpu, one-x4: times the requests/s of cuda_ipc"]["measured"] == pytest.approx(
        1.5, rel=0.02
    )
    assert judged["broker-gpu, eight: TTFT p99 lower than cuda_ipc's, ms"]["met"]
    assert judged["broker-gpu, eight: share of the scheduler thread in transport"]["measured"] == 0.01
    memory = judged["broker-gpu, one: GPU memory for transport, MiB (a third of cuda_ipc's)"]
    assert (memory["measured"], memory["goal"], memory["met"]) == (310.0, 400.0, True)
    for run in found["runs"]:  # workers that are not on the GPU
        if run["transport"] == "broker-gpu":
            run["watch"]["processes"][0]["gpu_mib"] = None
    assert goals.carried(found, "broker-gpu", "one") == 300.0
    assert goals.memory(found, "broker-gpu", "one") == 300.0
    slow = {goal["what"]: goal["met"] for goal in result(cpu=3.0, cuda_ipc=1.5, broker=2.9)["goals"]}
    assert not slow["broker, one: times the requests/s of cpu"]
    assert not slow["broker, one: TTFT p99 lower than cuda_ipc's, ms"]


def test_texts_that_differ_are_found() -> None:
    found = result(cpu=1.0, broker=1.0)
    assert [line["differing"] for line in found["texts"]] == [[]]
    found["runs"][-5]["texts"][3] = "another"
    (line,) = goals.texts(found)
    assert (line["transports"], line["differing"]) == (["cpu", "broker"], [3])


def test_only_what_exceeds_the_spread_has_changed() -> None:
    before = result(cpu=1.0, broker=1.0)
    assert not [change for change in compare(before, copy.deepcopy(before)) if change.verdict]
    changes = compare(before, result(cpu=1.0, broker=1.5))
    told = {(change.transport, change.load, change.name): change.verdict for change in changes}
    assert told["broker", "one", "requests_per_second"] == told["broker", "one", "e2e_ms mean"] == "worse"
    assert told["cpu", "one", "requests_per_second"] == ""
    better = compare(result(broker=1.5), before)
    assert {change.verdict for change in better if change.name == "ttft_ms p50"} == {"better"}
    after = copy.deepcopy(before)
    after["versions"]["mmbroker"] = "2"
    assert differences(before, after) == ["mmbroker: 1 before, 2 after"]


def test_turns_that_differ_are_spread() -> None:
    before = result(broker=1.0)
    for other in result(broker=1.6)["runs"]:
        before["runs"].append({**other, "turn": 1})
    changes = compare(before, result(broker=1.5))
    assert not [change for change in changes if change.name == "requests_per_second" and change.verdict]


def test_the_command_compares_and_shows(tmp_path: Path) -> None:
    for name, seconds in (("a", 1.0), ("b", 1.5)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result(cpu=3.0, cuda_ipc=2.0, broker_gpu=seconds)))
    serve = [sys.executable, "-m", "bench.serve"]
    for words, code, told in (
        (("compare", "a.json", "b.json"), 1, "worse"),
        (("compare", "b.json", "a.json"), 0, "better"),
        (("show", "a.json"), 0, "broker-gpu"),
    ):
        paths = [str(tmp_path / word) if word.endswith(".json") else word for word in words]
        done = subprocess.run([*serve, *paths], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, told in done.stdout) == (code, True), done.stderr
        assert max(map(len, done.stdout.splitlines())) <= tables.WIDTH


def test_pictures_are_the_same_for_the_same_figures(tmp_path: Path) -> None:
    found = result(cpu=3.0, cuda_ipc=2.0, broker_gpu=1.0)
    first, second = (plots.draw(found, tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["serve-rate.svg", "serve-ttft.svg", "serve-thread.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


# --- looking in -----------------------------------------------------------------------------------------------------


def test_the_loops_counts_are_close_to_the_times() -> None:
    for nanoseconds in (1, 7, 8, 1000, 12_345, 1_000_000, 987_654_321):
        assert loop_probe.length(loop_probe.bucket(nanoseconds)) == pytest.approx(
            nanoseconds, rel=0.13, abs=8
        )
    before = [0] * 512
    after = list(before)
    for milliseconds in range(1, 101):
        after[loop_probe.bucket(milliseconds * 1_000_000)] += 1
    made = inside.turns(before, after)
    assert made is not None and made["n"] == 100
    assert made["p50"] == pytest.approx(50, rel=0.13) and made["p99"] == pytest.approx(99, rel=0.13)
    assert inside.turns(after, after) is None


def test_waits_are_those_between_two_looks() -> None:
    before = ({0.1: 5.0, 1.0: 5.0, float("inf"): 5.0}, 0.25, 5.0)
    after = ({0.1: 15.0, 1.0: 25.0, float("inf"): 25.0}, 10.25, 25.0)
    made = inside.waited(before, after)
    assert made is not None
    assert (made["n"], made["mean"], made["p50"], made["p99"]) == (20, 500.0, 100.0, 982.0)
    assert inside.waited(None, None) is None


@pytest.mark.sglang
def test_a_real_server_on_the_cpu(tmp_path: Path, no_leaks: None) -> None:
    """The smoke load through the broker; every figure is there, and what the engine's own probe counts."""
    command = [
        sys.executable,
        "-m",
        "bench.serve",
        "--out",
        str(tmp_path),
        "--transports",
        "broker",
        "--look",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "serve.json").read_text())
    (run,) = found["runs"]
    made = run["figures"]
    assert (made["answered"], made["failed"], made["short_answers"]) == (12, 0, 0)
    for time in figures.TIMES:
        assert all(one["value"] > 0 for one in made[f"{time}_ms"].values())
    assert run["queue_ms"]["n"] == 12 and run["loop_ms"]["n"] > 0
    assert run["profile"].get("samples") or "py-spy" in run["profile"]["left_out"]
    assert {one["role"] for one in run["watch"]["processes"]} >= {"tokenizer", "scheduler", "broker"}
    assert run["broker"]["seals"] >= 24
    assert "smoke: 2 x 112x84" in done.stdout
