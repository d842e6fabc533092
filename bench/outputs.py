"""What sharing encoder outputs saves: three real SGLang servers on one broker, two of which share.

    python bench/outputs.py [--pictures N] [--json FILE]

The first server sees each picture first; then the second one does, which shares with it, and the third, which does not.
The model is the demo's with a larger encoder: on a CPU, and far from a real one. Takes some minutes on two cores, which
should have nothing else to do.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import machine
from bench.processes import Workshop
from mmbroker.adapters.sglang.settings import SHARE_OUTPUTS
from mmbroker.demo import pictures
from mmbroker.demo.engine import Engine
from mmbroker.demo.model import make

#: The encoder: 8 layers, 320 wide.
VISION: Final[dict[str, Any]] = {
    "depth": 8,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_heads": 5,
    "fullatt_block_indexes": [7],
}
SIZE: Final = (644, 476)
SERVERS: Final = {"first": True, "second, sharing": True, "third, not sharing": False}


def picture(seed: int) -> str:
    data = io.BytesIO()
    pictures.generated(seed, *SIZE).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def family_seconds(engine: Engine) -> float:
    """CPU time of a server's processes."""
    spent = 0.0
    for process in engine.processes():
        try:
            spent += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return spent


def serve(engine: Engine, urls: list[str]) -> dict[str, Any]:
    """Each picture in a request of its own, one after the other, for one token."""
    before, spent = engine.counters()["scheduler-0"], family_seconds(engine)
    seconds, texts = [], []
    for url in urls:
        answer = engine.ask([url], tokens=1)
        seconds.append(answer.seconds)
        texts.append(answer.texts)
    deadline = time.monotonic() + 30
    while True:
        after = engine.counters()["scheduler-0"]
        if after["outputs_published"] == after["outputs_offered"] or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    changed = {name: after[name] - before[name] for name in after}
    return {
        "seconds_p50": statistics.median(seconds),
        "cpu_seconds": family_seconds(engine) - spent,
        "encoder_runs": changed["encoded"],
        "outputs_used": changed["outputs_used"],
        "outputs_published": changed["outputs_published"],
        "texts": texts,
    }


def run(count: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    with Workshop() as shop, shop.broker(host_mib=1024) as broker, ExitStack() as stack:
        model = Path(shop.place("model"))
        model.mkdir()
        make(model, **VISION)
        engines: dict[str, Engine] = {}
        for name, shares in SERVERS.items():
            scratch = Path(shop.place("e"))
            scratch.mkdir()
            engine = Engine(
                model,
                scratch,
                ("--mm-transport", "broker", "--mm-broker", broker.path),
                {SHARE_OUTPUTS: "1" if shares else "0"},
                measure=True,
            )
            engines[name] = engine
            stack.callback(engine.stop)
        for engine in engines.values():
            engine.wait_ready()
        for warm in (True, False):
            urls = [picture(10_000 * warm + n) for n in range(2 if warm else count)]
            found["servers"] = {name: serve(engine, urls) for name, engine in engines.items()}
        texts = [server.pop("texts") for server in found["servers"].values()]
        found["texts_equal"] = all(text == texts[0] for text in texts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=12, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up on the way
    found = run(options.pictures)
    print(f"{'server':24}{'request, p50':>14}{'CPU':>10}{'encoder runs':>14}")
    for name, server in found["servers"].items():
        spent = f"{server['cpu_seconds']:.1f} s"
        print(f"{name:24}{server['seconds_p50'] * 1e3:>11.0f} ms{spent:>10}{server['encoder_runs']:>14}")
    print(f"texts equal: {found['texts_equal']}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
