"""Planes: codes packed for products that never take the bytes apart.

A code of 8, 6 or 3 bits is split into planes of 4, 2 and 1 bits, and all coefficients' planes of one width lie in one
matrix: a step then takes two or three products, however many widths are in use. Tokens stand in eight lines of equal
length; a byte holds one coefficient's codes of tokens from different lines (its fields), so that tokens folded in later
are more columns, whatever the width.

Legend: S streams, K plane rows (coefficients), M tokens, c = M / 8 columns, P rows, w width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freqdepth.codes import UNQUANTIZED, Digits
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


@dataclass(frozen=True)
class Rows:
    """Where a run of a plane's rows belongs.

    Attributes:
        index: into the widths.
        columns: the coefficients.
        shift: place of the plane in their codes.
    """

    index: int
    columns: slice
    shift: int


def plane_layout(widths: list[tuple[int, int]]) -> dict[int, list[Rows]]:
    """Per plane width: its rows, in order, for (bits, coefficients) in the coefficients' order."""
    layout: dict[int, list[Rows]] = {}
    start = 0
    for index, (bits, count) in enumerate(widths):
        for width, shift in [] if bits == UNQUANTIZED else plane_widths(bits):
            layout.setdefault(width, []).append(Rows(index, slice(start, start + count), shift))
        start += count
    return layout


def to_planes(x: Tensor, rows: list[Rows]) -> Tensor:
    """Coefficients' numbers [..., R] as those of plane rows [..., K], times the place values."""
    return torch.cat([x[..., r.columns] * 2.0**r.shift if r.shift else x[..., r.columns] for r in rows], dim=-1)


def add_planes(total: Tensor, x: Tensor, rows: list[Rows]) -> None:
    """Add plane rows' numbers [..., K], times the place values, to the coefficients' [..., R] in place."""
    first = 0
    for r in rows:
        count = r.columns.stop - r.columns.start
        total[..., r.columns].add_(x[..., first : first + count], alpha=2.0**r.shift)
        first += count


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
        shifts = torch.arange(0, 8, self.width, dtype=torch.uint8, device=self.packed.device)
        fields = self.packed.unsqueeze(1) >> shifts[:, None, None, None]
        return fields.bitwise_and_(2**self.width - 1).flatten(1, 2)

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
