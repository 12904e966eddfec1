"""Rows as pairs of signed 8-bit digits, in C, brought into the order of planes on the way.

Legend: P rows, R entries of a row, K coefficients of all planes, M tokens, c columns of bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.kernels import native
from kvcore.kernels.native.plane_floats import layout_table
from kvcore.kernels.plane_operands import Layout


def plane_digits(rows: Tensor, layout: Layout, most: int) -> tuple[Tensor, Tensor]:
    """Digits of rows, an entry per coefficient of every plane, times its place.

    Args:
        rows: fp32 [P, R].
        layout: see `plane_operands`.
        most: the largest digit.

    Returns:
        int8 [2 * P, K], the high digits of all rows and then the low ones, and the scales fp32 [P, 1]: entries are
        `scale * (high + low / (2 * most))`.
    """
    table, counts, reach = layout_table(layout)
    if reach > rows.shape[1]:
        raise ValueError(f"plane_digits: {tuple(rows.shape)} do not fit {layout}")
    return _digits("plane_digits", rows, sum(counts), most, len(counts), table, sum(counts))


def line_digits(weights: Tensor, main: int, columns: int, tile: int, most: int) -> tuple[Tensor, Tensor]:
    """Digits of weights fp32 [P, M], dithered, with the tokens in eight lines: int8 [2 * P, 8 * c], scales as above.

    Args:
        weights: of the tokens in order.
        main: the first tokens, which fill the first columns of all lines, one line after the other.
        columns: how many that are; what `main` leaves of them is 0.
        tile: tokens of a tile, a multiple of 8; each of the other tokens' tiles fills the next tile / 8 columns.
        most: the largest digit.
    """
    tail = weights.shape[1] - main
    if not (0 <= main <= 8 * columns and tail >= 0) or (tail and (tile < 8 or tile % 8 or tail % tile)):
        raise ValueError(f"line_digits: {tuple(weights.shape)} are not {main} tokens and tiles of {tile}")
    return _digits("line_digits", weights, 8 * columns + tail, most, main, columns, tail, tile)


def _digits(name: str, rows: Tensor, count: int, most: int, *options: object) -> tuple[Tensor, Tensor]:
    library, reason = native._loaded()
    if library is None:
        raise RuntimeError(f"native digits are off: {reason}")
    if rows.dtype != torch.float32 or rows.stride(1) != 1 or not 1 <= most <= 127:
        raise ValueError(f"{name}: {rows.dtype} rows, strides {rows.stride()}, digits up to {most}")
    num_rows = rows.shape[0]
    digits, scale = torch.empty(2 * num_rows, count, dtype=torch.int8), torch.empty(num_rows, 1)
    failed = getattr(library, name)(
        rows.data_ptr(), rows.stride(0), num_rows, *options, most, digits.data_ptr(), scale.data_ptr()
    )  # fmt: skip
    if failed:
        raise MemoryError(f"{name}: no memory for a row")
    return digits, scale
