"""SnapKV: the last tokens of the prompt choose which earlier ones stay.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", https://arxiv.org/abs/2404.14469, section 4.
Legend: Hkv KV heads, n prompt tokens of one row, w window tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.baselines.eviction import GENERATED, EvictingMethod
from kvcore.baselines.scores import POOLINGS, ObservingLayer, Pooling, pooled, ranks, received_mass
from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer
from kvcore.method import register


@dataclass(frozen=True, kw_only=True)
class WindowOptions(EvictingMethod):
    """Options shared by the methods that score with an observation window.

    Args:
        window: newest prompt tokens whose queries score the others; they are kept (32 in the paper). A budget of less
            than twice the window keeps half of its entries as the window.
    """

    window: int = 32

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be >= 1 token; received {self.window}")


@dataclass(frozen=True, kw_only=True)
class PooledWindowOptions(WindowOptions):
    """Options of the methods that pool the window's attention over neighbouring tokens.

    Args:
        kernel: width of the pooling in tokens, odd (7 in the paper's LongBench setting).
        pooling: `max` (the paper's LongBench setting) or `avg` (the default of the official code).
    """

    kernel: int = 7
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd number of tokens >= 1; received {self.kernel}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; received {self.pooling!r}")


class WindowLayer(ObservingLayer):
    """Window tokens rank by recency above all other prompt tokens, which rank by the window's attention.

    While decoding, the budget holds: a generated token takes the place of the lowest-ranked prompt token, window
    tokens last, and of the oldest generated token when no prompt token is left.
    """

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, window: int) -> None:
        super().__init__(spec, budget, layer_idx)
        self.window = window

    def kept_window(self, num_tokens: int) -> int:
        """Newest tokens kept whatever their score: the window, at most half of the budget's entries."""
        entries = self.budget.entries(num_tokens, self.entry_bytes, self.spec)
        return min(self.window, max(1, entries // 2), num_tokens)

    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        num_tokens = keys.shape[1]
        prefix = num_tokens - self.kept_window(num_tokens)
        priority = torch.arange(num_tokens, dtype=torch.float32, device=keys.device) + (GENERATED - num_tokens)
        priority = priority.repeat(keys.shape[0], 1)
        if prefix > 0:
            priority[:, :prefix] = self.prefix_ranks(keys, row, scale, prefix)
        return priority

    @abstractmethod
    def prefix_ranks(self, keys: Tensor, row: int, scale: float, prefix: int) -> Tensor:
        """Ranks [Hkv, prefix] in [0, n) of the tokens before the window; -inf for one that is not kept."""

    def window_mass(self, keys: Tensor, row: int, scale: float, prefix: int) -> Tensor:
        """[Hkv, prefix], fp32: attention that the tokens before the window received from the window."""
        return received_mass(self.window_queries(row, keys.shape[1]), keys, scale)[:, :prefix]


class SnapKVLayer(WindowLayer):
    """Ranks by pooled window attention."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, options: PooledWindowOptions) -> None:
        super().__init__(spec, budget, layer_idx, options.window)
        self.options = options

    def prefix_ranks(self, keys: Tensor, row: int, scale: float, prefix: int) -> Tensor:
        mass = self.window_mass(keys, row, scale, prefix)
        return ranks(pooled(mass, self.options.kernel, self.options.pooling))


@register
@dataclass(frozen=True, kw_only=True)
class SnapKV(PooledWindowOptions):
    """Top-k prompt tokens per KV head by pooled attention of an observation window (https://arxiv.org/abs/2404.14469:
    votes = the window's attention summed over its queries, eq. 1; top-k of them, eq. 2; pooling before the top-k,
    section 4.2), and the window itself.

    Under grouped-query attention the vote of a KV head is the mean over its query heads, so that one set of tokens per
    KV head is stored.
    """

    name: ClassVar[str] = "snapkv"

    def make_evicting_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return SnapKVLayer(spec, budget, layer_idx, self)
