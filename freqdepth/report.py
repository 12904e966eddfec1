"""What FreqDepthKV decided: mode map, spectrum, probe loss and bytes per part, as tables and plots.

Legend: blocks of layers x KV heads; R coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from freqdepth.basis import KltBasis
from freqdepth.cache import FreqDepthCache
from freqdepth.layout import RowBlock
from freqdepth.shared import SharedSide

MODE_COLORS = {"shared": "#4c72b0", "residual": "#dd8452", "exact": "#55a868"}
PARTS = ("coefficients", "steps", "bases", "means and metric", "residual", "exact heads", "window", "positions")


def block_statistics(cache: FreqDepthCache, row: int = 0) -> list[dict[str, Any]]:
    """Per block of one row: layers, modes, losses, λ, widths, energy, folded tokens and bytes per part.

    Raises:
        ValueError: nothing has been compressed (empty cache or budget=1.0).
    """
    if not cache.blocks or not cache.blocks[0].rows:
        raise ValueError("the cache holds no compressed block: run a prefill with budget < 1.0 first")
    found = []
    for block in cache.blocks:
        stored = block.rows[row]
        statistics = asdict(stored.report)
        statistics["layers"] = [block.members.start, block.members.stop - 1]
        statistics["bytes"] = bytes_by_part(stored)
        folded = statistics["folded_tokens"]
        statistics["fold_error_per_token"] = statistics["fold_error"] / folded if folded else 0.0
        found.append(statistics)
    return found


def bytes_by_part(row: RowBlock) -> dict[str, int]:
    """Bytes of one row of one block by what they are for; they add up to everything stored."""
    parts = dict.fromkeys(PARTS, 0)
    for side in (row.keys, row.values):
        if side is not None:
            _add_side(parts, side)
    for residual in (row.residual_keys, row.residual_values):
        if residual is not None:
            parts["residual"] += _bytes(residual.tensors())
    parts["exact heads"] = _bytes([*row.exact_keys, *row.exact_values])
    scales = [scale for scale in (*row.key_scale, *row.value_scale) if scale is not None]
    parts["window"] = _bytes([*row.window_keys, *row.window_values, *scales])
    parts["positions"] = _bytes([t for t in (row.positions, row.frequencies, row.hidden) if t is not None])
    return parts


def _add_side(parts: dict[str, int], side: SharedSide) -> None:
    every = _bytes(side.coefficients.tensors())
    steps = side.coefficients.step.nbytes + side.coefficients.offset.nbytes
    parts["coefficients"] += every - steps
    parts["steps"] += steps
    parts["means and metric"] += side.mean.nbytes
    basis = _bytes(side.basis.tensors())
    if isinstance(side.basis, KltBasis):
        parts["means and metric"] += side.basis.metric.nbytes
        basis -= side.basis.metric.nbytes
    parts["bases"] += basis


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def plot_modes(statistics: list[dict[str, Any]], path: Path | str) -> Path:
    """Mode map: one cell per block of layers and KV head, labelled with the probe loss; written as PNG."""
    num_heads = len(statistics[0]["modes"])
    figure = Figure(figsize=(1.2 * num_heads + 2.5, 0.6 * len(statistics) + 1.6))
    axes = figure.subplots()
    for y, block in enumerate(statistics):
        for x, mode in enumerate(block["modes"]):
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=MODE_COLORS[mode], edgecolor="white"))
            axes.text(x + 0.5, y + 0.5, f"{block['loss'][x]:.2g}", ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(0, num_heads), ylim=(len(statistics), 0), xlabel="KV head", ylabel="layers of the block")
    axes.set_xticks([x + 0.5 for x in range(num_heads)], [str(x) for x in range(num_heads)])
    labels = [f"{block['layers'][0]}-{block['layers'][1]}" for block in statistics]
    axes.set_yticks([y + 0.5 for y in range(len(statistics))], labels)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color in MODE_COLORS.values()]
    axes.legend(handles, list(MODE_COLORS), loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    axes.set_title("mode and probe loss")
    return _saved(figure, path)


def plot_spectrum(statistics: list[dict[str, Any]], path: Path | str) -> Path:
    """Share of the energy outside the leading coefficients, per block, for keys and values; written as PNG."""
    figure = Figure(figsize=(9, 3.5))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, side in zip(panels, ("key", "value"), strict=True):
        for block in statistics:
            energy = block[f"{side}_energy"]
            if not energy:
                continue
            label = f"layers {block['layers'][0]}-{block['layers'][1]}"
            remaining = [max(1 - share, 1e-6) for share in energy]
            axes.plot(range(1, len(remaining) + 1), remaining, marker="." if len(energy) < 16 else None, label=label)
        axes.set(xlabel="coefficients", title=f"{side}s", yscale="log")
    panels[0].set_ylabel("energy not covered")
    panels[0].legend(fontsize=7, frameon=False)
    return _saved(figure, path)


def _saved(figure: Figure, path: Path | str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return path
