"""The real SGLang under load, with one transport after another: how fast, how late, and what it costs.

    python -m bench.serve --model PATH --gpu 0 --out DIRECTORY [--only LOAD ...] [--transports cpu,cuda_ipc,broker]
    python -m bench.serve --url http://127.0.0.1:30000 --model NAME --out DIRECTORY
    python -m bench.serve --out DIRECTORY                   # a tiny model on the CPU, to see that it works
    python -m bench.serve compare A.json B.json             # what got better or worse beyond the runs' own spread
    python -m bench.serve show A.json [--plots DIRECTORY]

DIRECTORY gets `serve.json`, all figures, after every load, and `runs.jsonl`, every time of every request. A run that
finds some goes on from there. The loads, by default the goals' and six that span the matrix, are in `serving/loads.py`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

# Everything else is imported where it is used: the processes that only send import this file again, and shall not
# wait for torch.


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    if words[:1] == ["show"]:
        return _show(words[1:])
    return _run(words)


def _compare(words: list[str]) -> int:
    from bench.serving import tables
    from bench.serving.compare import compare, differences

    parser = argparse.ArgumentParser(prog="serve compare", description="Exit code 1 if anything got worse.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--all", action="store_true", help="every figure, not only those that changed")
    asked = parser.parse_args(words)
    before, after = (json.loads(path.read_text()) for path in (asked.before, asked.after))
    changes = compare(before, after)
    tables.show_changes(changes, differences(before, after), asked.all)
    return int(any(change.verdict == "worse" for change in changes))


def _show(words: list[str]) -> int:
    from bench.serving import tables

    parser = argparse.ArgumentParser(prog="serve show")
    parser.add_argument("result", type=Path)
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="draw them there (matplotlib)")
    asked = parser.parse_args(words)
    found = json.loads(asked.result.read_text())
    tables.show(found)
    if asked.plots is not None:
        from bench.serving import plots

        for path in plots.draw(found, asked.plots, asked.result.stem):
            print(path)
    return 0


def _run(words: list[str]) -> int:
    from bench.processes import Workshop
    from bench.serving import loads, tables
    from bench.serving.campaign import Campaign, Plan
    from bench.serving.servers import TRANSPORTS, Maker

    parser = argparse.ArgumentParser(
        prog="serve", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--model", help="a model's directory; with --url, the name the server knows it by")
    parser.add_argument(
        "--gpu", default="", help="the GPU of server and broker; without it everything is on the CPU"
    )
    parser.add_argument(
        "--url", help="a server that is there already, of any kind that speaks OpenAI's protocol"
    )
    parser.add_argument("--transports", default="", help=f"of {', '.join(TRANSPORTS)}, with commas between")
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=FLAGS", help="one more kind of server"
    )
    parser.add_argument("--flags", default="", help="for every server, beside those that suit the machine")
    parser.add_argument(
        "--broker",
        action="append",
        default=[],
        metavar="[TRANSPORT:]SETTING=VALUE",
        help="e.g. device_mib=512; with a transport's name, for its broker alone",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LOAD", help="this load; may be repeated"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="TRANSPORT:LOAD")
    parser.add_argument("--matrix", action="store_true", help="every load")
    parser.add_argument("--requests", type=int, metavar="N", help="of each load")
    parser.add_argument(
        "--together", action="store_true", help="all servers at once; they take turns at each load"
    )
    parser.add_argument(
        "--no-freeze",
        action="store_true",
        help="do not ask servers to freeze their garbage once they are warm",
    )
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="how often each load is run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="S", help="for everything")
    parser.add_argument("--load-limit", type=float, default=180.0, metavar="S", help="for one load")
    parser.add_argument(
        "--look", type=float, default=5.0, metavar="S", help="how long py-spy looks; 0: not at all"
    )
    parser.add_argument("--plots", action="store_true", help="draw them into DIRECTORY, too (matplotlib)")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and clean up on the way
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        wanted = loads.matrix() if asked.matrix else loads.named(asked.only or _default(asked.gpu, asked.url))
        extra = tuple(_pair(one, "=") for one in asked.server)
        known = {**TRANSPORTS, **dict(extra)}
        default = ",".join(["cpu", "cuda_ipc", "broker-cpu"] if asked.gpu else ["cpu", "broker"])
        chosen = tuple((asked.transports or default).split(","))
        if unknown := [name for name in chosen if name not in known]:
            raise ValueError(f"there is no transport {', '.join(unknown)}; there are {', '.join(known)}")
        broker = tuple(_pair(one, "=") for one in asked.broker)
        skip = frozenset(_pair(one, ":") for one in asked.skip)
        if (asked.gpu or asked.url) and not asked.model:
            raise ValueError("--model is needed")
    except ValueError as error:
        parser.error(str(error))
    if asked.requests is not None:
        wanted = [replace(load, requests=asked.requests) for load in wanted]
    plan = Plan(
        transports=chosen,
        loads=tuple(wanted),
        out=asked.out,
        seed=asked.seed,
        turns=asked.turns,
        look=asked.look,
        limit=asked.time_limit,
        load_limit=asked.load_limit,
        skip=skip,
        together=asked.together,
        freeze=not asked.no_freeze,
    )
    with Workshop() as shop:
        campaign = Campaign(plan, say, shop.path)
        if asked.url:
            campaign.ask(asked.url, asked.model, "url")
        else:
            if asked.gpu:
                model = Path(asked.model)
            else:
                from mmbroker.demo.model import tiny_model

                model = Path(asked.model) if asked.model else tiny_model()
            campaign.serve(Maker(shop, model, asked.gpu, asked.flags, broker, extra, asked.out))
    tables.show(campaign.found)
    if asked.plots:
        from bench.serving import plots

        plots.draw(campaign.found, asked.out)
    say("done")
    figures = [run["figures"] for run in campaign.found["runs"]]
    differ = any(line["differing"] for line in campaign.found["texts"])
    return int(not figures or differ or any(one["failed"] or one["cut"] for one in figures))


def _default(gpu: str, url: str | None) -> list[str]:
    from bench.serving import loads

    return list(loads.DEFAULT) if gpu or url else [loads.SMOKE.name]


def _pair(text: str, between: str) -> tuple[str, str]:
    name, found, value = text.partition(between)
    if not (name and found):
        raise ValueError(f"{text!r} is not of the form A{between}B")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
