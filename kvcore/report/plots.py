"""Plots of a results file: needle heatmaps, quality against budget, scores per method.

Every axis has a unit, every title its sample count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from kvcore.report.style import (
    MARKERS,
    STYLE,
    budget_text,
    counts_text,
    draw_points,
    method_looks,
    metric_label,
    new_figure,
    scale_of_shares,
    scale_of_values,
    shown_metrics,
)

MANY_LINES = 8


def plot_results(results: dict[str, Any], folder: Path) -> list[Path]:
    """Every plot that the results allow, as PNG files in `folder`; returns their paths."""
    paths = []
    with plt.style.context(STYLE):
        for bench in dict.fromkeys(row["bench"] for row in results["summary"]):
            summary = [row for row in results["summary"] if row["bench"] == bench]
            samples = [row for row in results["samples"] if row["bench"] == bench]
            if any("depth" in row for row in samples):
                paths.append(needle_heatmaps(samples, folder / f"{bench}_heatmap.png"))
            for metric in shown_metrics(summary):
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
    if len(contexts) == 1:
        return _needle_columns(samples, runs, contexts, depths)
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(1.6 + 3.4 * columns, 1.0 + 3.0 * lines), squeeze=False, layout="constrained"
    )
    image = None
    for axis, (label, budget) in zip(axes.flat, runs, strict=False):
        grid, count = _recall_grid(samples, label, budget, contexts, depths)
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        cells = int((~np.isnan(grid)).sum())
        each = f" ({count // cells} per cell)" if count % cells == 0 else ""
        name = label if label == "full" else f"{label}, budget {budget_text(budget)}"
        axis.set_title(f"{name}\nmean {np.nanmean(grid):.2f}, n={count}{each}", fontsize=10)
        axis.set_xticks(range(len(contexts)), [str(c) for c in contexts], rotation=45)
        axis.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
        axis.set_xlabel("context (tokens)")
        axis.set_ylabel("needle depth (%)")
        _write_cells(axis, grid)
    for axis in list(axes.flat)[len(runs) :]:
        axis.axis("off")
    if image is not None:
        figure.colorbar(image, ax=axes, label="recall of the needle", shrink=0.8)
    return figure


def _needle_columns(
    samples: Sequence[dict[str, Any]], runs: list[tuple[str, float]], contexts: list[int], depths: list[float]
) -> Figure:
    """At one context a grid would be a column: the runs stand side by side instead."""
    found = [_recall_grid(samples, label, budget, contexts, depths) for label, budget in runs]
    grid = np.concatenate([column for column, _ in found], axis=1)
    figure, (axis,) = new_figure(max(4.6, 2.6 + 0.5 * len(runs)), 4.4)
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    names = [
        f"{label if label == 'full' else f'{label}, {budget_text(budget)}'} (n={count})"
        for (label, budget), (_, count) in zip(runs, found, strict=True)
    ]
    axis.set_xticks(range(len(runs)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
    axis.set_ylabel("needle depth (%)")
    axis.set_title(f"context {contexts[0]} tokens", fontsize=10)
    _write_cells(axis, grid)
    figure.colorbar(image, ax=axis, label="recall of the needle")
    return figure


def _write_cells(axis: Any, grid: np.ndarray) -> None:
    """The value into every cell that has one."""
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            axis.text(x, y, f"{value:.1f}", ha="center", va="center", color="w" if value < 0.6 else "k", fontsize=8)


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
    """A metric against the nominal budget, one line per method, with confidence intervals.

    With one budget only, methods stand side by side on the horizontal axis instead.
    """
    budgets = {row["budget"] for row in rows if row["method"] != "full"}
    figure = _by_budget(metric, rows) if len(budgets) > 1 else _by_method(metric, rows)
    budget = "" if len(budgets) != 1 else f", budget {budget_text(next(iter(budgets)))}"
    figure.suptitle(f"{bench} on {rows[0]['backbone']}{budget}, {counts_text(rows)}", fontsize=11)
    return figure


def _by_budget(metric: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """One line per method at the longest context; the full cache is a line across."""
    contexts = [row["context"] for row in rows if row["context"] is not None]
    longest = max(contexts, default=None)
    rows = [row for row in rows if row["context"] == longest]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    many = len(methods) > MANY_LINES
    figure, (axis,) = new_figure(9.4 if many else 7.2, 5.2 if many else 4.6)
    looks = method_looks(methods)
    in_tokens = any(row["budget"] > 1 for row in rows)
    factor = 1 if in_tokens else 100
    for index, method in enumerate(methods):
        points = sorted((row for row in rows if row["method"] == method), key=lambda row: row["budget"])
        # side by side: equal values and their intervals would hide each other
        apart = factor * (1 + 0.012 * (index - len(methods) / 2))
        if method == "full":
            axis.axhline(points[0]["value"], color=looks[method][0], linestyle="--", linewidth=1.2, label=method)
        else:
            draw_points(axis, points, [apart * p["budget"] for p in points], method, looks[method])
    shares = [factor * row["budget"] for row in rows if row["method"] != "full"]
    place = "" if longest is None else f", context {longest} tokens"
    if in_tokens:
        axis.set_xlabel(f"budget (tokens per layer and KV head){place}")
    else:
        scale_of_shares(axis, shares)
        axis.set_xlabel(f"nominal budget (% of the full cache's bytes){place}")
    if many:
        figure.legend(loc="outside right center", fontsize=8)
    else:
        axis.legend(fontsize=8)
    scale_of_values(axis, metric, rows)
    axis.set_ylabel(metric_label(metric))
    axis.grid(alpha=0.3)
    return figure


def _by_method(metric: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Methods side by side, one marker per context."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    contexts = sorted({row["context"] for row in rows}, key=lambda c: (c is not None, c))
    figure, (axis,) = new_figure(max(7.2, 1.5 + 0.42 * len(methods)), 4.8)
    for index, context in enumerate(contexts):
        points = [row for row in rows if row["context"] == context]
        offset = (index - (len(contexts) - 1) / 2) * 0.15
        xs = [methods.index(p["method"]) + offset for p in points]
        name = "no context" if context is None else f"{context} tokens"
        draw_points(axis, points, xs, name, (None, MARKERS[index % len(MARKERS)]), linestyle="none")
    axis.set_xticks(range(len(methods)), methods, rotation=35, ha="right", rotation_mode="anchor", fontsize=9)
    axis.set_xlim(-0.5, len(methods) - 0.5)
    if len(contexts) > 1:
        axis.legend(title="context", fontsize=8, title_fontsize=8)
    elif contexts[0] is not None:
        axis.set_xlabel(f"method, context {contexts[0]} tokens")
    scale_of_values(axis, metric, rows)
    axis.set_ylabel(metric_label(metric))
    axis.grid(alpha=0.3)
    return figure


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
