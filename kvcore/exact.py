"""Layers that keep every token exactly: the full cache, and the window of sliding-window layers.

Legend: B batch rows, Hq query heads, Hkv KV heads, N stored tokens, Q new tokens, d head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer, LayerPrompt


class ExactLayer(CacheLayer):
    """Every key and value, grown by concatenation and attended by SDPA, as transformers' `DynamicCache` does."""

    is_croppable = True
    host_fields = frozenset({"padding"})

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> None:
        super().__init__(spec, budget, layer_idx)
        self.keys: Tensor | None = None  # [B, Hkv, N, d]
        self.values: Tensor | None = None  # [B, Hkv, N, d]
        self.padding: Tensor | None = None  # [B], left-padding tokens still among the N

    def build(self, prompt: LayerPrompt) -> None:
        self.keys, self.values = prompt.keys, prompt.values
        self.padding = torch.tensor(prompt.padding)
        self._padded = any(prompt.padding)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        keys, values = self.append(key, value)
        self.attended = tokens - self._mean_padding() - (key.shape[2] - 1) / 2
        return exact_attention(query, keys, values, scale, self.visible(key.shape[2]))

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; returns all keys and values [B, Hkv, N, d]."""
        assert self.keys is not None and self.values is not None
        self.keys = torch.cat([self.keys, key], dim=2)
        self.values = torch.cat([self.values, value], dim=2)
        return self.keys, self.values

    def visible(self, num_queries: int, window: int | None = None) -> Tensor | None:
        """Boolean mask [B, 1, Q, N] of what each new token may see; None when it is everything."""
        assert self.keys is not None and self.padding is not None
        num_keys = self.keys.shape[2]
        if num_queries == 1 and not self._padded and (window is None or window >= num_keys):
            return None
        positions = torch.arange(num_keys, device=self.keys.device)
        rows = positions[num_keys - num_queries :, None]
        mask = (positions <= rows) & (positions >= self.padding.to(positions.device)[:, None, None, None])
        return mask if window is None else mask & (positions > rows - window)

    def crop(self, tokens_to_remove: int) -> None:
        assert self.keys is not None and self.values is not None
        # cloned, so that the removed tokens' storage is really given back
        self.keys = self.keys[:, :, : -abs(tokens_to_remove)].clone()
        self.values = self.values[:, :, : -abs(tokens_to_remove)].clone()

    def _mean_padding(self) -> float:
        return float(self.padding.float().mean()) if self._padded and self.padding is not None else 0.0


class SlidingLayer(ExactLayer):
    """A layer whose model attends to the last `window` tokens only: exactly those are kept.

    Used for every method at budget=1.0; under compression such models are refused by name.
    """

    is_croppable = False

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, window: int) -> None:
        super().__init__(spec, budget, layer_idx)
        self.window = window

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        self._trim()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        keys, values = self.append(key, value)
        self.attended = min(self.window, keys.shape[2])
        output = exact_attention(query, keys, values, scale, self.visible(key.shape[2], self.window))
        self._trim()
        return output

    def _trim(self) -> None:
        """Drop what no future token can see: the next token looks back on `window - 1` stored ones."""
        assert self.keys is not None and self.values is not None and self.padding is not None
        excess = self.keys.shape[2] - (self.window - 1)
        if excess > 0:
            self.keys = self.keys[:, :, excess:].clone()
            self.values = self.values[:, :, excess:].clone()
            self.padding = (self.padding - excess).clamp_min(0)
            self._padded = bool(self.padding.any())


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """SDPA of Q tokens over all N entries, reading each key once per KV head.

    Args:
        query: [B, Hq, Q, d].
        keys, values: [B, Hkv, N, d].
        scale: factor on the logits.
        mask: boolean [B, 1, Q, N] or None.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    group_size = num_heads // keys.shape[1]
    if num_queries == 1:
        packed = query.reshape(batch, keys.shape[1], group_size, head_dim)
        output = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
        return output.reshape(batch, num_heads, 1, -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=group_size > 1)
