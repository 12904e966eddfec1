"""Randomised truncated SVD of spans, in fp32, seeded, never differentiated through. arXiv 2606.31145, section 3.2.

Legend: ... batch dimensions (rows, heads, spans of equal length), n tokens of a span, d head dimension, r kept rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OVERSAMPLING = 8
POWER_ITERATIONS = 2


@dataclass
class Factors:
    """U σ Vᵀ of a batch of spans.

    Attributes:
        left: U [..., n, r].
        sigma: σ [..., r], descending, >= 0.
        right: Vᵀ [..., r, d].
    """

    left: Tensor
    sigma: Tensor
    right: Tensor

    def rows(self, gates: Tensor | None = None) -> Tensor:
        """Σ_i g_i σ_i u_i v_iᵀ [..., n, d]; gates [..., r] or None for ones."""
        sigma = self.sigma if gates is None else self.sigma * gates
        return (self.left * sigma.unsqueeze(-2)) @ self.right


@torch.no_grad()
def truncated_svd(matrix: Tensor, rank: int, seed: int = 0, where: str = "") -> Factors:
    """Randomised truncated SVD (Halko et al. 2011, algorithm 4.4) of [..., n, d]; exact when rank >= min(n, d).

    Args:
        matrix: any float dtype; computed in fp32.
        rank: components wanted.
        seed: of the random test matrix.
        where: what the matrix is, for messages (layer and span).

    Raises:
        ValueError: the matrix is not finite.
    """
    matrix = matrix.detach().float()
    check_finite(matrix, where)
    limit = min(matrix.shape[-2:])
    rank = min(rank, limit)
    if rank + OVERSAMPLING >= limit:
        left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
        return Factors(left[..., :rank], sigma[..., :rank], right[..., :rank, :])
    generator = torch.Generator().manual_seed(seed)
    test = torch.randn(matrix.shape[-1], rank + OVERSAMPLING, generator=generator).to(matrix.device)
    basis = torch.linalg.qr(matrix @ test).Q
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.mT @ basis).Q).Q
    left, sigma, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    return Factors((basis @ left)[..., :rank], sigma[..., :rank], right[..., :rank, :])


def check_finite(tensor: Tensor, where: str) -> None:
    """Refuse NaN and infinity, naming the first span that holds one.

    Raises:
        ValueError: naming `where` and the index of the first bad matrix.
    """
    if bool(tensor.isfinite().all()):
        return
    bad = (~tensor.isfinite()).flatten(-2).any(-1).nonzero()[0].tolist()
    raise ValueError(
        f"SeKV received values that are not finite ({where or 'span'}, index {bad} of its batch dimensions): "
        "the model itself produced NaN or infinity in this layer; check its dtype and inputs"
    )


def rows_are_cheaper(tokens: int, dim: int, rank: int) -> bool:
    """Whether the raw n x d rows hold no more numbers than rank-r factors: n·d <= r·(n + d + 1)."""
    return tokens * dim <= rank * (tokens + dim + 1)
