"""Codes of coefficients as planes, and where their tokens lie: the operand of `plane_logits` and `plane_mix`.

A code of 8, 6 or 3 bits is split into planes of 4, 2 and 1 bits, and the planes of one width of all coefficients lie in
one matrix. Tokens stand in eight lines; field f of byte row i belongs to place f * n + i of the lines.

Legend: S streams, P rows, R coefficients, K coefficients of a plane, n byte rows, M tokens, c columns of the lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

LINES = 8
# (first coefficient, coefficients, shift) of a plane's coefficients, in order; (width, runs) of each plane
Runs = tuple[tuple[int, int, int], ...]
Layout = tuple[tuple[int, Runs], ...]


@dataclass(frozen=True)
class TokenLines:
    """Where tokens stand: the main ones fill the first columns of all lines, one line after the other; each tile of the
    others fills the next tile / 8 columns.

    Attributes:
        main, main_columns: tokens, and the columns that they fill (what they leave of them is padding).
        tail, tile: the other tokens, a whole number of tiles, and tokens of a tile.
    """

    main: int
    main_columns: int
    tail: int = 0
    tile: int = 0

    @property
    def places(self) -> int:
        """8 * c, padding included."""
        return LINES * self.main_columns + self.tail

    def to_tokens(self, x: Tensor) -> Tensor:
        """[..., 8 * c] as [..., M], in order and without padding."""
        x = x.unflatten(-1, (LINES, -1))
        main = x[..., : self.main_columns].flatten(-2)[..., : self.main]
        if not self.tail:
            return main
        tiles = x[..., self.main_columns :].unflatten(
            -1, (-1, self.tile // LINES)
        )  # [..., 8, tiles, columns of a tile]
        return torch.cat([main, tiles.transpose(-3, -2).flatten(-3)], dim=-1)

    def to_lines(self, x: Tensor) -> Tensor:
        """The inverse, with zeros for the padding: [..., M] -> [..., 8 * c]."""
        main = F.pad(x[..., : self.main], (0, LINES * self.main_columns - self.main)).unflatten(-1, (LINES, -1))
        if not self.tail:
            return main.flatten(-2)
        tail = x[..., self.main :].unflatten(-1, (-1, LINES, self.tile // LINES))
        return torch.cat([main, tail.transpose(-3, -2).flatten(-2)], dim=-1).flatten(-2)


@dataclass(frozen=True)
class CoefficientPlanes:
    """Codes of R coefficients over M tokens.

    Attributes:
        packed: of each plane, uint8 [S, n, K].
        layout: see `Layout`; widths are 1, 2 or 4. A coefficient in no plane has the code 0.
        num_coefficients: R.
        lines: where the tokens stand.
    """

    packed: Sequence[Tensor]
    layout: Layout
    num_coefficients: int
    lines: TokenLines

    @property
    def counts(self) -> list[int]:
        """K of each plane."""
        return [packed.shape[-1] for packed in self.packed]

    @property
    def widths(self) -> list[int]:
        return [width for width, _ in self.layout]

    def planes(self) -> list[tuple[Tensor, int]]:
        """Bytes and width of each."""
        return list(zip(self.packed, self.widths, strict=True))


def to_planes(x: Tensor, layout: Layout) -> Tensor:
    """Coefficients' numbers [..., R] as those of all planes [..., K of all], times the place values."""
    parts = [(x[..., first : first + count], shift) for _, runs in layout for first, count, shift in runs]
    return torch.cat([part * 2.0**shift if shift else part for part, shift in parts], dim=-1)


def add_planes(total: Tensor, x: Tensor, layout: Layout) -> None:
    """Add the planes' numbers [..., K of all], times the place values, to the coefficients' [..., R] in place."""
    start = 0
    for _, runs in layout:
        for first, count, shift in runs:
            total[..., first : first + count].add_(x[..., start : start + count], alpha=2**shift)
            start += count
