"""StreamingLLM: attention sinks and a recency window.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", https://arxiv.org/abs/2309.17453, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcore.baselines.eviction import GENERATED, PINNED, EvictingLayer, EvictingMethod
from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer
from kvcore.method import register
from kvcore.rope import shift_positions

Positions = Literal["absolute", "in_cache"]


class StreamingLayer(EvictingLayer):
    """Sinks pinned, everything else ranked by recency; the window keeps sliding while decoding."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, num_sinks: int, positions: Positions) -> None:
        super().__init__(spec, budget, layer_idx)
        self.num_sinks, self.positions = num_sinks, positions

    def rank(self, keys: Tensor, values: Tensor, row: int, scale: float) -> Tensor:
        num_tokens = keys.shape[1]
        # a budget smaller than twice the sinks still keeps as many recent tokens as sinks
        self._sinks = min(self.num_sinks, self.capacity(num_tokens) // 2)
        priority = torch.arange(num_tokens, dtype=torch.float32, device=keys.device) + (GENERATED - num_tokens)
        priority[: self._sinks] = PINNED
        return priority.expand(keys.shape[0], -1)

    def _stored_parts(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """With in-cache positions (section 3.2) the kept tokens stand at 0..C-1. Attention depends on relative
        positions only, so shifting the window back by the number of dropped tokens equals moving the sinks forward."""
        parts = super()._stored_parts()
        keys, values, bias = parts[0]
        if self.positions == "absolute" or self._sinks == 0 or self.spec.inverse_frequencies is None:
            return parts
        assert self.priority is not None
        live = self.priority.isfinite().sum(-1)  # [B, Hkv]
        dropped = self._lengths.to(live.device)[:, None] - live
        moved = shift_positions(keys[:, :, : self._sinks], dropped[:, :, None], self.spec.inverse_frequencies)
        cut = [None, None] if bias is None else [bias[..., : self._sinks], bias[..., self._sinks :]]
        return [
            (moved, values[:, :, : self._sinks], cut[0]),
            (keys[:, :, self._sinks :], values[:, :, self._sinks :], cut[1]),
        ]


@register
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(EvictingMethod):
    """Sinks + recency window (https://arxiv.org/abs/2309.17453).

    Args:
        num_sinks: first tokens kept for good (4 in the paper).
        positions: `absolute` keeps every key where it was (default: inside the model's context length it measures the
            same, see README); `in_cache` is the paper's section 3.2, positions 0..C-1 inside the cache, which lets
            text run past the model's context length.
    """

    name: ClassVar[str] = "streaming_llm"
    num_sinks: int = 4
    positions: Positions = "absolute"

    def __post_init__(self) -> None:
        if self.num_sinks < 0:
            raise ValueError(f"num_sinks must be >= 0; received {self.num_sinks}")
        if self.positions not in ("absolute", "in_cache"):
            raise ValueError(f"positions must be 'absolute' or 'in_cache'; received {self.positions!r}")

    def make_evicting_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return StreamingLayer(spec, budget, layer_idx, self.num_sinks, self.positions)
