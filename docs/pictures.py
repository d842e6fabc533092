"""Make the pictures of this folder: `python docs/pictures.py`, in an environment with torch and Chromium.

A real broker serves a made-up crowd for a minute and a half: two engines, four workers, pictures of several sizes, some
of them over and over. What `top` and the page show of it is kept.
"""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console

import mmbroker
from mmbroker import overview, top
from mmbroker.link import Link
from mmbroker.proto.messages import Report, Status
from tests.web.browser import Browser

DOCS = Path(__file__).resolve().parent

SECONDS = 90.0
#: Rows of patches, of 1,176 float32 values each.
SIZES = (128, 256, 512, 1024, 2048)


class Crowd:
    """Workers that put, engines that take, and requests that end after a while."""

    def __init__(self, broker: Path) -> None:
        self._ended = threading.Event()
        self._tables = {}
        self._clients = []
        for engine in ("qwen-a", "qwen-b"):
            client = mmbroker.connect(broker, name=f"{engine}/scheduler-0")
            self._tables[engine] = client.attach(engine=engine, access="readonly")
            self._clients.append(client)
        workers = [
            mmbroker.connect(broker, name=f"{engine}/tokenizer") for engine in self._tables for _ in range(2)
        ]
        self._clients += workers
        self._threads = [
            threading.Thread(target=self._work, args=(worker, engine, seed))
            for seed, (worker, engine) in enumerate(
                zip(workers, [e for e in self._tables for _ in range(2)], strict=True)
            )
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, client: mmbroker.Client, engine: str, seed: int) -> None:
        dice = random.Random(seed)
        held: list[tuple[float, mmbroker.Held]] = []
        number = seed
        while not self._ended.wait(dice.expovariate(12)):
            number += 4
            seen_before = dice.random() < 0.35
            value = float(dice.randrange(40) if seen_before else 1000 + number)
            size = SIZES[int(value) % 5]
            for one in client.put_many(
                [torch.full((size, 1176), value + i) for i in range(dice.choice((1, 1, 2, 4)))], to=engine
            ):
                self._tables[engine].take(one.ref).release()
                held.append((time.monotonic() + dice.uniform(0.3, 2.0), one))
            now = time.monotonic()
            for until, one in held:
                if until < now:
                    one.drop()
            held = [(until, one) for until, one in held if until >= now]

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()


def picture_top(broker: Path) -> None:
    link = Link(broker, "mmbroker-cli")
    reports = []
    for pause in (0.0, 5.0):
        time.sleep(pause)
        answer = link.call(Status())
        assert isinstance(answer, Report)
        reports.append(answer.status)
    link.close()
    mine = [s for s in reports[1]["sessions"] if s["name"] != "mmbroker-cli"]
    for number, session in enumerate(mine):
        session["pid"] = 4100 + number  # one process plays them all here
    out = Console(record=True, width=80, height=40, file=io.StringIO(), force_terminal=True)
    out.print(top.draw(overview.overview(reports[1], reports[0]), "bytes", clients=10))
    picture = out.export_svg(title="mmbroker top")
    # The reader's own fonts will do: a picture that fetches some tells others who reads this.
    (DOCS / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mmb-", dir="/tmp") as root:
        command = [sys.executable, "-m", "mmbroker", "start", "--cpu", "--name", "demo", "--host-mib", "1024"]
        with subprocess.Popen(
            [*command, "--http", "127.0.0.1:0"], env={"MMBROKER_DIR": root}, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            crowd = Crowd(Path(root, "demo"))
            try:
                time.sleep(SECONDS)
                picture_top(Path(root, "demo"))
                for name, width, height, dark, part in (
                    ("page.png", 1200, 960, False, None),
                    ("page-segments.png", 1200, 620, False, "segments"),
                    ("page-dark.png", 1200, 620, True, None),
                    ("page-phone.png", 390, 844, True, None),
                ):
                    with Browser(width, height, dark) as browser:
                        browser.open(found.group())
                        browser.until("rows.length > 10", "some rows")
                        if part is not None:
                            browser.value(f"document.getElementById('{part}').parentElement.scrollIntoView()")
                        browser.picture(DOCS / name, whole=False)
            finally:
                crowd.close()
                process.terminate()


if __name__ == "__main__":
    main()
