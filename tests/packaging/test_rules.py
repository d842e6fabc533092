"""Rules for the whole tree. Each stands for a hole or a leak that other systems had."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("broker", "proto", "adapters")

#: Modules that run code from data.
CODE_FROM_DATA = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
#: Methods of other libraries that do the same.
CODE_FROM_DATA_METHODS = {"send_pyobj", "recv_pyobj"}

#: The state machine and its parts, beside all of proto.
PURE = (
    *("admission", "arena/allocator", "books", "events", "figures", "health", "holds", "leases"),
    *("pool", "quotas", "records", "replicas", "report", "room", "state", "tallies", "timers"),
)
#: What they do without: I/O, clocks, threads.
OUTSIDE = {
    *("asyncio", "io", "os", "pathlib", "select", "signal", "socket", "subprocess", "threading", "time"),
    *("torch", "uvloop", "zmq"),
}


def tracked(*suffixes: str) -> list[Path]:
    """Files of the tree that git has, or would take."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [path for name in names if (path := ROOT / name).suffix in suffixes and path.is_file()]


def modules(*folders: str) -> dict[str, ast.Module]:
    found = {str(path.relative_to(ROOT)): path for path in tracked(".py")}
    return {
        name: ast.parse(path.read_text(), name)
        for name, path in found.items()
        if name.split("/")[0] in folders
    }


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls, with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Text in the code; docstrings may name what is avoided."""
    doc = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in doc:
            yield node.lineno, node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def broken(
    trees: dict[str, ast.Module], rule: Callable[[ast.Module], Iterator[tuple[int, str]]]
) -> list[str]:
    return [f"{name}:{line}: {what}" for name, tree in trees.items() for line, what in rule(tree)]


# --- the rules ------------------------------------------------------------------------------------------------------


def no_code_from_data(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree):
        if name.partition(".")[0] in CODE_FROM_DATA:
            yield line, f"imports {name}"
    for call, name in calls(tree):
        last = name.rpartition(".")[2]
        torch_load = name in ("torch.load", "numpy.load", "np.load")
        if name in ("eval", "exec") or last in CODE_FROM_DATA_METHODS or torch_load:
            yield call.lineno, f"calls {name}"


def no_named_shared_memory(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree):
        if "shared_memory" in name or name.startswith("posix_ipc"):
            yield line, f"imports {name}"
    for line, text in strings(tree):
        if "/dev/shm" in text or text == "shm_open":
            yield line, f"says {text!r}"


def nothing_listens_on_a_network(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, text in strings(tree):
        if "tcp://" in text or "0.0.0.0" in text or text in ("::", "[::]"):
            yield line, f"says {text!r}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in (
            "AF_INET",
            "AF_INET6",
            "create_server",
            "start_server",
        ):
            yield node.lineno, f"uses {node.attr}"


def no_wall_clock(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree):
        if name.partition(".")[0] == "datetime":
            yield line, f"imports {name}"
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if name in ("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.CLOCK_REALTIME"):
            yield node.lineno, f"uses {name}"


def no_timed_waits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for call, name in calls(tree):
        waits = name in ("time.sleep", "sleep", "asyncio.sleep", "signal.pause", "anyio.sleep")
        if waits and not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0):
            yield call.lineno, f"calls {ast.unparse(call)}"


def no_broad_kills(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, text in strings(tree):
        if text in ("pkill", "killall") or text.startswith(("pkill ", "killall ")):
            yield line, f"says {text!r}"


def nothing_skipped(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.skip":
            yield node.lineno, "skips a test for good"


def test_no_code_comes_out_of_data() -> None:
    assert broken(modules(*SHIPPED, "engines"), no_code_from_data) == []


def without_the_demo() -> dict[str, ast.Module]:
    """What ships, but for the part that runs somebody else's server: it looks for a port, and tidies up after it."""
    trees = modules(*SHIPPED)
    del trees["broker/demo/engine.py"]
    return trees


def without_the_page() -> dict[str, ast.Module]:
    """The one part that listens, at loopback if told to: `tests/web` sees that it listens nowhere else."""
    trees = without_the_demo()
    del trees["broker/web/http.py"]
    return trees


def test_no_named_shared_memory() -> None:
    assert broken(without_the_demo(), no_named_shared_memory) == []


def test_nothing_listens_on_a_network() -> None:
    assert broken(without_the_page(), nothing_listens_on_a_network) == []


#: Where people are shown a time of day.
STAMPED = ("broker/logs.py", "broker/spans.py", "broker/tier/command.py", "broker/web/site.py")


