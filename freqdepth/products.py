"""Integer products of rows and weights with planes of one stream: in C where that is available, else in torch.

Legend: P rows, K plane rows (coefficients) of all planes, M tokens, padding included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freqdepth.codes import Digits
from freqdepth.planes import Plane
from kvcore.kernels import native

# Most rows of digits that the C form takes: from here on the matrix products of torch are faster.
MOST_NATIVE_ROWS = 64


def integer_logits(planes: list[Plane], digits: Digits) -> Tensor:
    """`rows @ codesᵀ`: digits of plane rows' numbers [P, K] -> fp32 [P, M]."""
    counts = [plane.packed.shape[-1] for plane in planes]
    parts = digits.digits.split(counts, dim=-1)
    if in_c(digits.scale.shape[0]):
        total = torch.zeros(parts[0].shape[0], planes[0].num_tokens, dtype=torch.int32)
        for plane, part in zip(planes, parts, strict=True):
            native.add_plane_logits(total, part, plane.packed[0].flatten(0, 1), plane.width)
        return digits.joined(total).mul_(digits.scale)
    joined = torch.zeros(digits.scale.shape[0], planes[0].num_tokens)
    start = 0
    for plane, count in zip(planes, counts, strict=True):
        joined += _plane_logits(plane, digits, start)
        start += count
    return joined.mul_(digits.scale)


def integer_mix(planes: list[Plane], digits: Digits) -> Tensor:
    """`weights @ codes`: digits of weights [P, M] -> fp32 [P, K]."""
    counts = [plane.packed.shape[-1] for plane in planes]
    inside = in_c(digits.scale.shape[0])
    total = torch.zeros(digits.digits.shape[0], sum(counts), dtype=torch.int32 if inside else torch.float32)
    for plane, part in zip(planes, total.split(counts, dim=-1), strict=True):
        if inside:
            native.add_plane_mix(part, digits.digits, plane.packed[0].flatten(0, 1), plane.width)
        else:
            _add_plane_mix(plane, digits, part)
    return digits.joined(total).mul_(digits.scale)


def in_c(num_rows: int) -> bool:
    """Whether the products of P rows are taken in C."""
    return 2 * num_rows <= MOST_NATIVE_ROWS and native.off_reason() is None


def _plane_logits(plane: Plane, digits: Digits, start: int) -> Tensor:
    """One plane's part for the digits' columns from `start` on, without their scale: fp32 [P, M]."""
    sums, factors = [], []
    for index in range(plane.num_fields):
        field, factor = plane.field(index)
        sums.append(digits.sums(field[0].view(torch.int8).T, start))
        factors.append(factor)
    joined = digits.joined(torch.cat(sums, dim=-1))
    joined.view(joined.shape[0], plane.num_fields, -1).mul_(joined.new_tensor(factors).unsqueeze(-1))
    return joined


def _add_plane_mix(plane: Plane, digits: Digits, total: Tensor) -> None:
    """Add one plane's part, without the digits' scale, to fp32 [2 * P, K]."""
    size = digits.digits.shape[1] // plane.num_fields
    for index in range(plane.num_fields):
        field, factor = plane.field(index)
        total.add_(digits.sums(field[0].view(torch.int8), index * size), alpha=factor)
