"""The bench of GPU memory that engines share: what is sent, what is read from the books and the driver, what is made of
it; and real servers on the CPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import sharing_gpu
from bench.gpu_peers import Engine, Feeder, uuid
from bench.processes import Workshop
from bench.serving import books, pairs, watch
from mmbroker.cuda import DriverError
from mmbroker.cuda.devices import Device
from mmbroker.cuda.fake_memory import VARIABLE, Machine, Make

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


# --- what is sent ---------------------------------------------------------------------------------------------------


class Asked:
    """A server that notes what it is asked, and does not answer before `other` was asked as much."""

    def __init__(self) -> None:
        self.pictures: list[str] = []
        self.ahead = 0
        self.other: Asked | None = None
        self.changed = threading.Condition()

    def ask(self, pictures: Sequence[str], tokens: int, timeout: float) -> None:
        assert self.other is not None
        with self.changed:
            self.pictures += pictures
            self.changed.notify_all()
        with self.other.changed:
            mine = len(self.pictures)
            self.other.changed.wait_for(lambda: self.other and len(self.other.pictures) >= mine, timeout)
            self.ahead = max(self.ahead, len(self.other.pictures) - mine)
        if pictures == ["c"]:
            raise ConnectionError("the line is dead")


def test_servers_are_asked_together_and_wait_for_each_other() -> None:
    one, two = Asked(), Asked()
    one.other, two.other = two, one
    _, wrong = pairs.send([one, two], [["a"], ["b"], ["c"], ["d"]], 1, 4, 60.0)
    assert one.pictures == two.pictures == ["a", "b", "c", "d"]
    assert one.ahead == two.ahead == 0
    assert wrong == ["ConnectionError: the line is dead"] * 2
    assert pairs.send([one], [["e"]], 1, 4, 0.0)[1] == ["not sent within 0 s"]


def test_pictures_come_once_and_are_the_same_every_time() -> None:
    traffic = sharing_gpu.ON_A_CPU
    made = pairs.pictures(traffic, 0, 3)
    assert [len(urls) for urls in made] == [traffic.images] * 3
    assert len({url for urls in made for url in urls}) == 3 * traffic.images
    assert made[1:] == pairs.pictures(traffic, 1, 2)


def test_a_model_with_few_layers_has_its_features_and_prompts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    vision = {"depth": 32, "hidden_size": 1280, "patch_size": 14, "fullatt_block_indexes": [1, 7, 31]}
    text = {"num_hidden_layers": 36, "layer_types": ["full_attention"] * 36, "hidden_size": 2048}
    (model / "config.json").write_text(json.dumps({**text, "text_config": text, "vision_config": vision}))
    for name in ("tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text(name)
    made = pairs.shallow(model, 4, tmp_path / "few")
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "tokenizer.json"]
    config = json.loads((made / "config.json").read_text())
    few = {**text, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    assert config == {
        **few,
        "text_config": few,
        "vision_config": {**vision, "depth": 4, "fullatt_block_indexes": [1]},
    }
    again = json.loads((pairs.shallow(model, 1, tmp_path / "one") / "config.json").read_text())
    assert again["vision_config"]["fullatt_block_indexes"] == [0]


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.long
def test_two_brokers_have_twice_what_one_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on a fake GPU that read the same features."""
    machine = Machine(tmp_path / "gpus", Make(total=1024 * MIB, context=64 * MIB))
    monkeypatch.setenv(VARIABLE, os.fspath(machine.directory))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = {"gpu": uuid(), "host_mib": 64, "segment_mib": 4, "device_headroom_mib": 0}
    found = {}
    for count in (1, 2):
        with Workshop() as shop:
            brokers = [shop.broker(**settings) for _ in range(count)]
            feeders = [shop.worker(f"f{i}").make(Feeder, broker.path) for i, broker in enumerate(brokers)]
            engines = [shop.worker(f"e{i}").make(Engine, brokers[i % count].path, f"e{i}") for i in range(2)]
            for feeder in feeders:
                feeder.call("load", 2.4, 3)
            with books.Books(brokers) as told:
                for i, engine in enumerate(engines):
                    refs = feeders[i % count].call("grant", f"e{i}")
                    assert engine.call("settle", refs) == 0
                for feeder in feeders:
                    feeder.call("drop")
            for remote in (*engines, *feeders):
                remote.call("close")
            assert books.emptied(brokers, 60.0)
            assert machine.free(uuid()) == 1024 * MIB - 2 * 64 * MIB  # the engines' contexts
            found[count] = told.found
    one, two = found[1], found[2]
    for tier in ("host", "device"):
        for what in ("used", "held"):
            assert one["together"][tier][what] * 2 == two["together"][tier][what] > 0, (tier, what)
        assert [each[tier]["used"] for each in two["each"]] == [one["together"][tier]["used"]] * 2
    assert one["together"]["device"]["capacity"] >= one["together"]["device"]["used"]
    assert [counts["holds"] for counts in one["counters"]] == [6]
    assert [counts["holds"] for counts in two["counters"]] == [3, 3]
    assert [rank["path"] for rank in one["ranks"]] == ["device", "device"]
    assert one["limits"] == [{"host": 64 * MIB, "device": 1024 * MIB}]


