"""`mmbroker profile`: what a scheduler's thread spends its time on, by name. py-spy looks; the engine stays as it is.

A sample is a stack. The frame nearest to its leaf that a rule knows says what the thread was doing: a hash inside the
unpacking of a request is hashing. What no rule knows is the engine's own scheduling.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from mmbroker.proto.errors import BrokerError

#: What a thread does, in the order of a report, with what it means.
KINDS: Final = {
    "transport": "features come in: sockets, shared memory, handles, copies",
    "hash": "hashing features",
    "rebuild": "making tensors and inputs of what came in",
    "broker": "mmbroker's own look-ups",
    "forward": "running the model",
    "schedule": "the scheduler's own work",
    "idle": "waiting for work",
}
#: What the broker takes off a scheduler's thread.
SAVED: Final = ("transport", "hash", "rebuild")


class Rule(NamedTuple):
    """Frames in files with `file` in their path, of functions named in `functions` (none: all).

    `leaf`: only where it calls nothing that Python sees, so that what it calls is told apart from what it does itself.
    """

    kind: str
    file: str
    functions: tuple[str, ...] = ()
    leaf: bool = False


#: The first that fits a frame decides. Names of SGLang 0.5.17 to 0.5.23, ZeroMQ, torch and Python.
RULES: Final = (
    Rule("hash", "managers/mm_utils.py", ("hash_feature", "data_hash", "tensor_hash", "flatten_nested_list")),
    Rule("hash", "managers/schedule_batch.py", ("set_pad_value", "set_hash", "set_identity")),
    Rule("hash", "layers/multimodal.py"),
    Rule("hash", "hashlib.py"),
    Rule("hash", "", ("hash_feature",)),
    Rule("transport", "managers/mm_utils.py", (
        *("_unwrap_tensor_or_list", "unwrap_shm_features", "has_shm_features", "_feature_has_shm"),
        *("materialize", "close_and_unlink", "__setstate__", "__del__", "discard_shm_features"),
    )),
    # Features go back to the CPU after the encoder.
    Rule("transport", "managers/mm_utils.py", ("general_mm_embed_routine", "prepare_mm_inputs"), leaf=True),
    Rule("transport", "cuda_ipc_transport_utils.py"),
    Rule("transport", "cuda_vmm"),
    Rule("transport", "multiprocessing/shared_memory.py"),
    Rule("transport", "multiprocessing/resource_tracker.py"),
    Rule("transport", "torch/multiprocessing/reductions.py"),
    Rule("transport", "zmq/sugar/socket.py", ("_deserialize", "<lambda>")),
    Rule("transport", "srt/utils", ("broadcast_pyobj", "point_to_point_pyobj")),
    Rule("rebuild", "torch/_utils.py", ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")),
    Rule("rebuild", "managers/schedule_batch.py", ("from_dict", "from_processor_output", "reconstruct", "merge")),
    Rule("rebuild", "managers/mm_utils.py", ("get_new_expanded_mm_items", "_try_simple_split", "pad_input_tokens")),
    Rule("rebuild", "", ("_get_multimodal_inputs", "_process_and_broadcast_mm_inputs")),
    Rule("broker", "mmbroker/table.py"),
    Rule("broker", "mmbroker/entry.py"),
    # Its other functions call SGLang's own.
    Rule("broker", "mmbroker/adapters/sglang/consumer.py", ("_prepare", "_try", "_take", "_agreed", "_release")),
    Rule("broker", "mmbroker/adapters/sglang/packing.py"),
    Rule("broker", "mmbroker/adapters/sglang/uses.py"),
    Rule("forward", "", ("run_batch", "forward_batch_generation", "launch_batch_sample_if_needed")),
    Rule("forward", "model_executor/"),
    Rule("idle", "", ("on_idle", "self_check_during_idle", "sleep", "poll", "select", "maybe_sleep")),
    Rule("idle", "zmq/"),
    Rule("idle", "", ("recv_requests", "recv_limit_reached", "_pull_raw_reqs", "sock_recv", "maybe_sleep_on_idle")),
)  # fmt: skip


class Frame(NamedTuple):
    """`function` is the last part of the qualified name; `file` as py-spy shortens it."""

    function: str
    file: str
    text: str


class Profile(NamedTuple):
    """Samples of one thread: `stacks` from root to leaf, with counts; `kinds` in samples; `leaves` by kind."""

    samples: int
    kinds: Counter[str]
    leaves: dict[str, Counter[str]]
    stacks: Counter[tuple[str, ...]]

    def share(self, *kinds: str) -> float:
        return sum(self.kinds[kind] for kind in kinds) / self.samples if self.samples else 0.0


class Process(NamedTuple):
    pid: int
    parent: int
    title: str


# --- finding the thread ---------------------------------------------------------------------------------------------


def schedulers(pid: int) -> list[Process]:
    """SGLang's schedulers among a process and its descendants; that process itself if there are none."""
    everybody = {process.pid: process for process in _processes()}
    if pid not in everybody:
        raise BrokerError(f"there is no process {pid}: see `pgrep -af sglang`")
    family = {pid}
    while more := {p.pid for p in everybody.values() if p.parent in family} - family:
        family |= more
    found = [everybody[one] for one in sorted(family) if "sglang::scheduler" in everybody[one].title]
    return found or [everybody[pid]]


