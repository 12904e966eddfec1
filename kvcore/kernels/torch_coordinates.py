"""Logits of tokens kept as a few coordinates of low precision: the torch path, which never takes bytes apart.

Legend: B batch, Hq query heads, Hkv KV heads, Q query tokens, N tokens, m coordinates, L = B * Hkv lines of bytes,
P = G * Q rows of a KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coordinate_logits(query: Tensor, codes: Tensor, parts: list[tuple[int, int]], offset: Tensor) -> Tensor:
    """See `reference_compressed.coordinate_logits`."""
    lines = codes.flatten(0, 1)
    rows = query.float().reshape(lines.shape[0], -1, query.shape[3])  # [L, P, m]
    result, first, byte = offset.float().reshape(lines.shape[0], -1, 1), 0, 0
    for dims, bits in parts:
        width = dims * bits // 8
        result = _add_product(result, rows[..., first : first + dims], lines[:, byte : byte + width], bits)
        first, byte = first + dims, byte + width
    return result.view(*query.shape[:3], -1)


def _add_product(result: Tensor, weights: Tensor, packed: Tensor, bits: int) -> Tensor:
    """result + Σ weight · code.

    A byte of p codes is b_0 = Σ_j c_j 2^(bits · (p - 1 - j)); with b_j the byte without its first j codes,
    c_j = (b_j - b_(j+1)) / 2^(bits · (p - 1 - j)). So Σ w_j c_j = Σ_j b_j · (w'_j - w'_(j-1)), w'_j = w_j / 2^(...).

    Args:
        result: [L, P, N] or [L, P, 1].
        weights: [L, P, dims].
        packed: uint8 [L, dims · bits / 8, N].
    """
    per_byte = 8 // bits
    before: Tensor | None = None
    for index, piece in enumerate(weights.chunk(per_byte, dim=-1)):
        left = bits * (per_byte - 1 - index)
        scaled = piece * 2.0**-left
        low = packed if index == 0 else packed.bitwise_and(2 ** (left + bits) - 1)
        result = torch.baddbmm(result, scaled if before is None else scaled - before, low.float())
        before = scaled
    return result