class Driver:
    """Tells of one GPU of 1000 MiB. `state`: what is free, and what processes have; `then`: what somebody takes between
    two questions."""

    def __init__(self, free: int, *used: int) -> None:
        self.now(free, *used)
        self.then = 0
        self.busy_shares = [0.5]

    def now(self, free: int, *used: int) -> None:
        """In MiB; the first process is this one."""
        pids = (os.getpid(), 1)
        self.state = free * MIB, {pid: mib * MIB for pid, mib in zip(pids, used, strict=False)}

    def existing(self) -> list[Device]:
        return [Device("GPU-1", 0, "a GPU", 1000 * MIB)]

    def free(self, uuid: str) -> int:
        return self.state[0]

    def busy(self, uuid: str) -> float:
        if not self.busy_shares:
            raise DriverError("NVML_ERROR_3", "nvmlDeviceGetUtilizationRates", "Not Supported")
        return self.busy_shares[-1]

    def processes(self, uuid: str) -> dict[int, int]:
        free, used = self.state
        self.state = free - self.then, used
        return used


def test_what_the_driver_counts_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(400, 300, 100)
    monkeypatch.setattr(watch, "Nvml", lambda: driver)
    gpu = watch.Gpu("0")
    assert gpu.unattributed() == 200 * MIB
    driver.then = 1
    assert gpu.unattributed() is None
    driver.then = 0
    assert gpu.unattributed() is not None
    driver.state = driver.state[0], {7: -1}  # it does not tell
    assert gpu.unattributed() is None
    assert watch.Gpu("").unattributed() is None


