"""Products with planes on a CPU, or wherever Triton does not run: in integers for one stream on a CPU (in C where that
is available), else in floats.

Legend: S streams, P rows, R coefficients, K coefficients of one or all planes, n byte rows of a plane, F = 8 / width
fields of a byte, M tokens, L places of the lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.kernels import native
from kvcore.kernels.native.digits import line_digits, plane_digits
from kvcore.kernels.plane_operands import CoefficientPlanes, add_planes, to_planes

# Most rows of digits that the C form takes: from here on the matrix products of torch are faster.
MOST_NATIVE_ROWS = 64
_DIGIT = 127  # the largest of 8 bits with a sign


def plane_logits(rows: Tensor, codes: CoefficientPlanes) -> Tensor:
    """See `reference_compressed.plane_logits`. Integers are exact to 2 ** -15 of a row's largest entry."""
    if _in_integers(rows):
        return codes.lines.to_tokens(_integer_logits(rows[0].float(), codes)).unsqueeze(0)
    parts = to_planes(rows.float(), codes.layout).split(codes.counts, dim=-1)
    products = [
        torch.cat([torch.matmul(part * factor, field.float().mT) for field, factor in _fields(packed, width)], dim=-1)
        for part, (packed, width) in zip(parts, codes.planes(), strict=True)
    ]
    return codes.lines.to_tokens(torch.stack(products).sum(0))


def plane_mix(weights: Tensor, codes: CoefficientPlanes) -> Tensor:
    """See `reference_compressed.plane_mix`. In integers the sum of any run of weights is kept."""
    if _in_integers(weights):
        mixed = _integer_mix(weights[0].float(), codes).unsqueeze(0)
    else:
        lines = codes.lines.to_lines(weights.float())
        mixed = torch.cat([_float_mix(lines, packed, width) for packed, width in codes.planes()], dim=-1)
    total = mixed.new_zeros(*mixed.shape[:2], codes.num_coefficients)
    add_planes(total, mixed, codes.layout)
    return total


def _float_mix(lines: Tensor, packed: Tensor, width: int) -> Tensor:
    """[S, P, L] times the codes of one plane [S, n, K]."""
    parts = lines.chunk(8 // width, dim=-1)
    products = [
        torch.matmul(part * factor, field.float())
        for part, (field, factor) in zip(parts, _fields(packed, width), strict=True)
    ]
    return torch.stack(products).sum(0)


def _in_integers(rows: Tensor) -> bool:
    """Whether products of rows [S, P, ...] go through 8-bit integers: on a CPU by far the fastest."""
    return rows.device.type == "cpu" and rows.shape[0] == 1


def _in_c(num_rows: int) -> bool:
    return 2 * num_rows <= MOST_NATIVE_ROWS and native.off_reason() is None


def _integer_logits(rows: Tensor, codes: CoefficientPlanes) -> Tensor:
    """[P, R] -> fp32 [P, L]."""
    if _in_c(rows.shape[0]):
        most = largest_digit(sum(codes.counts))
        digits = Digits(*plane_digits(rows, codes.layout, most), most)
        total = torch.zeros(digits.digits.shape[0], codes.lines.places, dtype=torch.int32)
        for (packed, width), part in zip(codes.planes(), digits.digits.split(codes.counts, dim=-1), strict=True):
            native.add_plane_logits(total, part, packed[0], width)
        return digits.joined(total).mul_(digits.scale)
    digits = Digits.of(to_planes(rows, codes.layout))
    joined = rows.new_zeros(rows.shape[0], codes.lines.places)
    start = 0
    for packed, width in codes.planes():
        joined += _one_plane_logits(packed[0], width, digits, start)
        start += packed.shape[-1]
    return joined.mul_(digits.scale)


def _integer_mix(weights: Tensor, codes: CoefficientPlanes) -> Tensor:
    """[P, M] -> fp32 [P, K of all planes]."""
    lines, inside = codes.lines, _in_c(weights.shape[0])
    if inside:
        most = largest_digit(lines.places)
        digits = Digits(*line_digits(weights, lines.main, lines.main_columns, lines.tile, most), most)
    else:
        digits = Digits.of(lines.to_lines(weights), dithered=True)
    total = torch.zeros(digits.digits.shape[0], sum(codes.counts), dtype=torch.int32 if inside else torch.float32)
    for (packed, width), part in zip(codes.planes(), total.split(codes.counts, dim=-1), strict=True):
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

    def __init__(self, digits: Tensor, scale: Tensor, most: int) -> None:
        self.digits, self.scale, self.most = digits, scale, most

    @classmethod
    def of(cls, rows: Tensor, dithered: bool = False) -> Digits:
        """Digits of rows.

        Args:
            rows: [P, K], any float dtype.
            dithered: entries are rounded up or down so that any run of them keeps its sum. For attention weights: of a
                long text whose tokens have less than half a unit each, nothing would be left by the nearest. What is 0
                stays 0.
        """
        rows, most = rows.float(), largest_digit(rows.shape[1])
        largest = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-30)
        scaled = rows * (most / largest)
        high = scaled.round()
        low = scaled.sub_(high).mul_(2 * most)
        low = low.add_(_dither(rows.shape[1], rows.device)).floor_() if dithered else low.round_()
        return cls(torch.cat([high, low]).to(torch.int8), largest / most, most)

    def sums(self, codes: Tensor, start: int = 0) -> Tensor:
        """The digits' products `[:, start : start + k] @ codes` for int8 codes [k, N]: int32 [2 * P, N]."""
        mine = self.digits[:, start : start + codes.shape[0]]
        # with an inner dimension of 1 torch 2.13's _int_mm reads memory that is not its own
        return torch._int_mm(mine, codes) if codes.shape[0] > 1 else mine.int() * codes

    def joined(self, sums: Tensor) -> Tensor:
        """What the digits' sums [2 * P, N] (int32 or fp32) stand for, but for `scale`: fp32 [P, N]."""
        high, low = sums.float().chunk(2)
        return high.add_(low, alpha=1 / (2 * self.most))


def largest_digit(count: int) -> int:
    """Of rows of `count` entries: sums of digit times code must hold in int32 when all are alike (from 66K on)."""
    return max(1, min(_DIGIT, (2**31 - 1) // (255 * count)))


def _dither(count: int, device: torch.device) -> Tensor:
    """[count] numbers in [0, 1) of which every run is spread evenly: multiples of the golden ratio, of 24 bits."""
    steps = torch.arange(count, device=device).mul_(2654435769).bitwise_and_(2**32 - 1)
    return steps.bitwise_right_shift_(8).float().mul_(2**-24)
