"""Codes of coefficients, their steps, and products of rows with them as integers.

A coefficient has one step for all tokens, fixed at the prefill, so that tokens folded in later join the same form:
`value = (code + 0.5 - 2 ** (bits - 1)) * step`. Steps are absorbed into the query and the output.

Legend: S streams, R coefficients, M tokens, P rows (queries times heads of a stream), K inner dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.quant import packed_bytes

# A coefficient class of this width is not quantised: it is stored in the model's dtype.
UNQUANTIZED = 16
# Tokens of a prompt are padded to this many.
ALIGNMENT = 32
_DIGIT = 127  # the largest of 8 bits with a sign


def padded(count: int) -> int:
    """Tokens of a packed segment that holds `count`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def step_sizes(values: Tensor, bits: int, deviation: Tensor, multiples: Tensor) -> Tensor:
    """The step [S, R] of least squared error among `multiples` of a Gaussian's best one.

    Args:
        values: sample [S, M, R].
        bits: width of the codes.
        deviation: root mean square [S, R] of each coefficient.
        multiples: candidate factors.
    """
    candidates = deviation * GAUSSIAN_STEP[bits] * multiples[:, None, None]
    errors = torch.stack([squared_error(values, step, bits) for step in candidates])
    return candidates.gather(0, errors.argmin(0, keepdim=True))[0]


def squared_error(values: Tensor, step: Tensor, bits: int) -> Tensor:
    """Mean squared error [S, R] of quantising [S, M, R] with steps [S, R]."""
    half = 2 ** (bits - 1)
    step = step.unsqueeze(1)
    rounded = torch.div(values, step).floor_().clamp_(-half, half - 1).add_(0.5).mul_(step)
    return rounded.sub_(values).square_().mean(1)


# Best uniform step of a unit Gaussian with 2 ** bits mid-rise levels (Max 1960, table II).
GAUSSIAN_STEP = {1: 1.596, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}


def encode(values: Tensor, step: Tensor, bits: int) -> Tensor:
    """Codes (uint8, same shape) of [S, M, R] with steps [S, R]."""
    half = 2 ** (bits - 1)
    return (values / step.unsqueeze(1)).floor_().clamp_(-half, half - 1).add_(half).to(torch.uint8)


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


def code_offsets(widths: list[tuple[int, int]]) -> Tensor:
    """What is added to the codes of each coefficient before its step: fp32 [R] for (bits, coefficients)."""
    one = torch.tensor([0.0 if bits == UNQUANTIZED else 0.5 - 2 ** (bits - 1) for bits, _ in widths])
    return one.repeat_interleave(torch.tensor([count for _, count in widths]))


def integer_path(rows: Tensor) -> bool:
    """Whether the product of rows [S, P, K] with codes goes through 8-bit integers: on a CPU by far the fastest."""
    return rows.device.type == "cpu" and rows.shape[0] == 1


def class_bytes(bits: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one coefficient's codes, its step and offset included."""
    return (padded(tokens) * dtype.itemsize if bits == UNQUANTIZED else packed_bytes(padded(tokens), bits)) + 8
