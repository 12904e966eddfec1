"""PyramidKV: SnapKV's scores, with more room in low layers than in high ones.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
https://arxiv.org/abs/2406.02069, section 4.2.
Legend: L layers, k_l slots of layer l, k mean slots of a layer, w window tokens, n tokens of one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvcore.baselines.snapkv import PooledWindowOptions, SnapKVLayer
from kvcore.budget import Budget, ModelSpec
from kvcore.layer import CacheLayer
from kvcore.method import register


class PyramidKVLayer(SnapKVLayer):
    """A SnapKV layer whose slots follow an arithmetic sequence over the layers."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, options: PyramidKV) -> None:
        super().__init__(spec, budget, layer_idx, options)
        self.beta = options.beta

    def capacity(self, tokens: int) -> int:
        mean = super().capacity(tokens)
        # mirrored layers sum to exactly twice the mean, so all layers together sum to L times the mean
        mirror = self.spec.num_layers - 1 - self.layer_idx
        if self.layer_idx == mirror:
            return mean
        low = math.floor(self._line(min(self.layer_idx, mirror), mean, tokens))
        return low if self.layer_idx < mirror else 2 * mean - low

    def _line(self, layer_idx: int, mean: int, tokens: int) -> float:
        """Slots of a layer of the lower half before rounding: a line from the largest (layer 0) to the smallest."""
        window = self.kept_window(tokens)
        smallest = window + (mean - window) / self.beta
        largest = min(2 * mean - smallest, tokens)
        smallest = 2 * mean - largest
        return largest - layer_idx * (largest - smallest) / (self.spec.num_layers - 1)


@register
@dataclass(frozen=True, kw_only=True)
class PyramidKV(PooledWindowOptions):
    """SnapKV's choice of tokens with layer budgets on an arithmetic sequence (https://arxiv.org/abs/2406.02069, section
    4.2): the last layer has w + (k - w) / beta slots, layer 0 as many above the mean k as the last has
    below it, at most all n tokens, and the others lie on the line between them. Layer budgets sum to L k.

    Args:
        beta: steepness; beta = 1 is flat (20 in the paper).
    """

    name: ClassVar[str] = "pyramidkv"
    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1.0:
            raise ValueError(f"beta must be >= 1 (1 gives every layer the same budget); received {self.beta}")

    def make_evicting_layer(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> CacheLayer:
        return PyramidKVLayer(spec, budget, layer_idx, self)
