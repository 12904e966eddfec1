"""MiniCache: adjacent deep layers share the directions of their keys and values and keep their own norms.

Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
https://arxiv.org/abs/2405.14366, section 4, eq. 2 and 3.
Legend: Hkv KV heads, d head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcore.baselines.eviction import PRIORITY_BYTES
from kvcore.baselines.layer_pairs import NORMS, MergedStore, PairedLayer, Shared
from kvcore.baselines.snapkv import PooledWindowOptions, SnapKVLayer
from kvcore.budget import Budget, ModelSpec, UnreachableBudgetError
from kvcore.cache import CompressedCache
from kvcore.exact import ExactLayer
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import register
from kvcore.state import BatchedState

Eviction = Literal["snapkv", "recency", "none"]
EVICTIONS: tuple[Eviction, ...] = ("snapkv", "recency", "none")


@dataclass(frozen=True)
class Plan:
    """How many tokens a byte budget holds, the same in every layer.

    Attributes:
        spec, budget: of the cache.
        num_pairs: merged layer pairs.
        retention: share of the kept tokens that stay unmerged.
        evicts: whether tokens may be dropped.
    """

    spec: ModelSpec
    budget: Budget
    num_pairs: int
    retention: float
    evicts: bool

    @property
    def merged_bytes(self) -> int:
        """Bytes of one merged token of a pair and KV head: two directions, four norms, its rank."""
        return (2 * self.spec.head_dim + len(NORMS)) * self.spec.dtype.itemsize + PRIORITY_BYTES

    @property
    def token_share(self) -> float:
        """Bytes of one kept token over all layers, as a share of the full cache's."""
        single = (self.spec.num_layers - 2 * self.num_pairs) * (self.spec.entry_bytes + PRIORITY_BYTES)
        pair = (1 - self.retention) * self.merged_bytes + self.retention * 2 * self.spec.entry_bytes
        return (single + self.num_pairs * pair) / (self.spec.num_layers * self.spec.entry_bytes)

    def tokens(self, total: int) -> int:
        """Kept tokens of a row of `total` tokens."""
        if not self.evicts:
            return total
        per_token = self.token_share if self.budget.scope == "bytes" else 1.0
        return max(1, min(total, math.floor(self.budget.share(total) * total / per_token + 1e-9)))

    def retained(self, total: int) -> int:
        """Unmerged tokens among them."""
        return math.floor(self.retention * self.tokens(total))


class SingleLayer(SnapKVLayer):
    """A layer that is not merged: it keeps as many tokens as the merged ones."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, options: MiniCache, plan: Plan) -> None:
        super().__init__(spec, budget, layer_idx, options)
        self.plan, self.by_recency = plan, options.eviction != "snapkv"

    def capacity(self, tokens: int) -> int:
        return self.plan.tokens(tokens)

    def prefix_ranks(self, keys: Tensor, row: int, scale: float, prefix: int) -> Tensor:
        if self.by_recency:
            return torch.arange(prefix, dtype=torch.float32, device=keys.device).expand(keys.shape[0], -1)
        return super().prefix_ranks(keys, row, scale, prefix)


class MiniCacheCache(CompressedCache):
    """Compresses the two layers of a pair together; every shared store is counted and reordered once."""

    def layer_prefilled(self, layer_idx: int, scale: float) -> None:
        layer = self.layers[layer_idx]
        if not isinstance(layer, PairedLayer):
            super().layer_prefilled(layer_idx, scale)
        elif layer.upper:
            self._record_prefill_peak()
            lower = self.layers[layer_idx - 1]
            assert isinstance(lower, PairedLayer)
            first, second = (
                LayerPrompt(*self._staged.pop(index), self._padding, scale) for index in (layer_idx - 1, layer_idx)
            )
            layer.shared.store.build_pair((lower, layer), (first, second))

    def stored_states(self) -> list[BatchedState]:
        lower = [layer for layer in self.layers if isinstance(layer, PairedLayer) and not layer.upper]
        return [
            *(layer for layer in self.layers if not isinstance(layer, PairedLayer)),
            *(x.shared.store for x in lower),
        ]


@register
@dataclass(frozen=True, kw_only=True)
class MiniCache(PooledWindowOptions):
    """Layer pairs of the deeper half share directions (https://arxiv.org/abs/2405.14366): x_l = |x_l| e with
    e = sin((1 - t) W) / sin(W) x_(l-1) / |x_(l-1)| + sin(t W) / sin(W) x_l / |x_l|, W the angle between the two (eq. 2
    and 3), for keys and for values. Tokens whose directions differ most are retained unmerged (section 4.2).

    Merging alone reaches about 0.78 of the full cache, so smaller budgets also evict tokens, by default with SnapKV's
    scores (in a pair the mean of both layers', so that both keep the same tokens): this composition is an extension of
    ours, and `eviction=none` is the paper's method. With budget=1.0 nothing is merged.

    Args:
        start: depth from which layers are merged, as a share of the layers (0.5 in the paper); pairs end at the last
            layer.
        interpolation: t (0.6 in the paper).
        retention: share of the kept tokens that stay unmerged (the paper's gamma = 0.05 is a threshold on the distance;
            a share makes the bytes known beforehand).
        eviction: `snapkv`, `recency` (the newest tokens stay) or `none`.
        window, kernel, pooling: of SnapKV's scores.
    """

    name: ClassVar[str] = "minicache"
    cache_class: ClassVar[type[CompressedCache]] = MiniCacheCache
    start: float = 0.5
    interpolation: float = 0.6
    retention: float = 0.05
    eviction: Eviction = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (
            ("start", self.start),
            ("interpolation", self.interpolation),
            ("retention", self.retention),
        ):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1; received {value}")
        if self.eviction not in EVICTIONS:
            raise ValueError(f"eviction must be one of {', '.join(EVICTIONS)}; received {self.eviction!r}")

    def plan(self, spec: ModelSpec, budget: Budget) -> Plan:
        """How many tokens and pairs a cache holds."""
        num_pairs = math.floor(spec.num_layers * (1 - self.start) / 2 + 1e-9)
        return Plan(spec, budget, num_pairs, self.retention, self.eviction != "none")

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        if self.eviction != "none" or budget.is_full:
            return
        smallest = self.plan(spec, budget).token_share
        if isinstance(budget.value, int) or budget.value < smallest:
            levers = "a larger share, or eviction=snapkv or recency (merging keeps every token, so its share is fixed)"
            raise UnreachableBudgetError(self.name, budget.value, smallest, levers)

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        plan = self.plan(spec, budget)
        first_pair = spec.num_layers - 2 * plan.num_pairs
        layers: list[CacheLayer] = [SingleLayer(spec, budget, index, self, plan) for index in range(first_pair)]
        for lower in range(first_pair, spec.num_layers, 2):
            shared = Shared(MergedStore(spec, budget, lower + 1, self, plan))
            layers.append(PairedLayer(spec, budget, lower, self, shared, upper=False))
            layers.append(PairedLayer(spec, budget, lower + 1, self, shared, upper=True))
        return layers
