"""Planes: codes packed for products that never take the bytes apart.

A code of 8, 6 or 3 bits is split into planes of 4, 2 and 1 bits, and all coefficients' planes of one width lie in one
matrix: a step then takes two or three products, however many widths are in use. Tokens stand in eight lines of equal
length; a byte holds one coefficient's codes of tokens from different lines (its fields), so that tokens folded in later
are more columns, whatever the width.

Legend: S streams, K plane rows (coefficients), M tokens, c = M / 8 columns, P rows, w width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from freqdepth.codes import UNQUANTIZED
from kvcore.kernels import native
from kvcore.kernels.plane_operands import LINES, Layout, Runs, add_planes
from kvcore.state import BatchedState

# Most rows a head for which fp32 products are taken in C: from here on the matrix products of torch are faster.
MOST_FLOAT_ROWS = 24


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


def plane_layout(widths: Sequence[tuple[int, int]]) -> dict[int, list[Rows]]:
    """Per plane width: its rows, in order, for (bits, coefficients) in the coefficients' order. Not to be changed."""
    return _plane_layout(tuple(widths))


@lru_cache(maxsize=1024)
def _plane_layout(widths: tuple[tuple[int, int], ...]) -> dict[int, list[Rows]]:
    layout: dict[int, list[Rows]] = {}
    start = 0
    for index, (bits, count) in enumerate(widths):
        for width, shift in [] if bits == UNQUANTIZED else plane_widths(bits):
            layout.setdefault(width, []).append(Rows(index, slice(start, start + count), shift))
        start += count
    return layout


@lru_cache(maxsize=1024)
def plane_runs(widths: tuple[tuple[int, int], ...]) -> Layout:
    """`plane_layout` as products take it: (width, runs) per plane."""
    return tuple((width, runs_of(rows)) for width, rows in _plane_layout(widths).items())


def runs_of(rows: list[Rows]) -> Runs:
    """One plane's rows as products take them."""
    return tuple((r.columns.start, r.columns.stop - r.columns.start, r.shift) for r in rows)


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

    @property
    def num_tokens(self) -> int:
        """M."""
        return LINES * self.packed.shape[2]

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

    def codes(self, some: slice = slice(None)) -> Tensor:
        """uint8 [S, 8, c, K] of some streams."""
        shifts = torch.arange(0, 8, self.width, dtype=torch.uint8, device=self.packed.device)
        fields = self.packed[some].unsqueeze(1) >> shifts[:, None, None, None]
        return fields.bitwise_and_(2**self.width - 1).flatten(1, 2)


def add_codes(total: Tensor, planes: list[Plane], parts: Iterable[list[Rows]], some: slice) -> None:
    """Add the planes' codes of some streams to `total` (uint8 [n, M, R], zeros), in C where that is available.

    Args:
        total: M may leave out tokens that fill the last bytes.
        planes: the planes.
        parts: where the rows of each belong (see `plane_layout`).
        some: a run of streams.
    """
    in_c = total.device.type == "cpu" and native.off_reason() is None
    for plane, rows in zip(planes, parts, strict=True):
        if in_c:
            native.add_plane_codes(total, plane.packed[some].flatten(1, 2), plane.width, runs_of(rows))
        else:
            codes = plane.codes(some).flatten(1, 2)[:, : total.shape[1]]
            add_planes(total, codes, ((plane.width, runs_of(rows)),))


def few_rows(rows: Tensor) -> bool:
    """Whether fp32 products of rows [..., P, n] with codes are taken in C, which never writes the codes out."""
    return rows.device.type == "cpu" and rows.shape[-2] <= MOST_FLOAT_ROWS and native.off_reason() is None