def _processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                )
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue  # it has ended
            yield Process(int(entry.name), parent, title)


# --- looking --------------------------------------------------------------------------------------------------------


def record(pid: int, seconds: float, rate: int) -> Profile:
    """Sample a process's main thread. Raises `BrokerError` that says what py-spy needs."""
    return sort(raw(pid, seconds, rate, "--idle", "--threads"))


def raw(pid: int, seconds: float, rate: int, *options: str) -> list[str]:
    """A process's collapsed stacks, each with how often it was seen; `options` are py-spy's. Errors as of `record`."""
    with tempfile.TemporaryDirectory(prefix="mmbroker-") as scratch:
        output = Path(scratch, "raw")
        command = [_py_spy(), "record", "--pid", str(pid), "--duration", str(max(1, round(seconds)))]
        command += ["--rate", str(rate), "--format", "raw", "--output", str(output), *options]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode or not output.exists():
            why = next(
                (line for line in (*done.stderr.splitlines(), *done.stdout.splitlines()) if "rror" in line),
                "",
            )
            raise BrokerError(
                f"py-spy could not look at process {pid} ({why.removeprefix('Error: ') or 'it said nothing'}): "
                "it needs the same user with CAP_SYS_PTRACE, or root"
            )
        return output.read_text().splitlines()


def _py_spy() -> str:
    try:
        for file in metadata.distribution("py-spy").files or ():
            # Where it was installed into a directory (`pip install --target`), its own list of files is wrong.
            if file.name == "py-spy" and (found := Path(str(file.locate())).resolve()).exists():
                return str(found)
    except metadata.PackageNotFoundError:
        pass
    if elsewhere := shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent)):
        return elsewhere
    raise BrokerError("py-spy is not installed here: pip install 'mmbroker[profile]'")


# --- sorting --------------------------------------------------------------------------------------------------------


def sort(lines: Iterable[str]) -> Profile:
    """Collapsed stacks (``thread (1): MainThread;f (a.py:1);g (b.py:2) 93``) of the main thread, by what it did."""
    kinds: Counter[str] = Counter()
    leaves: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        text, _, number = line.rpartition(" ")
        if not number.isdigit():
            continue
        thread, *frames = text.split(";")
        if not thread.endswith("MainThread") or not frames:
            continue
        stack = [_frame(frame) for frame in frames]
        kind, at = classify(stack)
        kinds[kind] += int(number)
        leaves[kind][stack[at].function] += int(number)
        stacks[kind, *(frame.text for frame in stack)] += int(number)
    return Profile(kinds.total(), kinds, leaves, stacks)


def _frame(text: str) -> Frame:
    function, _, place = text.rpartition(" (")
    return Frame(function.rpartition(".")[2], place.rpartition(":")[0] or place.rstrip(")"), function or text)


def classify(stack: Sequence[Frame]) -> tuple[str, int]:
    """What a stack's thread was doing, and which of its frames says so."""
    for at in range(len(stack) - 1, -1, -1):
        for rule in RULES:
            if rule.leaf and at < len(stack) - 1:
                continue
            if rule.file in stack[at].file and (not rule.functions or stack[at].function in rule.functions):
                return rule.kind, at
    if stack[-1].function.startswith("event_loop"):
        return "idle", len(stack) - 1
    return "schedule", len(stack) - 1


# --- what it means --------------------------------------------------------------------------------------------------


def verdict(profile: Profile) -> str:
    """What the broker would save, or saved, in a sentence or two."""
    carried = profile.share(*SAVED)
    if not profile.samples:
        return "The thread was not seen: is it a Python process?"
    if profile.kinds["broker"]:
        return (
            f"The broker serves here: its look-ups take {profile.share('broker'):.1%} of this thread, and "
            f"{carried:.1%} still go into transport, hashing and rebuilding."
        )
    if carried < 0.02:
        return (
            f"Transport, hashing and rebuilding take {carried:.1%} of this thread: the broker would change little at "
            "this load. Look again while pictures come in."
        )
    busy = 1 - profile.share("idle")
    return (
        f"Transport, hashing and rebuilding take {carried:.1%} of this thread, {carried / busy:.0%} of what it works. "
        "With the broker they are a look-up."
    )


def report(profile: Profile, process: Process, seconds: float) -> dict[str, Any]:
    """For programs: shares of the thread's time."""
    return {
        "pid": process.pid,
        "title": process.title,
        "seconds": seconds,
        "samples": profile.samples,
        "shares": {kind: profile.share(kind) for kind in KINDS},
        "functions": {
            kind: dict(profile.leaves[kind].most_common(5)) for kind in KINDS if profile.kinds[kind]
        },
        "verdict": verdict(profile),
    }
