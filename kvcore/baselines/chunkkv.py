"""ChunkKV: whole chunks of neighbouring tokens are kept or dropped, and layers share the choice.

Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
https://arxiv.org/abs/2502.00299, algorithms 1 and 2.
Legend: Hkv KV heads, n prompt tokens of one row, w window tokens, c tokens of a chunk, M chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.baselines.eviction import INFINITY
from kvcore.baselines.scores import ranks
from kvcore.baselines.snapkv import WindowLayer, WindowOptions
from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.method import register


class SharedRanks:
    """Prefix ranks handed from the first layer of a reuse group to the others; empty outside a prefill."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}


class ChunkKVLayer(WindowLayer):
    """Chunks rank by the window attention that they receive. While decoding, the lowest chunk goes token by token."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, options: ChunkKV, shared: SharedRanks) -> None:
        super().__init__(spec, budget, layer_idx, options.window)
        self.chunk, self.shared = options.chunk, shared
        self.leads = layer_idx % options.reuse_layers == 0
        self.closes = (layer_idx + 1) % options.reuse_layers == 0 or layer_idx + 1 == spec.num_layers

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        if self.leads:
            super().observe(query, keys, padding, scale)

    def build(self, prompt: LayerPrompt) -> None:
        super().build(prompt)
        if self.closes:
            self.shared.rows.clear()

    def prefix_ranks(self, keys: Tensor, row: int, scale: float, prefix: int) -> Tensor:
        if self.leads:
            window = keys.shape[1] - prefix
            slots = self.capacity(keys.shape[1]) - window
            self.shared.rows[row] = self.chunk_ranks(self.window_mass(keys, row, scale, prefix), slots)
        return self.shared.rows[row].to(keys.device)

    def chunk_ranks(self, mass: Tensor, slots: int) -> Tensor:
        """Ranks of the tokens of the best chunks; -inf for all others.

        Args:
            mass: [Hkv, prefix], attention received from the window.
            slots: slots for these tokens. When not one chunk fits, chunks are as short as to fit.
        """
        prefix = mass.shape[1]
        size = max(1, min(self.chunk, slots))
        totals = F.pad(mass, (0, -prefix % size)).unflatten(1, (-1, size)).sum(dim=-1)  # [Hkv, M]
        num_kept = totals.shape[1] if slots >= prefix else slots // size
        order = ranks(totals)
        within = torch.arange(size, dtype=torch.float32, device=mass.device)
        tokens = (order * size).masked_fill(order < totals.shape[1] - num_kept, -INFINITY)[:, :, None] + within
        return tokens.flatten(1)[:, :prefix]


@register
@dataclass(frozen=True, kw_only=True)
class ChunkKV(WindowOptions):
    """Whole chunks chosen per KV head by the observation window's attention summed over the chunk
    (https://arxiv.org/abs/2502.00299, algorithm 1), with the chosen indices reused by the following layers (algorithm
    2). Attention is averaged over the query heads of a KV head. Slots that no whole chunk fills stay free for the first
    generated tokens.

    Args:
        chunk: tokens of a chunk (10 in the paper).
        reuse_layers: layers that share one choice, the first of them makes it (2 in the paper; 1 shares nothing).
    """

    name: ClassVar[str] = "chunkkv"
    chunk: int = 10
    reuse_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be >= 1 token; received {self.chunk}")
        if self.reuse_layers < 1:
            raise ValueError(f"reuse_layers must be >= 1 (1 shares nothing); received {self.reuse_layers}")

    def make_layers(self, spec: ModelSpec, budget: Budget) -> list[CacheLayer]:
        if budget.is_full:
            return super().make_layers(spec, budget)
        shared = SharedRanks()
        return [ChunkKVLayer(spec, budget, index, self, shared) for index in range(spec.num_layers)]
