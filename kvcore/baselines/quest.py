"""Quest: pages scored by the bounds of their keys.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", https://arxiv.org/abs/2406.10774.
Legend: B batch rows, Hq query heads, Hkv KV heads, U pages, R rows that spill, m tokens, p page size, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.baselines.retrieval import SIZE_BYTES, RetrievalCache, RetrievalLayer, check_options
from kvcore.baselines.retrieval_choice import Units
from kvcore.baselines.retrieval_plan import Planner
from kvcore.baselines.retrieval_store import Shared, hide
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache
from kvcore.exact import ExactLayer
from kvcore.kernels import decode_attention, group_queries, merge_states
from kvcore.layer import CacheLayer
from kvcore.method import Method, register


class QuestLayer(RetrievalLayer):
    """Pages of consecutive tokens; what leaves the window fills the newest page."""

    def group(self, keys: Tensor, values: Tensor, row: int, first: int) -> Units:
        page, (num_heads, count, _) = self.page_size(row), keys.shape
        pages = -(-count // page)
        sizes = (count - torch.arange(pages, device=keys.device) * page).clamp_max(page).expand(num_heads, -1)
        padding = pages * page - count
        low = F.pad(keys, (0, 0, 0, padding), value=float("inf")).unflatten(1, (pages, page))
        high = F.pad(keys, (0, 0, 0, padding), value=float("-inf")).unflatten(1, (pages, page))
        order = torch.arange(count, device=keys.device).expand(num_heads, -1)
        return Units(order, sizes, {"minimum": low.amin(2), "maximum": high.amax(2)} if pages else self._none(keys))

    def page_size(self, row: int) -> int:
        return int(self.unit_tokens[row])

    def score(self, query: Tensor, scale: float) -> Tensor:
        """Section 3.3: sum over channels of max(q M, q m), the largest logit that any key of the page could have."""
        grouped = group_queries(query, self.spec.num_kv_heads)
        upward, downward = grouped.clamp_min(0).mean(2, keepdim=True), grouped.clamp_max(0).mean(2, keepdim=True)
        bound = upward @ self.summaries["maximum"].transpose(-1, -2)
        return (bound + downward @ self.summaries["minimum"].transpose(-1, -2)).squeeze(2).float()

    def absorb(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        newest = (self.unit_counts[rows.cpu()] - 1).to(rows.device)
        page = self.unit_tokens[rows.cpu()].to(rows.device)
        opens = newest < 0
        if self.sizes.shape[2]:
            opens |= self.sizes[rows, 0, newest.clamp_min(0)] >= page
        where, unit, places = self.open_units(rows, opens, {"minimum": keys, "maximum": keys})
        low, high = self.summaries["minimum"], self.summaries["maximum"]
        low[where, :, unit] = low[where, :, unit].minimum(keys[places, :, 0])
        high[where, :, unit] = high[where, :, unit].maximum(keys[places, :, 0])

    def _none(self, keys: Tensor) -> dict[str, Tensor]:
        empty = keys.new_zeros(keys.shape[0], 0, keys.shape[2])
        return {"minimum": empty, "maximum": empty}


class DenseLayer(RetrievalLayer):
    """A layer without selection: every host token passes through the fetch buffer, one bufferful at a time."""

    def group(self, keys: Tensor, values: Tensor, row: int, first: int) -> Units:
        order = torch.arange(keys.shape[1], device=keys.device).expand(keys.shape[0], -1)
        return Units(order, order[:, :0], {})

    def score(self, query: Tensor, scale: float) -> Tensor:
        raise NotImplementedError("a dense layer selects nothing")

    def absorb(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Nothing is summarised."""

    def attended_slots(self, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        held = self.host.counts.to(query.device)[:, None, None]
        slot = torch.arange(int(self.host.counts.max()), device=query.device)
        live = (slot < held).expand(-1, self.spec.num_kv_heads, -1)
        return (slot * live).contiguous(), live

    def attend_one(self, query: Tensor, scale: float) -> tuple[Tensor, float]:
        held = self.host.counts.to(query.device)
        states = [decode_attention(query, keys, values, scale, bias) for keys, values, bias in self.resident.parts()]
        total, block = int(self.host.counts.max()), max(split.fetched for split in self.splits())
        for start in range(0, total, max(block, 1)):  # one pass per bufferful, not per token
            slot = torch.arange(start, min(start + block, total), device=query.device)
            live = (slot < held[:, None])[:, None].expand(-1, self.spec.num_kv_heads, -1)
            index = (slot * live).contiguous()
            keys, values = self.shared.workspace.request(self.host, index, query, self.shared.link).arrive()
            states.append(decode_attention(query, keys, values, scale, hide(~live)))
        moved = int(self.host.counts.sum()) * self.spec.num_kv_heads
        self.fetched_bytes += moved * self.spec.entry_bytes if self.offloaded else 0
        output, _ = merge_states([output for output, _ in states], [lse for _, lse in states])
        return output, float(self.lengths.float().mean())


@register
@dataclass(frozen=True, kw_only=True)
class Quest(Method):
    """Query-aware page selection (https://arxiv.org/abs/2406.10774, section 3.3 and algorithm 1).

    A page's score is `sum_i max(q_i M_i, q_i m_i)` with the channel-wise maximum M and minimum m of its keys; the best
    pages are attended exactly. Under grouped-query attention scores are averaged over the query heads of a group and
    pages are chosen per KV head. The paper keeps every token on the device and its budget is one of attended tokens;
    here tokens live on the host by default, so that the budget is one of device bytes, and fetched pages are traffic.

    Args:
        page_size: tokens per page (16 in the paper); doubled up to four times where the summaries of a small budget
            would not fit (page bounds of 16 tokens cost 1/16 of the full cache).
        dense_layers: first layers without selection (2 in the paper): all their tokens pass through the fetch buffer
            at every step. Ignored with budget_scope=layer, which counts them.
        num_sinks: first tokens kept on the device.
        fetch_share: tokens fetched per step and layer, as a share of the tokens so far, at most; the rest of the
            budget is an exact local window.
        offload: False keeps tokens on the device as in the paper; the budget is then attended tokens, and the
            measured device share is above 1.
    """

    name: ClassVar[str] = "quest"
    cache_class: ClassVar[type[CompressedCache]] = RetrievalCache
    page_size: int = 16
    dense_layers: int = 2
    num_sinks: int = 4
    fetch_share: float = 0.2
    offload: bool = True

    def __post_init__(self) -> None:
        check_options(self, ("page_size",), ("dense_layers", "num_sinks"), ("fetch_share",))

    def planner(self, spec: ModelSpec, budget: Budget, summarised: bool = True) -> Planner:
        return Planner(
            self.name,
            spec,
            budget,
            unit_bytes=spec.entry_bytes + SIZE_BYTES,
            unit_tokens=self.page_size,
            num_sinks=self.num_sinks,
            fetch_share=self.fetch_share,
            offload=self.offload,
            whole_units=True,
            summarised=summarised,
        )

    def validate(self, spec: ModelSpec, budget: Budget) -> None:
        super().validate(spec, budget)
        self.planner(spec, budget).validate()

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return [ExactLayer(spec, budget, index) for index in range(spec.num_layers)]
        shared, dense = Shared(), self.dense_layers if budget.scope == "bytes" else 0
        layers: list[CacheLayer] = []
        for index in range(spec.num_layers):
            kind = DenseLayer if index < dense else QuestLayer
            layer = kind(spec, budget, index, self.planner(spec, budget, summarised=index >= dense), shared)
            layer.offloaded = self.offload
            layers.append(layer)
        return layers