def test_nothing_reads_the_wall_clock() -> None:
    """It jumps. What is measured or waited for is on the monotonic clock."""
    trees = modules(*SHIPPED)
    for shown in STAMPED:
        del trees[shown]
    assert broken(trees, no_wall_clock) == []


def test_no_wildcard_address_anywhere() -> None:
    def wildcard(tree: ast.Module) -> Iterator[tuple[int, str]]:
        return ((line, text) for line, text in strings(tree) if "0.0.0.0" in text or "tcp://*" in text)

    trees = modules(*SHIPPED, "bench", "engines", "tests")
    del trees["tests/packaging/test_rules.py"]
    assert broken(trees, wildcard) == []


def test_tests_do_not_sleep() -> None:
    assert broken(modules("tests"), no_timed_waits) == []


def test_tests_and_tools_end_only_their_own_processes() -> None:
    trees = modules(*SHIPPED, "tests", "bench", "engines")
    del trees["tests/packaging/test_rules.py"]
    assert broken(trees, no_broad_kills) == []


def test_no_test_is_skipped_for_good() -> None:
    trees = modules("tests")
    del trees["tests/packaging/test_rules.py"]
    assert broken(trees, nothing_skipped) == []


def test_nothing_unfinished() -> None:
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error", "pragma: no " + "cover"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in tracked(".py", ".md", ".sh", ".toml", ".txt", ".svg", "")
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for word in words
        if word in line
    ]
    assert found == []


def test_the_tests_that_the_threat_model_names_are_there() -> None:
    """`docs/security.md` names them by file and name; a claim without its test would be a wish."""
    text = (ROOT / "docs" / "security.md").read_text()
    named = [
        (file, name)
        for file, names in re.findall(r"`([a-z]+/test_[a-z_]+)`(?:: ([a-z_, ]+))?", text)
        for name in (names.split(", ") if names else [""])
        if " " not in name.strip()
    ]
    assert len(named) > 50
    missing = [
        f"{file}: {name}"
        for file, name in named
        if f"def test_{name.strip()}" not in (ROOT / "tests" / f"{file}.py").read_text()
    ]
    assert missing == []


def test_imports_point_down() -> None:
    """proto < everything; the state machine and its parts do no I/O; the daemon never needs torch."""
    trees = modules(*SHIPPED)
    upward = [
        f"{name}:{line}: {module}"
        for name, tree in trees.items()
        if name.startswith("proto/")
        for line, module in imports(tree)
        if module.startswith("mmbroker") and not module.startswith("mmbroker.proto")
    ]
    assert upward == []
    pure = {f"broker/{name}.py" for name in PURE} | {name for name in trees if name.startswith("proto/")}
    impure = [
        f"{name}:{line}: {module}"
        for name in sorted(pure)
        for line, module in imports(trees[name])
        if module.partition(".")[0] in OUTSIDE
    ]
    assert impure == []


# --- the rules find what they look for ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (no_code_from_data, "import pickle"),
        (no_code_from_data, "from pickle import loads"),
        (no_code_from_data, "from torch.utils import data; import dill as d"),
        (no_code_from_data, "eval('1')"),
        (no_code_from_data, "socket.recv_pyobj()"),
        (no_code_from_data, "torch.load('x')"),
        (no_named_shared_memory, "from multiprocessing import shared_memory"),
        (no_named_shared_memory, "from multiprocessing.shared_memory import SharedMemory"),
        (no_named_shared_memory, "open('/dev/shm/x')"),
        (nothing_listens_on_a_network, "s.bind('tcp://127.0.0.1:1')"),
        (nothing_listens_on_a_network, "s.bind(('0.0.0.0', 1))"),
        (nothing_listens_on_a_network, "socket.socket(socket.AF_INET)"),
        (nothing_listens_on_a_network, "asyncio.start_server(f)"),
        (no_wall_clock, "import datetime"),
        (no_wall_clock, "now = time.time()"),
        (no_wall_clock, "clock = time.time"),
        (no_wall_clock, "time.clock_gettime(time.CLOCK_REALTIME)"),
        (no_timed_waits, "time.sleep(1)"),
        (no_timed_waits, "await_(asyncio.sleep(0.1))"),
        (no_timed_waits, "from time import sleep; sleep(x)"),
        (no_broad_kills, "run(['pkill', 'x'])"),
        (nothing_skipped, "@pytest.mark.skip\ndef f(): pass"),
    ],
)
def test_the_rules_catch_it(rule: Callable[[ast.Module], Iterator[tuple[int, str]]], code: str) -> None:
    assert list(rule(ast.parse(code)))
