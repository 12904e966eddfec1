"""Shared by every evicting method: kept tokens in slots, and eviction that continues while decoding.

Legend: B batch rows, Hkv KV heads, n prompt tokens of one row, C slots, Q new tokens, d head dimension.

A slot carries a priority: +inf, not available to this row; -inf, free; finite, a live token. New tokens are attended
together with everything live, then take free slots first and those of the lowest priority after that, so the number
of live entries never exceeds the budget of the tokens so far. Generated tokens rank above prompt tokens, older ones
below newer ones; tokens that must stay (sinks) rank above all.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CacheLayer, LayerPrompt
from kvcore.kernels import attend_parts, causal_bias

# Ranks: prompt scores must stay below GENERATED, positions are added to it, PINNED is above any position.
GENERATED = 1e6
PINNED = 1e9
PRIORITY_BYTES = 4


class EvictingLayer(CacheLayer):
    """One layer that keeps some tokens and drops the rest for good."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> None:
        super().__init__(spec, budget, layer_idx)
        self.keys: Tensor | None = None  # [B, Hkv, C, d]
        self.values: Tensor | None = None  # [B, Hkv, C, d]
        self.priority: Tensor | None = None  # [B, Hkv, C], fp32
        self._row_prompt: list[int] = []
        self._rows_differ = False

    # --- what a method decides
    @abstractmethod
    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        """Priority [Hkv, n] (fp32) of every prompt token of one row: prompt scores in [0, GENERATED), or PINNED."""

    def capacity(self, tokens: int) -> int:
        """Slots per KV head of this layer for a row of `tokens` tokens."""
        return self.budget.entries(tokens, self.entry_bytes, self.spec)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one slot, side data included."""
        return self.spec.entry_bytes + (0 if self.budget.is_full else PRIORITY_BYTES)

    # --- prefill
    def build(self, prompt: LayerPrompt) -> None:
        rows = []
        for index in range(prompt.keys.shape[0]):
            keys, values = prompt.row(index)
            count = self.capacity(keys.shape[1])
            priority = self.rank(keys, values, index, prompt.scale)
            best = priority.topk(min(count, keys.shape[1]), dim=-1, sorted=False).indices.sort(dim=-1).values
            gather = best.unsqueeze(-1).expand(-1, -1, keys.shape[2])
            rows.append((keys.gather(1, gather), values.gather(1, gather), priority.gather(1, best)))
        width = max(row[0].shape[1] for row in rows)
        self._rows_differ = any(row[0].shape[1] != width for row in rows)
        self.keys = torch.stack([_widen(row[0], width, 0.0) for row in rows])
        self.values = torch.stack([_widen(row[1], width, 0.0) for row in rows])
        self.priority = torch.stack([_widen(row[2], width, float("inf")) for row in rows])
        self._lengths = torch.tensor([prompt.row(index)[0].shape[1] for index in range(len(rows))])

    # --- decode
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        assert self.keys is not None and self.values is not None and self.priority is not None
        self.attended = self._live_mean() + (key.shape[2] + 1) / 2
        new_tokens = (key, value, causal_bias(key.shape[2], key.device))
        output = attend_parts(query, [*self._stored_parts(), new_tokens], scale)
        self._store(key, value)
        return output

    def _stored_parts(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The stored tokens as attention parts; a method that moves keys overrides this."""
        assert self.keys is not None and self.values is not None
        return [(self.keys, self.values, self._bias())]

    def _bias(self) -> Tensor | None:
        """[B, Hkv, 1, 1, C]: hides slots that are free or not available; None when every slot is live."""
        assert self.priority is not None
        if not self._rows_differ:
            return None
        hidden = torch.zeros_like(self.priority).masked_fill(~self.priority.isfinite(), float("-inf"))
        return hidden[:, :, None, None]

    def _live_mean(self) -> float:
        assert self.priority is not None
        if not self._rows_differ:
            return self.priority.shape[2]
        return float(self.priority.isfinite().float().sum(-1).mean())

    def _store(self, key: Tensor, value: Tensor) -> None:
        """Put new tokens into free slots, then over the lowest priorities."""
        self._lengths = self._lengths + key.shape[2]
        self._grow(key.shape[2])
        assert self.keys is not None and self.values is not None and self.priority is not None
        # never more new tokens than the poorest row may evict, so that pinned slots survive
        replaceable = int((self.priority < PINNED).sum(-1).min())
        count = min(key.shape[2], max(replaceable, 1))
        key, value = key[:, :, -count:], value[:, :, -count:]
        slots = self.priority.topk(count, dim=-1, largest=False).indices
        rank = GENERATED + self._length + torch.arange(count, device=key.device, dtype=torch.float32)
        self.priority.scatter_(2, slots, rank.expand(slots.shape))
        slots = slots.unsqueeze(-1)
        self.keys.scatter_(2, slots.expand(key.shape), key)
        self.values.scatter_(2, slots.expand(value.shape), value)

    def _grow(self, new_tokens: int) -> None:
        """Make the slots available that the budget of the longer sequence allows; they are filled at once."""
        assert self.keys is not None and self.values is not None and self.priority is not None
        lengths = self._lengths.tolist()
        before = [self.capacity(length - new_tokens) for length in lengths]
        after = [self.capacity(length) for length in lengths]
        if before == after:
            return
        extra = max(after) - self.keys.shape[2]
        if extra > 0:
            self.keys, self.values = (_pad_slots(t, extra, 0.0) for t in (self.keys, self.values))
            self.priority = _pad_slots(self.priority, extra, float("inf"))
        available = torch.tensor(after, device=self.priority.device)[:, None, None]
        slot = torch.arange(self.priority.shape[2], device=self.priority.device)
        opened = (slot < available) & self.priority.isinf() & (self.priority > 0)
        self.priority = self.priority.masked_fill(opened, float("-inf"))
        self._rows_differ = len(set(after)) > 1


def _widen(tensor: Tensor, width: int, fill: float) -> Tensor:
    """[Hkv, c, ...] -> [Hkv, width, ...]."""
    extra = width - tensor.shape[1]
    if extra == 0:
        return tensor
    return torch.cat([tensor, tensor.new_full((tensor.shape[0], extra, *tensor.shape[2:]), fill)], dim=1)


def _pad_slots(tensor: Tensor, extra: int, fill: float) -> Tensor:
    """[B, Hkv, C, ...] -> [B, Hkv, C + extra, ...]."""
    return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], extra, *tensor.shape[3:]), fill)], dim=2)
