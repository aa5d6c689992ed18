"""Plots of comparisons as SVG, by matplotlib: an extra of the package."""

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from loradock.lab.comparison import Row

_COLOURS: Final = {
    "fifo": "#999999", "lru": "#222222", "sieve": "#0072b2", "gdsf": "#d55e00",
    "adaptive": "#009e73",
}  # fmt: skip
"""Colours that people with any colour vision tell apart (Okabe and Ito)."""

_COLUMNS: Final = 4


def plot_load_time(rows: Sequence[Row], path: Path) -> None:
    """Write an SVG: for each workload, load time by memory, a line per policy and the bound.

    Load times are relative to LRU's.
    """
    by_workload: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_workload[row.workload].append(row)
    columns = min(_COLUMNS, len(by_workload))
    lines = ceil(len(by_workload) / columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axes, (name, found) in zip(grid, by_workload.items(), strict=False):
        _draw(axes, name, found)
    for axes in grid[len(by_workload) :]:
        axes.set_visible(False)
    grid[0].set_ylabel("load time, LRU = 1")
    # The axes share it; set last, because it ends automatic scaling.
    grid[0].set_ylim(bottom=0)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _draw(axes: Any, name: str, rows: Sequence[Row]) -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xscale("log")
    shares = sorted({row.memory_share for row in rows})
    axes.set_xticks(shares, [f"{100 * share:g}" for share in shares], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("memory, % of all adapters", fontsize=8)
    axes.grid(visible=True, alpha=0.25)
    by_policy: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_policy[row.policy].append(row)
    for policy, found in by_policy.items():
        times, colour = [row.of_lru for row in found], _COLOURS.get(policy)
        axes.plot(shares, times, label=policy, marker="o", markersize=3, color=colour)
    first = next(iter(by_policy.values()))
    bounds = [row.bound_s / row.load_s * row.of_lru for row in first]
    axes.plot(shares, bounds, label="offline bound", linestyle="--", color="#cc79a7")
