"""Depth transforms: how the keys (or values) of J adjacent layers become a few shared coefficients.

Legend: J layers of a block, H KV heads, S streams (heads that share coefficients: H streams of one head, or one stream
of all heads), Hs heads per stream, M tokens, d head dimension, D = J * Hs * d features of a token, R coefficients.
Everything is computed in fp32, whatever the dtype of the cache.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

# Strips in which the upper triangle of a Gram matrix is computed: 0.045 s for 4,096 x 960, the whole product 0.070.
_GRAM_STRIPS = 4
# Below this share of the features a subspace iteration is cheaper than the whole eigendecomposition.
_SUBSPACE_SHARE = 0.6
_OVERSAMPLING = 16


def dct_basis(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal DCT-II basis F [size, size] (fp32), one frequency per row, lowest first; `Z = F X`, `X = Fᵀ Z`."""
    position = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (position + 0.5) * position[:, None]) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.to(device, torch.float32)


def depth_transform(x: Tensor) -> Tensor:
    """Eq. 1: depth frequencies `F X` of [J, ..., T, d], in the input's dtype."""
    return torch.einsum("fj,j...->f...", dct_basis(x.shape[0], x.device), x.float()).to(x.dtype)


def inverse_depth_transform(z: Tensor) -> Tensor:
    """Eq. 1: `Fᵀ Z` of [J, ..., T, d], in the input's dtype."""
    return torch.einsum("fj,f...->j...", dct_basis(z.shape[0], z.device), z.float()).to(z.dtype)


def align_layers(x: Tensor) -> Tensor:
    """Orthogonal Procrustes: the rotation of every layer and head onto the block's first layer.

    Args:
        x: [J, H, M, d]; each layer is centred over its tokens.

    Returns:
        Rotations [J, H, d, d]: `x[j] @ rotation[j]` is closest to `x[0]`; the first is the identity.
    """
    centred = x.float() - x.float().mean(2, keepdim=True)
    # in double precision: what the rotation lacks in orthogonality is lost between projecting and reading
    left, _, right = torch.linalg.svd((centred.transpose(-1, -2) @ centred[:1]).double())
    rotation = (left @ right).float()
    rotation[0] = torch.eye(x.shape[-1], device=x.device)
    return rotation


def unstack_features(features: Tensor, num_layers: int, head_dim: int) -> Tensor:
    """Features, ordered (j, h, d), as vectors of every layer and head: [S, M, D] -> [J, H, M, d]."""
    split = features.unflatten(-1, (num_layers, -1, head_dim))  # [S, M, J, Hs, d]
    return split.permute(2, 0, 3, 1, 4).flatten(1, 2)


def gram_matrix(x: Tensor) -> Tensor:
    """`xᵀ x` [S, D, D] of [S, M, D], symmetric to the last bit: strips of the upper triangle, mirrored."""
    size, turned = x.shape[-1], x.mT
    gram = x.new_empty(x.shape[0], size, size)
    borders = [size * strip // _GRAM_STRIPS for strip in range(_GRAM_STRIPS + 1)]
    for first, last in pairwise(borders):
        gram[:, first:last, first:] = turned[:, first:last] @ x[..., first:]
        gram[:, last:, first:last] = gram[:, first:last, last:].mT
    return gram


def depth_klt(features: Tensor, rank: int, max_tokens: int, iterations: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Leading directions of the features' second moment: the depth transform the data asks for.

    Args:
        features: [S, M, D] (fp32), centred.
        rank: R directions, at most D.
        max_tokens: tokens of the Gram matrix, an even sample of the M.
        iterations: subspace iterations where R is small against D; otherwise the whole spectrum is solved.
        seed: of the random start.

    Returns:
        Orthonormal basis [S, D, R], strongest first, and the mean square of each coefficient [S, R].
    """
    num_tokens, size = features.shape[1:]
    sample = features[:, :: max(1, -(-num_tokens // max_tokens))]
    gram = gram_matrix(sample).div_(sample.shape[1])
    if rank + _OVERSAMPLING >= _SUBSPACE_SHARE * size:
        energy, basis = torch.linalg.eigh(gram)
        return basis.flip(-1)[..., :rank], energy.flip(-1)[..., :rank].clamp_min(0)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    mixed = gram @ torch.randn(size, rank + _OVERSAMPLING, generator=generator).to(gram.device)
    for _ in range(iterations):
        mixed = gram @ _independent(mixed)
    subspace = torch.linalg.qr(mixed).Q
    energy, inner = torch.linalg.eigh(subspace.transpose(-1, -2) @ gram @ subspace)
    return (subspace @ inner.flip(-1))[..., :rank], energy.flip(-1)[..., :rank].clamp_min(0)


def _independent(x: Tensor) -> Tensor:
    """Well conditioned columns that span those of [S, D, R]: the L of an LU decomposition, cheaper than a QR's Q.

    Text of very few different tokens has fewer directions than columns; L is whole then, too, and spans more.
    """
    factors, pivots, _ = torch.linalg.lu_factor_ex(x)
    swaps, lower, _ = torch.lu_unpack(factors, pivots, unpack_pivots=True)
    return lower.gather(1, swaps.argmax(-1, keepdim=True).expand_as(lower))


def energy_shares(basis_energy: Tensor, total: Tensor) -> Tensor:
    """Cumulative share of the energy [..., R] in the leading coefficients, given the total energy [...]."""
    return basis_energy.cumsum(-1) / total.unsqueeze(-1).clamp_min(1e-30)
