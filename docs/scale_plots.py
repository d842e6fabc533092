"""Draw the plots of `scale.md`: who answers in a fleet, and what that asks for. `make_scale.py` calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.demand import Found, master_cores, network_gbit_s
from docs import plots


def draw(found: Found, directory: Path) -> list[Path]:
    """Who answers, and what it asks, by the number of machines."""
    return [
        plots.save(_answers(found), directory / "scale-answers.svg"),
        plots.save(_load(found), directory / "scale-load.svg"),
    ]


def _by_skew(found: Found) -> dict[float, list[dict[str, Any]]]:
    made: dict[float, list[dict[str, Any]]] = {}
    for line in found["simulation"]["lines"]:
        if line["of"] == "machines":
            made.setdefault(line["skew"], []).append(line)
    return made


def _machines(axes: Any, lines: list[dict[str, Any]]) -> list[int]:
    machines = [line["machines"] for line in lines]
    axes.set_xscale("log")
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.set_xlim(machines[0], machines[-1])
    axes.set_xlabel("machines of 8 GPUs")
    axes.spines[["top", "right"]].set_visible(False)
    return machines


def _answers(found: Found) -> Any:
    by_skew, once = _by_skew(found), 100 * found["simulation"]["assumed"]["once"]
    figure, panels = plots.panels(len(by_skew), "Who answers a request for a picture")
    for axes, (skew, lines) in zip(panels, by_skew.items(), strict=True):
        machines = _machines(axes, lines)
        shares = [[100 * line[name] for line in lines] for name in ("local", "tier", "made")]
        axes.stackplot(machines, shares, colors=("#0f766e", "#5eead4", "#e2e8f0"))
        axes.set_title(f"skew {skew:g}", fontsize=11, loc="left")
        axes.set_ylim(0, 100)
        axes.axhline(100 - once, color="#94a3b8", linestyle="--")
        low = 0.0
        for name, values, colour in zip(
            ("its broker's cache", "the tier", "made"), shares, ("white", "#134e4a", "#475569"), strict=True
        ):
            if values[-1] > 7:
                middle = 91 if name == "made" else low + values[-1] / 2  # above the line of what comes once
                axes.annotate(
                    f"{name} {values[-1]:.0f} %", (machines[-1], middle), xytext=(-6, -4),
                    textcoords="offset points", ha="right", color=colour, fontweight="bold",
                )  # fmt: skip
            low += values[-1]
    panels[0].annotate(
        "pictures that come only once",
        (1, 100 - once),
        xytext=(4, 5),
        textcoords="offset points",
        color="#475569",
    )
    panels[0].set_yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    return figure


def _load(found: Found) -> Any:
    assumed = found["simulation"]["assumed"]
    figure, (left, right) = plots.panels(2, "What that asks for", sharey=False)
    for (skew, lines), colour in zip(_by_skew(found).items(), ("#b45309", "#0f766e", "#4f46e5"), strict=True):
        for axes, values in (
            (left, [master_cores(found, line) for line in lines]),
            (right, [network_gbit_s(line) for line in lines]),
        ):
            machines = _machines(axes, lines)
            axes.plot(machines, values, "o-", color=colour, markersize=4, label=f"skew {skew:g}")
    left.set_title("cores of the one master", fontsize=11, loc="left")
    left.set_yscale("log")
    left.axhline(assumed["master_threads"], color="#94a3b8", linestyle="--")
    left.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    left.annotate(
        "its threads",
        (1, assumed["master_threads"]),
        xytext=(4, -12),
        textcoords="offset points",
        color="#475569",
    )
    left.minorticks_off()
    left.legend(frameon=False, loc="lower right")
    right.set_title("Gbit/s of a machine's network, in each direction", fontsize=11, loc="left")
    right.set_ylim(0)
    for axes in (left, right):
        axes.grid(axis="y", color="#e2e8f0")
    return figure
