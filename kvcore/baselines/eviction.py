"""Shared by every evicting method: kept tokens in slots, and eviction that continues while decoding.

Legend: B batch rows, Hkv KV heads, n prompt tokens of one row, c kept tokens of one row, C slots, Q new tokens,
d head dimension.

A slot carries a priority: +inf, not available to this row; -inf, free; finite, a live token. New tokens are attended
together with everything live, then take free slots first and those that rank lowest after that, so the number of
live entries never exceeds the budget of the tokens so far. By default generated tokens rank above prompt tokens, older
ones below newer ones; tokens that must stay (sinks) rank above all.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.exact import ExactLayer
from kvcore.kernels import attend_parts, causal_bias, group_queries
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import Method

# Ranks: prompt scores must stay below GENERATED, positions are added to it, PINNED is above any position.
GENERATED = 1e6
PINNED = 1e9
PRIORITY_BYTES = 4
INFINITY = float("inf")


@dataclass
class Entries:
    """What is kept of one row's prompt.

    Attributes:
        keys, values: [Hkv, c, d].
        priority: [Hkv, c], fp32; -inf leaves the slot free.
        side: further tensors [Hkv, c] of the layer's `side_dtypes`.
    """

    keys: Tensor
    values: Tensor
    priority: Tensor
    side: dict[str, Tensor] = field(default_factory=dict)


class EvictingLayer(CacheLayer):
    """One layer that keeps some tokens and drops the rest for good.

    Attributes:
        side_dtypes: names and dtypes of further per-slot tensors, counted in the budget.
    """

    host_fields = frozenset({"_lengths"})

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> None:
        super().__init__(spec, budget, layer_idx)
        self.keys: Tensor | None = None  # [B, Hkv, C, d]
        self.values: Tensor | None = None  # [B, Hkv, C, d]
        self.priority: Tensor | None = None  # [B, Hkv, C], fp32
        self.side_dtypes: dict[str, torch.dtype] = {}
        self.side: dict[str, Tensor] = {}  # [B, Hkv, C] each
        self._masked = False  # whether some slot is not live

    # --- what a method decides
    @abstractmethod
    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        """Rank [Hkv, n] (floating) of every prompt token of one row: prompt scores in [0, GENERATED), or PINNED; -inf
        for one that is not kept though there be room."""

    def slot_priority(self, rank: Tensor, indices: Tensor, row: int) -> Tensor:
        """Priority [Hkv, c] that the kept tokens start with; by default their rank.

        Args:
            rank: [Hkv, n], of every prompt token.
            indices: [Hkv, c], positions of the kept tokens in their row.
            row: batch row.
        """
        return rank.gather(1, indices)

    def capacity(self, tokens: int) -> int:
        """Slots per KV head of this layer for a row of `tokens` tokens."""
        return self.budget.entries(tokens, self.entry_bytes, self.spec)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one slot, side data included."""
        return self.spec.entry_bytes + PRIORITY_BYTES + sum(dtype.itemsize for dtype in self.side_dtypes.values())

    def side_entries(self, indices: Tensor, offset: int) -> dict[str, Tensor]:
        """Side tensors [Hkv, c] of the kept prompt tokens.

        Args:
            indices: [Hkv, c], positions of the kept tokens in their row.
            offset: left-padding tokens of the row.
        """
        return {}

    def eviction_rank(self) -> Tensor:
        """[B, Hkv, C], floating: slots are given up from the lowest; the infinities of the priority are kept."""
        assert self.priority is not None
        return self.priority

    def make_room(self, new_tokens: int) -> None:
        """Free slots before new tokens are stored; by default they overwrite the lowest ranked one by one."""

    # --- prefill
    def compress(self, prompt: LayerPrompt, row: int) -> Entries:
        """What this layer keeps of one row: at most `capacity` entries. The best-ranked tokens, in text order;
        equal ranks go to the earlier token."""
        keys, values = prompt.row(row)
        rank = self.rank(keys, values, row, prompt.scale)
        count = min(self.capacity(keys.shape[1]), keys.shape[1])
        best = rank.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
        gather = best.unsqueeze(-1).expand(-1, -1, keys.shape[2])
        side = self.side_entries(best, prompt.padding[row])
        priority = self.slot_priority(rank, best, row).float()
        return Entries(keys.gather(1, gather), values.gather(1, gather), priority, side)

    def build(self, prompt: LayerPrompt) -> None:
        rows = [self.compress(prompt, row) for row in range(len(prompt.padding))]
        lengths = [prompt.keys.shape[2] - pad for pad in prompt.padding]
        self._lengths = torch.tensor(lengths)  # tokens of each row so far
        capacities = [self.capacity(length) for length in lengths]
        width = max(capacities)
        self.keys = torch.stack([_widen(row.keys, width, 0.0) for row in rows])
        self.values = torch.stack([_widen(row.values, width, 0.0) for row in rows])
        self.priority = torch.stack(
            [
                _widen(_widen(row.priority, capacity, -INFINITY), width, INFINITY)
                for row, capacity in zip(rows, capacities, strict=True)
            ]
        )
        self.side = {
            name: torch.stack([_widen(row.side[name].to(dtype), width, 0) for row in rows])
            for name, dtype in self.side_dtypes.items()
        }
        self._masked = not bool(self.priority.isfinite().all())

    # --- decode
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        self.attended = self._live_mean() + (key.shape[2] + 1) / 2
        new_tokens = (key, value, causal_bias(key.shape[2], key.device))
        output = attend_parts(query, [*self._stored_parts(), new_tokens], scale)
        positions = self._new_positions(key.shape[2], key.device)
        self._store(key, value, (GENERATED + positions).expand(*key.shape[:3]), {})
        return output

    def _new_positions(self, count: int, device: torch.device) -> Tensor:
        """[Q], fp32: positions of the new tokens, padding included (`_length` is the tokens before this forward)."""
        return self._length + torch.arange(count, device=device, dtype=torch.float32)

    def _stored_parts(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The stored tokens as attention parts; a method that moves keys overrides this."""
        assert self.keys is not None and self.values is not None
        return [(self.keys, self.values, self._bias())]

    def attended_lse(self, query: Tensor, scale: float) -> Tensor | None:
        assert self.keys is not None and self.priority is not None
        hidden = torch.zeros_like(self.priority).masked_fill(~self._prompt_slots(), -INFINITY)
        logits = torch.matmul(group_queries(query, self.keys.shape[1]) * scale, self.keys.transpose(-1, -2)).float()
        return torch.logsumexp(logits + hidden[:, :, None], dim=-1).view(query.shape[:3])

    def _prompt_slots(self) -> Tensor:
        """[B, Hkv, C], bool: live slots that hold a prompt token."""
        assert self.priority is not None
        return ((self.priority < GENERATED) | (self.priority >= PINNED)) & self.priority.isfinite()

    def _bias(self) -> Tensor | None:
        """[B, Hkv, 1, 1, C]: hides slots that are free or not available; None when every slot is live."""
        assert self.priority is not None
        if not self._masked:
            return None
        hidden = torch.zeros_like(self.priority).masked_fill(~self.priority.isfinite(), -INFINITY)
        return hidden[:, :, None, None]

    def _live_mean(self) -> float:
        assert self.priority is not None
        if not self._masked:
            return self.priority.shape[2]
        return float(self.priority.isfinite().float().sum(-1).mean())

    def _store(self, key: Tensor, value: Tensor, priority: Tensor, side: dict[str, Tensor]) -> None:
        """Put new tokens into free slots, then over those that rank lowest.

        Args:
            key, value: [B, Hkv, Q, d].
            priority: [B, Hkv, Q], finite.
            side: [B, Hkv, Q] for every name in `side_dtypes`.
        """
        resized = self._resize(key.shape[2])
        self.make_room(key.shape[2])
        assert self.keys is not None and self.values is not None and self.priority is not None
        # never more new tokens than the poorest row may evict, so that pinned slots survive
        replaceable = int((self.priority < PINNED).sum(-1).min())
        count = min(key.shape[2], max(replaceable, 1))
        slots = self.eviction_rank().topk(count, dim=-1, largest=False).indices
        self.priority.scatter_(2, slots, priority[:, :, -count:].to(self.priority.dtype))
        for name, new in side.items():
            self.side[name].scatter_(2, slots, new[:, :, -count:].to(self.side[name].dtype))
        slots = slots.unsqueeze(-1).expand(-1, -1, -1, key.shape[3])
        self.keys.scatter_(2, slots, key[:, :, -count:])
        self.values.scatter_(2, slots, value[:, :, -count:])
        if self._masked or resized:
            self._masked = not bool(self.priority.isfinite().all())

    def _resize(self, new_tokens: int) -> bool:
        """Give every row the slots that the budget of its new length allows: open free ones, or close the lowest
        ranked. Returns whether anything changed."""
        assert self.priority is not None
        before = [self.capacity(length) for length in self._lengths.tolist()]
        self._lengths = self._lengths + new_tokens
        after = [self.capacity(length) for length in self._lengths.tolist()]
        if before == after:
            return False
        wanted = torch.tensor(after, device=self.priority.device)[:, None, None]
        if any(new < old for new, old in zip(after, before, strict=True)):
            available = self.priority != INFINITY
            surplus = available.sum(-1, keepdim=True) - wanted
            order = self.eviction_rank().argsort(dim=-1).argsort(dim=-1)  # unavailable slots come last
            self.priority = self.priority.masked_fill(available & (order < surplus), INFINITY)
        self._set_width(max(after))
        unavailable = self.priority == INFINITY
        missing = wanted - (~unavailable).sum(-1, keepdim=True)
        opened = unavailable & (unavailable.cumsum(-1) <= missing)
        self.priority = self.priority.masked_fill(opened, -INFINITY)
        return True

    def _set_width(self, width: int) -> None:
        """Slots in storage: more as unavailable ones at the end, fewer by dropping unavailable ones."""
        assert self.keys is not None and self.values is not None and self.priority is not None
        extra = width - self.keys.shape[2]
        if extra > 0:
            self.keys, self.values = (_pad_slots(t, extra, 0.0) for t in (self.keys, self.values))
            self.priority = _pad_slots(self.priority, extra, INFINITY)
            self.side = {name: _pad_slots(t, extra, 0) for name, t in self.side.items()}
        elif extra < 0:
            kept = (self.priority == INFINITY).int().sort(dim=-1, stable=True).indices[:, :, :width]
            gather = kept.unsqueeze(-1).expand(-1, -1, -1, self.keys.shape[3])
            self.keys, self.values = self.keys.gather(2, gather), self.values.gather(2, gather)
            self.priority = self.priority.gather(2, kept)
            self.side = {name: t.gather(2, kept) for name, t in self.side.items()}


@dataclass(frozen=True, kw_only=True)
class EvictingMethod(Method):
    """Base of the evicting methods. With budget=1.0 nothing is ever evicted, so layers are exact and hold no ranks."""

    def make_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        if budget.is_full:
            return ExactLayer(spec, budget, layer_idx)
        return self.make_evicting_layer(spec, budget, layer_idx)

    def make_evicting_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        """An empty layer for a budget below the full cache."""
        raise NotImplementedError


def _widen(tensor: Tensor, width: int, fill: float) -> Tensor:
    """[Hkv, c, ...] -> [Hkv, width, ...]."""
    extra = width - tensor.shape[1]
    if extra == 0:
        return tensor
    return torch.cat([tensor, tensor.new_full((tensor.shape[0], extra, *tensor.shape[2:]), fill)], dim=1)


def _pad_slots(tensor: Tensor, extra: int, fill: float) -> Tensor:
    """[B, Hkv, C, ...] -> [B, Hkv, C + extra, ...]."""
    return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], extra, *tensor.shape[3:]), fill)], dim=2)
