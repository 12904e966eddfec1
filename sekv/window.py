"""The exact local window of one layer: new tokens enter at the end, blocks of the oldest leave together.

Legend: B batch rows, Hkv KV heads, R slots (window + block), n tokens, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.state import BatchedState


class Window(BatchedState):
    """R slots, the first `filled` of them in use, oldest first; rows with a shorter window begin later (`start`).

    Every row gains one token per step and loses `block` tokens per overflow, so `start` never moves.

    Attributes:
        keys, values: [B, Hkv, R, d].
        start: int64 [B], first slot that the row uses.
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

    def pop_block(self) -> tuple[Tensor, Tensor]:
        """Take out every row's oldest `block` tokens: keys and values [B, Hkv, block, d]."""
        block = self.block
        index = (self.start[:, None] + torch.arange(block, device=self.start.device))[:, None, :, None]
        index = index.expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
        keys, values = self.keys.gather(2, index), self.values.gather(2, index)
        for tensor in (self.keys, self.values):
            tensor[:, :, : self.filled - block] = tensor[:, :, block : self.filled].clone()
        self.filled -= block
        return keys, values

    def view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [B, Hkv, filled, d], and which slots are hidden [B, 1, 1, filled] (None: none)."""
        hidden = None
        if self._ragged:
            hidden = (torch.arange(self.filled, device=self.start.device) < self.start[:, None])[:, None, None]
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled], hidden

    def mean_tokens(self) -> float:
        """Mean tokens held per row."""
        return self.filled - (float(self.start.float().mean()) if self._ragged else 0.0)
