"""Scissorhands: tokens that many recent tokens ignored are dropped, many at a time.

Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
Time", https://arxiv.org/abs/2305.17118, algorithms 1 and 2.
Legend: B batch rows, Hkv KV heads, C slots, n prompt tokens of one row, w history window, r recent window, N entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.baselines.eviction import INFINITY, PINNED, EvictingMethod
from kvcore.baselines.h2o import AccumulatingLayer
from kvcore.baselines.scores import ObservingLayer, low_counts
from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer
from kvcore.method import register

# Counts come first and positions break ties: exact in fp64 for positions below 2^20.
POSITIONS = 2.0**20


class ScissorhandsLayer(AccumulatingLayer, ObservingLayer):
    """Scores: minus the number of tokens of the history that gave an entry less than average attention."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, options: Scissorhands) -> None:
        super().__init__(spec, budget, layer_idx)
        self.window, self.options = options.history, options
        self._counts: Tensor | None = None  # [Hkv, n] of the row being compressed

    def recent(self, tokens: int) -> int:
        return min(self.options.recent, self.capacity(tokens) // 2)

    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        num_tokens = keys.shape[1]
        counts = low_counts(self.window_queries(row, num_tokens), keys, scale)
        positions = torch.arange(num_tokens, device=keys.device)
        rank = -counts.double() * POSITIONS + positions
        rank[:, num_tokens - self.recent(num_tokens) :] = PINNED
        self._counts = counts
        return rank

    def slot_priority(self, rank: Tensor, indices: Tensor, row: int) -> Tensor:
        counts, self._counts = self._counts, None
        assert counts is not None
        return -counts.gather(1, indices)

    def eviction_rank(self) -> Tensor:
        safe = super().eviction_rank()
        return torch.where(safe.isfinite() & (safe < PINNED), safe.double() * POSITIONS + self.side["positions"], safe)

    def step_scores(self, probabilities: Tensor, visible: Tensor) -> Tensor:
        average = 1.0 / visible.sum(dim=-1, keepdim=True)
        return -((probabilities < average) & visible).sum(dim=2).float()

    def make_room(self, new_tokens: int) -> None:
        """When the slots are full, free `drop_share` of them at once, the most often ignored ones."""
        assert self.priority is not None
        if self.options.drop_share == 0.0:
            return
        free = (self.priority == -INFINITY).sum(dim=-1, keepdim=True)
        full = free < new_tokens
        if not bool(full.any()):
            return
        available = (self.priority != INFINITY).sum(dim=-1, keepdim=True)
        drops = (self.options.drop_share * available).floor().long() * full
        # free slots come first in the order, then the live ones from the lowest rank
        rank = self.eviction_rank()
        order = rank.argsort(dim=-1).argsort(dim=-1)
        dropped = (order >= free) & (order < free + drops) & (rank < PINNED)
        self.priority = self.priority.masked_fill(dropped, -INFINITY)
        self._masked = True


@register
@dataclass(frozen=True, kw_only=True)
class Scissorhands(EvictingMethod):
    """Evicts by persistence of importance (https://arxiv.org/abs/2305.17118, algorithm 2): over a history window of w
    tokens, count how often an entry received less than the average attention 1 / t of the t entries then visible; the
    entries with the highest counts go, m at a time, and the newest r tokens are safe. Of equal counts the older goes.

    The prompt is compressed once, from exact attention of its last w tokens; each generated token adds its own count,
    so the history is the prompt's window and everything generated since (an exact sliding window would need w bits per
    entry). Under grouped-query attention the attention of a KV head is the mean over its query heads.

    Args:
        history: w, tokens of the history window (400 in the paper).
        recent: r, newest tokens that are safe (10 in the paper); at most half of the entries.
        drop_share: m as a share of the entries (0.5 in the paper). Between two drops the cache is below its budget; 0.0
            evicts one by one and keeps it full.
    """

    name: ClassVar[str] = "scissorhands"
    history: int = 400
    recent: int = 10
    drop_share: float = 0.5

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError(f"history must be >= 1 token; received {self.history}")
        if self.recent < 0:
            raise ValueError(f"recent must be >= 0 tokens; received {self.recent}")
        if not 0.0 <= self.drop_share < 1.0:
            raise ValueError(f"drop_share must be in [0, 1); received {self.drop_share}")

    def make_evicting_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return ScissorhandsLayer(spec, budget, layer_idx, self)
