"""The shared form of a block's keys or values.

Legend: J layers of the block, S streams, Hs heads per stream, P query rows per head, M middle tokens, F folded tokens,
R coefficients, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freqdepth.basis import DepthBasis
from freqdepth.residual import ResidualStore
from freqdepth.store import CoefficientStore
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

    def logits(self, query: Tensor, layer: int, residual: ResidualStore | None = None) -> Tensor:
        """`query · reconstructed keys`: [S, Hs, P, d] -> [S, Hs, P, M], fp32; no key is reconstructed."""
        rows = self.basis.enter(query, layer)
        product = self.coefficients.logits(self.basis.absorb(rows, layer)).unflatten(1, query.shape[1:3])
        product.add_(torch.matmul(query.float(), self.mean[layer].float().mT))
        if residual is not None:
            residual.add_logits(product.flatten(0, 1), rows.flatten(0, 1), layer)
        return product

    def rotated_logits(
        self, query: Tensor, layer: int, positions: Tensor, frequencies: Tensor, residual: ResidualStore | None = None
    ) -> Tensor:
        """The same for coefficients of keys before RoPE, which stand at `positions` [S or 1, M]."""
        basis = self.basis.matrix(layer, torch.float32)
        mean, query = self.mean[layer].float(), query.float()
        corrected = None if residual is None else residual.rebuilt(layer, self.basis)
        parts, first = [], 0
        for tile, where in zip(
            self.coefficients.coefficients().split(_ROTATION_TILE, dim=1),
            positions.split(_ROTATION_TILE, dim=1),
            strict=True,
        ):
            keys = torch.einsum("smr,srhd->shmd", tile, basis) + mean
            if residual is not None and corrected is not None:
                mine = corrected[:, first : first + keys.shape[2]]
                keys.flatten(0, 1)[residual.members, : mine.shape[1]] += mine
            first += keys.shape[2]
            parts.append(torch.matmul(query, shift_positions(keys, where.unsqueeze(1), frequencies).mT))
        return torch.cat(parts, dim=-1)

    def output(self, weights: Tensor, layer: int, residual: ResidualStore | None = None) -> Tensor:
        """`weights · reconstructed values`: fp32 [S, Hs, P, M] -> [S, Hs, P, d]."""
        mixed = self.coefficients.mix(weights.flatten(1, 2))
        expanded = self.basis.expand(mixed, layer, weights.shape[1])
        if residual is not None:
            residual.add_output(expanded.flatten(0, 1), weights.flatten(0, 1), layer)
        total = weights.sum(-1, keepdim=True)
        return torch.addcmul(self.basis.leave(expanded, layer), total, self.mean[layer].float())

    def fold(self, x: Tensor, tile: int) -> Tensor:
        """Append tokens [J, S, Hs, F, d], `tile` at a time; returns their squared error relative to their energy about
        the mean."""
        centred = x.float() - self.mean.float()
        whole = self.basis.whole()
        tiles = self.basis.project(centred, whole).split(tile, dim=1)
        stored = torch.cat([self.coefficients.append(part) for part in tiles], dim=1)
        left = self.basis.rebuilt(stored, whole) - centred
        return left.square().sum() / centred.square().sum().clamp_min(1e-20)

    def rebuild(self, coefficients: Tensor) -> Tensor:
        """Coefficients [S, m, R] as vectors [J, S, Hs, m, d]; for tests."""
        return self.basis.rebuilt(coefficients, self.basis.whole()) + self.mean.float()
