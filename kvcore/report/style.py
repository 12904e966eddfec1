"""How pictures look: colours and markers of methods, labels with units, one way to draw points with intervals.

Colours are Okabe and Ito's: told apart by colour-blind readers; in print, where colours fall together, markers differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

from kvcore.cli import groups

COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#7F7F7F")
MARKERS = "D^v<>*hXpso"  # as many as have no divisor in common with the number of colours: no pair comes twice
# what a reader looks for first looks the same in every picture
OWN_LOOK = {"full": ("#000000", "P"), "sekv": ("#D55E00", "o"), "freqdepth": ("#0072B2", "s")}
STYLE = {"axes.prop_cycle": cycler(color=["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F"])}
LABELS = {
    "kl": "KL to the full cache (nats), lower is better",
    "agreement": "top-1 agreement with the full cache (share of the steps)",
    "coverage": "share of the attention mass attended",
    "recall": "recall of the needle (share of its facts)",
    "string_match": "RULER score (% of the answers found)",
    "average": "mean score of the tasks (0 to 100)",
    "accuracy": "accuracy (%)",
    "exact_match": "exact match (% of the questions)",
    "strict_match": "strict match (% of the questions)",
    "pass@1": "pass@1 (% of the programs)",
    "f1": "token F1 (0 to 100)",
    "rouge_l": "ROUGE-L (0 to 100)",
    "rouge_lsum": "ROUGE-Lsum (0 to 100)",
    "total_seconds": "prefill and decoding together (s)",
    "ttft_seconds": "time to the first token (s)",
    "prefill_seconds": "prefill (s)",
    "ms_per_token": "decoding (ms per token)",
    "tokens_per_second": "tokens written per second (of prefill and decoding)",
    "peak_growth_bytes": "growth of the memory at its peak (bytes)",
}
# of the efficiency benchmark's two dozen metrics; the ratios are to the full cache of the same run
SHOWN_METRICS = (
    *("total_seconds", "total_seconds_ratio", "tokens_per_second", "tokens_per_second_ratio", "ttft_seconds"),
    *("ms_per_token_ratio", "peak_growth_bytes_ratio"),
)
MANY_METRICS = 10


def shown_metrics(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics worth a column and a picture."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    return metrics if len(metrics) <= MANY_METRICS else [m for m in metrics if m in SHOWN_METRICS]


def metric_label(metric: str) -> str:
    """Name and unit of a metric, for an axis."""
    if metric.endswith("_ratio"):
        name = LABELS.get(metric.removesuffix("_ratio"), metric.removesuffix("_ratio")).split(" (")[0]
        return f"{name} / full cache's"
    return LABELS.get(metric, f"{metric} (0 to 100)")


def budget_text(budget: float | int) -> str:
    """A budget with its unit: a share of the bytes, or tokens per layer and KV head."""
    return f"{100 * budget:g}%" if budget <= 1.0 else f"{budget:g} tokens"


def counts_text(rows: Sequence[dict[str, Any]]) -> str:
    """Sample counts, and whether there are intervals."""
    counts = sorted({row["n"] for row in rows})
    text = f"n={counts[0]}" if len(counts) == 1 else f"n={counts[0]} to {counts[-1]}"
    return text + (", 95% intervals" if any(row.get("ci_low") is not None for row in rows) else ", no intervals")


@lru_cache(maxsize=1)
def _known_methods() -> list[str]:
    return groups()["method"]


def method_looks(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) of each method: those of `conf/method` the same in every picture, no pair twice in one."""
    known = _known_methods()
    others = [m for m in methods if m not in known]
    looks = {}
    for method in methods:
        index = known.index(method) if method in known else len(known) + others.index(method)
        looks[method] = OWN_LOOK.get(method, (COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]))
    return looks


def new_figure(width: float, height: float, columns: int = 1, share_y: bool = False) -> tuple[Figure, Any]:
    """A figure in this project's style and its axes, side by side; sizes in inches."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, sharey=share_y, layout="constrained"
    )
    return figure, axes[0]


def draw_points(
    axis: Any,
    points: Sequence[dict[str, Any]],
    xs: Sequence[float],
    label: str,
    look: tuple[str | None, str],
    linestyle: str = "-",
) -> None:
    """Values with their intervals; `look` is (colour, marker), None takes the next colour of the cycle."""
    colour, marker = look
    ys = np.array([p["value"] for p in points], dtype=float)
    low = np.array([p["value"] if p.get("ci_low") is None else p["ci_low"] for p in points], dtype=float)
    high = np.array([p["value"] if p.get("ci_high") is None else p["ci_high"] for p in points], dtype=float)
    errors = np.clip(np.stack([ys - low, high - ys]), 0, None)
    own = label in OWN_LOOK
    axis.errorbar(
        xs, ys, yerr=errors, label=label, marker=marker, color=colour, linestyle=linestyle,
        capsize=3, elinewidth=0.9, linewidth=1.8 if own else 1.2, markersize=8 if own else 6, zorder=3 if own else 2,
    )  # fmt: skip


def scale_of_values(axis: Any, metric: str, rows: Sequence[dict[str, Any]]) -> None:
    """Divergences: logarithmic, with the full cache's 0 on the axis. Needles: from none to all, whatever was found."""
    values = [row["value"] for row in rows]
    if metric == "kl" and min(values) > -1e-6 and max(values) > 0:
        axis.set_yscale("symlog", linthresh=1e-3)
        axis.set_ylim(bottom=0, top=2 * max(values))
    elif metric == "recall":
        axis.set_ylim(-0.05, 1.05)


def scale_of_shares(axis: Any, percents: Sequence[float]) -> None:
    """Shares of the cache in percent: logarithmic, since the small ones lie close together."""
    axis.set_xscale("log")
    ticks = [t for t in (1, 2, 5, 10, 15, 20, 50, 100) if 0.7 * min(percents) <= t <= 1.3 * max(percents)]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
