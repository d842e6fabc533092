"""Write the tables of `benchmarks.md`, and its pictures, from the stored results: `python docs/make_benchmarks.py`.

A table stands between ``<!-- NAME FILE -->`` and ``<!-- end -->``; everything else of the page is written by hand. The
pictures need matplotlib. No figure of the page is typed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.serving import goals
from bench.serving.plots import draw
from bench.sharing_gpu import cells
from bench.tables import number

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"
PAGE = DOCS / "benchmarks.md"
_BLOCK = re.compile(
    r"(<!-- (?P<name>[a-z_]+)(?P<files>(?: \S+)*) -->\n)(?P<old>.*?)(<!-- end -->)", re.DOTALL
)

#: A loop that is so many percent slower runs only when nothing arrives.
STANDS_STILL = 1000.0

Lines = Iterator[str]
#: What makes a block's lines from the results that it names.
Maker = Callable[..., Lines]


def page(text: str, makers: Mapping[str, Maker] | None = None) -> str:
    """The page with every block made anew."""
    makers = TABLES if makers is None else makers

    def block(found: re.Match[str]) -> str:
        results = [json.loads((RESULTS / file).read_text()) for file in found["files"].split()]
        return f"{found[1]}{_joined(makers[found['name']](*results))}{found[5]}"

    return _BLOCK.sub(block, text)


def _joined(lines: Lines) -> str:
    return "".join(f"{line}\n" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """Markdown; a heading that begins with ``>`` aligns its column right."""
    yield "| " + " | ".join(one.removeprefix(">") for one in head) + " |"
    yield "|" + "|".join(" ---: " if one.startswith(">") else " --- " for one in head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


# --- the transport alone --------------------------------------------------------------------------------------------


def where(found: dict[str, Any]) -> Lines:
    """The machine of a result."""
    machine, versions = found["machine"], found["versions"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if version != "absent")
    yield (
        f"{found['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}; {told}."
    )


def rows(found: dict[str, Any]) -> Lines:
    yield from table(
        (">MB", "transport", ">p50 us", ">p99 us", ">first read p50 us", ">end of use p50 us"),
        [
            (
                f"{line['mb']:g}",
                line["transport"],
                *(
                    number(line[name])
                    for name in ("scheduler_us_p50", "scheduler_us_p99", "first_read_us_p50", "end_us_p50")
                ),
            )
            for line in found["rows"]
        ],
    )


def producer(found: dict[str, Any]) -> Lines:
    yield from table(
        (">MB", ">at once", "way", ">p50 us", ">p99 us", ">times hash + copy"),
        [
            (
                f"{line['mb']:g}",
                str(line["batch"]),
                line["way"],
                number(line["us_p50"]),
                number(line["us_p99"]),
                f"{line['times_yardstick']:.2f}",
            )
            for line in found["producer"]["lines"]
        ],
    )


def round_trips(found: dict[str, Any]) -> Lines:
    told, growing = found["round_trips"], found["round_trips"]["while_growing"]
    names = {
        "control": "a control round trip",
        "bare_zeromq": "the same of bare ZeroMQ",
        "seal_to_answer": f"from a seal to its answer, one rank, {told['seal_mb']:g} MB",
    }
    yield from table(
        ("what", ">p50 us", ">p99 us", ">while segments grow: p50 us", ">p99 us"),
        [
            (title, *(number(one[name][p]) for one in (told, growing) for p in ("p50", "p99")))
            for name, title in names.items()
        ],
    )


def loop(found: dict[str, Any]) -> Lines:
    yield from table(
        (
            ">MB",
            ">a second",
            ">in a request",
            "transport",
            ">reached",
            ">waits %",
            ">slower %",
            "middle half",
        ),
        [
            (
                f"{line['mb']:g}",
                f"{line['asked_per_second']:g}",
                str(line.get("together", 1)),
                line["transport"],
                f"{line['reached_per_second']:.0f}",
                f"{100 * line['waited_us'] / line['iteration_us']:.1f}",
                *(
                    (
                        f"{line['slowdown_percent']:.1f}",
                        f"{line['slowdown_percent_low']:.1f} to {line['slowdown_percent_high']:.1f}",
                    )
                    if line["slowdown_percent"] < STANDS_STILL
                    else ("stands still", "")
                ),
            )
            for line in found["loop"]
        ],
    )


def memory(found: dict[str, Any]) -> Lines:
    yield from table(
        ("process", ">PSS MiB", ">RSS MiB", ">RSS without segments MiB"),
        [
            (line["process"], *(f"{line[k]:.1f}" for k in ("pss_mib", "rss_mib", "rss_without_segments_mib")))
            for line in found["memory"]["processes"]
        ],
    )


# --- on a GPU -------------------------------------------------------------------------------------------------------


def gpu_rows(found: dict[str, Any]) -> Lines:
    ways = list(dict.fromkeys(line["way"] for line in found["rows"]))
    by = {(line["way"], line["mb"], line["load"]): line["p50"] for line in found["rows"]}
    sizes = list(dict.fromkeys(line["mb"] for line in found["rows"]))
    yield from table(
        ("way", *(f">{mb:g} MB" for mb in sizes), *(f">{mb:g} MB, busy" for mb in sizes)),
        [(way, *(number(by.get((way, mb, load))) for load in (False, True) for mb in sizes)) for way in ways],
    )


def gpu_bandwidth(found: dict[str, Any]) -> Lines:
    yield from table(
        (">MB", ">broker GB/s", ">plain copy GB/s", ">% of it"),
        [
            (f"{x['mb']:g}", number(x["arena"]), number(x["plain"]), f"{x['percent_of_plain']:.0f}")
            for x in found["bandwidth"]
        ],
    )


def gpu_latency(found: dict[str, Any]) -> Lines:
    names = {"there": "memory is there", "growing": "memory grows meanwhile"}
    yield from table(
        (f"from a seal to a loaded feature of {found['latency']['mb']:g} MB", ">p50 us", ">p99 us", ">n"),
        [
            (
                title,
                *(number(found["latency"][name][p]) for p in ("p50", "p99")),
                str(found["latency"][name]["n"]),
            )
            for name, title in names.items()
        ],
    )


def gpu_memory(found: dict[str, Any]) -> Lines:
    names = {
        "broker_idle": "a broker, idle",
        "broker_with_one_segment": "its first segment",
        "cpu_worker": "a worker that puts features made on the CPU",
        "bare_context": "any process with a torch CUDA context",
    }
    told = found["memory"]
    yield from table(
        (">MiB", "of GPU memory"), [(f"{told[name]:.2f}", title) for name, title in names.items()]
    )


def missed(found: dict[str, Any]) -> Lines:
    """The goals that were not reached."""
    lines = [goal for goal in found["goals"] if not goal["met"]]
    if not lines:
        yield "Every goal of this result was met."
        return
    yield from table(
        ("goal that was missed", ">goal", ">measured"),
        [
            (g["what"], f"{'<=' if g['at_most'] else '>='} {g['goal']:g}", f"{g['measured']:.4g}")
            for g in lines
        ],
    )


# --- the same pictures again ----------------------------------------------------------------------------------------


def sharing(found: dict[str, Any]) -> Lines:
    yield from table(
        ("transport", ">engines", ">repeats %", ">requests/s", ">tokenizer CPU ms", ">scheduler CPU ms", ">pictures",
         ">preprocessed", ">hits %", ">encoder runs", ">live MiB"),
        [
            (
                line["transport"],
                str(line["engines"]),
                str(line["repeats_percent"]),
                *(number(line[name]) for name in ("requests_per_s", "tokenizer_cpu_ms", "scheduler_cpu_ms")),
                str(line["pictures"]),
                str(line["preprocessed"]),
                f"{line['hit_percent']:.0f}" if line["live_bytes"] else "",
                str(line["encoder_runs"]),
                f"{line['live_bytes']['host'] / 2**20:.0f}" if line["live_bytes"] else "",
            )
            for line in found["lines"]
        ],
    )  # fmt: skip


def sharing_known(found: dict[str, Any]) -> Lines:
    yield from table(
        ("transport", ">no picture", ">a new one", ">a known one", ">URL kB"),
        [
            (
                line["transport"],
                *(number(line[name]) for name in ("text_ms", "new_ms", "known_ms")),
                f"{line['url_bytes'] / 1000:.0f}",
            )
            for line in found["hits"]
        ],
    )


def sharing_gpu(found: dict[str, Any]) -> Lines:
    load = found["settings"]
    yield (
        f"MiB at their peak. {load['requests']} requests to each of two engines with {load['images']} pictures of "
        f"{load['size'][0]}x{load['size'][1]}, {load['in_flight']} of them in flight; {_layers(load['layers'])}."
    )
    yield ""
    yield from table(
        ("", ">brokers", ">GPU: theirs", ">of no process", ">tokenizers", ">schedulers", ">GPU: live features",
         ">in use", ">host: live features", ">requests/s"),
        [cells(row) for row in found["rows"]],
    )  # fmt: skip
    for row in found["rows"]:
        for problem in row["problems"]:
            yield ""
            yield f"{row['arrangement']}: {problem}"
    for left in found["left_out"]:
        yield ""
        yield f"Left out: {left['arrangement']}: {left['why'].splitlines()[-1]}"


def _layers(layers: int) -> str:
    return f"{layers} layers in each half of the model" if layers else "all layers of the model"


def goals_of(found: dict[str, Any]) -> Lines:
    yield from _goals(found["goals"])


def outputs(found: dict[str, Any]) -> Lines:
    yield from table(
        ("server", ">request ms p50", ">CPU s", ">encoder runs", ">outputs used"),
        [
            (
                name,
                number(1000 * server["seconds_p50"]),
                number(server["cpu_seconds"]),
                str(server["encoder_runs"]),
                str(server["outputs_used"]),
            )
            for name, server in found["servers"].items()
        ],
    )


def reuse(found: dict[str, Any]) -> Lines:
    yield (
        f"{found['pictures']:,} pictures: {found['settings']} settings of two processors each, "
        f"{found['encoded_pictures']} encoded pictures, {found['options']} options of a request. "
        f"{found['through_broker']:,} came by way of the broker, {found['refused']:,} were refused by "
        f"SGLang in the same words; {found['keys']:,} keys for {found['outputs']:,} different outputs; "
        f"{found['wrong']} wrong."
    )


# --- the engine under load ------------------------------------------------------------------------------------------


def serve() -> Lines:
    """Every stored run of `bench/serve.py`, the newest first."""
    files = sorted(RESULTS.glob("serve-*.json"), key=lambda file: file.stem)
    files.sort(key=lambda file: json.loads(file.read_text())["date"], reverse=True)
    if not files:
        yield "No run is stored yet."
    for file in files:
        found = json.loads(file.read_text())
        yield f"### {file.stem}"
        yield ""
        yield from where(found)
        yield ""
        yield from _loads(found)
        yield ""
        yield from _inside(found)
        yield ""
        if found["goals"]:
            yield from _goals(found["goals"])
            yield ""
        for line in found["texts"]:
            agree = len(line["differing"])
            what = "all agree" if not agree else f"{agree} differ"
            yield f"Texts of {line['transports'][0]} and {line['transports'][1]}, {line['requests']} requests: {what}."
        yield ""
        for picture, title in (
            ("rate", "Requests a second"),
            ("ttft", "TTFT p99"),
            ("thread", "The scheduler thread"),
        ):
            if (DOCS / f"{file.stem}-{picture}.svg").exists():
                yield f"![{title}]({file.stem}-{picture}.svg)"
                yield ""
        for line in found["left_out"]:
            yield f"Left out: {line['transport']}, {line['load']}: {line['why'].splitlines()[-1]}"


def thread(found: dict[str, Any]) -> Lines:
    """Milliseconds of the scheduler's thread for a request, by what it does; and how much faster its engine would be if
    all of its transport took no time, and nothing else changed."""
    yield from table(
        ("load", "transport", ">requests/s", ">ms a request: transport", ">the model", ">scheduling", ">idle",
         ">times, without transport", ">GPU busy"),
        [
            (
                run["load"]["name"],
                run["transport"],
                number(rate),
                *(number(1000 * share / rate) for share in _shares(run["profile"])),
                f"{1 / (1 - run['profile']['transport']):.2f}",
                f"{run['watch']['gpu_busy']:.0%}" if "gpu_busy" in run["watch"] else "-",
            )
            for run in found["runs"]
            if run["profile"].get("shares")
            for rate in (run["figures"]["requests_per_second"]["value"],)
        ],
    )  # fmt: skip


def _shares(profile: dict[str, Any]) -> tuple[float, ...]:
    return (profile["transport"], *(profile["shares"][kind] for kind in ("forward", "schedule", "idle")))


def _goals(goals: Sequence[dict[str, Any]]) -> Lines:
    yield from table(
        ("goal", ">goal", ">measured", ""),
        [
            (
                g["what"],
                f"{'<=' if g['at_most'] else '>='} {g['goal']:g}",
                f"{g['measured']:.4g}",
                "met" if g["met"] else "**missed**",
            )
            for g in goals
        ],
    )


def _loads(found: dict[str, Any]) -> Lines:
    def of(run: dict[str, Any], name: str, *statistics: str) -> list[str]:
        return [number(run["figures"].get(name, {}).get(p, {}).get("value")) for p in statistics]

    yield from table(
        ("load", "transport", ">requests/s", ">TTFT ms p50", ">p95", ">p99", ">mean", ">TPOT p50", ">p99",
         ">ITL p50", ">p99", ">E2E p50", ">p99", ">mean", ">failed"),
        [
            (
                run["load"]["name"],
                run["transport"] + (" (cut)" if run["figures"]["cut"] else ""),
                number(run["figures"].get("requests_per_second", {}).get("value")),
                *of(run, "ttft_ms", "p50", "p95", "p99", "mean"),
                *of(run, "tpot_ms", "p50", "p99"),
                *of(run, "itl_ms", "p50", "p99"),
                *of(run, "e2e_ms", "p50", "p99", "mean"),
                str(run["figures"]["failed"]),
            )
            for run in found["runs"]
        ],
    )  # fmt: skip


def _inside(found: dict[str, Any]) -> Lines:
    yield from table(
        ("load", "transport", ">queue ms p50", ">p99", ">loop ms p50", ">p99", ">transport", ">idle", ">GPU busy",
         ">MiB tokenizers and broker", ">cores tokenizers", ">scheduler", ">broker"),
        [
            (
                run["load"]["name"],
                run["transport"],
                *(number((run.get(k) or {}).get(p)) for k in ("queue_ms", "loop_ms") for p in ("p50", "p99")),
                *(
                    "-" if share is None else f"{share:.1%}"
                    for share in (
                        run["profile"].get("transport"),
                        run["profile"].get("shares", {}).get("idle"),
                        run["watch"].get("gpu_busy"),
                    )
                ),
                number(goals.memory({"runs": [run]}, run["transport"], run["load"]["name"])),
                *(
                    number(sum(p["cores"] or 0.0 for p in run["watch"].get("processes", ()) if p["role"] == role))
                    for role in ("tokenizer", "scheduler", "broker")
                ),
            )
            for run in found["runs"]
            if run["load"]["concurrency"] > 1
        ],
    )  # fmt: skip


TABLES: dict[str, Maker] = {
    "where": where,
    "rows": rows,
    "producer": producer,
    "round_trips": round_trips,
    "loop": loop,
    "memory": memory,
    "gpu_rows": gpu_rows,
    "gpu_bandwidth": gpu_bandwidth,
    "gpu_latency": gpu_latency,
    "gpu_memory": gpu_memory,
    "missed": missed,
    "serve": serve,
    "thread": thread,
    "sharing": sharing,
    "sharing_known": sharing_known,
    "sharing_gpu": sharing_gpu,
    "goals": goals_of,
    "outputs": outputs,
    "reuse": reuse,
}


# --- pictures -------------------------------------------------------------------------------------------------------


def pictures() -> None:
    """Those of every stored run; what a thread pays by size is drawn by `plots.py`."""
    for file in RESULTS.glob("serve-*.json"):
        draw(json.loads(file.read_text()), DOCS, file.stem)


if __name__ == "__main__":
    pictures()
    PAGE.write_text(page(PAGE.read_text()))
