"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import PATIENCE, BrokerProcess, RawClient, eventually

COMMANDS = (
    *("start", "status", "stop", "drain", "evict", "ls", "top", "profile", "doctor", "bench", "demo"),
    "completion",
)


def mmbroker(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MMBROKER_") or k == "MMBROKER_DIR"}
    return subprocess.run(
        [sys.executable, "-m", "mmbroker", *args],
        env={**clean, "COLUMNS": "80", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    """What it complains about: one line on stderr, nothing else."""
    assert result.stdout == ""
    assert result.stderr.startswith("mmbroker: ") and result.stderr.count("\n") == 1
    return result.stderr


# --- without a broker -----------------------------------------------------------------------------------------------


def test_help_is_enough_to_get_going() -> None:
    result = mmbroker("--help")
    assert result.returncode == 0 and result.stderr == ""
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    assert "mmbroker start --cpu" in result.stdout
    assert "--mm-transport broker" in result.stdout
    assert "MMBROKER_DIR" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = mmbroker(command, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert f"{command} [OPTIONS]" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert mmbroker("--version").stdout == f"mmbroker {version('mmbroker')}\n"


def test_nothing_loads_torch() -> None:
    """Neither the package nor the command line nor the daemon: it would take seconds, and memory for ever."""
    code = (
        "import sys, mmbroker, mmbroker.cli, mmbroker.server, mmbroker.link, mmbroker.screen, mmbroker.web.site;"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'sglang', 'transformers'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments", [["status"], ["status", "--json"], ["ls"], ["stop"], ["drain"], ["evict"]], ids=" ".join
)
def test_no_broker_there(broker_root: Path, arguments: list[str]) -> None:
    result = mmbroker(*arguments, MMBROKER_DIR=str(broker_root))
    assert result.returncode == 3
    said = one_sentence(result)
    assert str(broker_root / "cpu") in said
    assert f"MMBROKER_DIR={broker_root} mmbroker start" in said


def test_no_broker_of_that_name(broker_root: Path) -> None:
    for result in (
        mmbroker("status", "--name", "other", MMBROKER_DIR=str(broker_root)),
        mmbroker("status", MMBROKER_DIR=str(broker_root), MMBROKER_NAME="other"),
    ):
        assert result.returncode == 3
        assert "mmbroker start --cpu --name other" in one_sentence(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["start", "--nonsense"],
        ["start", "--host-mib", "much"],
        ["start", "--host-mib", "0"],
        ["start", "--allow-uid", "somebody"],
        ["ls", "-n", "0"],
        ["stop", "now"],
    ],
    ids=" ".join,
)
def test_usage_errors(broker_root: Path, arguments: list[str]) -> None:
    result = mmbroker(*arguments, MMBROKER_DIR=str(broker_root))
    assert result.returncode == 2
    assert result.stdout == "" and "Usage:" in result.stderr


def test_settings_that_make_no_sense(broker_root: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("host_mb = 3\n")
    for result, named in (
        (mmbroker("start", "--config", str(config), MMBROKER_DIR=str(broker_root)), "host_mb"),
        (mmbroker("start", "--config", "absent.toml", MMBROKER_DIR=str(broker_root)), "absent.toml"),
        (mmbroker("start", MMBROKER_DIR=str(broker_root), MMBROKER_HOST_MIB="much"), "host_mib"),
        (mmbroker("start", "--name", "../up", MMBROKER_DIR=str(broker_root)), "name"),
        (mmbroker("start", "--http", "10.0.0.1:9400", MMBROKER_DIR=str(broker_root)), "ssh -L 9400"),
        (mmbroker("start", MMBROKER_DIR=str(broker_root / ("x" * 120))), "107"),
    ):
        assert result.returncode == 1
        assert named in one_sentence(result)


# --- with one -------------------------------------------------------------------------------------------------------


def test_a_second_broker_is_refused(broker: BrokerProcess) -> None:
    result = mmbroker("start", MMBROKER_DIR=str(broker.root))
    assert result.returncode == 1
    said = one_sentence(result)
    assert str(broker.pid) in said and "mmbroker stop" in said and "--name" in said
    assert broker.status()["daemon"]["pid"] == broker.pid


def create(client: RawClient, name: str, kib: int, to: str | None = None) -> int:
    """A lease for a feature of so many KiB."""
    form = tensor_form("uint8", (kib, 1024), "image")
    created = client.call(m.Create([m.Item(Key.caller(name), form)], to))
    assert isinstance(created, m.Created) and isinstance(created.results[0], m.Leased)
    return created.results[0].lease


def put(client: RawClient, name: str, kib: int, to: str | None = None) -> None:
    """A sealed feature; with `to`, the answer to its seal waits for the engine."""
    client.post(m.Seal([m.Sealing(create(client, name, kib, to))], to))


def test_status_shows_what_there_is(start_broker: StartBroker) -> None:
    broker = start_broker(lagging_after=0.001, stuck_after=3600.0, host_mib=8)
    with (
        RawClient(broker.directory, name="a-worker") as worker,
        RawClient(broker.directory, name="a-rank") as rank,
    ):
        rank.call(m.Attach("engine-a", 0, 1))
        put(worker, "x", 2048, "engine-a")  # which the rank does not acknowledge
        rank.notice(m.Granted)
        worker.call(m.Tally({"fallback_full": 3, "requests": 1234}))
        worker.post(
            m.Create([m.Item(Key.caller("y"), tensor_form("uint8", (7 << 20,), "image"))]), timeout=60
        )
        report = eventually(
            lambda: (
                (found := broker.status())["waiting"] and found["engines"][0]["ranks"][0]["lagging"] and found
            ),
            "a lagging rank and a waiting create",
        )
        result = mmbroker("status", MMBROKER_DIR=str(broker.root))
        as_json = mmbroker("status", "--json", MMBROKER_DIR=str(broker.root))
    assert (result.returncode, result.stderr) == (0, "")
    shown = result.stdout
    assert max(map(len, shown.splitlines())) <= 80
    for expected in (
        str(broker.directory),
        f"process {broker.pid}",
        "8 MiB",  # the limit
        "2 MiB",  # used
        "a-worker",
        "engine-a",
        str(os.getpid()),  # the rank's process
        "lagging",
        "Waiting (1)",
        "7 MiB",
        "requests 1,234",
        "3 features went the engine's own way",
    ):
        assert expected in shown, (expected, shown)
    told = json.loads(as_json.stdout)
    assert told.keys() == report.keys()
    assert told["engines"][0]["engine"] == "engine-a"


def test_status_is_bad_while_nothing_gets_done(start_broker: StartBroker) -> None:
    """In words, in the report and in the exit code; and well again as soon as something has been done."""
    broker = start_broker(host_mib=8, stuck_after=0.05)
    with RawClient(broker.directory, name="a-worker") as worker, RawClient(broker.directory) as rank:
        assert (result := mmbroker("status", MMBROKER_DIR=str(broker.root))).returncode == 0, result.stderr
        rank.call(m.Attach("engine-a", 0, 1))
        put(worker, "x", 64, "engine-a")  # which the rank does not acknowledge
        (grant,) = rank.notice(m.Granted).grants
        eventually(lambda: not broker.status()["health"]["ok"], "a bad health")
        result = mmbroker("status", MMBROKER_DIR=str(broker.root))
        as_json = mmbroker("status", "--json", MMBROKER_DIR=str(broker.root))
        assert (result.returncode, result.stderr) == (as_json.returncode, as_json.stderr) == (1, "")
        assert "NOT WELL: work is pending, and nothing has finished for" in result.stdout
        assert f"-> rank 0 (pid {os.getpid()}) of engine 'engine-a' has not acknowledged" in result.stdout
        health = json.loads(as_json.stdout)["health"]
        assert health["stuck"] and health["oldest_pending_s"] >= 0.05
        rank.cast(m.Ack([grant.ref.hold]))
        assert isinstance(worker.answer(worker.seq), m.Sealed)
        assert mmbroker("status", MMBROKER_DIR=str(broker.root)).returncode == 0


def test_ls_lists_the_largest_features(broker: BrokerProcess) -> None:
    with RawClient(broker.directory) as client:
        for name, kib in (("small", 1), ("large", 512), ("middle", 64)):
            put(client, name, kib)
        eventually(lambda: broker.status()["features"] == 3, "three features")
        result = mmbroker("ls", "-n", "2")
        as_json = mmbroker("ls", "--json", "-n", "3")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "512 KiB  uint8 512x1024  image     caller " in lines[2]
    assert "64 KiB  uint8 64x1024   image     caller " in lines[3]
    assert lines[4].startswith("2 of 3 features")
    assert [feature["bytes"] >> 10 for feature in json.loads(as_json.stdout)] == [512, 64, 1]


def test_stop_waits_for_the_end(start_broker: StartBroker) -> None:
    broker = start_broker()
    result = mmbroker("stop", MMBROKER_DIR=str(broker.root))
    assert (result.returncode, result.stderr) == (0, "")
    assert not broker.directory.exists()
    assert broker.wait() == 0
    assert mmbroker("stop", MMBROKER_DIR=str(broker.root)).returncode == 3


def test_stop_says_when_somebody_is_still_writing(start_broker: StartBroker) -> None:
    broker = start_broker()
    with RawClient(broker.directory, name="worker") as client:
        lease = create(client, "x", 1)
        result = mmbroker("stop", "--timeout", "0.01", MMBROKER_DIR=str(broker.root))
        assert result.returncode == 1
        assert "still ending after 0.01 s" in one_sentence(result)
        client.cast(m.Abort([lease]))
        assert broker.wait() == 0


def test_a_killed_broker_is_no_broker(start_broker: StartBroker) -> None:
    broker = start_broker()
    broker.kill()
    assert (broker.directory / "lifeline.sock").exists()
    result = mmbroker("status", MMBROKER_DIR=str(broker.root))
    assert result.returncode == 3
    assert "mmbroker start" in one_sentence(result)


def test_several_brokers_have_to_be_named(start_broker: StartBroker) -> None:
    one, two = start_broker(name="one"), start_broker(name="two")
    result = mmbroker("status", MMBROKER_DIR=str(one.root))
    assert result.returncode == 2
    assert "one, two" in result.stderr and "--name" in result.stderr
    for broker in (one, two):
        shown = mmbroker("status", "--json", "--name", broker.name, MMBROKER_DIR=str(one.root)).stdout
        assert json.loads(shown)["daemon"]["pid"] == broker.pid


def test_status_shows_what_engines_have_in_common(broker: BrokerProcess) -> None:
    """By their names as they are, too."""
    with (
        RawClient(broker.directory, name="maker") as maker,
        RawClient(broker.directory, name="user") as user,
        RawClient(broker.directory, name="worker") as worker,
    ):
        maker.call(m.Attach("[b]one", 0, 1))
        user.call(m.Attach("two", 0, 1))
        put(maker, "x", 2048)
        for name in ("[b]one", "two"):
            worker.post(m.Lookup([Key.caller("x")], name), timeout=60)
        user.notice(m.Granted)
        told = json.loads(mmbroker("status", "--json", MMBROKER_DIR=str(broker.root)).stdout)
        shown = mmbroker("status", MMBROKER_DIR=str(broker.root)).stdout
    one, two = sorted(told["engines"], key=lambda engine: str(engine["engine"]))
    assert two["reused"] == [{"engine": "[b]one", "features": 1, "bytes": 2 << 20}]
    assert one["granted"] == two["granted"] == {"features": 1, "bytes": 2 << 20}
    assert [shares["engine"] for shares in one["shares"] + two["shares"]] == ["two", "[b]one"]
    assert "1 features, 2 MiB of 1 features, 2 MiB so far from [b]one" in shown
    assert "1 features, 2 MiB in use with two" in shown


def test_status_and_top_show_the_tier(broker: BrokerProcess) -> None:
    sought, absent = Key.derived(b"s" * 32), Key.derived(b"a" * 32)
    with RawClient(broker.directory, name="[b]mover") as mover, RawClient(broker.directory) as worker:
        mover.call(m.Tier(True, 10.0, 8))
        mover.call(m.Attach("tier", 0, 1))
        worker.post(m.Lookup([sought, absent]), timeout=60)
        wanted = mover.notice(m.Sought).wanted
        mover.call(m.Abort([one.promise for one in wanted if one.key == absent]))
        shown = [mmbroker(*verb).stdout for verb in (("status",), ("top", "--once"))]
        (told,) = json.loads(mmbroker("status", "--json").stdout)["movers"]
        mover.call(m.Tier(False))
        closed = mmbroker("status").stdout
    assert told["counts"] == {
        "sought": 2, "found": 0, "absent": 1, "late": 0, "busy": 0, "fresh": 0, "fresh_dropped": 0,
    }  # fmt: skip
    for text in shown:
        (row,) = (
            line.split() for line in text[text.index("Beyond this machine") :].splitlines() if "of 8" in line
        )
        assert row[0] == "[b]mover" and row[3:] == ["open", "1", "of", "8", "0", "1", "0", "0"], text
        assert max(map(len, text.splitlines())) <= 80
    assert "closed" in closed


def test_names_are_shown_as_they_are(broker: BrokerProcess) -> None:
    """What looks like a style to the library that draws the tables is nothing of the kind."""
    with RawClient(broker.directory, name="[red]w[/red]") as rank:
        rank.call(m.Attach("[/no] [bold]e", 0, 1, why="[link=x]", path="pinned"))
        rank.call(m.Tally({"[b]puts": 7}))
        result = mmbroker("status", MMBROKER_DIR=str(broker.root))
    assert (result.returncode, result.stderr) == (0, "")
    for shown in ("[red]w[/red]", "Engine [/no] [bold]e", "[b]puts 7"):
        assert shown in result.stdout


def test_drain_waits_for_what_is_held(broker: BrokerProcess) -> None:
    with RawClient(broker.directory, name="worker") as client:
        put(client, "x", 1)
        eventually(lambda: broker.status()["holds"] == 1, "a hold")
        result = mmbroker("drain", "--timeout", "0.01")
        assert result.returncode == 1
        said = one_sentence(result)
        assert "1 hold(s) and 0 lease(s) are left" in said and "drain --undo" in said
        assert "draining" in mmbroker("status").stdout
        refused = client.call(m.Create([m.Item(Key.caller("y"), tensor_form("uint8", (1,), "image"))]))
        assert isinstance(refused, m.Failed) and refused.error == "BrokerLost"
    result = mmbroker("drain")
    assert (result.returncode, result.stderr) == (0, "") and "is drained" in result.stdout
    assert "takes new work again" in mmbroker("drain", "--undo").stdout
    with RawClient(broker.directory) as client:
        create(client, "z", 1)


def test_evict_drops_the_cache(broker: BrokerProcess) -> None:
    with RawClient(broker.directory, name="worker") as client:
        for number in range(300):
            put(client, f"x{number}", 4)
        client.answer(client.seq)
    eventually(lambda: broker.status()["features_idle"] == 300, "300 features in the cache")
    assert mmbroker("evict", "--namespace", "another").stdout == "evicted 0 features, 0 B\n"
    assert mmbroker("evict").stdout == "evicted 300 features, 1.17 MiB\n"
    assert json.loads(mmbroker("evict", "--json").stdout) == {"features": 0, "bytes": 0}
    assert broker.status()["features"] == 0
