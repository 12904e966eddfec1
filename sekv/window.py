"""The exact local window of one layer: new tokens enter at the end, blocks of the oldest leave together.

Legend: B batch rows, Hkv KV heads, R slots (window + block), n tokens, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.state import BatchedState


class Window(BatchedState):
    """R slots, the first `filled` of them in use, oldest first; short rows begin later (`start`).

    Attributes:
        keys, values: [B, Hkv, R, d].
        start: int64 [B], first slot that holds a token of the row.
        filled: slots in use.
    """

    def __init__(self, keys: Tensor, values: Tensor, start: Tensor, block: int) -> None:
        """A window that holds keys and values [B, Hkv, n, d] and has room for `block` more."""
        room = (*keys.shape[:2], block, keys.shape[3])
        self.keys = torch.cat([keys, keys.new_zeros(room)], dim=2)
        self.values = torch.cat([values, values.new_zeros(room)], dim=2)
        self.start, self.filled, self.block = start, keys.shape[2], block
        self._ragged = bool((start > 0).any())

    @property
    def is_full(self) -> bool:
        return self.filled == self.keys.shape[2]

    def push(self, key: Tensor, value: Tensor) -> None:
        """One more token [B, Hkv, 1, d]; the window must not be full."""
        self.keys[:, :, self.filled : self.filled + 1] = key
        self.values[:, :, self.filled : self.filled + 1] = value
        self.filled += 1

    def pop_block(self) -> tuple[Tensor, Tensor, Tensor]:
        """Take out the oldest `block` slots: keys, values [B, Hkv, block, d], and which hold tokens [B, block]."""
        block = self.block
        keys, values = self.keys[:, :, :block].clone(), self.values[:, :, :block].clone()
        live = torch.arange(block, device=self.start.device) >= self.start[:, None]
        for tensor in (self.keys, self.values):
            tensor[:, :, : self.filled - block] = tensor[:, :, block : self.filled].clone()
        self.filled -= block
        self.start = (self.start - block).clamp_min(0)
        self._ragged = bool((self.start > 0).any())
        return keys, values, live

    def view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [B, Hkv, filled, d], and which slots are hidden [B, 1, 1, filled] (None: none)."""
        hidden = None
        if self._ragged:
            hidden = (torch.arange(self.filled, device=self.start.device) < self.start[:, None])[:, None, None]
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled], hidden

    def mean_tokens(self) -> float:
        """Mean tokens held per row."""
        return self.filled - (float(self.start.float().mean()) if self._ragged else 0.0)
