"""fp32 products of a few rows with the codes of planes in C: nothing is written out as numbers.

Legend: B batch rows, H heads, P rows per head, T tokens per head, w width, c columns of bytes, K coefficients of a
plane, R entries of a row, G groups of coefficients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore.kernels import native
from kvcore.kernels.plane_operands import Layout


class TokenScales(NamedTuple):
    """Scale and zero point of each token and group of coefficients: numbers are `code * scale + zero`.

    Attributes:
        scale, zero: fp16 [B', H * T, G].
        group: coefficients of a group; the last may be smaller.
    """

    scale: Tensor
    zero: Tensor
    group: int


class PlaneCodes(NamedTuple):
    """Codes in planes, from batch row `first` on.

    Attributes:
        packed: per plane uint8 [B', w, c, K]; a head's tokens follow those of the head before, H * T at most 8 * c.
        layout: see `Layout`.
        first: the first batch row of the product.
        scales: what makes numbers of codes; None where codes are the numbers.
    """

    packed: Sequence[Tensor]
    layout: Layout
    first: int = 0
    scales: TokenScales | None = None


def add_plane_dot(total: Tensor, rows: Tensor, codes: PlaneCodes) -> None:
    """Add `rows @ numbersᵀ` to `total`, each head's rows with its tokens: fp32 [B, H, P, T], fp32 [B, H, P, R]."""
    _call("plane_dot", rows, total, total.shape[3], rows.shape[3], codes)


def add_plane_sum(total: Tensor, weights: Tensor, codes: PlaneCodes) -> None:
    """Add `weights @ numbers` to `total`, each head's tokens weighted: fp32 [B, H, P, R], fp32 [B, H, P, T]."""
    _call("plane_sum", weights, total, weights.shape[3], total.shape[3], codes)


def _call(name: str, x: Tensor, total: Tensor, tokens: int, entries: int, codes: PlaneCodes) -> None:
    library, reason = native._loaded()
    if library is None:
        raise RuntimeError(f"native products are off: {reason}")
    batch, heads, num_rows = total.shape[:3]
    if x.shape[:3] != total.shape[:3] or codes.first < 0:
        raise ValueError(f"{name}: {tuple(x.shape)} do not fit sums {tuple(total.shape)} from row {codes.first} on")
    if not (num_rows and codes.packed):
        return
    columns = codes.packed[0].shape[2]
    table, counts, reach = layout_table(codes.layout, columns)
    last = codes.first + batch
    for packed, (width, _), count in zip(codes.packed, codes.layout, counts, strict=True):
        rows, *shape = packed.shape
        if shape != [width, columns, count] or rows < last or heads * tokens > 8 * columns or reach > entries:
            raise ValueError(f"{name}: {tuple(x.shape)} do not fit codes {tuple(packed.shape)} of {width} bits")
        if not (packed.is_contiguous() and packed.dtype == torch.uint8):
            raise ValueError(f"{name}: codes are bytes that lie side by side")
    scale, zero, group = _scales(name, codes.scales, last, heads * tokens, counts)
    pointers = (ctypes.c_void_p * len(counts))(*(packed.data_ptr() for packed in codes.packed))
    failed = getattr(library, name)(
        pointers, len(counts), table, scale, zero, group, codes.first, batch, heads, tokens, num_rows,
        x.data_ptr(), _line_stride(name, x), total.data_ptr(), _line_stride(name, total),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"{name}: no memory for the rows")


@lru_cache(maxsize=1024)
def layout_table(layout: Layout, columns: int = 0) -> tuple[ctypes.Array[ctypes.c_int64], tuple[int, ...], int]:
    """The layout of planes with `columns` as C reads it, the coefficients of each plane, and the entries of a row."""
    table: list[int] = []
    for width, runs in layout:
        if any(start < 0 or size < 0 or place < 0 or place + width > 8 for start, size, place in runs):
            raise ValueError(f"runs {runs} do not fit a code of 8 bits")
        table += [width, width * columns, sum(size for _, size, _ in runs), len(runs)]
        table += [number for run in runs for number in run]
    counts = tuple(sum(size for _, size, _ in runs) for _, runs in layout)
    if not all(counts):
        raise ValueError(f"planes of {counts} coefficients")
    reach = max(start + size for _, runs in layout for start, size, _ in runs)
    return (ctypes.c_int64 * len(table))(*table), counts, reach


def _scales(
    name: str, scales: TokenScales | None, batch: int, tokens: int, counts: tuple[int, ...]
) -> tuple[int, int, int]:
    """Addresses of scales and zero points, and the coefficients of a group; zeros without scales."""
    if scales is None:
        return 0, 0, 0
    shape, alike = (tokens, -(-counts[0] // scales.group)), counts == counts[:1] * len(counts)
    for numbers in (scales.scale, scales.zero):
        fits = alike and numbers.shape[0] >= batch and numbers.shape[1:] == shape
        if not fits or numbers.dtype != torch.float16 or not numbers.is_contiguous():
            raise ValueError(f"{name}: {numbers.dtype} {tuple(numbers.shape)} are no fp16 {(batch, *shape)}")
    return scales.scale.data_ptr(), scales.zero.data_ptr(), scales.group


def _line_stride(name: str, x: Tensor) -> int:
    """Distance of neighbouring lines of fp32 [B, H, P, n], the same from the first to the last."""
    batch, heads, rows, entries = x.shape
    by_batch, by_head, stride, side = x.stride()
    if rows == 1:
        stride = by_head if heads > 1 else by_batch
    even = (heads == 1 or by_head == rows * stride) and (batch == 1 or by_batch == heads * rows * stride)
    if x.dtype != torch.float32 or not even or (entries > 1 and side != 1):
        raise ValueError(f"{name}: fp32 lines at equal distances are needed; received {x.dtype}, strides {x.stride()}")
    return stride