def test_memory_is_watched_from_before_to_its_most(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(500, 300)
    monkeypatch.setattr(watch, "Nvml", lambda: driver)
    seen = watch.Watch(watch.Gpu("0"), [os.getpid()], [2, 3])
    with seen:
        driver.now(300, 350)
        seen._look()
        driver.now(500, 300)
        seen._look()
    mine, *brokers = seen.found["processes"]
    assert (mine["gpu_before_mib"], mine["gpu_mib"]) == (300.0, 350.0)
    assert [(broker["role"], broker["gpu_mib"]) for broker in brokers] == [("broker", None)] * 2
    assert seen.found["gpu_free_least_mib"] == 300.0
    assert seen.found["gpu_unattributed_before_mib"] == 200.0
    assert seen.found["gpu_unattributed_most_mib"] == 350.0


def test_how_busy_the_gpu_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(500, 300)
    monkeypatch.setattr(watch, "Nvml", lambda: driver)
    monkeypatch.setattr(watch, "PERIOD", 1000.0)  # it looks when it is told to
    with watch.Watch(watch.Gpu("0"), [os.getpid()], []) as seen:
        driver.busy_shares.append(1.0)
        seen._look()
    assert seen.found["gpu_busy"] == 0.75
    driver.busy_shares = []  # it does not tell
    with watch.Watch(watch.Gpu("0"), [os.getpid()], []) as seen:
        pass
    assert "gpu_busy" not in seen.found


# --- what is made of it ---------------------------------------------------------------------------------------------


def row(name: str, device_mib: int, **change: Any) -> dict[str, Any]:
    """Of a run in which all went well."""
    transport, brokers = pairs.ARRANGEMENTS[name]
    figures = {"capacity": device_mib * MIB, "used": device_mib * MIB // 2, "held": device_mib * MIB // 4}
    made: dict[str, Any] = {
        "arrangement": name,
        "transport": transport,
        "brokers": brokers,
        "empty_before": True,
        "requests": 8,
        "failed": 0,
        "failures": [],
        "requests_per_s": 4.0,
        "books": {
            "together": {"host": figures, "device": figures},
            "counters": [{"holds": 8}] * brokers,
            "ranks": [{"engine": "e", "rank": 0, "path": "device", "why": "", "access": "readonly"}] * 2,
        }
        if brokers
        else None,
        "watch": {
            "processes": [
                {"role": "tokenizer", "gpu_mib": 1200.0},
                {"role": "tokenizer", "gpu_mib": 1300.0},
                {"role": "scheduler", "gpu_mib": 9000.0},
                *[{"role": "broker", "gpu_mib": None}] * brokers,
            ],
            "gpu_left_out": "",
            "gpu_unattributed_before_mib": 600.0,
            "gpu_unattributed_most_mib": 600.0 + device_mib,
        },
        "counters": [{"tokenizer": {"features": 400}}] * 2,
    } | change
    return made | {
        "gpu_mib": sharing_gpu.gpu_mib(made),
        "problems": sharing_gpu.problems(made, on_gpu=True),
    }


def test_memory_is_the_books_or_the_drivers_if_that_is_more() -> None:
    told = row("shared", 300)
    assert told["gpu_mib"] == {
        "brokers": 300.0,
        "tokenizers": 2500.0,
        "schedulers": 9000.0,
        "unattributed": 300.0,
    }
    told["watch"]["processes"].append({"role": "broker", "gpu_mib": 500.0})
    assert sharing_gpu.gpu_mib(told)["brokers"] == 500.0
    silent = {"processes": told["watch"]["processes"], "gpu_left_out": "no GPU"}
    assert sharing_gpu.gpu_mib(row("cuda_ipc", 0, watch=silent)) == dict.fromkeys(told["gpu_mib"])


def test_goals_are_of_pairs_without_problems() -> None:
    rows = [row("shared", 300), row("alone", 600), row("shared-gpu", 300), row("cuda_ipc", 0)]
    made = sharing_gpu.goals({"rows": rows})
    assert [(goal["measured"], goal["met"]) for goal in made] == [(50.0, True)] * 3
    assert {goal["what"].partition(":")[0] for goal in made} == {"features made on the CPU"}
    rows.append(row("alone-gpu", 500))
    assert [goal["met"] for goal in sharing_gpu.goals({"rows": rows})] == [True] * 3 + [False] * 3
    limited = copy.deepcopy(rows[0]["books"])
    limited["counters"][0]["replicas_evicted_room"] = 3
    rows[0] = row("shared", 300, books=limited)
    assert rows[0]["problems"] == ["broker 1 was at a limit: {'replicas_evicted_room': 3}"]
    assert len(sharing_gpu.goals({"rows": rows})) == 3


def test_a_row_says_what_is_wrong_with_it() -> None:
    def wrong(**change: Any) -> str:
        return " ".join(row("shared", 300, **change)["problems"])

    assert not wrong() and not wrong(counters=[{"tokenizer": {"features": 400, "fallback_late": 4}}] * 1)
    assert "{'fallback_late': 9}" in wrong(counters=[{"tokenizer": {"features": 400, "fallback_late": 9}}])
    assert "through_host" in wrong(counters=[{"tokenizer": {"features": 400, "through_host": 9}}])
    assert "HTTP 500" in wrong(failed=1, failures=["HTTP 500"])
    elsewhere = copy.deepcopy(row("shared", 300)["books"])
    elsewhere["ranks"][1] = {**elsewhere["ranks"][1], "path": "pinned"}
    assert "pinned" in wrong(books=elsewhere)
    elsewhere["ranks"].pop()
    assert "not every rank" in wrong(books=elsewhere)


def test_the_table_has_a_cell_for_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("shared", 3000), row("alone", 6000), row("cuda_ipc", 0)]
    machine = {"cpu": "c", "cores": 2, "load_before": 0.0}
    settings = sharing_gpu.ON_A_GPU.shape()
    found = {"date": "today", "machine": machine, "settings": settings, "rows": rows, "left_out": []}
    sharing_gpu.show(found | {"goals": sharing_gpu.goals(found)})
    told = capsys.readouterr().out
    assert "…" not in told and "3,000" in told and "met" in told
    assert max(map(len, told.splitlines())) <= 120
    assert sharing_gpu.cells(rows[2]) == ["cuda_ipc", "0", "-", "-", "2,500", "9,000", "-", "-", "-", "4.00"]


# --- real servers ---------------------------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.long
def test_real_servers_on_the_cpu(tmp_path: Path, no_leaks: None) -> None:
    """Two on one broker, and then two with one each; what is there is not measured again."""
    command = [sys.executable, "-m", "bench.sharing_gpu", "--out", str(tmp_path), "--requests", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / sharing_gpu.RESULT).read_text())
    assert [row["arrangement"] for row in found["rows"]] == ["shared", "alone"]
    for one in found["rows"]:
        assert (one["failed"], one["problems"], one["empty_before"]) == (0, [], True)
        assert sum(roles["tokenizer"]["features"] for roles in one["counters"]) == 16
        roles = [process["role"] for process in one["watch"]["processes"]]
        assert roles.count("scheduler") == 2 and roles.count("broker") == one["brokers"]
    assert [goal["measured"] for goal in found["goals"]] == [50.0]
    assert {path.name for path in tmp_path.glob("*.log")} == {
        f"{name}-{number}.log" for name in ("shared", "alone") for number in (1, 2)
    }
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (
        again.returncode == 0
        and json.loads((tmp_path / sharing_gpu.RESULT).read_text())["rows"] == found["rows"]
    )
