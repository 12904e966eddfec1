"""Planes: codes packed for products that never take the bytes apart.

A code of 8, 6 or 3 bits is split into planes of 4, 2 and 1 bits, and all coefficients' planes of one width lie in one
matrix: a step then takes two or three products, however many widths are in use. Tokens stand in eight lines of equal
length; a byte holds one coefficient's codes of tokens from different lines (its fields), so that tokens folded in later
are more columns, whatever the width.

Legend: S streams, K plane rows (coefficients), M tokens, c = M / 8 columns, P rows, w width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freqdepth.codes import Digits
from kvcore.state import BatchedState

LINES = 8


def plane_widths(bits: int) -> list[tuple[int, int]]:
    """(width, shift) of the planes of a code, lowest bits first. 8 bits are two planes of 4: a byte has its sign."""
    if bits == 8:
        return [(4, 0), (4, 4)]
    planes, shift = [], 0
    for width in (4, 2, 1):
        if bits & width:
            planes.append((width, shift))
            shift += width
    return planes


class Plane(BatchedState):
    """Codes of one width.

    Attributes:
        width: 1, 2 or 4 bits.
        packed: uint8 [S, w, c, K].
    """

    def __init__(self, width: int, codes: Tensor) -> None:
        """`codes`: uint8 [S, M, K], M a multiple of 8; higher bits are left out."""
        self.width = width
        self.packed = self._pack(codes)

    @property
    def num_fields(self) -> int:
        return 8 // self.width

    def _pack(self, codes: Tensor) -> Tensor:
        lines = (codes & (2**self.width - 1)).unflatten(1, (self.num_fields, self.width, -1))
        packed = lines[:, 0].clone()
        for index in range(1, self.num_fields):
            packed |= lines[:, index] << (index * self.width)
        return packed

    def append(self, codes: Tensor) -> None:
        """More tokens: uint8 [S, M', K]."""
        self.packed = torch.cat([self.packed, self._pack(codes)], dim=2)

    def drop_columns(self, first: int, count: int) -> None:
        """Forget columns."""
        self.packed = torch.cat([self.packed[:, :, :first], self.packed[:, :, first + count :]], dim=2)

    def codes(self) -> Tensor:
        """uint8 [S, 8, c, K]."""
        parts = [(self.packed >> (index * self.width)) & (2**self.width - 1) for index in range(self.num_fields)]
        return torch.cat(parts, dim=1)

    def _field(self, index: int) -> tuple[Tensor, float]:
        """One field of all bytes [S, w * c, K], below 128, and the factor that makes it codes.

        Only the last field is shifted: the others times their power of two still fit a signed byte.
        """
        flat, place = self.packed.flatten(1, 2), index * self.width
        if index == self.num_fields - 1:
            return flat >> place, 1.0
        return flat & ((2**self.width - 1) << place), 0.5**place

    def logits(self, rows: Tensor, integers: bool) -> Tensor:
        """`rows @ codesᵀ`: [S, P, K] -> fp32 [S, P, M]."""
        parts, digits = [], Digits(rows[0]) if integers else None
        for index in range(self.num_fields):
            field, factor = self._field(index)
            if digits is None:
                parts.append(torch.matmul(rows * factor, field.float().mT))
            else:
                parts.append(digits.product(field[0].view(torch.int8).T, factor).unsqueeze(0))
        return torch.cat(parts, dim=-1)

    def mix(self, weights: Tensor, digits: Digits | None) -> Tensor:
        """`weights @ codes`: [S, P, M] (and the same as digits) -> fp32 [S, P, K]."""
        total: Tensor | None = None
        size = weights.shape[-1] // self.num_fields
        for index in range(self.num_fields):
            field, factor = self._field(index)
            if digits is None:
                part = torch.matmul(weights[..., index * size : (index + 1) * size] * factor, field.float())
            else:
                part = digits.product(field[0].view(torch.int8), factor, start=index * size).unsqueeze(0)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total
