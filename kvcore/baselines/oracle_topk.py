"""Oracle top-k: what the best choice of tokens, made afresh at every step, would give. An upper reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.exact import ExactLayer
from kvcore.kernels import decode_attention, group_queries
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import Method, register


class OracleLayer(ExactLayer):
    """Keeps everything; attends, per KV head, to the tokens with the most true attention mass of its query group."""

    is_croppable = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        keys, values = self.append(key, value)
        num_queries = key.shape[2]
        bias = self._visible_bias(num_queries)
        if bias is None and self.budget.is_full:
            self.attended = tokens
            return decode_attention(query, keys, values, scale)[0]
        outputs, attended = [], 0.0
        for index in range(num_queries):  # one selection per token; decoding has one token
            one = query[:, :, index : index + 1]
            row = None if bias is None else bias[:, :, :, index : index + 1]
            chosen, kept = self._choose(one, keys, scale, row, tokens - num_queries + index + 1)
            outputs.append(decode_attention(one, keys, values, scale, chosen)[0])
            attended += kept / num_queries
        self.attended = attended
        return torch.cat(outputs, dim=2)

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        self._prompt_tokens = prompt.keys.shape[2]

    def attended_lse(self, query: Tensor, scale: float) -> Tensor | None:
        assert self.keys is not None
        bias, _ = self._choose(query, self.keys, scale, self._visible_bias(1), self.keys.shape[2])
        keys, count = self.keys[:, :, : self._prompt_tokens], self._prompt_tokens
        logits = torch.matmul(group_queries(query, keys.shape[1]) * scale, keys.transpose(-1, -2)).float()
        return torch.logsumexp(logits + bias[:, :, :, 0, :count], dim=-1).view(query.shape[:3])

    def _visible_bias(self, num_queries: int) -> Tensor | None:
        visible = self.visible(num_queries)
        if visible is None:
            return None
        return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))[:, :, None]

    def _choose(
        self, query: Tensor, keys: Tensor, scale: float, bias: Tensor | None, tokens: int
    ) -> tuple[Tensor, float]:
        """Additive bias [B, Hkv, 1, 1, N] that hides all but the chosen tokens, and how many are chosen per head."""
        assert self.padding is not None
        batch, num_kv_heads, num_keys, _ = keys.shape
        logits = torch.matmul(group_queries(query, num_kv_heads), keys.transpose(-1, -2)).float() * scale
        if bias is not None:
            logits = logits + bias[:, :, 0]
        mass = torch.softmax(logits, dim=-1).sum(dim=2)  # [B, Hkv, N], summed over the query group
        counts = [self.budget.entries(tokens - int(pad)) for pad in self.padding]
        order = mass.argsort(dim=-1, descending=True)
        rank = torch.empty_like(order).scatter_(2, order, torch.arange(num_keys, device=order.device).expand_as(order))
        keep = rank < torch.tensor(counts, device=rank.device)[:, None, None]
        hidden = torch.zeros_like(mass).masked_fill(~keep, float("-inf"))[:, :, None, None]
        return (hidden if bias is None else hidden + bias), sum(counts) / batch


@register
@dataclass(frozen=True, kw_only=True)
class OracleTopK(Method):
    """Top-k tokens per step by true attention, k from the budget. It stores the full cache (its measured device share
    is 1.0) and is marked as a reference in every result."""

    name: ClassVar[str] = "oracle_topk"
    reference_only: ClassVar[bool] = True

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return OracleLayer(spec, budget, layer_idx)
