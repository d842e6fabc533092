"""Draw `gain.svg` from stored results: `python docs/plots.py`, in an environment with matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"
GPU, CPU = "gpu-h200-2026-11-29.json", "transport-amd-2026-11-29.json"

#: What is drawn: the name in the results, the name in the plot, the colour.
ON_GPU = (
    ("cpu (ShmPointerMMData)", "SGLang cpu", "#b91c1c"),
    ("cuda_ipc, handle cache, and hash", "SGLang cuda_ipc, with the hash", "#b45309"),
    ("cuda_ipc, handle cache", "SGLang cuda_ipc", "#4f46e5"),
    ("broker", "mmbroker", "#0f766e"),
)
ON_CPU = (
    ("sglang", "SGLang cpu", "#b91c1c"),
    ("sglang, hash given", "SGLang cpu, hash given", "#4f46e5"),
    ("broker, copy", "mmbroker, private copies", "#14b8a6"),
    ("broker, readonly", "mmbroker", "#0f766e"),
)


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _lines(rows: list[dict[str, Any]], way: str, value: str) -> dict[str, list[tuple[float, float]]]:
    """Sizes and microseconds of each way."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row.get("load"):
            found.setdefault(row[way], []).append((row["mb"], row[value]))
    return found


def _spoken(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.1f} ms"


def _panel(axes: Axes, title: str, lines: dict[str, list[tuple[float, float]]], ways: Any) -> None:
    for name, shown, colour in ways:
        points = sorted(lines[name])
        sizes, times = zip(*points, strict=True)
        strong = shown == "mmbroker"
        axes.plot(
            sizes, times, "o-", color=colour, linewidth=2.6 if strong else 1.6, markersize=5 if strong else 4
        )
        # The label stands a little off its line, on the side where there is room.
        below = strong or shown == "SGLang cuda_ipc"
        axes.annotate(
            f"{shown}: {_spoken(times[-1])}",
            (sizes[-1], times[-1]),
            xytext=(0, -20 if below else 7),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontweight="bold" if strong else "normal",
        )
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([0.6, 2.4, 9.6, 38], ["0.6", "2.4", "9.6", "38"])
    axes.minorticks_off()
    axes.set_yticks([1, 10, 100, 1000, 10000], ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms"])
    axes.set_ylim(1, 60000)
    axes.set_xlabel("size of one picture's features, MB")
    axes.grid(axis="y", color="#e2e8f0")
    axes.spines[["top", "right"]].set_visible(False)


def panels(count: int, title: str, sharey: bool = True) -> tuple[Figure, Any]:
    """A figure with so many panels side by side, in the style of all."""
    plt.rcParams.update(
        {"svg.hashsalt": "mmbroker", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    )
    figure, axes = plt.subplots(1, count, figsize=(11, 4.4), sharey=sharey, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure, axes


def save(figure: Figure, target: Path) -> Path:
    """The same bytes from the same results, with one version of matplotlib."""
    figure.savefig(target, format="svg", facecolor="white", metadata={"Date": None})
    plt.close(figure)
    return target


def draw(target: Path) -> None:
    """What one picture costs the scheduler's thread."""
    figure, (left, right) = panels(2, "What one picture costs the scheduler's thread (p50)")
    _panel(left, "on an H200, beside SGLang 0.5.17", _lines(_load(GPU)["rows"], "way", "p50"), ON_GPU)
    _panel(
        right,
        "on two cores of an EPYC, beside SGLang 0.5.23",
        _lines(_load(CPU)["rows"], "transport", "scheduler_us_p50"),
        ON_CPU,
    )
    save(figure, target)


if __name__ == "__main__":
    draw(DOCS / "gain.svg")
