"""Products with planes on a CPU, or wherever Triton does not run: in integers for one stream on a CPU (in C where that
is available), else in floats.

Legend: S streams, P rows, K coefficients of all planes, n byte rows of a plane, F = 8 / width fields of a byte,
M = F * n tokens, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore.kernels import native

Planes = Sequence[tuple[Tensor, int]]  # bytes uint8 [S, n, K'] and width of each

# Most rows of digits that the C form takes: from here on the matrix products of torch are faster.
MOST_NATIVE_ROWS = 64
_DIGIT = 127  # the largest of 8 bits with a sign


def plane_logits(rows: Tensor, planes: Planes) -> Tensor:
    """See `reference_compressed.plane_logits`. Integers are exact to 2 ** -15 of a row's largest entry."""
    counts = [packed.shape[-1] for packed, _ in planes]
    if _in_integers(rows):
        return _integer_logits(rows[0], planes, counts).unsqueeze(0)
    parts = rows.float().split(counts, dim=-1)
    products = [
        torch.cat([torch.matmul(part * factor, field.float().mT) for field, factor in _fields(packed, width)], dim=-1)
        for part, (packed, width) in zip(parts, planes, strict=True)
    ]
    return torch.stack(products).sum(0)


def plane_mix(weights: Tensor, planes: Planes) -> Tensor:
    """See `reference_compressed.plane_mix`. In integers the sum of any run of weights is kept."""
    if _in_integers(weights):
        return _integer_mix(weights[0], planes).unsqueeze(0)
    mixed = []
    for packed, width in planes:
        parts = weights.float().chunk(8 // width, dim=-1)
        products = [
            torch.matmul(part * factor, field.float())
            for part, (field, factor) in zip(parts, _fields(packed, width), strict=True)
        ]
        mixed.append(torch.stack(products).sum(0))
    return torch.cat(mixed, dim=-1)


def _in_integers(rows: Tensor) -> bool:
    """Whether products of rows [S, P, ...] go through 8-bit integers: on a CPU by far the fastest."""
    return rows.device.type == "cpu" and rows.shape[0] == 1


def _in_c(digits: Digits) -> bool:
    return digits.digits.shape[0] <= MOST_NATIVE_ROWS and native.off_reason() is None


def _integer_logits(rows: Tensor, planes: Planes, counts: list[int]) -> Tensor:
    """[P, K] -> fp32 [P, M]."""
    digits = Digits(rows)
    num_tokens = planes[0][0].shape[1] * (8 // planes[0][1])
    if _in_c(digits):
        parts = digits.digits.split(counts, dim=-1)
        total = torch.zeros(parts[0].shape[0], num_tokens, dtype=torch.int32)
        for (packed, width), part in zip(planes, parts, strict=True):
            native.add_plane_logits(total, part, packed[0], width)
        return digits.joined(total).mul_(digits.scale)
    joined = rows.new_zeros(rows.shape[0], num_tokens, dtype=torch.float32)
    start = 0
    for (packed, width), count in zip(planes, counts, strict=True):
        joined += _one_plane_logits(packed[0], width, digits, start)
        start += count
    return joined.mul_(digits.scale)


def _integer_mix(weights: Tensor, planes: Planes) -> Tensor:
    """[P, M] -> fp32 [P, K]."""
    digits = Digits(weights, dithered=True)
    counts = [packed.shape[-1] for packed, _ in planes]
    inside = _in_c(digits)
    total = torch.zeros(digits.digits.shape[0], sum(counts), dtype=torch.int32 if inside else torch.float32)
    for (packed, width), part in zip(planes, total.split(counts, dim=-1), strict=True):
        if inside:
            native.add_plane_mix(part, digits.digits, packed[0], width)
        else:
            _add_one_plane_mix(packed[0], width, digits, part)
    return digits.joined(total).mul_(digits.scale)


def _one_plane_logits(packed: Tensor, width: int, digits: Digits, start: int) -> Tensor:
    """A plane's part [n, K'] for the digits' columns from `start` on, without their scale: fp32 [P, M]."""
    sums, factors = [], []
    for field, factor in _fields(packed, width):
        sums.append(digits.sums(field.view(torch.int8).T, start))
        factors.append(factor)
    joined = digits.joined(torch.cat(sums, dim=-1))
    joined.view(joined.shape[0], len(factors), -1).mul_(joined.new_tensor(factors).unsqueeze(-1))
    return joined


def _add_one_plane_mix(packed: Tensor, width: int, digits: Digits, total: Tensor) -> None:
    """Add a plane's part, without the digits' scale, to fp32 [2 * P, K']."""
    for index, (field, factor) in enumerate(_fields(packed, width)):
        total.add_(digits.sums(field.view(torch.int8), index * packed.shape[0]), alpha=factor)


def _fields(packed: Tensor, width: int) -> list[tuple[Tensor, float]]:
    """Each field of all bytes, below 128, and the factor that makes it codes.

    Only the last field is shifted: the others times their power of two still fit a signed byte.
    """
    mask, last = 2**width - 1, 8 - width
    fields = [(packed & (mask << place), 0.5**place) for place in range(0, last, width)]
    return [*fields, (packed >> last, 1.0)]


class Digits:
    """Rows [P, K] as two signed 8-bit digits and a scale: integer products are exact to 2 ** -15 of the largest entry.

    Attributes:
        digits: int8 [2 * P, K]: the high digits of all rows, then the low ones.
        most: the largest digit.
        scale: fp32 [P, 1].
    """

    def __init__(self, rows: Tensor, dithered: bool = False) -> None:
        """Digits of rows.

        Args:
            rows: [P, K], any float dtype.
            dithered: entries are rounded up or down so that any run of them keeps its sum. For attention weights: of a
                long text whose tokens have less than half a unit each, nothing would be left by the nearest. What is 0
                stays 0.
        """
        rows = rows.float()
        largest = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-30)
        # from 66K entries on smaller digits: sums of digit times code must hold in int32 when all are alike
        self.most = max(1, min(_DIGIT, (2**31 - 1) // (255 * rows.shape[1])))
        self.scale = largest / self.most
        scaled = rows * (self.most / largest)
        high = scaled.round()
        low = scaled.sub_(high).mul_(2 * self.most)
        low = low.add_(_dither(rows.shape[1], rows.device)).floor_() if dithered else low.round_()
        self.digits = torch.cat([high, low]).to(torch.int8)

    def sums(self, codes: Tensor, start: int = 0) -> Tensor:
        """The digits' products `[:, start : start + k] @ codes` for int8 codes [k, N]: int32 [2 * P, N]."""
        mine = self.digits[:, start : start + codes.shape[0]]
        # with an inner dimension of 1 torch 2.13's _int_mm reads memory that is not its own
        return torch._int_mm(mine, codes) if codes.shape[0] > 1 else mine.int() * codes

    def joined(self, sums: Tensor) -> Tensor:
        """What the digits' sums [2 * P, N] (int32 or fp32) stand for, but for `scale`: fp32 [P, N]."""
        high, low = sums.float().chunk(2)
        return high.add_(low, alpha=1 / (2 * self.most))


def _dither(count: int, device: torch.device) -> Tensor:
    """[count] numbers in [0, 1) of which every run is spread evenly: multiples of the golden ratio."""
    steps = torch.arange(count, device=device, dtype=torch.float64)
    return steps.mul_((5**0.5 - 1) / 2).frac_().float().clamp_max_(1 - 2**-24)
