"""The shared form of a block's keys or values, and the corrections of residual tokens.

Legend: J layers of the block, S streams, Hs heads per stream, P query rows per head, M middle tokens, F folded tokens,
r residual tokens, R coefficients, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freqdepth.basis import DepthBasis, KltBasis
from freqdepth.store import CoefficientStore
from kvcore.quant import QuantizedTensor
from kvcore.rope import shift_positions
from kvcore.state import BatchedState

# Keys before RoPE are turned a tile at a time: no full-size key exists.
_ROTATION_TILE = 512


class SharedSide(BatchedState):
    """Keys or values of the shared heads: coefficients, layer bases, means.

    Attributes:
        coefficients, basis: see their classes.
        mean: [J, S, Hs, 1, d], in the model's dtype.
    """

    def __init__(self, coefficients: CoefficientStore, basis: DepthBasis, mean: Tensor) -> None:
        self.coefficients, self.basis, self.mean = coefficients, basis, mean

    def logits(self, query: Tensor, layer: int) -> Tensor:
        """`query · reconstructed keys`: [S, Hs, P, d] -> [S, Hs, P, M], fp32; no key is reconstructed."""
        rows = self.basis.absorb(query, layer)
        product = self.coefficients.logits(rows).unflatten(1, query.shape[1:3])
        return product.add_(torch.matmul(query.float(), self.mean[layer].float().mT))

    def rotated_logits(self, query: Tensor, layer: int, positions: Tensor, frequencies: Tensor) -> Tensor:
        """The same for coefficients of keys before RoPE, which stand at `positions` [S or 1, M]."""
        basis = self.basis.matrix(layer, torch.float32)
        mean, query = self.mean[layer].float(), query.float()
        parts = []
        for tile, where in zip(
            self.coefficients.coefficients().split(_ROTATION_TILE, dim=1),
            positions.split(_ROTATION_TILE, dim=1),
            strict=True,
        ):
            keys = torch.einsum("smr,srhd->shmd", tile, basis) + mean
            parts.append(torch.matmul(query, shift_positions(keys, where.unsqueeze(1), frequencies).mT))
        return torch.cat(parts, dim=-1)

    def output(self, weights: Tensor, layer: int) -> Tensor:
        """`weights · reconstructed values`: [S, Hs, P, M] -> [S, Hs, P, d]."""
        mixed = self.coefficients.mix(weights.flatten(1, 2))
        total = weights.sum(-1, keepdim=True)
        expanded = self.basis.expand(mixed, layer, weights.shape[1], weights.dtype)
        return torch.addcmul(expanded, total, self.mean[layer].to(weights.dtype))

    def fold(self, x: Tensor, tile: int) -> Tensor:
        """Append tokens [J, S, Hs, F, d], `tile` at a time; returns their squared error relative to their energy about
        the mean."""
        centred = x.float() - self.mean.float()
        tiles = self.basis.project(centred).split(tile, dim=1)
        stored = torch.cat([self.coefficients.append(part) for part in tiles], dim=1)
        return (self.rebuild(stored) - x.float()).square().sum() / centred.square().sum().clamp_min(1e-20)

    def rebuild(self, coefficients: Tensor) -> Tensor:
        """A few tokens' coefficients [S, m, R] as [J, S, Hs, m, d]; for the fold error and tests."""
        layers = [
            torch.einsum("smr,srhd->shmd", coefficients, self.basis.matrix(layer, torch.float32))
            for layer in range(self.mean.shape[0])
        ]
        return torch.stack(layers) + self.mean.float()


class ResidualStore(BatchedState):
    """High-frequency corrections of the first r middle tokens, for the heads in residual mode.

    Attributes:
        heads: the KV heads.
        members: their places among the shared heads.
        components: per depth component [Hres, r, d], quantised or in the model's dtype: one per layer with a KLT, one
            per high frequency with a DCT.
        mixing: [J, components], fp32, or None when component j is layer j's correction.
        rotation: [J, Hres, d, d] of an aligned DCT, or None.
    """

    def __init__(
        self,
        heads: list[int],
        members: list[int],
        components: list[QuantizedTensor | Tensor],
        mixing: Tensor | None,
        rotation: Tensor | None,
    ) -> None:
        self.heads, self.members, self.components = heads, members, components
        self.mixing, self.rotation = mixing, rotation

    def layer(self, layer: int, dtype: torch.dtype, basis: DepthBasis) -> Tensor:
        """Corrections of one layer: [Hres, r, d]. With a KLT they are stored in the metric's domain: rounding them
        where they are felt evenly keeps it out of the directions that the queries look at."""
        if self.mixing is None:
            part = _dense(self.components[layer], torch.float32)
            return (
                basis.metric.rebuilt_heads(part, layer, self.members).to(dtype)
                if isinstance(basis, KltBasis)
                else part.to(dtype)
            )
        stacked = torch.stack([_dense(component, torch.float32) for component in self.components])
        correction = torch.einsum("c,chrd->hrd", self.mixing[layer], stacked)
        if self.rotation is not None:
            correction = correction @ self.rotation[layer].float().mT
        return correction.to(dtype)

    @property
    def num_tokens(self) -> int:
        return _dense(self.components[0], torch.float32).shape[1]


def _dense(component: QuantizedTensor | Tensor, dtype: torch.dtype) -> Tensor:
    return component.to(dtype) if isinstance(component, Tensor) else component.dequantize(dtype)
