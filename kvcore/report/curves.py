"""Figures of a report beyond those of a single run: memory, quality against cost, zooming, training.

Every axis has a unit, every title its sample count; bars are 95% bootstrap intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvcore.report.style import (
    MARKERS,
    budget_text,
    counts_text,
    draw_points,
    method_looks,
    metric_label,
    new_figure,
    scale_of_shares,
    scale_of_values,
)

Rows = Sequence[dict[str, Any]]
COSTS = {
    "device_share": ("device bytes (% of the full cache)", 100.0),
    "h2d_bytes_per_token": ("host-to-device traffic (KB per token)", 1e-3),
}


def memory_curve(rows: Rows) -> Figure:
    """Device and host bytes of the cache against the context, one line per method and budget."""
    figure, axes = new_figure(9.0, 4.2, columns=2)
    runs = list(dict.fromkeys((row["method"], row["budget"]) for row in rows))
    # a method at several budgets needs a look for each
    several = len(runs) > len({method for method, _ in runs})
    looks = method_looks([f"{method} {budget}" if several and method != "full" else method for method, budget in runs])
    for axis, column, where in zip(axes, ("device_bytes", "host_bytes"), ("device", "host"), strict=True):
        for (method, budget), (colour, marker) in zip(runs, looks.values(), strict=True):
            points = {r["context"]: r[column] / 2**20 for r in rows if (r["method"], r["budget"]) == (method, budget)}
            xs = sorted(points)
            name = method if method == "full" else f"{method}, {budget_text(budget)}"
            axis.plot(xs, [points[x] for x in xs], marker=marker, color=colour, alpha=0.8, label=name)
        axis.set_xscale("log", base=2)
        contexts = sorted({row["context"] for row in rows})
        axis.set_xticks(contexts, [str(c) for c in contexts], rotation=45)
        axis.set_xlabel("context (tokens)")
        axis.set_ylabel(f"cache on the {where} (MiB)")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    title = f"{rows[0]['bench']} on {rows[0]['backbone']}, the largest of the samples, n={_counts(rows)}"
    figure.suptitle(title, fontsize=11)
    return figure


def quality_against_cost(rows: Rows, metric: str, better_high: bool) -> Figure:
    """A metric against device share and against traffic; the line joins the runs that no other run beats in both."""
    figure, axes = new_figure(11.0, 4.8, columns=2, share_y=True)
    looks = method_looks(list(dict.fromkeys(row["method"] for row in rows)))
    for axis, (column, (label, factor)) in zip(axes, COSTS.items(), strict=True):
        for method, look in looks.items():
            points = [row for row in rows if row["method"] == method]
            xs = [factor * row[column] for row in points]
            name = f"{method} (reference)" if points[0].get("reference_only") else method
            draw_points(axis, points, xs, name, look, linestyle="none")
        fair = [row for row in rows if not row.get("reference_only")]
        front = pareto_front(fair, column, better_high)
        axis.plot([factor * r[column] for r in front], [r["value"] for r in front], color="0.5", lw=1, zorder=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(metric_label(metric))
    scale_of_shares(axes[0], [100 * row["device_share"] for row in rows])
    axes[1].set_xscale("symlog", linthresh=1)
    axes[1].set_xlim(-0.2, max(1, 3e-3 * max(row["h2d_bytes_per_token"] for row in rows)))
    scale_of_values(axes[0], metric, rows)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    context = ", ".join(str(c) for c in sorted({row["context"] for row in rows}))
    title = f"{rows[0]['bench']} on {rows[0]['backbone']}, context {context} tokens, {counts_text(rows)}"
    title += "; line: best runs"
    figure.suptitle(title, fontsize=11)
    return figure


def pareto_front(rows: Rows, column: str, better_high: bool) -> list[dict[str, Any]]:
    """The runs that cost less than every run of at least their quality, cheapest first."""
    sign = -1.0 if better_high else 1.0
    front: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda r: (r[column], sign * r["value"])):
        if not front or sign * row["value"] < sign * front[-1]["value"]:
            front.append(row)
    return front


def zoom_heatmaps(samples: Rows) -> Figure:
    """Layers x query heads: share of the units at hand that are zoomed into, per run."""
    runs = list(dict.fromkeys((row["label"], row["budget"]) for row in samples))
    figure, axes = new_figure(1.2 + 4.2 * len(runs), 5.2, columns=len(runs))
    for axis, (label, budget) in zip(axes, runs, strict=True):
        own = [row["zoom"]["frequency"] for row in samples if (row["label"], row["budget"]) == (label, budget)]
        mean = 100 * np.mean(np.array(own, dtype=float), axis=0)
        image = axis.imshow(mean, cmap="viridis", aspect="auto", vmin=0, interpolation="nearest")
        title = f"{label}, budget {budget_text(budget)}\nmean {mean.mean():.1f}%, n={len(own)} samples"
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("query head")
        axis.set_ylabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axis, label="zoomed into (% of the units at hand)")
    return figure


def training_curves(records: Rows) -> Figure:
    """Loss and its parts, and measures on held-out documents, against the step."""
    trained = [r for r in records if "loss" in r]
    held_out = [r for r in records if any(key.startswith("eval/") for key in r)]
    figure, axes = new_figure(10.0, 4.0, columns=2)
    for index, key in enumerate(k for k in dict.fromkeys(k for r in trained for k in r) if k.startswith("loss")):
        if key != "loss" or not any(k.startswith("loss/") for r in trained for k in r):
            _line(axes[0], trained, key, index)
    axes[0].set_ylabel("loss (nats for distillation terms)")
    axes[0].set_title(f"training, {len(trained)} steps", fontsize=10)
    for index, key in enumerate(k for k in dict.fromkeys(k for r in held_out for k in r) if k.startswith("eval/")):
        if "rank" not in key:
            _line(axes[1], held_out, key, index)
    axes[1].set_ylabel("value on held-out documents")
    axes[1].set_title(f"held out, {len(held_out)} evaluations", fontsize=10)
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    return figure


def _line(axis: Any, records: Rows, key: str, index: int) -> None:
    own = [r for r in records if r.get(key) is not None]
    marker = MARKERS[index % len(MARKERS)] if len(own) < 30 else None
    axis.plot([r["step"] for r in own], [r[key] for r in own], label=key.removeprefix("eval/"), marker=marker)


def _counts(rows: Rows) -> str:
    counts = sorted({row["n"] for row in rows})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
