"""Rotary positions: turning post-RoPE keys from one position to another.

Legend: n tokens, d head dimension. RoPE rotates pair (i, i + d/2) by `position * inverse_frequency[i]`, so moving a
key from position a to b is one rotation by `(b - a)`, whatever attention scaling the keys already carry.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift_positions(key: Tensor, offset: Tensor | int, inverse_frequencies: Tensor) -> Tensor:
    """Rotate post-RoPE keys forward by `offset` positions (negative: backward; `-p` gives the pre-RoPE key of p).

    Args:
        key: [..., n, d], post-RoPE; with partial rotary only the first `2 * len(inverse_frequencies)` channels turn.
        offset: positions to move, an int or an integer tensor broadcastable to [..., n].
        inverse_frequencies: [d_rot / 2], fp32, in effect when the keys were rotated.

    Returns:
        The keys at their new positions, in the input's dtype. Computed in fp32.
    """
    offset = torch.as_tensor(offset, device=key.device, dtype=torch.float32)
    angle = offset.unsqueeze(-1) * inverse_frequencies.to(key.device)
    cos, sin = angle.cos(), angle.sin()
    half = inverse_frequencies.shape[0]
    first, second, rest = key[..., :half].float(), key[..., half : 2 * half].float(), key[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(key.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
