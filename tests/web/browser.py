"""A real browser, without a window: Chromium, told what to do through a pipe.

Nothing listens anywhere for it. `find` says where one is installed; without one, the tests that need it are not chosen.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.kit import PATIENCE, eventually

#: Starting a browser on two busy cores takes its time.
START = 3 * PATIENCE
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Puts the two pipes where Chromium expects them, and becomes it.
_TRAMPOLINE = """
import os, sys
commands, answers = int(sys.argv[1]), int(sys.argv[2])
commands, answers = os.dup(commands), os.dup(answers)
while min(commands, answers) < 5:
    commands, answers = os.dup(commands), os.dup(answers)
os.dup2(commands, 3); os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Where a browser is; None: there is none here."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page."""

    def __init__(self, width: int = 1200, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        path = find()
        assert path is not None
        self._home = tempfile.mkdtemp(prefix="mmb-browser-", dir="/tmp")
        commands_in, self._commands = os.pipe()
        self._answers, answers_out = os.pipe()
        flags = ["--headless", "--remote-debugging-pipe", f"--user-data-dir={self._home}", "--no-first-run"]
        flags += [
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-sync",
        ]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        trampoline = [sys.executable, "-c", _TRAMPOLINE, str(commands_in), str(answers_out), path, *flags]
        self.process = subprocess.Popen(
            trampoline,
            pass_fds=(commands_in, answers_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": self._home, "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )
        os.close(commands_in)
        os.close(answers_out)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.problems: list[str] = []  # exceptions, and what the page's policy has refused
        self.requests: list[str] = []  # URLs
        try:
            target = self.call("Target.createTarget", START, url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=scale,
                mobile=width < 600,
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self.call("Emulation.setEmulatedMedia", features=[scheme])
        except BaseException:
            self.close()
            raise

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {url!r} && document.readyState === 'complete'", "the page is there")

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, what: str, timeout: float = START) -> Any:
        """The expression's first true value in the page."""
        return eventually(lambda: self.value(expression), what, timeout)

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page, as far down as it goes."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, timeout: float = START, **parameters: Any) -> Any:
        """One command; events that come before its answer are filed."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while (message := self._next(deadline, method)).get("id") != self._number:
            self._file(message)
        assert "error" not in message, message
        return message["result"]

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"the browser did not answer {method}"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _file(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["exceptionDetails"])[:500])
            case "Log.entryAdded" if told["entry"]["source"] != "network":
                self.problems.append(told["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])

    def close(self) -> None:
        """End it, with everything it started."""
        for fd in (self._commands, self._answers):
            os.close(fd)
        try:
            self.process.wait(PATIENCE)  # it ends with its pipe
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        eventually(lambda: _gone(self._home), "the end of the browser's profile")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _gone(home: str) -> bool:
    """Its processes may still write there for a moment."""
    shutil.rmtree(home, ignore_errors=True)
    return not os.path.exists(home)
