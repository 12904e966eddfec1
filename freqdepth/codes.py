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


def code_offsets(widths: list[tuple[int, int]]) -> Tensor:
    """What is added to the codes of each coefficient before its step: fp32 [R] for (bits, coefficients)."""
    one = torch.tensor([0.0 if bits == UNQUANTIZED else 0.5 - 2 ** (bits - 1) for bits, _ in widths])
    return one.repeat_interleave(torch.tensor([count for _, count in widths]))


def class_bytes(bits: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one coefficient's codes, its step and offset included."""
    return (padded(tokens) * dtype.itemsize if bits == UNQUANTIZED else packed_bytes(padded(tokens), bits)) + 8
