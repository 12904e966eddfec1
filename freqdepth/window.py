"""The near window's numbers: newest tokens and sinks, in the model's dtype or as 8-bit floats.

Recent tokens are read the most, and what folding loses of them is felt the most: at half the bytes twice as many can
be kept. An 8-bit float loses 0.07% of a vector's energy, folding 5 to 40%.

Legend: H KV heads, W tokens, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
_LARGEST = 448.0


def window_scale(x: Tensor) -> Tensor:
    """Powers of two fp32 [H, 1, 1] that bring four times the largest entry of each head of [H, n, d] to the largest
    8-bit float: tokens to come may be larger, and small entries have exponents to spare."""
    largest = 4 * x.float().abs().amax((1, 2), keepdim=True)
    return torch.exp2(torch.log2(largest.clamp_min(1e-20) / _LARGEST).ceil())


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """[H, W, d] as stored; what is larger than the first window by a factor of 4 or more is clipped."""
    if scale is None:
        return x.to(dtype)
    return (x.float() / scale).clamp_(-_LARGEST, _LARGEST).to(dtype)


def restored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The inverse of `rounded`, in the dtype that is asked for."""
    return x.to(dtype) if scale is None else x.to(dtype) * scale.to(dtype)
