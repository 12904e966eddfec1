"""RetroInfer: clustered keys, the best clusters exact, the next ones estimated.

Chen et al., "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference",
https://arxiv.org/abs/2505.02922. Legend: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, U clusters,
R rows that spill, m tokens, c spilled tokens, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.baselines.clustering import spherical_kmeans
from kvcore.baselines.retrieval import SIZE_BYTES, RetrievalCache, RetrievalLayer, check_options
from kvcore.baselines.retrieval_choice import Choice, Units
from kvcore.baselines.retrieval_plan import Planner
from kvcore.baselines.retrieval_store import Part, Shared
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.exact import ExactLayer
from kvcore.kernels import group_queries
from kvcore.layer import CacheLayer
from kvcore.method import Method, register


class RetroInferLayer(RetrievalLayer):
    """Clusters of similar keys; whole clusters are fetched, the next best ones stand in by centroid and mean value."""

    whole_units = True

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, planner: Planner, shared: Shared, options: RetroInfer
    ) -> None:
        super().__init__(spec, budget, layer_idx, planner, shared)
        self.options = options

    def group(self, keys: Tensor, values: Tensor, row: int, first: int) -> Units:
        """Segmented clustering (section 4.2): every segment of the text is clustered by itself."""
        count = keys.shape[1]
        segments = max(1, -(-count // self.options.segment_tokens))
        bounds = [count * index // segments for index in range(segments + 1)]
        pieces = [
            self._cluster(keys[:, a:b], values[:, a:b], float(self.unit_tokens[row]), a) for a, b in pairwise(bounds)
        ]
        summaries = {name: torch.cat([p.summaries[name] for p in pieces], dim=1) for name in pieces[0].summaries}
        return Units(
            torch.cat([p.order for p in pieces], dim=1), torch.cat([p.sizes for p in pieces], dim=1), summaries
        )

    def _cluster(self, keys: Tensor, values: Tensor, unit_tokens: float, first: int) -> Units:
        """Clusters of one segment [Hkv, m, d] that starts at token `first` of the units."""
        num_heads, count, dim = keys.shape
        clusters = int(count / unit_tokens) if count >= unit_tokens else min(count, 1)
        if clusters == 0:
            label = torch.zeros(num_heads, 0, dtype=torch.long, device=keys.device)
        else:
            label = spherical_kmeans(keys, clusters, self.options.iterations)
        sizes = torch.zeros(num_heads, clusters, dtype=torch.long, device=keys.device)
        sizes.scatter_add_(1, label, torch.ones_like(label))

        def mean(tensor: Tensor) -> Tensor:
            sums = torch.zeros(num_heads, clusters, dim, device=keys.device)
            sums.scatter_add_(1, label.unsqueeze(-1).expand(-1, -1, dim), tensor.float())
            return (sums / sizes.clamp_min(1).unsqueeze(-1)).to(tensor.dtype)

        order = label.argsort(dim=1, stable=True) + first
        return Units(order, sizes, {"centroid": mean(keys), "mean_value": mean(values)})

    def score(self, query: Tensor, scale: float) -> Tensor:
        """Softmax over the centroids per query head, averaged over the group (section 4.2)."""
        grouped = group_queries(query, self.spec.num_kv_heads)
        logits = (grouped @ self.summaries["centroid"].transpose(-1, -2)).float() * scale
        return torch.softmax(logits.masked_fill((self.sizes == 0).unsqueeze(2), float("-inf")), dim=-1).mean(2)

    def tail(self, choice: Choice) -> list[Part]:
        """Estimation zone, equation 4: a cluster of s tokens weighs `s exp(q C)` and carries its mean value."""
        counts = self.unit_counts.to(choice.order.device)[:, None, None]
        rank = torch.arange(choice.order.shape[-1], device=choice.order.device)
        fetched = choice.taken.sum(-1, keepdim=True)
        wanted = (self.options.estimated * counts).ceil()
        estimated = torch.zeros_like(choice.taken).scatter(
            -1, choice.order, (rank >= fetched) & (rank < fetched + wanted)
        )
        weight = torch.where(estimated, self.sizes, 0).float().log()  # log 0 hides a cluster
        return [(self.summaries["centroid"], self.summaries["mean_value"], weight[:, :, None, None])]

    def spill_size(self, rows: Tensor) -> Tensor:
        """Half the window in whole clusters, at most one update segment; single tokens where that is no cluster."""
        unit = self.unit_tokens[rows].long()
        half = (self.resident.counts[rows] // 2).clamp(max=self.options.update_tokens)
        return (half // unit * unit).clamp_min(1)

    def absorb(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Cluster the spilled segment by itself (section 4.2, index update)."""
        if keys.shape[2] == 1:
            self._join(rows, keys, values)
            return
        for place, row in enumerate(rows.tolist()):  # once per segment and row, not per step
            units = self._cluster(keys[place], values[place], float(self.unit_tokens[row]), 0)
            self.host.reorder_last(row, units.order)
            one = rows[place : place + 1]
            self.add_units(one, units.sizes[None], {name: t[None] for name, t in units.summaries.items()})

    def _join(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """A window shorter than two clusters: the newest cluster takes in single tokens until it is full."""
        newest = (self.unit_counts[rows.cpu()] - 1).to(rows.device)
        opens = newest < 0
        if self.sizes.shape[2]:
            largest = self.sizes[rows, :, newest.clamp_min(0)].amax(1)
            opens |= largest >= self.unit_tokens[rows.cpu()].to(rows.device)
        joined = self.open_units(rows, opens, {"centroid": keys, "mean_value": values})
        self.average_in("centroid", joined, keys)
        self.average_in("mean_value", joined, values)


MOST_ITERATIONS = 10_000


@register
@dataclass(frozen=True, kw_only=True)
class RetroInfer(Method):
    """Wave index with three zones (https://arxiv.org/abs/2505.02922, section 4.2, equations 2-4).

    Steady zone: sinks and local window. Retrieval zone: clusters with the largest softmax weight of their centroid,
    averaged over the query heads of a group, fetched whole from the host for the KV head. Estimation zone: the next
    clusters weigh `s exp(q C)` with their mean value. Everything on the device is counted: centroids, mean values
    (the paper's value sums, divided by the sizes), sizes, sinks, window and fetch buffer.

    Args:
        cluster_tokens: tokens per cluster on average (16 in the paper); doubled up to four times where the centroids
            of a small budget would not fit.
        segment_tokens: tokens clustered together (8192 in the paper).
        iterations: k-means rounds (10 in the paper).
        estimated: share of the clusters in the estimation zone (0.232 in the paper).
        update_tokens: generated tokens clustered at a time (1024 in the paper), less where the window is short.
        num_sinks: first tokens kept on the device (4 in the paper).
        fetch_share: tokens fetched per step and layer, as a share of the tokens so far, at most (the paper's 1.8% of
            the clusters is for 120K tokens); the rest of the budget is the local window (64 in the paper).
    """

    name: ClassVar[str] = "retroinfer"
    cache_class: ClassVar[type[CompressedCache]] = RetrievalCache
    cluster_tokens: int = 16
    segment_tokens: int = 8192
    iterations: int = 10
    estimated: float = 0.232
    update_tokens: int = 1024
    num_sinks: int = 4
    fetch_share: float = 0.2

    def __post_init__(self) -> None:
        check_options(
            self,
            positive=("cluster_tokens", "segment_tokens", "iterations", "update_tokens"),
            non_negative=("num_sinks", "estimated"),
            shares=("fetch_share",),
        )
        if self.iterations > MOST_ITERATIONS:
            raise ValueError(
                f"method 'retroinfer': iterations must be <= {MOST_ITERATIONS} rounds; received {self.iterations}"
            )

    def planner(self, spec: ModelSpec, budget: Budget) -> Planner:
        unit_bytes = spec.entry_bytes + SIZE_BYTES
        return Planner(self.name, spec, budget, unit_bytes, self.cluster_tokens, self.num_sinks, self.fetch_share)

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        self.planner(spec, budget).validate()

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        shared, planner = Shared(), self.planner(spec, budget)
        return [RetroInferLayer(spec, budget, index, planner, shared, self) for index in range(spec.num_layers)]
