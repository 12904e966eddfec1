"""Plots of a results file: needle heatmaps, quality against budget, scores per method.

Colours are told apart by colour-blind readers and in print; every axis has a unit, every title its sample count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

STYLE = "tableau-colorblind10"
MARKERS = "osD^vP*X<>hp"
LABELS = {
    "kl": "KL to the full cache (nats), lower is better",
    "agreement": "top-1 agreement with the full cache",
    "coverage": "share of attention mass attended",
}


def plot_results(results: dict[str, Any], folder: Path) -> list[Path]:
    """Every plot that the results allow, as PNG files in `folder`; returns their paths."""
    paths = []
    with plt.style.context(STYLE):
        for bench in dict.fromkeys(row["bench"] for row in results["summary"]):
            summary = [row for row in results["summary"] if row["bench"] == bench]
            samples = [row for row in results["samples"] if row["bench"] == bench]
            if any("depth" in row for row in samples):
                paths.append(needle_heatmaps(samples, folder / f"{bench}_heatmap.png"))
            for metric in dict.fromkeys(row["metric"] for row in summary):
                rows = over_tasks([row for row in summary if row["metric"] == metric])
                paths.append(quality_against_budget(bench, metric, rows, folder / f"{bench}_{metric}.png"))
    return paths


def over_tasks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only the rows over all tasks where there are such."""
    overall = [row for row in rows if row["task"] in ("all", "mean")]
    return overall or list(rows)


def needle_heatmaps(samples: Sequence[dict[str, Any]], path: Path) -> Path:
    """`needle_grids` as a file."""
    return _save(needle_grids(samples), path)


def needle_grids(samples: Sequence[dict[str, Any]]) -> Figure:
    """One context x depth grid of recall per method and budget, side by side on one colour scale."""
    runs = list(dict.fromkeys((row["label"], row["budget"]) for row in samples))
    contexts = sorted({row["context"] for row in samples})
    depths = sorted({row["depth"] for row in samples})
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(1.6 + 3.4 * columns, 1.0 + 3.0 * lines), squeeze=False, layout="constrained"
    )
    image = None
    for axis, (label, budget) in zip(axes.flat, runs, strict=False):
        grid, count = _recall_grid(samples, label, budget, contexts, depths)
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_title(f"{label}, budget {budget:g}\nmean {np.nanmean(grid):.2f}, n={count}", fontsize=10)
        axis.set_xticks(range(len(contexts)), [str(c) for c in contexts], rotation=45)
        axis.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
        axis.set_xlabel("context (tokens)")
        axis.set_ylabel("needle depth (%)")
        for (y, x), value in np.ndenumerate(grid):
            if not np.isnan(value):
                axis.text(x, y, f"{value:.1f}", ha="center", va="center", color="w" if value < 0.6 else "k", fontsize=8)
    for axis in list(axes.flat)[len(runs) :]:
        axis.axis("off")
    if image is not None:
        figure.colorbar(image, ax=axes, label="recall of the needle", shrink=0.8)
    return figure


def _recall_grid(
    samples: Sequence[dict[str, Any]], label: str, budget: float, contexts: list[int], depths: list[float]
) -> tuple[np.ndarray, int]:
    """[depth, context] mean recall of one run, and its sample count."""
    cells: dict[tuple[int, int], list[float]] = {}
    for row in samples:
        if (row["label"], row["budget"]) == (label, budget):
            cells.setdefault((depths.index(row["depth"]), contexts.index(row["context"])), []).append(row["score"])
    grid = np.full((len(depths), len(contexts)), np.nan)
    for cell, values in cells.items():
        grid[cell] = sum(values) / len(values)
    return grid, sum(map(len, cells.values()))


def quality_against_budget(bench: str, metric: str, rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """`quality_figure` as a file."""
    return _save(quality_figure(bench, metric, rows), path)


def quality_figure(bench: str, metric: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """A metric against the measured device share, one line per method, with confidence intervals.

    With one budget only, methods stand side by side on the horizontal axis instead.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    budgets = {row["budget"] for row in rows if not (row["budget"] == 1.0 and row["method"] == "full")}
    contexts = sorted({row["context"] for row in rows if row["context"] is not None})
    figure, axis = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    if len(budgets) > 1:
        for index, method in enumerate(methods):
            points = sorted(
                (row for row in rows if row["method"] == method and row["context"] == contexts[-1]),
                key=lambda row: row["budget"],
            )
            draw_points(axis, points, [100 * p["budget"] for p in points], method, MARKERS[index % len(MARKERS)])
        axis.set_xlabel(f"nominal budget (% of the full cache's bytes), context {contexts[-1]} tokens")
        axis.legend(fontsize=8)
    else:
        for index, context in enumerate(contexts):
            points = [row for row in rows if row["context"] == context]
            offset = (index - (len(contexts) - 1) / 2) * 0.15
            xs = [methods.index(p["method"]) + offset for p in points]
            draw_points(axis, points, xs, f"{context} tokens", MARKERS[index % len(MARKERS)], linestyle="none")
        axis.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
        axis.legend(title="context", fontsize=8)
    values = [row["value"] for row in rows]
    if metric == "kl" and min(values) > -1e-6 and max(values) > 0:
        axis.set_yscale("symlog", linthresh=1e-3)
        axis.set_ylim(bottom=0, top=2 * max(values))
    axis.set_ylabel(LABELS.get(metric, metric))
    counts = sorted({row["n"] for row in rows})
    budget_text = "" if len(budgets) > 1 else f", budget {next(iter(budgets), 1.0):g}"
    axis.set_title(f"{bench} on {rows[0]['backbone']}{budget_text}, n={'-'.join(map(str, counts))}, 95% intervals")
    axis.grid(alpha=0.3)
    return figure


def new_figure(width: float, height: float, columns: int = 1, share_y: bool = False) -> tuple[Figure, Any]:
    """A figure in this project's style and its axes, side by side; sizes in inches."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, sharey=share_y, layout="constrained"
    )
    return figure, axes[0]


def draw_points(
    axis: Any, points: Sequence[dict[str, Any]], xs: Sequence[float], label: str, marker: str, linestyle: str = "-"
) -> None:
    ys = np.array([p["value"] for p in points], dtype=float)
    low = np.array([p["value"] if p.get("ci_low") is None else p["ci_low"] for p in points], dtype=float)
    high = np.array([p["value"] if p.get("ci_high") is None else p["ci_high"] for p in points], dtype=float)
    errors = np.clip(np.stack([ys - low, high - ys]), 0, None)
    axis.errorbar(xs, ys, yerr=errors, label=label, marker=marker, linestyle=linestyle, capsize=3)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
