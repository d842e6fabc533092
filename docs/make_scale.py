"""Write the tables and sentences of `scale.md`, and its plots, from stored results: `python docs/make_scale.py`.

What stands between ``<!-- NAME FILE ... -->`` and ``<!-- end -->`` is made from those results; the plots are of the
first. They need matplotlib. No figure of the page is typed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.demand import (
    MASTER,
    Found,
    fleet,
    fullest,
    largest,
    master_calls,
    master_cores,
    mover_cores,
    network_gbit_s,
)
from bench.tables import number
from docs.make_benchmarks import RESULTS, Lines, Maker, missed, page, table, where

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "scale.md"


def percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 else 1 if share >= 0.001 else 3}f} %"


def count(value: float) -> str:
    """Three significant digits of a large number, in words where it is very large."""
    for size, name in ((1e9, " billion"), (1e6, " million")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


# --- the page's blocks ----------------------------------------------------------------------------------------------


def first(found: Found, tier: Found) -> Lines:
    line = largest(found)
    yield from table(
        ("part", ">it has", f">asked by {line['machines']:,} machines", ">share"),
        [
            (
                what,
                f"{has:g} {unit}",
                f"{number(asked) if asked >= 0.1 else f'{asked:.2g}'} {unit}",
                percent(asked / has),
            )
            for what, has, asked, unit in fullest(found, tier, line)
        ],
    )


def first_said(found: Found, tier: Found) -> Lines:
    line, told, assumed = largest(found), found["simulation"]["asked"], found["simulation"]["assumed"]
    cores, gbit, mover = master_cores(found, line), network_gbit_s(line), mover_cores(found, tier, line)
    books, master = found["costs"]["broker"]["books"], found["costs"]["master"]
    cached = assumed["cache_gib"] * assumed["filled"] * 2**30 / told["feature_bytes"]
    own = next(what for what, *_ in fullest(found, tier, line) if what != MASTER).partition(",")[0]
    yield (
        f"What more machines fill is the master alone, until it is divided. On each machine, whatever their number, "
        f"{own} is the fullest part. One by one:"
    )
    yield ""
    yield (
        f"- **The master** is everybody's, and is asked for more with each machine: {cores:.1f} cores here, so one "
        f"core stands {line['machines'] / cores:,.0f} machines. {assumed['master_threads']} threads that work as well "
        f"together as one does alone would stand {assumed['master_threads'] * line['machines'] / cores:,.0f}; we had "
        "two cores, so that is a hope and no measurement. Several masters do not need it."
    )
    yield (
        f"- **The movers** need {mover:.2f} cores each, {mover * line['brokers']:.1f} on a machine: over TCP every "
        "byte is copied by the processor, and every byte that is fetched or stored is hashed."
    )
    yield (
        f"- **The network**: {gbit:.0f} Gbit/s in each direction, and "
        f"{percent(line['machine_out_mb_per_s'] / (line['machine_in_mb_per_s'] + line['machine_out_mb_per_s']))} of "
        f"that is storing. {assumed['network_gbit_s']} Gbit/s are full at "
        f"{told['requests_per_s'] * assumed['network_gbit_s'] / gbit:.0f} pictures a second and GPU; with 25 Gbit/s "
        f"the network would be at {percent(gbit / 25)}. Features of half the size, as bfloat16, halve it."
    )
    yield (
        f"- **Memory for names** does not matter: {count(line['objects'])} objects take "
        f"{line['objects'] * master['object_bytes'] / 1e9:.1f} GB at the master, and a broker's {count(cached)} cached "
        f"features {cached * books['cached_bytes'] / 1e6:.1f} MB of its books, beside {assumed['cache_gib']} GiB of "
        "features."
    )
    lenders, each = line["machines"] * line["brokers"], assumed["connections_of_a_pair"]
    yield (
        f"- **Connections** do: a mover holds {each} to each other one that lends memory, which are {each * lenders:,} "
        f"if all {lenders:,} do, and {each * line['machines']:,} if one on each machine does (`--store-mib` on that "
        "one alone). Raise the limit of open files where that is more than it allows."
    )


def asked(found: Found) -> Lines:
    told, assumed = found["simulation"]["asked"], found["simulation"]["assumed"]
    width, height = told["picture"]
    yield (
        f"- {told['requests_per_s']:.1f} requests a second and GPU, with one picture of {width}x{height} each: what an "
        f"H200 served through a broker (`bench/results/{told['from']}`). A feature is "
        f"{told['feature_bytes'] / 1e6:.1f} MB."
    )
    yield (
        f"- {count(assumed['pictures'])} pictures come again and again, Zipf-distributed with a skew of "
        f"{assumed['skew']:g} where nothing else is said; {percent(assumed['once'])} of requests bring one that "
        "nobody sends again."
    )
    yield (
        f"- Each of a machine's {assumed['gpus']} GPUs has its broker with {assumed['cache_gib']} GiB, and each "
        f"machine lends {assumed['tier_gib']} GiB to the tier; {percent(assumed['filled'])} of both are filled, and "
        "what was used longest ago goes first. Any request may go to any GPU."
    )
    yield (
        f"- All that is made is stored, and is there for others {assumed['delay_s']:g} s after it was missed; the "
        f"tier has been there for {assumed['after_s'] / 3600:g} h."
    )


def by_machines(found: Found) -> Lines:
    skew = found["simulation"]["assumed"]["skew"]
    lines = [x for x in found["simulation"]["lines"] if x["of"] == "machines" and x["skew"] == skew]
    yield from table(
        (">machines", ">own cache", ">tier", ">made", ">network Gbit/s", ">puts/s", ">calls of the master/s",
         ">its cores", ">objects"),
        [
            (
                f"{line['machines']:,}",
                *(percent(line[name]) for name in ("local", "tier", "made")),
                number(network_gbit_s(line)),
                count(line["tier_puts_per_s"]),
                count(master_calls(found, line)),
                number(master_cores(found, line)),
                count(line["objects"]),
            )
            for line in lines
        ],
    )  # fmt: skip


def by_memory(found: Found) -> Lines:
    lines = [line for line in found["simulation"]["lines"] if line["of"] == "memory"]
    tiers = sorted({line["tier_gib"] for line in lines})
    caches = sorted({line["cache_gib"] for line in lines})
    made = {(line["cache_gib"], line["tier_gib"]): line["made"] for line in lines}
    yield from table(
        (">a GPU's cache", *(f">{tier:g} GiB lent" if tier else ">no tier" for tier in tiers)),
        [(f"{cache:g} GiB", *(percent(made[cache, tier]) for tier in tiers)) for cache in caches],
    )


def choices(found: Found) -> Lines:
    """What else an operator may choose, each against the fleet that stands for all."""
    eight, one = (fleet(found, "brokers", brokers=brokers) for brokers in (8, 1))
    now, later = (fleet(found, "reuse", reuse=reuse) for reuse in (0, 1))
    yield (
        f"- **One broker for a machine's GPUs, with the memory of all**, answers {percent(one['local'])} from its own "
        f"cache instead of {percent(eight['local'])}; the tier does the rest, so as much is made "
        f"({percent(one['made'])} and {percent(eight['made'])}), and {percent(1 - one['tier'] / eight['tier'])} less "
        "crosses the network to be read."
    )
    yield (
        f"- **Storing only what was used again where it was made** (`--min-cost-per-mib` high, `--reuse 1`) writes "
        f"{percent(later['stored'])} of requests instead of {percent(now['stored'])}, but after an hour the tier "
        f"answers {percent(later['tier'])} instead of {percent(now['tier'])}: most pictures come again to another "
        "machine before they come again to the same one. Choose it where the network is what is short."
    )


def checks(found: Found) -> Lines:
    yield from table(
        (">machines", ">skew", ">stored after uses", ">own cache: computed", ">drawn", ">tier: computed", ">drawn"),
        [
            (
                str(line["machines"]),
                f"{line['skew']:g}",
                str(line["reuse"]),
                *(f"{100 * line[name]:.2f} %" for name in (
                    "local_computed", "local_drawn", "tier_computed", "tier_drawn",
                )),
            )
            for line in found["simulation"]["checks"]
        ],
    )  # fmt: skip


def check_said(found: Found) -> Lines:
    lines = found["simulation"]["checks"]
    worst = max(
        abs(line[f"{name}_computed"] - line[f"{name}_drawn"]) for line in lines for name in ("local", "tier")
    )
    yield f"The largest difference is {100 * worst:.2f} % of requests, of {count(lines[0]['requests'])} drawn each."


def sharding(found: Found) -> Lines:
    yield from table(
        (">masters", ">busiest, by namespace", ">busiest, by key", ">keys that one more takes"),
        [
            (
                str(line["masters"]),
                f"{line['by_namespace']:.2f} x the mean",
                f"{line['by_key']:.2f} x the mean",
                percent(line["moved"]),
            )
            for line in found["simulation"]["sharding"]
        ],
    )


def sharding_said(found: Found) -> Lines:
    assumed, line = found["simulation"]["assumed"], largest(found)
    cores = master_cores(found, line)
    several = found["simulation"]["sharding"][1]
    yield (
        f"{assumed['namespaces']:,} namespaces, whose loads are Zipf-distributed as well, and "
        f"{assumed['points']} points of each master on the ring. With {several['masters']} masters the busiest of "
        f"{line['machines']:,} machines' needs {cores / several['masters'] * several['by_namespace']:.1f} cores by "
        f"namespace, {cores / several['masters'] * several['by_key']:.1f} by key."
    )


def broker_costs(found: Found) -> Lines:
    told = found["costs"]["broker"]
    yield from table(
        ("a broker", ">features/s", ">features per second of its core"),
        [
            (line["what"], f"{line['per_second']:,}", f"{line['per_core_second']:,}")
            for line in told["lookups"]
        ],
    )


def broker_said(found: Found) -> Lines:
    books, told = found["costs"]["broker"]["books"], found["costs"]["broker"]
    yield (
        f"A cached feature takes {books['cached_bytes']:,} bytes of a broker's memory for its books, and "
        f"{books['held_bytes']:,} while an engine has it (mean of {books['features']:,}, with {books['extra_bytes']} "
        f"bytes sealed beside each). One core hashes {told['hash_gb_per_core_s']:.2f} GB/s, which is what verifying "
        "costs."
    )


def master_costs(found: Found) -> Lines:
    yield from table(
        ("Mooncake's master", ">calls", ">a second", ">per second of its core"),
        [
            (line["what"], f"{line['calls']:g}", f"{line['per_second']:,}", f"{line['per_core_second']:,}")
            for line in found["costs"]["master"]["lines"]
        ],
    )


def master_said(found: Found) -> Lines:
    told = found["costs"]["master"]
    clients = told["lines"][0]["clients"]
    idle = told["idle_ms_per_s_and_client"]
    yield (
        f"{clients} clients on the same two cores, so that the right column is what counts. An object takes "
        f"{told['object_bytes']:,} bytes of the master's memory (mean of {told['objects']:,}, with names of "
        f"{told['name_bytes']} bytes); an idle client "
        + (f"{idle:.3f} ms of a core each second" if idle > 0 else "too little of a core to be seen")
        + f" (mean of {told['idle_clients']})."
    )


def transfers(tier: Found) -> Lines:
    by = {(line["mb"], line["what"], line["way"]): line for line in tier["transfers"]}
    rows = dict.fromkeys((mb, what) for mb, what, _ in by)
    yield from table(
        (">MB", "what", ">store ms p50", ">p99", ">plain TCP ms p50", ">p99", ">% of its rate", ">store CPU ms",
         ">plain TCP CPU ms"),
        [
            (
                f"{mb:g}",
                what,
                *(number(by[mb, what, way][p]) for way in ("store", "plain TCP") for p in ("ms_p50", "ms_p99")),
                f"{100 * by[mb, what, 'store']['gb_per_s'] / by[mb, what, 'plain TCP']['gb_per_s']:.0f}",
                *(number(by[mb, what, way]["cpu_ms"]) for way in ("store", "plain TCP")),
            )
            for mb, what in rows
        ],
    )  # fmt: skip


def hits(tier: Found) -> Lines:
    lines = tier["hits"]["lines"]
    yield from table(
        (">MB", ">fetched ms p50", ">p99", ">within 20 ms", ">here already ms",
         *(f">{name}, CPU ms" for name in lines[0]["cpu_ms"]), ">storing one, CPU ms"),
        [
            (
                f"{line['mb']:g}",
                *(number(line["fetched"][p] / 1000) for p in ("p50", "p99")),
                f"{line['within_20_ms_percent']:g} %",
                number(line["here"]["p50"] / 1000),
                *(number(ms) for ms in (*line["cpu_ms"].values(), line["put_cpu_ms"])),
            )
            for line in lines
        ],
    )  # fmt: skip


def hits_said(tier: Found) -> Lines:
    lines = [line for line in tier["hits"]["lines"] if line["within_20_ms_percent"] < 50]
    if lines:
        sizes = " and ".join(f"{line['mb']:g} MB" for line in lines)
        yield (
            f"A worker waits 20 ms unless told otherwise. On this machine most features of {sizes} come later than "
            "that, and are made again meanwhile. Where features are so large, give `mmbroker tier` a longer "
            "`--wait-ms`."
        )
    else:
        yield "Most came within the 20 ms that a worker waits unless told otherwise."


def misses(tier: Found) -> Lines:
    yield from table(
        ("a miss", ">us p50", ">p99"),
        [(line["what"], number(line["p50"]), number(line["p99"])) for line in tier["misses"]],
    )


def picture(tier: Found) -> Lines:
    told = tier["picture"]
    width, height = told["size"]
    yield (
        f"A picture of {width}x{height} is {told['mb']:.1f} MB of features. Decoding and preprocessing it takes "
        f"{told['made_ms']:.0f} ms, fetching what another machine made {told['fetched_ms']:.0f} ms "
        f"({told['times']:.1f} times faster), and finding it in one's own broker {told['here_ms']:.2f} ms."
    )


BLOCKS: dict[str, Maker] = {
    made.__name__: made
    for made in (
        where, missed, first, first_said, asked, by_machines, by_memory, choices, checks, check_said, sharding,
        sharding_said, broker_costs, broker_said, master_costs, master_said, transfers, hits, hits_said, misses,
        picture,
    )
}  # fmt: skip


def results() -> Found:
    """The result of `bench/scale.py` that the page stands on."""
    (name,) = set(re.findall(r"<!-- first (\S+) ", PAGE.read_text()))
    found: Found = json.loads((RESULTS / name).read_text())
    return found


if __name__ == "__main__":
    from docs.scale_plots import draw

    draw(results(), DOCS)
    PAGE.write_text(page(PAGE.read_text(), BLOCKS))
