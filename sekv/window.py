"""The exact local window of one layer: new tokens enter at the end, blocks of the oldest leave together.

Legend: B batch rows, Hkv KV heads, R slots, n tokens that leave, m rows that they leave from, b tokens of the largest
block among them, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.state import BatchedState


@dataclass
class Block:
    """Tokens that leave the window at one overflow: of each row that is full, its own number.

    Attributes:
        rows: int64 [m], the rows.
        keys, values: [m, Hkv, b, d].
        live: bool [m, b], False beyond a row's own number.
        member, column: int64 [n], where the tokens are among `keys` and `values`.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    live: Tensor

    def __post_init__(self) -> None:
        self.member, self.column = self.live.nonzero(as_tuple=True)

    @property
    def row(self) -> Tensor:
        """int64 [n], batch row of every token."""
        return self.rows[self.member]

    @property
    def sizes(self) -> Tensor:
        """int64 [m], tokens of every row."""
        return self.live.sum(1)

    def only(self, chosen: Tensor) -> Block:
        """The rows [m] (bool) alone."""
        return Block(self.rows[chosen], self.keys[chosen], self.values[chosen], self.live[chosen])


def write_columns(target: Tensor, dim: int, row: Tensor, place: Tensor, columns: Tensor) -> Tensor:
    """`target` [B, ...] with columns [n, ...] put at (row, place) [n] along `dim`, widened as far as they reach."""
    row, place, columns = row.to(target.device), place.to(target.device), columns.to(target.device)
    missing = int(place.max()) + 1 - target.shape[dim] if place.numel() else 0
    if missing > 0:
        target = widened(target, dim, missing)
    target.movedim(dim, 1)[row, place] = columns.to(target.dtype)
    return target


def widened(target: Tensor, dim: int, room: int) -> Tensor:
    """`target` with `room` zeros more along `dim`."""
    shape = list(target.shape)
    shape[dim] = room
    return torch.cat([target, target.new_zeros(shape)], dim=dim)


class Window(BatchedState):
    """R slots, the first `filled` of them in use, oldest first; rows with fewer tokens begin later (`start`).

    Every row gains the tokens of a step. Where they would make more than `size`, its oldest `block` leave.

    Attributes:
        keys, values: [B, Hkv, R, d].
        start, size, block: int64 [B], in host memory: first slot in use, most tokens, tokens that leave at a time.
        hidden: bool [B, R], slots before `start`; None when every row begins at 0.
        filled: slots in use.
        until_full: tokens until some row is full.
    """

    host_fields = frozenset({"start", "size", "block"})

    def __init__(self, keys: Tensor, values: Tensor, start: Tensor, block: Tensor) -> None:
        """A window that holds keys and values [B, Hkv, n, d], without those before `start`, with room for `block`."""
        self.start, self.block = start.cpu(), block.cpu()
        self.filled = keys.shape[2]
        self.size = self.filled - self.start + self.block
        room = int(self.size.max()) - self.filled
        self.keys, self.values = widened(keys, 2, room), widened(values, 2, room)
        self._settle()

    def _settle(self) -> None:
        """Move everything to the front and see how things stand."""
        shift = int(self.start.min())
        if shift:
            for tensor in (self.keys, self.values):
                tensor[:, :, : self.filled - shift] = tensor[:, :, shift : self.filled].clone()
            self.filled -= shift
            self.start = self.start - shift
        self.until_full = int((self.size - self.filled + self.start).min())
        self._mean_start = float(self.start.float().mean())
        self.hidden: Tensor | None = None
        if self._mean_start:
            self.hidden = (torch.arange(self.keys.shape[2]) < self.start[:, None]).to(self.keys.device)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._settle()

    @property
    def longest_step(self) -> int:
        """Tokens for which popping one block from every row makes room."""
        return int(self.block.min())

    def push(self, key: Tensor, value: Tensor) -> None:
        """The next tokens [B, Hkv, Q, d], at most `until_full`."""
        end = self.filled + key.shape[2]
        self.keys[:, :, self.filled : end] = key
        self.values[:, :, self.filled : end] = value
        self.filled = end
        self.until_full -= key.shape[2]

    def pop(self, needed: int) -> Block:
        """Take out the oldest block of every row that has no room for `needed` more tokens."""
        rows = (self.size - self.filled + self.start < needed).nonzero().flatten()
        sizes = self.block[rows]
        column = torch.arange(int(sizes.max()))
        place = (self.start[rows, None] + column).clamp_max(self.filled - 1).to(self.keys.device)
        taken = rows.to(self.keys.device)
        index = place[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
        keys, values = self.keys[taken].gather(2, index), self.values[taken].gather(2, index)
        self.start = self.start.index_add(0, rows, sizes)
        self._settle()
        return Block(taken, keys, values, (column < sizes[:, None]).to(taken.device))

    def view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [B, Hkv, filled, d], and which slots are hidden [B, 1, 1, filled] (None: none)."""
        hidden = None if self.hidden is None else self.hidden[:, None, None, : self.filled]
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled], hidden

    def mean_tokens(self) -> float:
        """Mean tokens held per row."""
        return self.filled - self._mean_start
