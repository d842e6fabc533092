"""`mmbroker profile`: stacks are sorted by name; a real process is looked at; what py-spy cannot do is said."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmbroker import flame, profiling
from mmbroker.proto.errors import BrokerError

from .test_cli import mmbroker, one_sentence

MAIN = "thread (7): MainThread;<module> (x.py:1);Scheduler.event_loop_overlap (sglang/srt/managers/scheduler.py:2061)"
SCHEDULER = "sglang/srt/managers/scheduler.py"
UTILS = "sglang/srt/managers/mm_utils.py"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((), "idle"),
        ((f"Scheduler.on_idle ({SCHEDULER}:1)",), "idle"),
        ((f"Scheduler.recv_requests ({SCHEDULER}:1)", "Socket.recv_pyobj (zmq/sugar/socket.py:9)"), "idle"),
        (
            (
                f"Scheduler.recv_requests ({SCHEDULER}:1)",
                "Socket.recv_pyobj (zmq/sugar/socket.py:9)",
                "Socket._deserialize (zmq/sugar/socket.py:9)",
            ),
            "transport",
        ),
        (
            (
                "Socket._deserialize (zmq/sugar/socket.py:9)",
                f"ShmPointerMMData.__setstate__ ({UTILS}:1404)",
                "SharedMemory.__init__ (multiprocessing/shared_memory.py:104)",
            ),
            "transport",
        ),
        (
            ("Socket._deserialize (zmq/sugar/socket.py:9)", "_rebuild_tensor_v2 (torch/_utils.py:1)"),
            "rebuild",
        ),
        (
            (
                f"Scheduler.process_input_requests ({SCHEDULER}:1)",
                f"Scheduler._get_multimodal_inputs ({SCHEDULER}:1)",
                "MultimodalDataItem.set_pad_value (sglang/srt/managers/schedule_batch.py:1)",
                f"hash_feature ({UTILS}:931)",
                f"tensor_hash ({UTILS}:899)",
            ),
            "hash",
        ),
        ((f"Scheduler._get_multimodal_inputs ({SCHEDULER}:1)",), "rebuild"),
        (
            (
                f"Scheduler._get_multimodal_inputs ({SCHEDULER}:1)",
                "Consumer._take (mmbroker/adapters/sglang/consumer.py:1)",
                "take (mmbroker/table.py:1)",
            ),
            "broker",
        ),
        (
            (
                "Consumer.requests (mmbroker/adapters/sglang/consumer.py:1)",
                f"Scheduler.handle_generate_request ({SCHEDULER}:1)",
            ),
            "schedule",
        ),
        (
            (
                "get_multimodal_inputs (mmbroker/adapters/sglang/hooks.py:1)",
                f"hash_feature ({UTILS}:931)",
            ),
            "hash",
        ),
        (
            (f"Scheduler.run_batch ({SCHEDULER}:1)", "Linear.forward (torch/nn/modules/linear.py:1)"),
            "forward",
        ),
        (
            (f"Scheduler.run_batch ({SCHEDULER}:1)", f"general_mm_embed_routine ({UTILS}:1347)"),
            "transport",
        ),
        (
            (
                f"Scheduler.run_batch ({SCHEDULER}:1)",
                f"general_mm_embed_routine ({UTILS}:1373)",
                "Linear.forward (torch/nn/modules/linear.py:1)",
            ),
            "forward",
        ),
        ((f"Scheduler.get_next_batch_to_run ({SCHEDULER}:1)",), "schedule"),
        ((f"Scheduler.process_batch_result ({SCHEDULER}:1)", "f (sglang/other.py:1)"), "schedule"),
    ],
)
def test_the_frame_nearest_to_the_leaf_decides(frames: tuple[str, ...], kind: str) -> None:
    profile = profiling.sort([";".join((MAIN, *frames)) + " 5"])
    assert profile.kinds == {kind: 5}
    assert profile.share(kind) == 1.0


def test_other_threads_and_noise_do_not_count() -> None:
    profile = profiling.sort(
        [
            "thread (8): mmbroker-receiver;run (mmbroker/link.py:1);granted (mmbroker/table.py:1) 50",
            "",
            "a line of words",
            f"{MAIN};Scheduler.run_batch ({SCHEDULER}:1) 3",
        ]
    )
    assert (profile.samples, profile.kinds) == (3, {"forward": 3})


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({}, "was not seen"),
        ({"forward": 99, "hash": 1}, "would change little"),
        ({"forward": 25, "hash": 25, "idle": 50}, "25.0% of this thread, 50% of what it works"),
        ({"forward": 90, "broker": 1, "hash": 9}, "look-ups take 1.0% of this thread, and 9.0% still"),
    ],
)
def test_the_verdict_is_in_words(kinds: dict[str, int], words: str) -> None:
    profile = profiling.Profile(sum(kinds.values()), Counter(kinds), {}, Counter())
    assert words in profiling.verdict(profile)


def test_the_flame_graph_is_a_picture_of_the_counts() -> None:
    stacks = {("hash", "main", "a<b>"): 30, ("idle", "main"): 70}
    tree = ElementTree.fromstring(flame.draw(stacks, "process 1 & more"))
    titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["all: 100.0%", "main: 100.0%", "a<b>: 30.0%"]
    widths = [float(group[1].attrib["width"]) for group in tree.iter("{http://www.w3.org/2000/svg}g")]
    assert widths == [1200.0, 1200.0, 360.0]
    assert ElementTree.fromstring(flame.draw({}, "nothing")) is not None


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that hashes all the time, and has a child that calls itself a scheduler."""
    program = tmp_path / "victim.py"
    program.write_text(
        textwrap.dedent(
            """
            import hashlib, os, sys
            def hash_feature(data):
                for _ in range(20):
                    hashlib.sha256(data).digest()
            if len(sys.argv) == 1:
                os.execv(sys.executable, [sys.executable, __file__, "parent"])
            if sys.argv[1] == "parent":
                import subprocess
                child = subprocess.Popen([sys.executable, __file__, "sglang::scheduler_TP0"], stdin=subprocess.PIPE)
                print(child.pid, flush=True)
                sys.stdin.read()
                child.stdin.close()
                child.wait()
            else:
                import threading
                gone = threading.Event()
                threading.Thread(target=lambda: (sys.stdin.read(), gone.set()), daemon=True).start()
                while not gone.is_set():
                    hash_feature(bytes(1 << 20))
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.communicate()


def test_a_scheduler_is_found_and_looked_at(victim: subprocess.Popen[str], tmp_path: Path) -> None:
    assert victim.stdout is not None
    child = int(victim.stdout.readline())
    picture = tmp_path / "flame.svg"
    arguments = ["profile", str(victim.pid), "--seconds", "1", "--rate", "50", "--svg", str(picture)]
    result = mmbroker(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert told["pid"] == child and "sglang::scheduler" in told["title"]
    assert told["shares"]["hash"] > 0.9 and told["functions"]["hash"].keys() == {"hash_feature"}
    assert "With the broker they are a look-up" in told["verdict"]
    assert "hash_feature" in picture.read_text()
    shown = mmbroker(*arguments)
    assert (
        shown.returncode == 0
        and "hash_feature" in shown.stdout
        and str(picture) in shown.stdout.replace("\n", "")
    )


def test_another_rank_is_not_there(victim: subprocess.Popen[str]) -> None:
    assert victim.stdout is not None
    victim.stdout.readline()
    result = mmbroker("profile", str(victim.pid), "--rank", "1")
    assert result.returncode == 2 and "has 1 scheduler(s)" in result.stderr


def test_no_such_process() -> None:
    result = mmbroker("profile", str((1 << 22) - 1))
    assert result.returncode == 1 and "there is no process" in one_sentence(result)


def test_not_a_python_process() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
        result = mmbroker("profile", str(cat.pid), "--seconds", "1")
        assert result.returncode == 1 and "py-spy could not look" in one_sentence(result)


def test_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise profiling.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(profiling.metadata, "distribution", nothing)
    monkeypatch.setattr(profiling.shutil, "which", lambda name, path=None: None)
    with pytest.raises(BrokerError, match=r"pip install 'mmbroker\[profile\]'"):
        profiling.record(1, 1, 1)
