"""Pictures of a result, as SVG files. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from . import goals

_COLORS: Final = {"cpu": "#94a3b8", "cuda_ipc": "#fb923c", "broker": "#14b8a6", "broker-gpu": "#0f766e"}
_KINDS: Final = {
    "transport": "#fca5a5",
    "hash": "#fdba74",
    "rebuild": "#fde68a",
    "broker": "#5eead4",
    "forward": "#93c5fd",
    "schedule": "#d8b4fe",
    "idle": "#e2e8f0",
}


def draw(found: Mapping[str, Any], directory: Path, stem: str = "serve") -> list[Path]:
    """Requests/s, TTFT and the thread's time; what a result does not have is not drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mmbroker"  # the same picture for the same figures
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for name, title, unit, path in (
        ("rate", "Requests a second", "requests/s", ("figures", "requests_per_second")),
        ("ttft", "Time to the first token, p99", "ms", ("figures", "ttft_ms", "p99")),
    ):
        made.append(_bars(found, directory / f"{stem}-{name}.svg", title, unit, path))
    if any("shares" in run["profile"] for run in found["runs"]):
        made.append(_thread(found, directory / f"{stem}-thread.svg"))
    return made


def _order(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    runs = [run for run in found["runs"] if run["load"]["concurrency"] > 1]
    return (
        list(dict.fromkeys(run["load"]["name"] for run in runs)),
        list(dict.fromkeys(run["transport"] for run in runs)),
    )


def _bars(found: Mapping[str, Any], file: Path, title: str, unit: str, path: tuple[str, ...]) -> Path:
    from matplotlib.figure import Figure

    loads, transports = _order(found)
    figure = Figure(figsize=(max(5.0, 1.6 * len(loads)), 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(transports))
    for index, transport in enumerate(transports):
        values = [goals.value(found, transport, load, *path) or 0.0 for load in loads]
        places = [place + (index - (len(transports) - 1) / 2) * width for place in range(len(loads))]
        bars = axes.bar(places, values, width, label=transport, color=_COLORS.get(transport))
        axes.bar_label(bars, [f"{v:.3g}" if v else "" for v in values], fontsize=7)
    axes.set_xticks(range(len(loads)), loads, fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return _save(figure, file)


def _thread(found: Mapping[str, Any], file: Path) -> Path:
    from matplotlib.figure import Figure

    runs = [run for run in found["runs"] if "shares" in run["profile"] and run["load"]["concurrency"] > 1]
    names = [f"{run['load']['name']}, {run['transport']}" for run in runs]
    figure = Figure(figsize=(8.0, 1.2 + 0.32 * len(runs)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(runs)
    for kind, color in _KINDS.items():
        values = [100 * run["profile"]["shares"].get(kind, 0.0) for run in runs]
        axes.barh(range(len(runs)), values, 0.7, left=left, label=kind, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(runs)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the scheduler thread's time")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=7, fontsize=8, frameon=False
    )
    return _save(figure, file)


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file, metadata={"Date": None})
    return file
