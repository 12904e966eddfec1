"""Zoom statistics: how often each head expands, what the factor cache saves, what travels from host to device.

Legend: L layers, Hq query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


class ZoomStatistics:
    """Sums over the decode steps of one cache (not part of its memory).

    Attributes:
        expanded: [L, Hq] sum over steps and rows of the units zoomed into.
        available: [L] sum over steps and rows of the units that could have been.
        steps: [L] steps times rows.
        found_bytes: bytes of the rows zoomed into that were in the factor cache.
        moved_bytes: bytes of those that had to be fetched.
        rank_sum, rank_count: kept components of the spans' factors, for the mean effective rank.
        cache_bytes: bytes of the device factor cache at the latest step.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self.expanded = np.zeros((num_layers, num_heads))
        self.available = np.zeros(num_layers)
        self.steps = np.zeros(num_layers)
        self.found_bytes = self.moved_bytes = self.cache_bytes = 0
        self.rank_sum = self.rank_count = 0.0

    def record(self, layer: int, zoomed: Tensor, available: float) -> None:
        """One step: units zoomed into by each row and query head [B, Hq], and units at hand per row."""
        self.expanded[layer] += zoomed.sum(0).cpu().numpy()
        self.available[layer] += available * zoomed.shape[0]
        self.steps[layer] += zoomed.shape[0]

    @property
    def zoomed_bytes(self) -> int:
        """Bytes of the rows zoomed into, cached or not."""
        return self.found_bytes + self.moved_bytes

    def record_rank(self, ranks: Tensor) -> None:
        """Kept components of some spans."""
        self.rank_sum += float(ranks.sum())
        self.rank_count += ranks.numel()

    def summary(self) -> ZoomSummary:
        """Means over everything recorded."""
        steps = np.maximum(self.steps, 1)
        return ZoomSummary(
            frequency=(self.expanded / np.maximum(self.available, 1)[:, None]).tolist(),
            units_per_step=float((self.expanded / steps[:, None]).mean()),
            effective_rank=self.rank_sum / self.rank_count if self.rank_count else None,
            hit_rate=1.0 - self.moved_bytes / self.zoomed_bytes if self.zoomed_bytes else None,
            zoomed_bytes=self.zoomed_bytes,
            moved_bytes=self.moved_bytes,
            cache_bytes=self.cache_bytes,
        )


@dataclass(frozen=True)
class ZoomSummary:
    """Zoom statistics of one run.

    Attributes:
        frequency: L lists of Hq shares: units zoomed into per unit at hand (the article's heatmap).
        units_per_step: mean units (tokens or spans) that a query head zooms into per step and layer.
        effective_rank: mean kept components of a span's factors; None when raw rows are kept.
        hit_rate: share of the zoomed bytes found in the device factor cache; None when nothing was zoomed into.
        zoomed_bytes, moved_bytes: totals over the run.
        cache_bytes: bytes of the device factor cache, all layers.
    """

    frequency: list[list[float]]
    units_per_step: float
    effective_rank: float | None
    hit_rate: float | None
    zoomed_bytes: int
    moved_bytes: int
    cache_bytes: int
