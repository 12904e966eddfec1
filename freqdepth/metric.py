"""The metric of a block: how much an error in each direction of a key or value is felt by what reads it.

With `M = E[q qᵀ]` the moment of the probe's rows, an error `e` of a key costs `eᵀ M e`. Vectors are transformed as
`x A` with `A Aᵀ ≈ M`, so that plain squared errors of `x A` are what eq. 2 counts. `A = diag(w) (I - DᵀD)⁻¹`: the
channel weights `w` and the few directions that the rows share are all that is stored, and reading needs no inverse.

Legend: J layers of a block, H KV heads, S streams, Hs heads per stream, P rows, M tokens, k directions, d head
dimension.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from kvcore.state import BatchedState

# Largest share of a direction that reading may take off: keeps `I - DᵀD` well away from singular when D is rounded.
_MOST_TAKEN = 0.95


class Metric(BatchedState):
    """Stored metric of one side of a block.

    Attributes:
        weight: [J, S, Hs, d] > 0.
        directions: D [J, S, Hs, k, d]; None without directions.
    """

    def __init__(self, weight: Tensor, directions: Tensor | None) -> None:
        self.weight, self.directions = weight, directions

    @classmethod
    def of_moments(cls, moment: Tensor, num_directions: int, dtype: torch.dtype) -> Metric:
        """The metric of moments [J, S, Hs, d, d] (positive definite, fp32), stored in `dtype`."""
        weight = moment.diagonal(dim1=-2, dim2=-1).sqrt().to(dtype)
        if num_directions == 0:
            return cls(weight, None)
        size = moment.shape[-1]
        num_directions = min(num_directions, size - 1)
        scaled = moment / (weight.float().unsqueeze(-1) * weight.float().unsqueeze(-2))
        energy, vectors = torch.linalg.eigh(scaled)
        rest = energy[..., : size - num_directions].mean(-1, keepdim=True).clamp_min(1e-12)
        # A is diag(w) root(rest) (I - DᵀD)⁻¹: a direction of energy e keeps root(rest / e) when it is read
        taken = (1 - (rest / energy[..., size - num_directions :].clamp_min(1e-12)).sqrt()).clamp(0, _MOST_TAKEN)
        directions = (vectors[..., size - num_directions :] * taken.sqrt().unsqueeze(-2)).mT
        return cls((weight.float() * rest.sqrt()).to(dtype), directions.to(dtype).contiguous())

    @property
    def shape(self) -> torch.Size:
        """(J, S, Hs, d)."""
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.weight.nbytes + (0 if self.directions is None else self.directions.nbytes)

    def felt(self, x: Tensor) -> Tensor:
        """`x A` in fp32 for vectors [J, S, Hs, M, d] of every layer."""
        weighted, root = x.float() * self.weight.float().unsqueeze(-2), self._root()
        return weighted if root is None else torch.matmul(weighted, root)

    def features(self, x: Tensor, mean: Tensor) -> Tensor:
        """`(x - mean) A` of vectors [J, S, Hs, M, d], mean [J, S, Hs, 1, d]: fp32 features [S, M, D], layers
        (and heads) side by side.

        One head at a time, straight into its place: every pass over a whole block in fp32 costs a tenth of its Gram.
        """
        weight, root = self.weight.float(), self._root()
        num_layers, streams, num_heads, head_dim = self.shape
        stacked = weight.new_empty(streams, x.shape[3], num_layers, num_heads, head_dim)
        for layer, stream, head in product(range(num_layers), range(streams), range(num_heads)):
            one, place = (layer, stream, head), stacked[stream, :, layer, head]
            centred = x[one].float() - mean[one].float()
            if root is None:
                torch.mul(centred, weight[one], out=place)
            else:
                torch.mm(centred.mul_(weight[one]), root[one], out=place)
        return stacked.flatten(2)

    def _root(self) -> Tensor | None:
        """(I - DᵀD)⁻¹ [J, S, Hs, d, d], fp32; None without directions."""
        if self.directions is None:
            return None
        # I + Dᵀ (I - DDᵀ)⁻¹ D, in double precision: errors of fp32 would stay between the two domains
        directions = self.directions.double()
        small = (
            torch.eye(directions.shape[-2], device=directions.device, dtype=torch.float64) - directions @ directions.mT
        )
        root = directions.mT @ torch.linalg.inv(small) @ directions
        root.diagonal(dim1=-2, dim2=-1).add_(1)
        return root.float()

    def rebuilt(self, x: Tensor) -> Tensor:
        """The inverse of `felt`: `x A⁻¹` for [J, S, Hs, M, d]."""
        return self._taken(x, slice(None)) / self.weight.to(x.dtype).unsqueeze(-2)

    def rebuilt_heads(self, x: Tensor, layer: int, heads: list[int]) -> Tensor:
        """`x A⁻¹` for [H', M, d] of some heads (numbered through streams and heads) of one layer."""
        chosen = self.directions[layer].flatten(0, 1)[heads] if self.directions is not None else None
        one = Metric(self.weight[layer].flatten(0, 1)[heads][None], None if chosen is None else chosen[None])
        return one.rebuilt(x[None])[0]

    def rebuilt_layer(self, x: Tensor, layer: int) -> Tensor:
        """`x A⁻¹` for [S, Hs, P, d] of one layer."""
        return self._taken(x, layer) / self.weight[layer].to(x.dtype).unsqueeze(-2)

    def absorbed(self, query: Tensor, layer: int) -> Tensor:
        """Rows [S, Hs, P, d] (fp32) such that their product with `x A` is `query · x`: `query A⁻ᵀ`.

        fp32, because what is taken off is much larger than what remains, and `x A` is large where that is.
        """
        return self._taken(query.float() / self.weight[layer].float().unsqueeze(-2), layer)

    def _taken(self, x: Tensor, layer: int | slice) -> Tensor:
        """`x (I - DᵀD)`."""
        if self.directions is None:
            return x
        directions = self.directions[layer].to(x.dtype)
        return x - torch.matmul(torch.matmul(x, directions.mT), directions)
